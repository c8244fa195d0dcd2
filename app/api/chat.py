"""POST /v1/chat/completions: a conversation through the chat template to an answer."""

from fastapi import APIRouter, Request, Response

from app.api import openapi, prompts
from app.api.answers import ChatAnswers, ChatCompletion, RenderedPrompt, json_response
from app.api.generate import Received, answer, receive, submit
from app.api.schemas import ChatCompletionRequest
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
    received = await receive(request, ChatCompletionRequest)
    choices = await converse(received)
    return await answer(received, choices, ChatAnswers(received.model_name, choices, received.body.streaming))


@router.post(
    "/v1/chat/completions/render",
    **openapi.route("The prompt of a conversation", RenderedPrompt, *openapi.ENCODING, body=(ChatCompletionRequest,)),
)
async def render_chat(request: Request) -> Response:
    """Return the token ids of a conversation's prompt, and generate nothing."""
    received = await receive(request, ChatCompletionRequest, is_admitted=False)
    prompt = await prompts.render_and_encode(received.services, received.body, received.info)
    return json_response(RenderedPrompt(model=received.model_name, token_ids=prompt.token_ids))


async def converse(received: Received[ChatCompletionRequest]) -> Choices:
    """Submit a conversation. Raises ApiError 400, Busy or EngineUnavailable."""
    body, info, default = received.body, received.info, received.services.tokenizer.max_new_tokens
    with received.acquire() as permits:
        prompt = await prompts.render_and_encode(received.services, body, info)
        limit = body.max_completion_tokens or body.max_tokens
        limit_param = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        budget = token_budget("messages", len(prompt.token_ids), limit, default, info.max_model_len, limit_param)
        return submit(received, [prompt], [budget], permits)
