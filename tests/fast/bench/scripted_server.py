"""A tiny server on a real socket that sends planned bytes at planned moments of a clock that only it turns."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

Script = Sequence[tuple[float, str]]
"""(moment in seconds, bytes sent then)."""


class Clock:
    """A clock that the server sets. It tells the server when the client has read it."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.looked = asyncio.Event()

    def __call__(self) -> float:
        self.looked.set()
        return self.now


class ScriptedServer:
    """Server that sends `script` for every request and keeps the bodies in `seen`.

    After each piece of a streamed answer it waits until the client has read the clock.
    """

    def __init__(self, clock: Clock, script: Script, status: int = 200) -> None:
        self.clock, self.script, self.status = clock, script, status
        self.seen: list[Any] = []
        self.paths: list[str] = []
        self.clients: set[tuple[str, int]] = set()
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        self.seen.append(json.loads(body + message["body"] or "null"))
        self.paths.append(scope["path"])
        self.clients.add(tuple(scope["client"]))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for moment, piece in self.script:
            self.clock.looked.clear()
            self.clock.now = moment
            await send({"type": "http.response.body", "body": piece.encode(), "more_body": True})
            if self.status == 200 and scope["method"] == "POST":
                await self.clock.looked.wait()
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def serving(script: Script, status: int = 200, now: float = 0.0) -> AsyncIterator[ScriptedServer]:
    """On a free port, with its clock at `now`."""
    app = ScriptedServer(Clock(now), script, status)
    listener = socket.create_server(("127.0.0.1", 0))
    app.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None, timeout_keep_alive=600)
    )
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield app
    finally:
        server.should_exit = True
        await task


def event(content: str = "", reason: str | None = None, **more: Any) -> str:
    """A chunk of a chat answer as an event."""
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n"


def usage(tokens: int, prompt_tokens: int = 7, cached_tokens: int = 0) -> str:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    counts_and_cached = counts | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return f"data: {json.dumps({'choices': [], 'usage': counts_and_cached})}\n\n"


DONE = "data: [DONE]\n\n"
