"""POST /v1/completions: bare prompts, as text or token ids, to their continuations."""

from fastapi import APIRouter, Request, Response

from app.api import openapi, prompts
from app.api.answers import Completion, CompletionAnswers, RenderedPrompt, json_response, rendered
from app.api.generate import Received, answer, receive, submit
from app.api.prompts import Prompt
from app.api.schemas import CompletionRequest
from app.api.services import services_of
from app.api.validation import token_budget
from app.text.tokenizer import Tokenizer

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint


@router.post(
    "/v1/completions",
    **openapi.route(
        "Continue a text", Completion, *openapi.GENERATING, body=(CompletionRequest,), stream=openapi.CHUNKS
    ),
)
async def completions(request: Request) -> Response:
    with services_of(request).hold(request) as held:
        received = await receive(request, CompletionRequest, held)
        body, info = received.body, received.info
        with received.acquire() as permits:
            given, echoed = await _prompts(received)
            clamps = received.services.config.clamp_max_tokens
            sizes = body.token_limit, DEFAULT_MAX_TOKENS, info.max_model_len
            budgets = [
                token_budget(param, len(prompt.token_ids), *sizes, clamps=clamps)
                for param, prompt in zip(body.prompts, given, strict=True)
            ]
            choices = submit(received, given, budgets, permits)
    return await answer(received, choices, CompletionAnswers(received.model_name, choices, body.streaming, echoed))


@router.post(
    "/v1/completions/render",
    **openapi.route("The tokens of prompts", list[RenderedPrompt], *openapi.ENCODING, body=(CompletionRequest,)),
)
async def render_completions(request: Request) -> Response:
    """Return the token ids of each prompt, and generate nothing."""
    with services_of(request).hold(request) as held:
        received = await receive(request, CompletionRequest, held, is_admitted=False)
        given, _ = await _prompts(received)
    return json_response(
        [
            rendered(received.model_name, prompt, () if index else received.warnings)
            for index, prompt in enumerate(given)
        ]
    )


async def _prompts(received: Received[CompletionRequest]) -> tuple[list[Prompt], list[str]]:
    """Return the prompts, and with `echo` the text of every choice's prompt."""
    body, services = received.body, received.services

    def made() -> tuple[list[Prompt], list[str]]:
        special = body.add_special_tokens is not False
        given = [
            prompts.bare(services, prompt, param, received.info, add_special_tokens=special)
            for param, prompt in body.prompts.items()
        ]
        return given, _texts(body, services.tokenizer) if body.echo else []

    return await services.in_thread(received.request, made)


def _texts(body: CompletionRequest, tokenizer: Tokenizer) -> list[str]:
    texts = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in body.prompts.values()]
    return [text for text in texts for _ in range(body.num_choices)]
