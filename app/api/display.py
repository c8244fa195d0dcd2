"""Display of the start at a terminal: a progress bar, then a box that says where to go."""

import asyncio
import contextlib
import json
import logging
import shlex
import time
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from app.engine_client.client import EngineClient
from app.engine_client.supervisor import EngineState
from app.messages import EngineInfo

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 15.0
"""Time between two lines of the log about one stage."""


async def show_start(engine: EngineClient, url: str, model: str) -> None:
    """Show the engine's progress and then the box, at every start of the engine. Runs until cancelled."""
    console = Console(stderr=True)
    while True:
        began = time.monotonic()
        state = await _show_loading(engine, console)
        if state.phase != "ready" or state.info is None:
            return
        logger.debug("KV: %d pages of %d tokens", state.info.num_pages, state.info.page_size)
        if console.is_terminal:
            console.print(ready_table(state.info, url, model))
            body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
            request = shlex.join(["curl", f"{url}/v1/chat/completions", "-d", body])
            console.print("try:", request, markup=False, highlight=False, soft_wrap=True)
        else:
            seconds = time.monotonic() - began
            logger.info("ready: %s", ready_line(state.info, seconds, url, model))
            if state.info.state_bytes:
                logger.info("state: %s", state_line(state.info))
        while engine.state.phase == "ready":
            await engine.supervisor.next_state()


async def _show_loading(engine: EngineClient, console: Console) -> EngineState:
    """Show the stage in one line on a terminal, else log a line for every stage, and for a long one from time to time.
    Return the state after loading.

    One line, because log lines, most of them the engine's, would overwrite more on a terminal.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    is_shown = console.is_terminal and engine.state.phase == "loading"  # and not at the end of the server
    shown: AbstractContextManager[object] = bar if is_shown else nullcontext()
    stage, task = "starting", bar.add_task("starting", total=None)
    began = logged = time.monotonic()
    with shown:
        while engine.state.phase == "loading":
            progress, now = engine.state.progress, time.monotonic()
            if progress is not None:
                if progress.stage != stage:
                    bar.remove_task(task)
                    stage, task, began, logged = progress.stage, bar.add_task(progress.stage), now, now
                    if not console.is_terminal:
                        logger.info("loading: %s", stage)
                bar.update(task, completed=progress.done, total=max(1, progress.total))
            if not console.is_terminal and now - logged >= _PROGRESS_SECONDS:
                logged = now
                share = f", {progress.done / max(1, progress.total):.0%} done" if progress is not None else ""
                logger.info("loading: %s, %.0f s%s", stage, now - began, share)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROGRESS_SECONDS):
                    await engine.supervisor.next_state()
    return engine.state


def ready_line(info: EngineInfo, seconds: float, url: str, model: str) -> str:
    """Return the line of the log for an engine that is ready after `seconds`."""
    draft = f"draft {info.draft}" if info.draft else "no draft, one token a step"
    return (
        f"{info.target} on {info.device} after {seconds:.0f} s, context {info.max_model_len} tokens, {draft}, "
        f"serving {model} at {url}"
    )


def ready_table(info: EngineInfo, url: str, model: str) -> Table:
    """Return the table of where to go, and what is loaded."""
    table = Table(title="dflash-server is ready", show_header=False, title_justify="left", min_width=60)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("page", f"{url}/")
    table.add_row("base_url", f"{url}/v1")
    table.add_row("model", f"{model}, {info.dtype} on {info.device}")
    table.add_row("draft", info.draft or "none: decoding plainly, one token a step")
    table.add_row("context", f"{info.max_model_len:,} tokens a request, {info.max_num_seqs} requests at once")
    if info.state_bytes:
        table.add_row("state", state_line(info))
    return table


def state_line(info: EngineInfo) -> str:
    """Return the memory of a hybrid target's states, and of those in its prefix cache."""
    size = f"{info.state_bytes / 2**20:,.0f} MiB of recurrent state for {info.max_num_seqs} requests"
    if not info.num_state_checkpoints:
        return f"{size}; no prefix cache, so cached_tokens is 0"
    cache = f"{info.state_cache_bytes / 2**20:,.0f} MiB for {info.num_state_checkpoints} checkpoints"
    return f"{size}, and {cache} of the prefix cache"


def print_error(message: str) -> None:
    """Write the one line that says why the server cannot go on."""
    logger.critical("%s", message, extra={"is_last": True})
