"""Structured data through frameworks of others: `python frameworks.py NAME URL` in an environment that has them.

Each case is what a user writes, with the base URL alone changed. An exception means that it does not work.
"""

import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

MODEL = "tiny"
QUESTION = "Three days in Bern, please."


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


def check(trip: Any) -> None:
    assert (trip.city, trip.days) == ("Bern", 3), trip


def instructor_with(mode: str) -> Callable[[str], None]:
    def case(url: str) -> None:
        import instructor
        from openai import OpenAI

        client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=getattr(instructor.Mode, mode))
        messages = [{"role": "user", "content": QUESTION}]
        check(client.chat.completions.create(model=MODEL, messages=messages, response_model=Trip, max_retries=1))

    return case


def langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key="none", model=MODEL)
    check(model.with_structured_output(Trip, method="function_calling").invoke(QUESTION))


def pydantic_ai_agent(url: str, **options: object) -> object:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(model, **options).run_sync(QUESTION).output


def pydantic_ai_output(url: str) -> None:
    check(pydantic_ai_agent(url, output_type=Trip))


CASES: dict[str, Callable[[str], None]] = {
    "instructor, Mode.TOOLS": instructor_with("TOOLS"),
    "instructor, Mode.TOOLS_STRICT": instructor_with("TOOLS_STRICT"),
    "instructor, Mode.MD_JSON": instructor_with("MD_JSON"),
    'LangChain, with_structured_output(method="function_calling")': langchain,
    "pydantic-ai, output_type": pydantic_ai_output,
}


def openai_parse(url: str) -> None:
    from openai import OpenAI

    messages = [{"role": "user", "content": QUESTION}]
    OpenAI(base_url=url, api_key="none").chat.completions.parse(model=MODEL, messages=messages, response_format=Trip)


def langchain_json_schema(url: str) -> None:
    from langchain_openai import ChatOpenAI

    ChatOpenAI(base_url=url, api_key="none", model=MODEL).with_structured_output(Trip).invoke(QUESTION)


def pydantic_ai_native(url: str) -> None:
    from pydantic_ai import NativeOutput

    pydantic_ai_agent(url, output_type=NativeOutput(Trip))


def pydantic_ai_prompted(url: str) -> None:
    from pydantic_ai import PromptedOutput

    pydantic_ai_agent(url, output_type=PromptedOutput(Trip))


REFUSED: dict[str, Callable[[str], None]] = {
    "openai, parse": openai_parse,
    "instructor, Mode.JSON": instructor_with("JSON"),
    "instructor, Mode.JSON_SCHEMA": instructor_with("JSON_SCHEMA"),
    "LangChain, with_structured_output with its default": langchain_json_schema,
    "pydantic-ai, NativeOutput": pydantic_ai_native,
    "pydantic-ai, PromptedOutput": pydantic_ai_prompted,
}

if __name__ == "__main__":
    (CASES | REFUSED)[sys.argv[1]](sys.argv[2])
