"""Lines about the start, for people who wait for it."""

import asyncio
import logging
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from app.api import display
from app.api.display import ready_line, ready_table, show_start, state_line
from app.engine_client.supervisor import EngineState, Phase
from app.messages import EngineInfo
from app.wire import LoadProgress


def engine(**states: int) -> EngineInfo:
    sizes = {"page_size": 16, "num_pages": 8, "max_model_len": 64, "max_num_seqs": 32, "max_num_batched_tokens": 64}
    return EngineInfo("t", None, "cpu", "float32", 1, [], **sizes, vocab_size=97, **states)


@pytest.mark.parametrize("state_bytes", [0, 663 << 20])
def test_the_table_tells_of_recurrent_state_and_of_the_cache_that_is_missing(state_bytes: int) -> None:
    shown = Console(file=StringIO(), width=200)
    shown.print(ready_table(engine(state_bytes=state_bytes), "http://h:1", "tiny"))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert ("663 MiB of recurrent state for 32 requests" in text) == bool(state_bytes)
    assert ("no prefix cache" in text) == bool(state_bytes)


def test_the_box_says_where_the_page_and_the_api_are_and_what_is_served() -> None:
    shown = Console(file=StringIO(), width=200)
    shown.print(ready_table(engine(), "http://h:1", "tiny"))
    rows = {line.split()[1]: line.split()[3] for line in shown.file.getvalue().splitlines() if "│" in line}  # type: ignore[attr-defined]
    assert (rows["page"], rows["base_url"], rows["model"]) == ("http://h:1/", "http://h:1/v1", "tiny,")
    assert (rows["draft"], rows["context"]) == ("none:", "64")


def test_the_line_of_recurrent_state_tells_of_the_checkpoints() -> None:
    said = "663 MiB of recurrent state for 32 requests, and 160 MiB for 8 checkpoints of the prefix cache"
    states = {"state_bytes": 663 << 20, "state_cache_bytes": 160 << 20, "num_state_checkpoints": 8}
    assert state_line(engine(**states)) == said


@pytest.mark.parametrize("end", ["draining", "dead"])
def test_a_bar_is_drawn_while_the_engine_loads_and_not_when_it_ends(
    end: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Console(file=StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr(display, "Console", lambda **_: terminal)
    states = [EngineState("ready", engine()), EngineState(end)]
    shown: list[str] = []

    async def next_state() -> None:
        shown.append(terminal.file.getvalue())  # type: ignore[attr-defined]
        client.state = states.pop(0)

    client: Any = SimpleNamespace(state=EngineState("loading"), supervisor=SimpleNamespace(next_state=next_state))
    asyncio.run(show_start(client, "http://h:1", "tiny"))
    assert not states and "starting" in shown[0] and "dflash-server is ready" in shown[1]
    assert terminal.file.getvalue() == shown[1]  # type: ignore[attr-defined]


def test_without_a_terminal_a_long_stage_is_told_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(display, "_PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(display, "Console", lambda **_: Console(file=StringIO(), force_terminal=False))

    async def silent() -> None:
        """A compiler that says nothing, until the log has three lines of it."""
        while len(caplog.messages) < 3:
            await asyncio.sleep(0.001)
        client.state = EngineState("dead")

    compiling = EngineState("loading", progress=LoadProgress("compiling", 1, 4))
    client: Any = SimpleNamespace(state=compiling, supervisor=SimpleNamespace(next_state=silent))
    with caplog.at_level(logging.INFO):
        asyncio.run(show_start(client, "http://h:1", "tiny"))
    first, *later = caplog.messages
    assert first == "loading: compiling" and set(later) == {"loading: compiling, 0 s, 25% done"}


@pytest.mark.parametrize(("draft", "said"), [("/drafts/d", "draft /drafts/d"), (None, "no draft, one token a step")])
def test_the_line_of_a_ready_engine_has_its_context_and_its_draft(draft: str | None, said: str) -> None:
    line = ready_line(replace(engine(), draft=draft), 12.0, "http://h:1", "tiny")
    assert line == f"t on cpu after 12 s, context 64 tokens, {said}, serving tiny at http://h:1"
