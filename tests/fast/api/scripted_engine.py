"""Engine process without a model. It speaks the ZeroMQ contract and emits the tokens that a test has planned.

argv: ORDERS SEEN COMMANDS REPLIES. `ORDERS` and `SEEN` lead to the test: orders come in, and every command of
the API process goes out. Requests without a plan wait for orders. Exits when stdin ends, as the real engine must.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from app.messages import EngineInfo, Request, SpecStep, StepOutput, StepStats, TokenDelta
from app.wire import Abort, Command, Fatal, FlushCache, LoadProgress, Ready, Reply, Shutdown, Stepped


class ScriptedEngine:
    def __init__(self, orders: str, seen: str, commands: str, replies: str) -> None:
        self.settings = json.loads(sys.stdin.buffer.readline())
        context = zmq.Context()
        self.orders = context.socket(zmq.PULL)
        self.orders.connect(orders)
        self.seen = context.socket(zmq.PUSH)
        self.seen.set_hwm(0)
        self.seen.connect(seen)
        self.folder = str(Path(commands.removeprefix("ipc://")).parent)
        self.commands = context.socket(zmq.PULL)
        self.commands.connect(commands)
        self.replies = context.socket(zmq.PUSH)
        self.replies.connect(replies)
        self.seen.linger = self.replies.linger = 1000  # The reader of the rest may have ended.
        self.running: dict[str, Request] = {}
        self.emitted: dict[str, int] = {}
        self.plan: list[list[int]] | None = None
        self.cached_tokens = 0

    def send(self, reply: Reply) -> None:
        self.replies.send(msgspec.msgpack.encode(reply))

    def tell(self, what: str, **more: Any) -> None:
        self.seen.send(msgspec.msgpack.encode({"what": what, **more}))

    def run(self) -> None:
        self.tell("started", settings=self.settings, pid=os.getpid(), folder=self.folder)
        poller = zmq.Poller()
        for source in (self.orders, self.commands, sys.stdin.fileno()):
            poller.register(source, zmq.POLLIN)
        while True:
            for source, _ in poller.poll():
                if source is self.orders:
                    self.obey(msgspec.msgpack.decode(self.orders.recv()))
                elif source is self.commands:
                    self.take(msgspec.msgpack.decode(self.commands.recv(), type=Command))
                else:
                    self.tell("orphaned")
                    sys.exit(0)

    def obey(self, order: dict[str, Any]) -> None:
        match order.pop("do"):
            case "progress":
                self.send(LoadProgress(**order))
            case "ready":
                self.send(Ready(msgspec.convert(order["info"], EngineInfo)))
            case "fatal":
                self.send(Fatal(**order))
                sys.exit(2)
            case "plan":
                self.plan, self.cached_tokens = order["steps"], order["cached_tokens"]
            case "emit":
                self.step(order["request_id"], order["token_ids"], order.get("finish"), order.get("error"))
            case "deliver":
                steps = msgspec.convert(order["steps"], list[SpecStep])
                delta = TokenDelta(order["request_id"], order["token_ids"], steps, finish_reason=order["finish"])
                if delta.finish_reason is not None:
                    self.running.pop(delta.request_id, None)
                self.send(Stepped(StepOutput([delta], self.stats(0.01))))
            case "garbage":
                self.replies.send(b"\xc1")
            case "sleep":
                time.sleep(order["seconds"])
            case "die":
                os._exit(order["code"])
        self.tell("obeyed")

    def take(self, command: Command) -> None:
        if isinstance(command, Shutdown):
            sys.exit(0)
        fields = msgspec.to_builtins(command)
        self.tell(fields.pop("type"), **fields.pop("request", fields))
        if isinstance(command, FlushCache):
            self.send(Stepped(StepOutput([], replace(self.stats(0.0), kind="idle"))))
        elif isinstance(command, Abort):
            if self.running.pop(command.request_id, None) and not self.running:
                self.send(Stepped(StepOutput([], replace(self.stats(0.0), kind="idle"))))
        else:
            request = command.request
            self.running[request.request_id] = request
            self.emitted[request.request_id] = 0
            for step in self.plan or []:
                if request.request_id in self.running:
                    self.step(request.request_id, step, None, None)

    def step(self, request_id: str, token_ids: list[int], finish: Any, error: str | None) -> None:
        """Send one engine step, cut at the first stop token or at the limit, as the engine cuts it."""
        request = self.running.get(request_id)
        begun = [request_id] if request and not self.emitted[request_id] else []
        if request is not None:
            room = request.max_tokens - self.emitted[request_id]
            stops = [index for index, token in enumerate(token_ids[:room]) if token in request.stop_token_ids]
            if stops:
                token_ids, finish = token_ids[: stops[0] + 1], "stop"
            elif len(token_ids) >= room:
                token_ids, finish = token_ids[:room], "length"
            self.emitted[request_id] += len(token_ids)
        if finish is not None:
            self.running.pop(request_id, None)
        steps = [SpecStep(len(token_ids), 15, len(token_ids) - 1)] if token_ids else []
        delta = TokenDelta(request_id, token_ids, steps, self.cached_tokens, finish, error)
        self.send(Stepped(StepOutput([delta], self.stats(0.01), scheduled=begun)))

    def stats(self, seconds: float) -> StepStats:
        return StepStats("decode", seconds, len(self.running), 0, 3 * len(self.running), 100, 0)


if __name__ == "__main__":
    ScriptedEngine(*sys.argv[1:]).run()
