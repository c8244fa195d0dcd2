"""A server whose engine has no model, in processes of its own. All clients get the same tokens.

`python -m tests.server.scripted server ENGINE_ARGUMENTS serve --host HOST --port PORT ...` is the server, where
ENGINE_ARGUMENTS is a JSON list. It starts `... engine TURN BATCH TOKENS_A_STEP WAITS TOKEN_IDS`, followed by the link's
arguments. The engine answers a whole batch with one StepOutput a step. If it WAITS, it takes each step after a message
from the ZeroMQ address TURN, else the first step alone. It exits when stdin ends.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence

import msgspec
import zmq

from app.messages import EngineInfo, FinishReason, Request, SpecStep, StepOutput, StepStats, TokenDelta
from app.wire import Command, Ready, Reply, Shutdown, Stepped, Submit

NUM_PAGES = 1 << 12


def steps_of(request_ids: Sequence[str], token_ids: Sequence[int], tokens: int, tokens_a_step: int) -> list[StepOutput]:
    """Return all steps of a batch whose answers repeat `token_ids` up to `tokens`. The first step has one token."""
    batch = len(request_ids)
    drafting = batch * (tokens_a_step > 1)
    stats = StepStats("decode", 0.01, batch, 0, batch, NUM_PAGES, 0, num_decoding=batch, num_drafting=drafting)
    outputs = []
    done = 0
    while done < tokens:
        count = min(tokens_a_step if done else 1, tokens - done)
        said = [token_ids[index % len(token_ids)] for index in range(done, done + count)]
        done += count
        finish: FinishReason | None = "length" if done == tokens else None
        steps = [SpecStep(count, count - 1, count - 1)]
        deltas = [TokenDelta(name, list(said), list(steps), finish_reason=finish) for name in request_ids]
        outputs.append(StepOutput(deltas, stats))
    return outputs


def engine(turn: str, batch: str, tokens_a_step: str, waits: str, token_ids: str, *link: str) -> int:
    """Answer whole batches until Shutdown."""
    commands, replies = link
    sys.stdin.readline()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    turns, inbox, outbox = (context.socket(kind) for kind in (zmq.PULL, zmq.PULL, zmq.PUSH))
    for socket, address in ((turns, turn), (inbox, commands), (outbox, replies)):
        socket.set_hwm(0)
        socket.connect(address)
    decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def send(reply: Reply) -> None:
        outbox.send(msgspec.msgpack.encode(reply))

    send(Ready(_info(int(batch))))
    requests: list[Request] = []
    while not isinstance(command := decoder.decode(inbox.recv()), Shutdown):
        if isinstance(command, Submit):
            requests.append(command.request)
        if len(requests) == int(batch):
            names, tokens = [request.request_id for request in requests], requests[0].max_tokens
            for number, output in enumerate(steps_of(names, json.loads(token_ids), tokens, int(tokens_a_step))):
                send(Stepped(output))
                if json.loads(waits) or number == 0:
                    turns.recv()
            requests = []
    return 0


def _info(batch: int) -> EngineInfo:
    return EngineInfo(
        target="scripted",
        draft=None,
        device="none",
        dtype="none",
        block_size=1,
        taps=[],
        page_size=16,
        num_pages=NUM_PAGES,
        max_model_len=1 << 16,
        max_num_seqs=batch,
        max_num_batched_tokens=1 << 16,
        vocab_size=1 << 18,
    )


def _exit_with_parent() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


def server(engine_arguments: str, _: str, *flags: str) -> int:
    from app.api.process import run
    from app.config.flags import parse_flags
    from app.config.sources import load_config
    from app.engine.checkpoint.files import DEMO

    wanted = [text for name in ("--host", "--port") for text in (name, flags[flags.index(name) + 1])]
    config = load_config(parse_flags([*wanted, "--log-level", "warning"]))
    command = (sys.executable, "-P", "-m", "tests.server.scripted", "engine", *json.loads(engine_arguments))
    return run(config.with_models(DEMO / "target", None), engine_command=command)


if __name__ == "__main__":
    sys.exit(server(*sys.argv[2:]) if sys.argv[1] == "server" else engine(*sys.argv[2:]))
