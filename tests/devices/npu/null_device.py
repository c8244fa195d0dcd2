"""Python side of the null device (csrc/): a trace of its calls, and the hooks of the numerics."""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_OnReplay = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_OnDestroyed = ctypes.CFUNCTYPE(None, ctypes.c_int64)

_lib = ctypes.CDLL("libascendcl.so")
_lib.npu_stub_trace_line.restype = ctypes.c_char_p
_lib.npu_stub_trace_line.argtypes = [ctypes.c_size_t]
_lib.npu_stub_trace_count.restype = ctypes.c_size_t
_lib.npu_stub_trace.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
_lib.npu_stub_state.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)]
_lib.npu_stub_record.argtypes = [ctypes.c_void_p, ctypes.c_int64]
_lib.npu_stub_captured_host_copies.restype = ctypes.c_int64
_lib.npu_stub_error.argtypes = [ctypes.c_char_p]


@dataclass(frozen=True, slots=True)
class StreamState:
    """State of one stream: the captured graph, the open task group, the one in update (0 is none), and its turn.

    `stands` is true while a replay waits at an event that no update has recorded yet.
    """

    graph: int
    group: int
    updating: int
    stands: bool
    update_turn: int


def stream_state(stream: int) -> StreamState:
    state = (ctypes.c_int64 * 5)()
    _lib.npu_stub_state(stream, state)
    return StreamState(state[0], state[1], state[2], bool(state[3]), state[4])


def record(stream: int, call: int) -> None:
    """Put call number `call` into the graph being captured on `stream`."""
    assert _lib.npu_stub_record(stream, call) == 0, "the stream is not being captured"


def on_replay(run: Callable[[int, int], int], destroyed: Callable[[int], None]) -> None:
    """`run(graph, call)` at each recorded call of a replay, non-zero for a failure; `destroyed(graph)` at its end."""
    global _callbacks
    _callbacks = _OnReplay(run), _OnDestroyed(destroyed)
    _lib.npu_stub_on_replay(*_callbacks)


def captured_host_copies() -> int:
    """Return the number of copies between host and device in graphs so far."""
    return _lib.npu_stub_captured_host_copies()


def let_device_copy(on: bool) -> None:
    """Set if copies within the device move bytes. Numerics move them instead, once the sources hold numbers."""
    _lib.npu_stub_device_copies(int(on))


def deliver() -> None:
    """Let all copies to pinned memory arrive."""
    _lib.npu_stub_deliver()


def let_go() -> None:
    """Forget replays that stand and captures that were left open."""
    _lib.npu_stub_let_go()


def set_error(text: str) -> None:
    """Set CANN's own account of the next error, which torch_npu reads."""
    _lib.npu_stub_error(text.encode())


def note(kind: str, name: str) -> None:
    """Add a line to the trace."""
    _lib.npu_stub_trace(kind.encode(), name.encode())


@dataclass(slots=True)
class Trace:
    """Calls of the device, as (kind, name) in order.

    "launch" is a kernel, "replay" a graph, and "sync" a wait of the host. "copy" and "sync-copy" name direction and
    bytes ("h2d 64"). A capture has "capture", "capture-copy" and "graph". "update" is a new kernel of a task group.
    """

    lines: list[tuple[str, str]] = field(default_factory=list)

    def of(self, *kinds: str) -> list[str]:
        return [name for kind, name in self.lines if kind in kinds]

    @property
    def launches(self) -> Counter[str]:
        """Kernels that the host launched one by one."""
        return Counter(self.of("launch"))

    @property
    def waits(self) -> list[str]:
        """Where the host waited for the device."""
        return self.of("sync", "sync-copy")


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """The trace of the block, filled when it ends."""
    trace = Trace()
    _lib.npu_stub_trace_clear()
    _lib.npu_stub_trace_start()
    try:
        yield trace
    finally:
        _lib.npu_stub_trace_stop()
        lines = (_lib.npu_stub_trace_line(i).decode() for i in range(_lib.npu_stub_trace_count()))
        trace.lines = [(kind, name) for kind, _, name in (line.partition(" ") for line in lines)]
