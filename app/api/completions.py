"""POST /v1/completions: bare prompts, as text or token ids, to their continuations."""

from fastapi import APIRouter, Request, Response

from app.api import openapi, prompts
from app.api.answers import CompletionAnswers, json_response
from app.api.generate import answer, receive, receive_to_render, submit
from app.api.prompts import Prompt
from app.api.schemas import CompletionRequest
from app.api.services import Services
from app.api.validation import token_budget
from app.engine_config import EngineInfo
from app.text.tokenizer import Tokenizer

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


@router.post("/v1/completions", **openapi.COMPLETIONS)
async def completions(request: Request) -> Response:
    call = await receive(request, CompletionRequest)
    body, info = call.body, call.info
    with call.acquire() as permits:
        given = await _encode(call.services, body, info)
        budgets = [
            token_budget(param, len(prompt.token_ids), body.max_tokens, DEFAULT_MAX_TOKENS, info.max_model_len)
            for prompt, param in zip(given, _params(body), strict=True)
        ]
        choices = submit(call, given, budgets, permits)
    echoed = _prompt_texts(body, call.services.tokenizer) if body.echo else ()
    return await answer(call, choices, CompletionAnswers(call.model_name, choices.usage, body.streaming, echoed))


@router.post("/v1/completions/render", **openapi.RENDER_COMPLETIONS)
async def render_completions(request: Request) -> Response:
    """Return the token ids of each prompt, and generate nothing."""
    services, body, info, name = await receive_to_render(request, CompletionRequest)
    given = await _encode(services, body, info)
    return json_response([{"model": name, "token_ids": prompt.token_ids} for prompt in given])


async def _encode(services: Services, body: CompletionRequest, info: EngineInfo) -> list[Prompt]:
    special = body.add_special_tokens is not False
    return [
        await prompts.encode_prompt(services, prompt, param, info, add_special_tokens=special)
        for prompt, param in zip(body.prompts, _params(body), strict=True)
    ]


def _params(body: CompletionRequest) -> list[str]:
    """Return the field of each prompt, by which an error names it."""
    return ["prompt"] if body.prompt_is_one else [f"prompt.{i}" for i in range(body.num_prompts)]


def _prompt_texts(body: CompletionRequest, tokenizer: Tokenizer) -> list[str]:
    """Return the text of every choice's prompt."""
    texts = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in body.prompts]
    return [text for text in texts for _ in range(body.num_choices)]
