"""POST /v1/completions: bare prompts, as text or token ids, to their continuations."""

from fastapi import APIRouter, Request, Response

from app.api import openapi, prompts
from app.api.answers import CompletionAnswers
from app.api.generate import answer, receive, submit
from app.api.schemas import CompletionRequest
from app.api.validation import token_budget
from app.text.tokenizer import Tokenizer

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


@router.post("/v1/completions", **openapi.COMPLETIONS)
async def completions(request: Request) -> Response:
    call = await receive(request, CompletionRequest)
    body, info = call.body, call.info
    special = body.add_special_tokens is not False
    params = ["prompt"] if body.prompt_is_one else [f"prompt.{i}" for i in range(body.num_prompts)]
    with call.acquire() as permits:
        given = [
            await prompts.encode_prompt(call.services, prompt, param, info, add_special_tokens=special)
            for prompt, param in zip(body.prompts, params, strict=True)
        ]
        budgets = [
            token_budget(param, len(prompt.token_ids), body.max_tokens, DEFAULT_MAX_TOKENS, info.max_model_len)
            for prompt, param in zip(given, params, strict=True)
        ]
        choices = submit(call, given, budgets, permits)
    echoed = _prompt_texts(body, call.services.tokenizer) if body.echo else ()
    return await answer(call, choices, CompletionAnswers(call.model_name, choices.usage, body.streaming, echoed))


def _prompt_texts(body: CompletionRequest, tokenizer: Tokenizer) -> list[str]:
    """Return the text of every choice's prompt."""
    texts = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in body.prompts]
    return [text for text in texts for _ in range(body.num_choices)]
