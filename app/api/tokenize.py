"""POST /tokenize and /detokenize: prompts to token ids and back, without the engine."""

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from app.api import openapi, prompts
from app.api.answers import json_response
from app.api.body import parse, read_json
from app.api.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from app.api.services import services_of
from app.text.parsers.base import Json

router = APIRouter()


@router.post("/tokenize", **openapi.TOKENIZE)
async def tokenize(request: Request) -> Response:
    """Return the tokens of a bare prompt, or of a conversation through the chat template."""
    services = services_of(request)
    raw = await read_json(request)
    is_bare = raw.get("messages") is None
    model: type[TokenizeRequest | TokenizeChatRequest] = TokenizeRequest if is_bare else TokenizeChatRequest
    body = parse(raw, model, services.metrics)
    services.served_name(body.model)
    info = services.engine.ready_info()
    warnings: Sequence[Json] = ()
    if isinstance(body, TokenizeChatRequest):
        prompt = await prompts.render_and_encode(services, body, info, must_fit=False)
        token_ids, warnings = prompt.token_ids, prompt.warnings
    else:
        special = body.add_special_tokens is not False
        token_ids = await prompts.encode_text(
            services, body.prompt, "prompt", info, add_special_tokens=special, must_fit=False
        )
    strings = services.tokenizer.token_strings(token_ids) if body.return_token_strs else None
    answer = {"count": len(token_ids), "max_model_len": info.max_model_len, "tokens": token_ids, "token_strs": strings}
    return json_response(answer | ({"warnings": warnings} if warnings else {}))


@router.post("/detokenize", **openapi.DETOKENIZE)
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, with special tokens."""
    services = services_of(request)
    body = parse(await read_json(request), DetokenizeRequest, services.metrics)
    services.served_name(body.model)
    prompts.check_ids("tokens", body.tokens, services.engine.ready_info())
    return json_response({"prompt": services.tokenizer.decode(body.tokens, skip_special_tokens=False)})
