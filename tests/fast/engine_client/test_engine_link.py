"""The engine process is this package's own, whatever directory the server starts in."""

import asyncio
import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import zmq

from app.api.server import ENGINE_COMMAND
from app.config.settings import env_name
from app.engine_client import link as engine_link
from app.engine_client.child_process import KEYS, engine_environment
from app.engine_client.link import EngineLink
from app.wire import HEARTBEAT, Fatal, Reply


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


OWNER = """
import sys
from app.engine_client.link import EngineLink
link = EngineLink()
print(link.folder, flush=True)
sys.stdin.read()
"""


@contextmanager
def folders(*names: str) -> Iterator[list[Path]]:
    """Yield folders for sockets, whose paths are short. TMPDIR is their parent."""
    with TemporaryDirectory(prefix="dft-", dir="/tmp") as parent, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", parent)
        made = [Path(parent, name) for name in names]
        for folder in made:
            folder.mkdir()
            (folder / HEARTBEAT).touch()
        yield made


def opened_folder() -> Path:
    """Return the folder of a link that was opened and closed."""
    link = EngineLink()
    asyncio.run(link.close())
    return link.folder


def test_the_folder_of_a_killed_server_is_removed_by_the_next_start_and_that_of_a_live_one_is_not() -> None:
    with (
        folders() as _,
        subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner,
    ):
        assert owner.stdin is not None and owner.stdout is not None
        alive = Path(owner.stdout.readline().strip())
        (alive / "work-x").mkdir()
        assert opened_folder().parent == alive.parent
        assert alive.is_dir()
        owner.kill()
        owner.wait()
        assert alive.is_dir()
        own = opened_folder()
        assert [*alive.parent.iterdir()] == [] and not own.exists()


def test_no_folder_is_removed_that_may_not_be_an_abandoned_one_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with folders("dflash-orphaned", "dflash-starting", "victim", "other-abandoned", "dflash-models") as (
        abandoned,
        starting,
        victim,
        other,
        models,
    ):
        (starting / HEARTBEAT).rename(starting / "unlocked")
        (link := starting.with_name("dflash-linkaway")).symlink_to(victim)
        (file := starting.with_name("dflash-onlyfile")).touch()
        (nowhere := starting.with_name("dflash-dangling")).symlink_to("nowhere")
        with monkeypatch.context() as patch:
            patch.setattr("os.getuid", lambda: 12345)
            opened_folder()
        assert abandoned.is_dir(), "it is another user's"
        opened_folder()
        assert not abandoned.exists()
        assert {*starting.parent.iterdir()} == {
            starting,
            victim,
            other,
            models,
            link,
            file,
            nowhere,
        }
        assert (victim / HEARTBEAT).exists()


def test_a_disk_without_locks_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with folders("dflash-orphaned") as (abandoned,):
        opened_folder()
        assert abandoned.is_dir()


def test_a_full_disk_is_left_as_it_is_and_the_next_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def write_elsewhere(path: Path, data: bytes) -> int:
        if path.is_relative_to(full):
            path.touch()
            raise OSError(errno.ENOSPC, "no space left")
        return write(path, data)

    with folders(), TemporaryDirectory(prefix="dft-", dir="/tmp") as full:
        monkeypatch.setenv("TMPDIR", full)
        monkeypatch.setattr(Path, "write_bytes", write_elsewhere)
        assert opened_folder().parent != Path(full)
        assert [*Path(full).iterdir()] == []


def test_beats_are_counted_when_a_cleaner_of_old_files_has_removed_the_heartbeat() -> None:
    link = EngineLink()
    with (link.folder / HEARTBEAT).open("r+b") as file:
        (link.folder / HEARTBEAT).unlink()
        file.write((7).to_bytes(8, sys.byteorder))
    assert link.num_beats == 7
    asyncio.run(link.close())
