"""POST /v1/chat/completions: a conversation through the chat template to an answer."""

from fastapi import APIRouter, Request, Response

from app.api import openapi, prompts
from app.api.answers import ChatAnswers, ChatCompletion, RenderedPrompt, json_response, rendered
from app.api.generate import Received, answer, receive, submit
from app.api.schemas import ChatCompletionRequest
from app.api.services import services_of
from app.api.stream import Choices
from app.api.validation import token_budget

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **openapi.route(
        "Answer a conversation",
        ChatCompletion,
        *openapi.GENERATING,
        body=(ChatCompletionRequest,),
        stream=openapi.CHUNKS,
    ),
)
async def chat_completions(request: Request) -> Response:
    with services_of(request).hold(request) as held:
        received = await receive(request, ChatCompletionRequest, held)
        choices = await converse(received)
    return await answer(received, choices, ChatAnswers(received.model_name, choices, received.body.streaming))


@router.post(
    "/v1/chat/completions/render",
    **openapi.route("The prompt of a conversation", RenderedPrompt, *openapi.ENCODING, body=(ChatCompletionRequest,)),
)
async def render_chat(request: Request) -> Response:
    """Return the token ids of a conversation's prompt, and generate nothing."""
    services = services_of(request)
    with services.hold(request) as held:
        received = await receive(request, ChatCompletionRequest, held, is_admitted=False)
        prompt = await services.in_thread(request, prompts.of_conversation, services, received.body, received.info)
    return json_response(rendered(received.model_name, prompt, [*received.warnings, *prompt.warnings]))


async def converse(received: Received[ChatCompletionRequest]) -> Choices:
    """Submit a conversation. Raises ApiError 400, Busy or EngineUnavailable."""
    body, info, services = received.body, received.info, received.services
    with received.acquire() as permits:
        prompt = await services.in_thread(received.request, prompts.of_conversation, services, body, info)
        default = services.tokenizer.max_new_tokens
        clamps = services.config.clamp_max_tokens
        sizes = len(prompt.token_ids), body.token_limit, default, info.max_model_len
        budget = token_budget("messages", *sizes, clamps=clamps)
        return submit(received, [prompt], [budget], permits)
