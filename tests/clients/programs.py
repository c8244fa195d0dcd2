"""Programs of each client's users: `python programs.py NAME chat|loop URL MODEL QUESTION` in the client's environment.

`chat` prints the texts of a whole answer and of streams. `loop` prints the arguments with which the tool was called,
and the answer behind its result. Nothing but the base URL and the model is this server's. The temperature is 0 where a
client sends another one by itself.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

Texts = list[str]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Return the current weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CITIES: list[str] = []


def get_weather(city: str) -> str:
    """Return the current weather in a city.

    Args:
        city: name of the city
    """
    CITIES.append(city)
    return "sunny"


def openai_client(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=url, api_key="none")


def openai_chat(url: str, model: str, question: str) -> Texts:
    create = openai_client(url).chat.completions.create
    messages = [{"role": "user", "content": question}]
    whole = create(model=model, messages=messages).choices[0].message.content
    chunks = create(model=model, messages=messages, stream=True)
    return [whole, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)]


def openai_chat_loop(url: str, model: str, question: str) -> str:
    return tool_loop(partial(openai_client(url).chat.completions.create, model=model), question, strict=True)


def tool_loop(create: Callable[..., Any], question: str, **more: Any) -> str:
    """Call the tool for as long as the model wants it, and return its last words."""
    tools = [{"type": "function", "function": WEATHER | more}]
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        message = create(messages=messages, tools=tools).choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message.model_dump())
        for call in message.tool_calls:
            told = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})


def openai_responses(url: str, model: str, question: str) -> Texts:
    responses = openai_client(url).responses
    whole = responses.create(model=model, input=question).output_text
    with responses.stream(model=model, input=question) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        return [whole, text, events.get_final_response().output_text]


def openai_responses_loop(url: str, model: str, question: str) -> str:
    responses = openai_client(url).responses
    tools = [{"type": "function", "strict": True, **WEATHER}]
    items: list[Any] = [{"role": "user", "content": question}]
    while True:
        response = responses.create(model=model, input=items, tools=tools)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        items += response.output
        for call in calls:
            told = get_weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": told})


def pydantic_ai_agent(url: str, model: str, **options: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return Agent(OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none")), **options)


def pydantic_ai(url: str, model: str, question: str) -> Texts:
    agent = pydantic_ai_agent(url, model)

    async def streamed() -> str:
        async with agent.run_stream(question) as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    return [agent.run_sync(question).output, asyncio.run(streamed())]


def pydantic_ai_loop(url: str, model: str, question: str) -> str:
    return str(pydantic_ai_agent(url, model, tools=[get_weather]).run_sync(question).output)


def agent_of_openai(url: str, model: str, **options: Any) -> Any:
    from agents import Agent, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=url, api_key="none"))
    return Agent(name="guide", model=model, **options)


def openai_agents(url: str, model: str, question: str) -> Texts:
    from agents import Runner

    async def both() -> Texts:
        agent = agent_of_openai(url, model)
        streamed = Runner.run_streamed(agent, question)
        pieces = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return [(await Runner.run(agent, question)).final_output, "".join(pieces)]

    return asyncio.run(both())


def openai_agents_loop(url: str, model: str, question: str) -> str:
    from agents import Runner, function_tool

    agent = agent_of_openai(url, model, tools=[function_tool(get_weather)])
    return str(asyncio.run(Runner.run(agent, question)).final_output)


def langchain(url: str, model: str, question: str) -> Texts:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model=model)
    return [chat.invoke(question).content, "".join(chunk.content for chunk in chat.stream(question))]


def langchain_loop(url: str, model: str, question: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(base_url=url, api_key="none", model=model), tools=[get_weather])
    return str(agent.invoke({"messages": [{"role": "user", "content": question}]})["messages"][-1].content)


def smolagents(url: str, model: str, question: str) -> Texts:
    from smolagents import OpenAIServerModel

    chat = OpenAIServerModel(model, api_base=url, api_key="none")
    messages = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    streamed = chat.generate_stream(messages)
    return [chat.generate(messages).content, "".join(delta.content or "" for delta in streamed)]


def smolagents_loop(url: str, model: str, question: str) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    chat = OpenAIServerModel(model, api_base=url, api_key="none")
    return str(ToolCallingAgent([tool(get_weather)], chat, max_steps=4).run(question))


def inspect_ai(url: str, model: str, question: str) -> Texts:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    models = [get_model(f"{api}/{model}", base_url=url, api_key="none") for api in ("openai", "openai-api/dflash")]
    with tempfile.TemporaryDirectory() as folder:
        task = Task([Sample(question, target="")], solver=generate(), scorer=includes())
        logs = eval(task, models, log_dir=folder, display="none")
        assert all(log.status == "success" for log in logs), [log.error for log in logs]
        return [log.samples[0].output.completion for log in logs]


def inspect_ai_loop(url: str, model: str, question: str) -> str:
    from inspect_ai.model import get_model
    from inspect_ai.tool import ToolDef

    async def execute(city: str) -> str:
        return get_weather(city)

    weather = ToolDef(execute, WEATHER["name"], WEATHER["description"], {"city": "name of the city"})
    chat = get_model(f"openai/{model}", base_url=url, api_key="none")
    return str(asyncio.run(chat.generate_loop(question, tools=[weather]))[1].completion)


def llama_index_model(url: str, model: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=model,
        api_base=url,
        api_key="none",
        temperature=0,
        context_window=1024,
        is_chat_model=True,
        is_function_calling_model=True,
    )


def llama_index(url: str, model: str, question: str) -> Texts:
    from llama_index.core.llms import ChatMessage

    chat, messages = llama_index_model(url, model), [ChatMessage(role="user", content=question)]
    streamed = "".join(part.delta or "" for part in chat.stream_chat(messages))
    return [str(chat.chat(messages).message.content), streamed]


def llama_index_loop(url: str, model: str, question: str) -> str:
    from llama_index.core.agent.workflow import FunctionAgent

    async def run() -> str:
        return str(await FunctionAgent(tools=[get_weather], llm=llama_index_model(url, model)).run(question))

    return asyncio.run(run())


def instructor(url: str, model: str, question: str) -> Texts:
    client = instructor_client(url)
    messages = [{"role": "user", "content": question}]
    whole = client.chat.completions.create(model=model, messages=messages, response_model=None)
    return [whole.choices[0].message.content]


def instructor_client(url: str) -> Any:
    import instructor

    return instructor.from_openai(openai_client(url))


def instructor_loop(url: str, model: str, question: str) -> str:
    """Get the arguments of a call that must be made. There is no result to tell."""
    from pydantic import create_model

    wanted = create_model("get_weather", city=(str, ...))
    messages = [{"role": "user", "content": question}]
    got = instructor_client(url).chat.completions.create(model=model, messages=messages, response_model=wanted)
    return get_weather(got.city)


def litellm(url: str, model: str, question: str) -> Texts:
    import litellm

    messages = [{"role": "user", "content": question}]
    texts = []
    for provider in ("openai", "hosted_vllm"):
        ask = partial(litellm.completion, f"{provider}/{model}", messages, api_base=url, api_key="none")
        texts.append(ask().choices[0].message.content)
        chunks = ask(stream=True)
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    return texts


def litellm_loop(url: str, model: str, question: str) -> str:
    import litellm

    create = partial(litellm.completion, f"openai/{model}", api_base=url, api_key="none")
    return tool_loop(create, question)


def autogen_agent(url: str, model: str, **options: Any) -> Any:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    features = dict.fromkeys(("vision", "json_output", "structured_output"), False)
    info = {"function_calling": True, "family": "unknown", **features}
    client = OpenAIChatCompletionClient(model=model, base_url=url, api_key="none", model_info=info)
    return AssistantAgent("guide", client, system_message=None, **options)


def autogen(url: str, model: str, question: str) -> Texts:
    """Ask with the names of speakers, which AutoGen sends by default."""
    from autogen_agentchat.messages import ModelClientStreamingChunkEvent

    async def both() -> Texts:
        whole = await autogen_agent(url, model).run(task=question)
        events = autogen_agent(url, model, model_client_stream=True).run_stream(task=question)
        pieces = [event.content async for event in events if isinstance(event, ModelClientStreamingChunkEvent)]
        return [whole.messages[-1].content, "".join(pieces)]

    return asyncio.run(both())


def autogen_loop(url: str, model: str, question: str) -> str:
    agent = autogen_agent(url, model, tools=[get_weather], max_tool_iterations=4)
    return str(asyncio.run(agent.run(task=question)).messages[-1].content)


class Client(NamedTuple):
    """A client. Its environment is a file of requirements, and `package` says its version.

    `prompt_fits` unless its prompt for tools is longer than the demo pair's context of 1,024 tokens. An agent always
    sends such a prompt, and has a test of its own.
    """

    environment: str
    package: str
    chat: Callable[[str, str, str], Texts] | None = None
    loop: Callable[[str, str, str], str] | None = None
    prompt_fits: bool = True
    is_agent: bool = False


CLIENTS = {
    "openai, chat.completions": Client("openai3", "openai", openai_chat, openai_chat_loop),
    "openai, responses": Client("openai3", "openai", openai_responses, openai_responses_loop),
    "openai 2, chat.completions": Client("openai2", "openai", openai_chat, openai_chat_loop),
    "pydantic-ai": Client("openai3", "pydantic-ai-slim", pydantic_ai, pydantic_ai_loop),
    "openai-agents": Client("openai3", "openai-agents", openai_agents, openai_agents_loop),
    "LangChain": Client("openai3", "langchain-openai", langchain, langchain_loop),
    "LlamaIndex": Client("openai2", "llama-index-llms-openai-like", llama_index, llama_index_loop),
    "instructor": Client("openai2", "instructor", instructor, instructor_loop),
    "smolagents": Client("openai3", "smolagents", smolagents, smolagents_loop, prompt_fits=False),
    "litellm": Client("openai2", "litellm", litellm, litellm_loop),
    "inspect-ai": Client("openai3", "inspect-ai", inspect_ai, inspect_ai_loop),
    "AutoGen": Client("openai2", "autogen-ext", autogen, autogen_loop),
    "AI SDK": Client("node", "ai"),
    "AI SDK, @ai-sdk/openai": Client("node", "@ai-sdk/openai"),
    "Agents JS": Client("node", "@openai/agents"),
    "Agents JS, chat.completions": Client("node", "@openai/agents"),
    "Agents JS, previousResponseId": Client("node", "@openai/agents"),
    "Codex": Client("node", "@openai/codex", is_agent=True),
}

if __name__ == "__main__":
    name, part, *given = sys.argv[1:]
    if part == "chat":
        print(json.dumps({"texts": CLIENTS[name].chat(*given)}))
    else:
        answer = CLIENTS[name].loop(*given)
        print(json.dumps({"calls": CITIES, "answer": answer}))
