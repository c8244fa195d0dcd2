"""Conversations as token rows, for both trainings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_pair.chat import Turns, turns_of
from tools.demo_pair.corpus import Sample, samples
from tools.demo_pair.corpus.tools import Conversation
from tools.demo_pair.model import Shape
from tools.demo_pair.tokenizer import IM_END, IM_START, PAD, SPECIAL

BUCKETS = (128, 256, 512, 1024)
TARGET_WEIGHTS: dict[str, float] = {
    "math": 0.28,
    "copy": 0.34,
    "jumble": 0.16,
    "prose": 0.08,
    "code": 0.05,
    "talk": 0.09,
    "first": 0.35,
}
DRAFT_WEIGHTS: dict[str, float] = {
    "math": 0.26,
    "copy": 0.44,
    "jumble": 0.08,
    "prose": 0.06,
    "code": 0.06,
    "talk": 0.10,
    "first": 0.35,
}
"""Fewer jumbles and stories, because no draft can know their next words."""
TOOL_SHARE = 0.35
"""Share of batches whose rows are conversations with tools."""
TOOL_BUCKETS, TOOL_ROW_WEIGHTS = (512, 1024), (0.4, 0.6)
DRILL_SHARE = 0.4
ROW_WEIGHTS = (0.68, 0.20, 0.09, 0.03)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a small demo model.",
    "Answer briefly.",
    "You are a friendly assistant.",
    "Be polite.",
    "You are a careful and exact assistant.",
)
Row = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class Batch:
    """`ids` `[B, T]` int64; `supervised` `[B, T]` bool: the token is part of an answer, or the end mark after one.

    `positions` `[T]` int64 are 0, 1, ... unless given.
    """

    ids: Tensor
    supervised: Tensor
    positions: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        positions = None if self.positions is None else self.positions.to(device)
        return Batch(self.ids.to(device), self.supervised.to(device), positions)


class Encoder:
    """Return the ids of ChatML, the same as those of apply_chat_template, and the supervised positions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end, self._newline = tokenizer.token_to_id(IM_END), tokenizer.encode("\n").ids
        start = tokenizer.token_to_id(IM_START)
        self._head = {role: [start, *tokenizer.encode(f"{role}\n").ids] for role in ("system", "user", "assistant")}

    def prompt(self, sample: Sample) -> list[int]:
        """Return the ids of the conversation up to the start of the answer."""
        return self.rows([turns_of(sample.messages, sample.tools)])[0][0] + self._head["assistant"]

    def rows(self, conversations: list[Turns]) -> list[Row]:
        contents = [content for turns in conversations for _, content in turns]
        encoded = iter(self._tokenizer.encode_batch(contents, add_special_tokens=False))
        return [self._row([(role, next(encoded).ids) for role, _ in turns]) for turns in conversations]

    def _row(self, turns: list[tuple[str, list[int]]]) -> Row:
        ids: list[int] = []
        supervised: list[bool] = []
        for role, content in turns:
            head = self._head[role]
            ids += [*head, *content, self._end, *self._newline]
            answer = role == "assistant"
            supervised += [False] * len(head) + [answer] * (len(content) + 1) + [False] * len(self._newline)
        return ids, supervised


def batches(
    tokenizer: Tokenizer, seed: str, tokens: int, weights: Mapping[str, float], drills: int = 0, worker: int = 0
) -> Iterator[Batch]:
    """Yield endless batches of `tokens` tokens, each of rows of one length. TOOL_SHARE of them are about tools.

    `weights` are the other domains' shares of samples. In the first `drills` batches many rows are repetition drills.
    Workers with the same seed have the same lengths in the same order, and conversations of their own.
    """
    lengths, rng = Random(seed), Random(f"{seed}/{worker}")
    encoder, pad = Encoder(tokenizer), tokenizer.token_to_id(PAD)
    others = _batches(tokenizer, rng, tokens, weights, drills)
    while True:
        if lengths.random() >= TOOL_SHARE:
            yield next(others)
            continue
        length = lengths.choices(TOOL_BUCKETS, TOOL_ROW_WEIGHTS)[0]
        rows = [_tool_row(encoder, rng, length) for _ in range(tokens // length)]
        yield replace(padded(rows, length, pad), positions=_with_jump(rng, length))


def _with_jump(rng: Random, length: int) -> Tensor:
    """Return positions `[T]` that leave some out, half of the time.

    Short rows so teach distances of long ones: PoSE (Zhu et al., arXiv 2309.10400).
    """
    positions = torch.arange(length)
    if rng.random() < 0.5:
        positions[rng.randrange(length) :] += rng.randint(0, Shape.max_positions - length)
    return positions


def _tool_row(encoder: Encoder, rng: Random, length: int) -> Row:
    """Return one conversation with tools, from its system message on, with as many exchanges as fit."""
    conversation = Conversation(rng, "train")
    ((ids, supervised),) = encoder.rows([turns_of(conversation.head, conversation.tools)])
    while True:
        ((new, answers),) = encoder.rows([turns_of(conversation.exchange()[0])])
        if len(ids) + len(new) > length:
            return (ids, supervised) if any(supervised) else _tool_row(encoder, rng, length)
        ids, supervised = ids + new, supervised + answers


def _batches(
    tokenizer: Tokenizer, rng: Random, tokens: int, weights: Mapping[str, float], drills: int
) -> Iterator[Batch]:
    """Yield batches without tools.

    A row is one long chat: samples follow each other, each with its own turns, until the next one does not fit.
    """
    encoder = Encoder(tokenizer)
    sources = {domain: samples(domain, "train", rng.getrandbits(48)) for domain in weights}
    rows: dict[int, list[Row]] = {bucket: [] for bucket in BUCKETS}
    pad = tokenizer.token_to_id(PAD)
    vocab = tokenizer.get_vocab_size()
    while True:
        for new in encoder.rows([_turns(rng, sources, weights) for _ in range(128)]):
            if drills > 0 and rng.random() < DRILL_SHARE:
                new = _drill(rng, vocab)
            wanted = rng.choices(BUCKETS, ROW_WEIGHTS)[0]
            bucket = next((b for b in BUCKETS if b >= wanted and len(new[0]) <= b), None)
            if bucket is None:
                continue
            waiting = rows[bucket]
            if waiting and len(waiting[-1][0]) + len(new[0]) <= bucket:
                waiting[-1] = (waiting[-1][0] + new[0], waiting[-1][1] + new[1])
                continue
            if len(waiting) == tokens // bucket:
                yield padded(waiting, bucket, pad)
                waiting.clear()
                drills -= 1
            waiting.append(new)


def _drill(rng: Random, vocab: int) -> Row:
    """Return random tokens that repeat. Copying heads form on these in a few hundred steps, and much later without."""
    period = rng.randint(3, 40)
    once = [rng.randrange(len(SPECIAL), vocab) for _ in range(period)]
    length = BUCKETS[0]
    return (once * length)[:length], [i >= period for i in range(length)]


def _turns(rng: Random, sources: Mapping[str, Iterator[Sample]], weights: Mapping[str, float]) -> Turns:
    sample = next(sources[rng.choices(list(weights), list(weights.values()))[0]])
    turns = [*turns_of(sample.messages, sample.tools), ("assistant", sample.answer)]
    return [("system", rng.choice(_SYSTEM)), *turns] if rng.random() < 0.1 else turns


def padded(rows: list[Row], length: int, pad: int) -> Batch:
    ids = torch.full((len(rows), length), pad)
    supervised = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, (row, mask) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        supervised[i, : len(row)] = torch.tensor(mask)
    return Batch(ids, supervised)
