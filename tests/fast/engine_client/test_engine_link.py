"""The engine process is this package's own, whatever directory the server starts in."""

import asyncio
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
import zmq

from app.api.server import ENGINE_COMMAND
from app.config.settings import env_name
from app.engine_client import link as engine_link
from app.engine_client.child_process import KEYS, engine_environment
from app.engine_client.link import EngineLink
from app.wire import Fatal, Reply


@pytest.mark.exhaustive
def test_another_app_in_the_working_folder_is_not_imported_in_our_place(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    for name in ("app/__init__.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('hijacked')")
    ended = subprocess.run(
        ENGINE_COMMAND, cwd=tmp_path, env=engine_environment(), capture_output=True, text=True, timeout=1700
    )
    assert "hijacked" not in ended.stderr
    assert "not enough values to unpack" in ended.stderr  # The error is of our main(), which takes two arguments.


@pytest.mark.parametrize("name", ["DFLASH_API_KEY", "dflash_Admin_key"])
def test_keys_that_the_environment_has_are_none_of_the_engines_business(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "a-key")
    monkeypatch.setenv("DFLASH_LOG_LEVEL", "debug")
    environment = engine_environment()
    assert "a-key" not in environment.values() and environment["DFLASH_LOG_LEVEL"] == "debug"
    assert {env_name("api_key"), env_name("admin_key")} == KEYS


def test_what_an_engine_said_just_before_its_end_is_heard_though_it_comes_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_link, "_LAST_WORDS_SECONDS", 10.0)

    async def first_reply() -> Reply:
        link = await EngineLink.open([sys.executable, "-c", ""], "{}")
        engine = zmq.Context.instance().socket(zmq.PUSH)
        try:
            while "exit code 0" not in link.exit_reason():
                await asyncio.sleep(0.01)
            engine.connect(link.addresses[1])
            said = msgspec.msgpack.encode(Fatal("out of memory"))
            asyncio.get_running_loop().call_later(0.1, engine.send, said)
            async with aclosing(link.replies()) as replies:
                return await anext(replies)
        finally:
            engine.close()
            await link.close()

    assert asyncio.run(first_reply()) == Fatal("out of memory")


def test_what_a_killed_engine_has_sent_or_still_sends_does_not_reach_the_next_one() -> None:
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]

    async def first_reply_of_the_next() -> Reply:
        late, own = (zmq.Context.instance().socket(zmq.PUSH) for _ in range(2))
        killed = await EngineLink.open(waits, "{}")
        following = None
        try:
            late.connect(killed.addresses[1])
            late.send(msgspec.msgpack.encode(Fatal("sent, and not read")))
            killed.kill()
            await killed.close()
            following = await EngineLink.open(waits, "{}")
            late.send(msgspec.msgpack.encode(Fatal("sent too late")))
            await asyncio.sleep(0.2)  # ZeroMQ connects again every 0.1 s
            own.connect(following.addresses[1])
            own.send(msgspec.msgpack.encode(Fatal("its own")))
            async with aclosing(following.replies()) as replies:
                return await anext(replies)
        finally:
            for socket in (late, own):
                socket.close(linger=0)
            if following is not None:
                await following.close()

    assert asyncio.run(first_reply_of_the_next()) == Fatal("its own")
