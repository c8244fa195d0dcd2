"""The demo pair as data: its checkpoints and held-out prompts.

Drafts are trained in `tools/train_draft`. The reader below needs only the standard library, because device reports run
in bare images.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).with_name("prompts.json")


@cache
def held_out() -> dict[str, list[dict[str, Any]]]:
    """Return the held-out prompts of each domain, with `messages`.

    Domains with one right answer add `answer`. The first prompts of a domain add `token_ids`, by the chat template.
    """
    prompts: dict[str, list[dict[str, Any]]] = _data()["prompts"]
    return prompts


def token_ids(count: int | None = None) -> list[tuple[int, ...]]:
    """Return the token ids of the first `count` prompts, one of each domain in turn; None means all that are stored."""
    domains = ([prompt["token_ids"] for prompt in prompts if "token_ids" in prompt] for prompts in held_out().values())
    return [tuple(ids) for turn in zip(*domains, strict=True) for ids in turn][:count]


def stop_token_ids() -> list[int]:
    """Return the tokens that end an answer of the demo's target."""
    return list(_data()["stop_token_ids"])


def words() -> list[str]:
    """Return words that the tokenizer knows, from which prompts without meaning are made."""
    return str(_data()["words"]).split()


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return data
