"""An engine that ends by an error of its device says what the error means: to the API side and in its own log."""

import io
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.engine import process
from app.engine.core import EngineCore
from app.engine.device.torch import TorchBackend
from app.engine.models.page_pool import PagePool
from app.engine.npu.error_codes import explain
from app.engine.schedule.scheduler import Scheduler
from app.engine.step.inputs import Layout
from app.messages import Request
from app.wire import Fatal

DEVICE_ERROR = (
    "npuSynchronizeDevice:NPUStream.cpp:627 NPU function error: AclrtSynchronizeDevice, error code is 507015\n"
    "[Error]: The aicore execution is abnormal."
)


class StandInLink:
    """Sent replies, and no sockets."""

    def __init__(self, *_: Any) -> None:
        self.sent: list[Any] = []
        links.append(self)

    def send(self, reply: Any) -> None:
        self.sent.append(reply)

    def receive(self, wait_ms: int | None) -> list[Any]:
        return []

    def close(self) -> None:
        pass


links: list[StandInLink] = []


def ended_by(message: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Fatal, str]:
    """(the last reply, the traceback) of an engine process whose first step raises RuntimeError(message)."""

    def launch(inputs: Any) -> None:
        raise RuntimeError(message)

    backend = TorchBackend(torch.device("cpu"))
    monkeypatch.setattr(backend, "explain", lambda error: explain(str(error)))
    pool = PagePool(num_pages=8, page_size=4)
    scheduler = Scheduler(pool, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8, block_size=1)
    scheduler.add(Request("r", [1, 2], max_tokens=2))
    runner = SimpleNamespace(backend=backend, layout=Layout(page_size=4), launch=launch, is_fatal=lambda error: True)
    engine = SimpleNamespace(core=EngineCore(scheduler, runner))
    monkeypatch.setattr(process, "Link", StandInLink)
    monkeypatch.setattr(process, "leave_with_parent", lambda: None)
    monkeypatch.setattr(process.wire, "decode_config", lambda line: EngineConfig(Path("target")))
    monkeypatch.setattr(process, "_info", lambda engine, config: None)
    monkeypatch.setattr(process, "build_engine", lambda config, progress, join: engine)
    monkeypatch.setattr(process.heartbeat, "share", lambda file: None)
    monkeypatch.setattr(tempfile, "tempdir", None)  # main() changes it, and this process goes on
    monkeypatch.setattr(sys, "argv", ["process", "commands", "replies"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}\n"))
    with pytest.raises(RuntimeError) as raised:
        process.main()
    for thread in threading.enumerate():
        if thread.daemon:
            thread.join(0.1)
    fatal = links[-1].sent[-1]
    assert isinstance(fatal, Fatal) and not fatal.user_error
    return fatal, "".join(traceback.format_exception(raised.value))


def test_the_meaning_of_a_devices_error_code_is_in_the_reason_and_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    fatal, log = ended_by(DEVICE_ERROR, monkeypatch)
    assert fatal.reason.startswith("RuntimeError: npuSynchronizeDevice:NPUStream.cpp:627")
    assert "error code is 507015 (507015: an AI core stopped with an exception" in fatal.reason
    assert "\n" not in fatal.reason
    assert "\n507015: an AI core stopped with an exception" in log and "aicore execution is abnormal" in log


def test_other_errors_are_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fatal, log = ended_by("a bad step\nin two lines", monkeypatch)
    assert fatal.reason == "RuntimeError: a bad step\nin two lines"
    assert log.endswith("in two lines\n")
