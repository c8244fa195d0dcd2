"""An engine process without a model, for `python -m tools.lab api`. It says the same tokens to everyone, in one
StepOutput a step for the whole batch. Either it takes each step when the clients have the one before: as fast as tokens
are taken, and never so fast that two steps become one event. Or it waits for the first step only, and runs ahead.

argv: CORES TURN BATCH TOKENS_A_STEP WAITS TOKEN_IDS COMMANDS REPLIES EPOCH. A message comes from the ZeroMQ address
`TURN` for every step that is waited for; CORES, WAITS and TOKEN_IDS are JSON. Exits when stdin ends.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence

import msgspec
import zmq

from app.messages import (
    Command,
    EngineInfo,
    FinishReason,
    Ready,
    Reply,
    Shutdown,
    SpecStep,
    StepOutput,
    StepStats,
    Submit,
    TokenDelta,
)
from tools.lab.api_cpu import stay_on

_MAX_MODEL_LEN = 1 << 16
_VOCAB_SIZE = 1 << 18
_NUM_PAGES = 1 << 12


def num_steps(tokens: int, tokens_a_step: int) -> int:
    """Of an answer: the first step is the prefill's, and says one token."""
    return 1 + -(-(tokens - 1) // tokens_a_step)


def steps_of(
    request_ids: Sequence[str], epoch: int, token_ids: Sequence[int], tokens: int, tokens_a_step: int
) -> list[StepOutput]:
    """All steps of a batch whose answers go round in `token_ids` until they have `tokens`."""
    drafting = len(request_ids) * (tokens_a_step > 1)
    stats = StepStats(
        "decode",
        0.01,
        num_running=len(request_ids),
        num_waiting=0,
        used_pages=len(request_ids),
        num_pages=_NUM_PAGES,
        num_preemptions=0,
        num_decoding=len(request_ids),
        num_drafting=drafting,
    )
    outputs = []
    done = 0
    while done < tokens:
        count = min(tokens_a_step if done else 1, tokens - done)
        said = [token_ids[index % len(token_ids)] for index in range(done, done + count)]
        done += count
        finish: FinishReason | None = "length" if done == tokens else None
        steps = [SpecStep(count, count - 1, count - 1)]
        deltas = [TokenDelta(name, list(said), list(steps), finish_reason=finish) for name in request_ids]
        outputs.append(StepOutput(epoch, deltas, stats))
    return outputs


class _Engine:
    def __init__(
        self,
        turn: str,
        batch: int,
        tokens_a_step: int,
        waits: bool,
        token_ids: list[int],
        link: tuple[str, str],
        epoch: int,
    ) -> None:
        self._batch = batch
        self._tokens_a_step = tokens_a_step
        self._waits = waits
        self._token_ids = token_ids
        self._epoch = epoch
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._turn, self._commands, self._replies = (context.socket(kind) for kind in (zmq.PULL, zmq.PULL, zmq.PUSH))
        for socket, address in ((self._turn, turn), (self._commands, link[0]), (self._replies, link[1])):
            socket.set_hwm(0)
            socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def run(self) -> None:
        """Wait for a whole batch, answer it, and again; until Shutdown."""
        self._send(Ready(self._epoch, self._info()))
        batch: list[Submit] = []
        while not isinstance(command := self._decoder.decode(self._commands.recv()), Shutdown):
            if isinstance(command, Submit):
                batch.append(command)
            if len(batch) == self._batch:
                self._answer(batch)
                batch = []

    def _answer(self, batch: Sequence[Submit]) -> None:
        names = [submit.request_id for submit in batch]
        outputs = steps_of(names, self._epoch, self._token_ids, batch[0].max_tokens, self._tokens_a_step)
        for number, output in enumerate(outputs):
            self._send(output)
            if self._waits or number == 0:
                self._turn.recv()

    def _send(self, reply: Reply) -> None:
        self._replies.send(self._encoder.encode(reply))

    def _info(self) -> EngineInfo:
        return EngineInfo(
            target="scripted",
            draft=None,
            device="none",
            dtype="none",
            block_size=1,
            taps=[],
            page_size=16,
            num_pages=_NUM_PAGES,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=self._batch,
            max_num_batched_tokens=_MAX_MODEL_LEN,
            vocab_size=_VOCAB_SIZE,
        )


def _leave_with_parent() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


def main() -> None:
    cores, turn, batch, tokens_a_step, waits, token_ids, commands, replies, epoch = sys.argv[1:]
    sys.stdin.readline()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    stay_on(json.loads(cores))
    said, link = json.loads(token_ids), (commands, replies)
    _Engine(turn, int(batch), int(tokens_a_step), json.loads(waits), said, link, int(epoch)).run()


if __name__ == "__main__":
    main()
