"""The way of a token through the API process taken apart: each part alone, in this process, over the very steps that
the scripted engine says. What they leave of the whole is sockets, HTTP and asyncio."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from app.api.answers import ChatAnswers, Piece, Usage
from app.api.schemas import StreamOptions
from app.api.stream import event
from app.client.request_stream import RequestStream
from app.messages import Reply, StepOutput
from app.metrics import Metrics
from app.text.detokenizer import Detokenizer
from app.text.parsers.qwen3 import OutputParser
from app.text.tokenizer import Tokenizer
from tools.lab.api_client import STOP
from tools.lab.api_engine import steps_of

_EPOCH = 1
_ROUNDS = 5


class Split(NamedTuple):
    """CPU seconds a token. `messages` is reading the engine's msgpack, `book` metrics and mailboxes, `stop` looking for
    stop strings, `parse` for reasoning and tools, `sse` making the JSON of an event."""

    messages: float
    book: float
    detokenise: float
    stop: float
    parse: float
    sse: float

    @property
    def whole(self) -> float:
        return sum(self)


def split(tokenizer: Tokenizer, token_ids: Sequence[int], batch: int, tokens: int, tokens_a_step: int) -> Split:
    """The least of a few rounds, for each part."""
    names = [f"{index:032x}-0" for index in range(batch)]
    outputs = steps_of(names, _EPOCH, token_ids, tokens, tokens_a_step)
    messages = [msgspec.msgpack.encode(output) for output in outputs]
    texts = _texts(tokenizer, outputs, STOP)
    pieces = [[Piece(0, text) for text in row] for row in texts]
    bare = _seconds(lambda: _texts(tokenizer, outputs, ()))
    parts = (
        _seconds(lambda: _decode(messages)),
        _seconds(lambda: _book(outputs)),
        bare,
        max(0.0, _seconds(lambda: _texts(tokenizer, outputs, STOP)) - bare),
        _seconds(lambda: _parse(texts)),
        _seconds(lambda: _events(pieces)),
    )
    return Split(*(seconds / (batch * tokens) for seconds in parts))


def _seconds(work: Callable[[], object]) -> float:
    took = []
    for _ in range(_ROUNDS):
        started = time.process_time()
        work()
        took.append(time.process_time() - started)
    return min(took)


def _decode(messages: Sequence[bytes]) -> None:
    decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
    for message in messages:
        decoder.decode(message)


def _book(outputs: Sequence[StepOutput]) -> None:
    metrics = Metrics()
    generations = {
        delta.request_id: RequestStream(delta.request_id, lambda _: None, metrics, 0.0) for delta in outputs[0].deltas
    }
    for output in outputs:
        metrics.step(output)
        for delta in output.deltas:
            generations[delta.request_id].put(delta)
        for generation in generations.values():
            generation.take()


def _texts(tokenizer: Tokenizer, outputs: Sequence[StepOutput], stop: Sequence[str]) -> list[list[str]]:
    """Of every step, the text that everyone gets."""
    detokenizers = {delta.request_id: Detokenizer(tokenizer.backend, stop) for delta in outputs[0].deltas}
    return [
        [detokenizers[delta.request_id].push(delta.token_ids, delta.finish_reason) for delta in output.deltas]
        for output in outputs
    ]


def _parse(texts: Sequence[Sequence[str]]) -> None:
    parsers = [OutputParser(reasoning=False, tools=False) for _ in texts[0]]
    for row in texts:
        for parser, text in zip(parsers, row, strict=True):
            parser.push(text)


def _events(pieces: Sequence[Sequence[Piece]]) -> None:
    answers = ChatAnswers("demo", lambda: Usage(1, 1), StreamOptions(include_usage=True))
    for row in pieces:
        for piece in row:
            b"".join([event(chunk) for chunk in answers.chunks(piece)])
