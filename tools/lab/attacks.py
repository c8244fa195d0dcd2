"""One client's attacks on a server, and what another client notices: `python -m tools.lab attacks`.

The demo pair is served to two keys. One attacks from several connections at once; the other asks for short completions
one after the other, and probes /live. Each attack has a new server.
"""

import argparse
import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from app.engine.checkpoint.files import DEMO
from tools.bench.command import out_folder, progress
from tools.bench.flags import add_out_flag, count
from tools.bench.markdown import Row, Table
from tools.bench.own_server import OwnServer
from tools.lab.publish import publish
from tools.parts import ToolParser

ATTACKER, VICTIM = "attackers-key", "victims-key"
BODY_BYTES = 8 * 2**20
SERVE_ARGS = ("--api-key", ATTACKER, VICTIM, "--max-concurrency-per-key", "16")
MEANING = (
    "/live and completions of 16 tokens, by another key than the attacker's, one after the other; memory is the API "
    "process's at its peak, above that at rest."
)
SLOW = "33 slow bodies"
_TIMEOUT = 60.0
_HEAD_START_SECONDS = 0.3
_PROBE_SECONDS = 0.02


class Attack(NamedTuple):
    """A body that each of some connections sends to `path` again and again, or SLOW once, without its last byte."""

    path: str
    body: bytes
    connections: int


@dataclass
class Noticed:
    """What a client noticed: the seconds of its answers, and how many requests had which status or error."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def slowest(self) -> float | None:
        return round(max(self.seconds), 3) if self.seconds else None

    @property
    def refusals(self) -> dict[str, int]:
        return {status: number for status, number in self.statuses.items() if status != "200"}


def attacks() -> dict[str, Attack]:
    """Return the attacks by name. Those "at the limit" are accepted, or refused as late as can be."""
    chat = "/v1/chat/completions"
    user = '{"role":"user","content":"hi"}'
    parts = '{"role":"user","content":' + _list('{"type":"text","text":""}', 1000) + "}"
    tool = '{"type":"function","function":{"name":"f","parameters":{"anyOf":' + _list("{}", 10_000) + "}}}"
    text = "".join(f"word {number} and, " for number in range(600_000))[: BODY_BYTES - 4096]
    keys = ",".join(f'"{number}":1' for number in range(600_000))
    endless = f'"prompt":"hi","logit_bias":{{"{_byte_token()}":100}},"max_tokens":1900,"n":4,"ignore_eos":true'
    bodies: dict[str, tuple[str, str, int]] = {
        "none": (chat, "", 0),
        "tokenize 8 MiB": ("/tokenize", json.dumps({"prompt": text}), 6),
        "tokenize 1 MiB": ("/tokenize", json.dumps({"prompt": text[: 2**20]}), 6),
        "render 3.6 MB": (
            f"{chat}/render",
            json.dumps({"messages": [{"role": "user", "content": text[:3600000]}]}),
            16,
        ),
        "completions 8 MiB": ("/v1/completions", json.dumps({"prompt": text}), 4),
        SLOW: ("/v1/completions", " " * BODY_BYTES, 33),
        "bytes of no character": ("/v1/completions", f'{{{endless},"stream":true}}', 4),
        "detokenize 2**20 ids": ("/detokenize", '{"tokens":' + _list("300", 2**20) + "}", 4),
        "args": (chat, _called(2_600_000), 4),
        "args at the limit": (chat, _called(262_000), 4),
        "messages": (chat, '{"messages":' + _list(user) + "}", 4),
        "parts": (chat, '{"messages":' + _list(parts) + "}", 4),
        "parts at the limit": (chat, '{"messages":' + _list(parts, 52) + "}", 4),
        "keys": (chat, f'{{"messages":[{user}],{keys}}}', 4),
        "tools": (chat, f'{{"messages":[{user}],"tools":' + _list(tool, 250) + "}", 4),
        "dicts": (chat, f'{{"messages":[{user}],"x":' + _list("{}") + "}", 4),
        "biases": (chat, f'{{"messages":[{user}],"logit_bias":{{{keys}}}}}', 4),
        "floats": (chat, f'{{"messages":[{user}],"x":' + _list("1.5") + "}", 4),
        "stops": (chat, f'{{"messages":[{user}],"stop":' + _list('"a"') + "}", 4),
        "nested lists": ("/v1/completions", '{"prompt":' + _list("[]") + "}", 4),
        "lists of ids": ("/v1/completions", '{"prompt":' + _list(_list("9", 1000)) + "}", 4),
        "ids at the limit": ("/v1/completions", '{"prompt":' + _list(_list("9", 1000), 1063) + "}", 4),
        "items": ("/v1/responses", '{"input":' + _list(user) + "}", 4),
    }
    return {name: Attack(path, body.encode(), connections) for name, (path, body, connections) in bodies.items()}


def _list(item: str, count: int | None = None) -> str:
    """Return a JSON list of an item, in almost BODY_BYTES without a `count`."""
    return f"[{','.join([item] * ((BODY_BYTES - 4096) // (len(item) + 1) if count is None else count))}]"


def _called(num_lists: int) -> str:
    """Return a conversation with a call, whose argument is a list of so many lists."""
    function = {"name": "f", "arguments": '{"a":' + _list("[]", num_lists) + "}"}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    return json.dumps({"messages": [{"role": "user", "content": "hi"}, call]})


def parser() -> argparse.ArgumentParser:
    flags = ToolParser(prog="python -m tools.lab attacks", description=__doc__)
    flags.add_argument("--seconds", type=count, default=5, help="seconds of each attack (default: 5)")
    flags.add_argument("--only", help="a regular expression that an attack's name must have")
    add_out_flag(flags, "attacks.json")
    return flags


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(options)
    chosen = {name: attack for name, attack in attacks().items() if re.search(options.only or "", name)}
    rows: list[Row] = []
    with progress() as shown:
        for name, attack in shown.track(chosen.items(), description="attacks"):
            with OwnServer("auto", SERVE_ARGS) as server:  # a new one for each, because work may outlast its clients
                server.wait_until_ready(lambda _: None)
                rows.append(row(server, name, attack, options.seconds))
    return publish("attacks", arguments, [Table("attacks", "Attacks", MEANING, rows)], folder)


def row(server: OwnServer, name: str, attack: Attack, seconds: int) -> Row:
    """Attack a server for some seconds, and return what was noticed."""
    live, victim, attacker = Noticed(), Noticed(), Noticed()
    ask = json.dumps({"prompt": "hi", "max_tokens": 16, "ignore_eos": True}).encode()
    exchange(server.port, VICTIM, "/v1/completions", ask)
    resting = peak_memory(server.process.pid)
    end = time.monotonic() + seconds
    with threads() as start:
        for _ in range(attack.connections):
            if name == SLOW:
                start(lambda: hold(server.port, attack.path, attack.body, end))
            else:
                start(lambda: repeat(attacker, end, lambda: exchange(server.port, ATTACKER, attack.path, attack.body)))
        time.sleep(_HEAD_START_SECONDS)
        start(lambda: repeat(live, end, lambda: exchange(server.port, VICTIM, "/live"), _PROBE_SECONDS))
        start(lambda: repeat(victim, end, lambda: exchange(server.port, VICTIM, "/v1/completions", ask)))
    return {
        "attack": name,
        "slowest /live, s": live.slowest,
        "answered": len(victim.seconds),
        "refused": str(victim.refusals or 0),
        "median, s": round(median(victim.seconds), 2) if victim.seconds else None,
        "slowest, s": victim.slowest,
        "attacker": ", ".join(f"{number} x {status}" for status, number in attacker.statuses.items()),
        "more MiB": (peak_memory(server.process.pid) - resting) // 2**20,
    }


@contextlib.contextmanager
def threads() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Yield a function that starts a thread. Wait for all at the end."""
    started: list[threading.Thread] = []

    def start(work: Callable[[], None]) -> None:
        started.append(threading.Thread(target=work, daemon=True))
        started[-1].start()

    yield start
    for thread in started:
        thread.join()


def repeat(noticed: Noticed, end: float, ask: Callable[[], int], pause: float = 0.0) -> None:
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            status = str(ask())
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
        noticed.statuses[status] += 1
        if status == "200":
            noticed.seconds.append(time.monotonic() - began)
        time.sleep(pause)


def exchange(port: int, key: str, path: str, body: bytes | None = None) -> int:
    """Return the status of a request whose answer was read to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    with contextlib.closing(connection):
        method = "GET" if body is None else "POST"
        with contextlib.suppress(ConnectionError):  # The server may answer before it has read all.
            connection.request(method, path, body, {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        response.read()
        return response.status


def hold(port: int, path: str, body: bytes, end: float) -> None:
    """Send all of a body but its last byte, and wait."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ATTACKER}\r\nContent-Length: {len(body)}\r\n\r\n"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + body[:-1])
        time.sleep(max(0.0, end - time.monotonic()))


def peak_memory(pid: int) -> int:
    """Return the most bytes of memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _byte_token() -> int:
    """Return the demo pair's token of the byte 0xC2, which begins a character of two bytes."""
    vocabulary = json.loads((DEMO / "target" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return int(vocabulary["Â"])
