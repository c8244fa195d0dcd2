"""The engine process hears nonsense, loses its parent, or gets a request that cannot run: it says so, or ends."""

import contextlib
import json
import re
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from app.config.engine import EngineConfig
from app.engine.load.engine import Engine
from app.engine.process import Link, serve
from app.engine_client.child_process import engine_environment
from app.messages import Request, SamplingParams, SpecStep, StepOutput, StepStats, TokenDelta
from app.wire import HEARTBEAT, Abort, Ready, Reply, Shutdown, Stepped, Submit, encode_config
from tests import UNTIMED
from tests.fast.engine.lossless import make_engine
from tests.fast.engine.pairs import Pair, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return make_engine(pair.target, pair.draft, max_model_len=64, max_num_seqs=4, page_size=4)


class Parent:
    """Both sockets as the API process has them."""

    def __init__(self, folder: Path) -> None:
        self.addresses = [f"ipc://{folder / name}" for name in ("commands", "replies")]
        self._context = zmq.Context()
        self.commands, self.replies = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self.commands.bind(self.addresses[0])
        self.replies.bind(self.addresses[1])
        self.replies.rcvtimeo = 300_000

    def send(self, *commands: Any) -> None:
        for command in commands:
            self.commands.send(command if isinstance(command, bytes) else msgspec.msgpack.encode(command))

    def replied(self) -> Iterator[Reply]:
        """Each as it comes. Raises zmq.Again where none comes for minutes."""
        while True:
            yield msgspec.msgpack.decode(self.replies.recv(), type=Reply)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parent]:
    parent = Parent(tmp_path_factory.mktemp("ipc"))
    yield parent
    parent.close()


def submit(request_id: str, **changed: Any) -> Submit:
    fields: dict[str, Any] = {"token_ids": [1, 2, 3], "max_tokens": 4}
    return Submit(Request(request_id, **fields | changed))


class PatientLink(Link):
    """Without work it hears that it has to leave, once it has heard all of so many commands."""

    def __init__(self, parent: Parent, count: int) -> None:
        super().__init__(*parent.addresses)
        self._left = count

    def receive(self, wait_ms: int | None) -> Any:
        if wait_ms is None and not self._left:
            return [Shutdown()]
        heard = super().receive(wait_ms)
        self._left -= len(heard)
        return heard


def answers(parent: Parent, engine: Engine, *commands: Any) -> dict[str, TokenDelta]:
    """The last delta of each request, of an engine that hears `commands`, one for each, and leaves when all is done."""
    link = PatientLink(parent, len(commands))
    try:
        parent.send(*commands)
        serve(link, engine)
    finally:
        link._commands.close()
        link._replies.close(linger=60_000)
    ended: dict[str, TokenDelta] = {}
    deltas = (delta for reply in parent.replied() if isinstance(reply, Stepped) for delta in reply.output.deltas)
    while len(ended) < len(commands):
        if (delta := next(deltas)).finish_reason:
            ended[delta.request_id] = delta
    return ended


def as_it_came(command: Submit, **changed: Any) -> bytes:
    fields = msgspec.to_builtins(command)
    return msgspec.msgpack.encode(fields | {"request": fields["request"] | changed})


def test_a_message_of_one_request_that_cannot_be_read_is_that_requests_error(parent: Parent, engine: Engine):
    good = submit("good")
    ended = answers(
        parent,
        engine,
        as_it_came(submit("wrong"), token_ids="1, 2"),
        as_it_came(submit("wrong too"), max_tokens=None),
        good,
    )
    assert ended["wrong"].finish_reason == ended["wrong too"].finish_reason == "error"
    assert "cannot read" in str(ended["wrong"].error) and "token_ids" in str(ended["wrong"].error)
    assert ended["good"].finish_reason == "length"


@pytest.mark.parametrize("level", ["debug", "info"])
def test_at_the_level_debug_an_engine_without_work_ends_when_a_page_is_lost(parent, engine, caplog, level):
    caplog.set_level(level.upper(), "app.engine.process")
    engine.core.scheduler.pool.grow(array("i"), 1)
    raises = pytest.raises(AssertionError, match="has 0 owners, but 1 are counted")
    with raises if level == "debug" else contextlib.nullcontext():
        assert answers(parent, engine, submit("good"))["good"].finish_reason == "length"


@pytest.mark.parametrize("nonsense", [b"", b"\xc1", b"\x93\x01\x02", msgspec.msgpack.encode({"type": "Submit"})])
def test_a_message_without_a_request_to_tell_ends_the_engine_by_name(parent: Parent, engine: Engine, nonsense: bytes):
    with pytest.raises(msgspec.DecodeError):
        answers(parent, engine, nonsense)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"max_tokens": 62}, "prompt of 3 tokens and max_tokens 62 .* at most 64"),
        ({"token_ids": [1] * 64, "max_tokens": 1}, "prompt of 64 tokens and max_tokens 1 .* at most 64"),
        ({"token_ids": []}, "prompt of 0 tokens"),
        ({"token_ids": [1, 97]}, r"in 0\.\.96"),
        ({"token_ids": [1, -1]}, r"in 0\.\.96"),
        ({"sampling": SamplingParams(logit_bias=[(97, 1.0)])}, r"logit_bias .* in 0\.\.96"),
        ({"sampling": SamplingParams(min_tokens=2), "stop_token_ids": [1000]}, r"stop_token_ids .* in 0\.\.96"),
    ],
)
def test_a_request_that_can_never_run_is_refused_and_the_next_one_is_served(parent, engine, changed, why):
    ended = answers(parent, engine, submit("bad", **changed), submit("good"))
    assert ended["bad"].finish_reason == "error" and re.search(why, str(ended["bad"].error))
    assert ended["good"].finish_reason == "length"


SAMPLING = SamplingParams(0.5, (1 << 63) + 1, 3, 0.75, 0.125, 0.5, -0.25, 1.5, [(4, 1.5)], 2)
WHOLE: tuple[Any, ...] = (
    Request("r", [1, 2], 7, SAMPLING, [5, 6], speculate=False, cache_salt="salt"),
    TokenDelta("r", [7, 8, 9], [SpecStep(2, 7, 1), SpecStep(1, 0, 0)], 16, "error", "a reason"),
    StepStats("mixed", 0.5, *range(1, 16), not_ahead="pages"),
)
"""Objects without a field that has its default."""


def test_every_field_of_a_request_and_of_a_step_comes_over_the_border_as_it_left(parent: Parent):
    request, delta, stats = WHOLE
    for it in (*WHOLE, SAMPLING):
        assert not [each.name for each in fields(it) if getattr(it, each.name) == each.default]
    link = Link(*parent.addresses)
    try:
        parent.send(Submit(request))
        (command,) = link.receive(None)
        link.send(Stepped(StepOutput([delta, delta], stats)))
        reply = next(parent.replied())
    finally:
        link.close()
    assert isinstance(command, Submit) and isinstance(reply, Stepped)
    for found, left in ((command.request, request), (reply.output.deltas[1], delta), (reply.output.stats, stats)):
        assert [getattr(found, each.name) for each in fields(left)] == [
            getattr(left, each.name) for each in fields(left)
        ]


@contextlib.contextmanager
def ready(parent: Parent, pair: Pair, stderr: Any = subprocess.DEVNULL, **settings: Any) -> Iterator[Any]:
    """Yield an engine's process that is ready."""
    config = EngineConfig(pair.target, pair.draft, device="cpu", max_num_seqs=4, **UNTIMED | settings)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "app.engine.process", *parent.addresses],
        stdin=subprocess.PIPE,
        stderr=stderr,
        env=engine_environment(),
    )
    try:
        assert process.stdin is not None
        process.stdin.write(encode_config(config).encode() + b"\n")
        process.stdin.flush()
        assert any(isinstance(reply, Ready) for reply in parent.replied())
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.exhaustive
def test_the_log_of_an_engine_has_the_draft_that_was_read_in_the_form_that_was_asked_for(parent, pair, tmp_path):
    with (tmp_path / "log").open("w+b") as stderr:
        with ready(parent, pair, stderr, max_model_len=64, verify="full", log_format="json", log_level="debug"):
            pass
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    (line,) = [line for line in lines if line["message"].startswith("draft: layers 2, masks ")]
    assert (line["level"], line["logger"]) == ("DEBUG", "app.engine.dflash.report")


@pytest.mark.exhaustive
def test_the_layers_of_an_engine_are_counted_in_a_file_beside_its_sockets(parent: Parent, pair: Pair):
    with ready(parent, pair, max_model_len=64):
        beats = Path(parent.addresses[0].removeprefix("ipc://")).with_name(HEARTBEAT).read_bytes()
    assert int.from_bytes(beats, sys.byteorder) > 0, "the warm-up has computed some"


@pytest.mark.exhaustive
def test_an_engine_whose_parent_is_gone_ends_in_the_midst_of_its_work(parent: Parent, pair: Pair):
    with ready(parent, pair, max_model_len=500) as process:
        parent.send(*(submit(str(i), max_tokens=480) for i in range(4)), Abort("nobody"))
        assert isinstance(next(parent.replied()), Stepped)
        process.stdin.close()
        assert process.wait(timeout=1700) == 1
