"""POST /v1/chat/completions: a conversation through the chat template to an answer."""

from fastapi import APIRouter, Request, Response

from app.api import openapi, prompts
from app.api.answers import ChatAnswers, json_response
from app.api.generate import Call, answer, receive, receive_to_render, submit
from app.api.schemas import ChatCompletionRequest
from app.api.stream import Choices
from app.api.validation import check_reasoning, token_budget

router = APIRouter()


@router.post("/v1/chat/completions", **openapi.CHAT)
async def chat_completions(request: Request) -> Response:
    call = await receive(request, ChatCompletionRequest)
    choices = await converse(call)
    return await answer(call, choices, ChatAnswers(call.model_name, choices.usage, call.body.streaming))


@router.post("/v1/chat/completions/render", **openapi.RENDER_CHAT)
async def render_chat(request: Request) -> Response:
    """Return the token ids of a conversation's prompt, and generate nothing."""
    services, body, info, name = await receive_to_render(request, ChatCompletionRequest)
    check_reasoning(body, services.reasoning)
    prompt = await prompts.render_and_encode(services, body, info)
    return json_response({"model": name, "token_ids": prompt.token_ids})


async def converse(call: Call[ChatCompletionRequest]) -> Choices:
    """Submit a conversation. Raises ApiError 400, Busy or EngineUnavailable."""
    body = call.body
    check_reasoning(body, call.services.reasoning)
    with call.acquire() as permits:
        prompt = await prompts.render_and_encode(call.services, body, call.info)
        limit = body.max_completion_tokens or body.max_tokens
        limit_param = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        budget = token_budget("messages", len(prompt.token_ids), limit, None, call.info.max_model_len, limit_param)
        return submit(call, [prompt], [budget], permits)
