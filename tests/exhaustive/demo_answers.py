"""The demo pair's answers to chats, and the number that an answer ends with."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from app.messages import Request
from app.text.tokenizer import Tokenizer
from tests.exhaustive.acceptance import engine
from tests.fast.engine.lossless import demo_folder, run_engine

Chat = dict[str, Any]
"""The fields `messages` and `tools` of a request."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_folder("target"))


def ask(question: str) -> Chat:
    return {"messages": [{"role": "user", "content": question}]}


def answer_ids(chats: Sequence[Chat], max_tokens: int, **settings: Any) -> list[list[int]]:
    texts = [tokenizer().chat_template.render(chat["messages"], tools=chat.get("tools")) for chat in chats]
    requests = [
        Request(
            str(i),
            tuple(tokenizer().encode(text, add_special_tokens=False)),
            max_tokens,
            stop_token_ids=frozenset(tokenizer().eos_ids),
        )
        for i, text in enumerate(texts)
    ]
    return run_engine(engine(**settings), requests).texts


def answers(chats: Sequence[Chat]) -> list[str]:
    return [tokenizer().decode(ids) for ids in answer_ids(chats, max_tokens=300)]


def final_number(text: str) -> int | None:
    """Return the last whole number in `text`, with or without separators of thousands."""
    found = re.findall(r"-?\d+", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    return int(found[-1]) if found else None
