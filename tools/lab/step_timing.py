"""Decode steps of given shapes, taken apart with a clock: scheduled, launched, read and committed as EngineCore does.

Sequences get to their context without a prefill: the scheduler plans it and is told that it was done, but nothing is
launched. So every length, page and page table is as in serving, and KV is whatever the memory held: attention costs
the same over it. The engine is of no use for anything else afterwards, for its prefix cache holds what was never
computed.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

import torch

from app.doctor.op_count import Launches
from app.engine.arrays import Ints
from app.engine.build.engine import Engine
from app.engine.schedule.batch import Batch, StepResult
from app.engine.sequence import Request
from app.engine.step import inputs as step_inputs
from app.engine.step.runner import PendingStep
from tools.lab.products import Products, by_operators

TIMED = 2
"""Steps that are timed of sequences once they are there; one before them is not, for it finds cold caches."""
PLAIN_TIMED = 32
"""The same of plain steps: their context grows by a token only, and some of their work may be put off for a few steps
and done for all of them at once."""
HOST_STEPS = 16
"""Steps of which the host's part alone is run."""
QUEUED = 4
"""Steps that are launched behind one another to keep a device busy."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decode step of `batch` sequences of `context` tokens, which verify a whole block if it `drafts`, else plain."""

    batch: int
    context: int
    drafts: bool

    @property
    def timed(self) -> int:
        """Steps in a row that are timed."""
        return TIMED if self.drafts else PLAIN_TIMED


@dataclass(frozen=True, slots=True)
class Split:
    """Milliseconds of a step. `build`, which makes arrays of the batch, is timed apart and is a part of `launch`."""

    schedule: float
    build: float
    launch: float
    read: float
    commit: float

    @property
    def total(self) -> float:
        return self.schedule + self.launch + self.read + self.commit

    @property
    def host(self) -> float:
        """What is done in Python and NumPy, whatever the device, with caches as the launch before has left them."""
        return self.schedule + self.build + self.commit


@dataclass(slots=True)
class Measured:
    """What was found of a shape. `operators` and `copies` are a step's on average; the others have a figure a round.

    `splits` are means of the timed steps; `hosts` milliseconds to schedule, build and commit a step when nothing is
    launched between. `queued` is milliseconds of a step among QUEUED ones, none where launching a step is computing it;
    there `products` is those of its products with weights alone.
    """

    operators: int = 0
    copies: int = 0
    splits: list[Split] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    products: list[float] = field(default_factory=list)

    @property
    def totals(self) -> list[float]:
        return [split.total for split in self.splits]

    @property
    def ms(self) -> float:
        return median(self.totals)

    def middle(self, part: Callable[[Split], float]) -> float:
        return median(part(split) for split in self.splits)


class Bench:
    """An engine and the prompts it is filled with."""

    def __init__(self, engine: Engine) -> None:
        self._core, self._sizes = engine.core, engine.sizes
        self._vocab_size = engine.target.vocab_size
        self._kind = engine.device.partition(":")[0]
        self._products: dict[Shape, Products] = {}
        self.is_asynchronous = self._kind != "cpu"

    @property
    def longest(self) -> int:
        """The longest context that leaves room for the steps."""
        return self._sizes.max_model_len - room(self._sizes.block_size)

    def fits(self, shape: Shape) -> bool:
        """Whether so many sequences of that length have places, rows and pages at once."""
        pool = self._core.scheduler.pool
        pages = pool.pages_for(shape.context + room(self._sizes.block_size) + self._sizes.block_size)
        return (
            shape.batch <= self._sizes.max_num_seqs
            and shape.context <= self.longest
            and shape.batch * (pages + 1) <= pool.num_usable
        )

    def count(self, shape: Shape) -> Measured:
        """What steps ask the device for; with it all that is lazy about this shape is done."""
        with self._seated(shape):
            self._step(shape)
            with Launches(self._kind) as counted:
                for _ in range(shape.timed):
                    self._step(shape)
        if not self.is_asynchronous:
            self._products[shape] = self._products_of(shape)
        return Measured(round(counted.total / shape.timed), round(counted.copies.total() / shape.timed))

    def time(self, shape: Shape, found: Measured) -> None:
        """Add a round to what was found."""
        with self._seated(shape):
            self._step(shape)
            splits = [self._step(shape) for _ in range(shape.timed)]
        found.splits.append(Split(*(fmean(getattr(split, part) for split in splits) for part in Split.__slots__)))
        found.hosts.append(self._host(shape))
        if self.is_asynchronous:
            found.queued.append(self._queued(shape))
        elif shape in self._products:
            found.products.append(1000 * self._products[shape].seconds() / shape.timed)

    def _products_of(self, shape: Shape) -> Products:
        """Those of the timed steps."""
        with self._seated(shape), by_operators(self._core.runner.forward):
            self._step(shape)
            with Products() as products:
                for _ in range(shape.timed):
                    self._step(shape)
        return products

    def _step(self, shape: Shape) -> Split:
        """EngineCore's step."""
        scheduler, runner = self._core.scheduler, self._core.runner
        begun = time.perf_counter()
        batch = self._decode_batch(shape)
        scheduled = time.perf_counter()
        self._arrays(batch)
        built = time.perf_counter()
        pending = runner.launch(batch)
        launched = time.perf_counter()
        result = pending.read()
        read = time.perf_counter()
        scheduler.commit(batch, result)
        moments = (begun, scheduled, built, launched, read, time.perf_counter())
        return Split(*(1000 * (end - start) for start, end in pairwise(moments)))

    def _arrays(self, batch: Batch) -> list[Ints]:
        """As `launch` makes them."""
        inputs = step_inputs.build(batch, self._sizes.page_size, batch.block_rows)
        return [*inputs.target.arrays, *(inputs.draft.arrays if inputs.draft else ())]

    def _host(self, shape: Shape) -> float:
        """Milliseconds of the host's part of a step, which yields a token of each sequence."""
        with self._seated(shape):
            self._pretend()
            begun = time.perf_counter()
            for _ in range(HOST_STEPS):
                batch = self._decode_batch(shape)
                self._arrays(batch)
                self._pretended(batch)
            return 1000 * (time.perf_counter() - begun) / HOST_STEPS

    def _queued(self, shape: Shape) -> float:
        """Milliseconds of a step when the device is given the next one before it is done with the last: what the device
        takes, or what launching does where that is more. All have the same rows, so context KV does not wait."""
        runner = self._core.runner

        def launched() -> PendingStep:
            pending = runner.launch(batch)
            runner.forward.pending_context.write()
            return pending

        with self._seated(shape):
            batch = self._decode_batch(shape)
            launched().read()
            begun = time.perf_counter()
            pending = [launched() for _ in range(QUEUED)]
            result = pending[-1].read()
            taken = time.perf_counter() - begun
            self._core.scheduler.commit(batch, result)
        return 1000 * taken / QUEUED

    def _decode_batch(self, shape: Shape) -> Batch:
        batch = self._core.scheduler.schedule()
        width = self._sizes.block_size if shape.drafts else 1
        assert [rows.count for rows in batch.rows] == [width] * shape.batch, "a step is not of the shape it should be"
        return batch

    @contextmanager
    def _seated(self, shape: Shape) -> Iterator[None]:
        """All sequences of the shape decode, and are gone at the end.

        First each prompt's pages are let into the prefix cache: found there, all prompts are over in the same step.
        """
        scheduler = self._core.scheduler
        block_size = self._sizes.block_size
        for number in range(shape.batch):
            self._core.add(self._request(number, shape, max_tokens=1))
        while scheduler.has_work:
            self._pretend()
        for number in range(shape.batch):
            self._core.add(self._request(number, shape, max_tokens=room(block_size)))
        while scheduler.waiting or not all(seq.is_decoding for seq in scheduler.running):
            self._pretend()
        yield
        for number in range(shape.batch):
            self._core.abort(_name(number))

    def _pretend(self) -> None:
        """A step that yields a token of each sequence and computes nothing."""
        self._pretended(self._core.scheduler.schedule())

    def _pretended(self, batch: Batch) -> None:
        count = len(batch.sampling)
        self._core.scheduler.commit(batch, StepResult([[0]] * count, [0] * count))

    def _request(self, number: int, shape: Shape, max_tokens: int) -> Request:
        """Its first token makes the context complete."""
        prompt = self._tokens[: shape.context - 1]
        return Request(_name(number), prompt, max_tokens, speculate=shape.drafts, cache_salt=_name(number))

    @cached_property
    def _tokens(self) -> tuple[int, ...]:
        return tuple(random.Random(0).choices(range(self._vocab_size), k=self.longest))


def room(block_size: int) -> int:
    """Tokens that a sequence may emit, so that no step is cut short: those of all steps, a block more, and a few that
    it may emit while others are not there yet."""
    return max((1 + TIMED) * block_size, 1 + PLAIN_TIMED, 1 + HOST_STEPS) + block_size + 8


def measure(
    bench: Bench, shapes: Sequence[Shape], rounds: int, on_step: Callable[[str], None] = lambda _: None
) -> Mapping[Shape, Measured]:
    """Every round times every shape once, in an order that turns, so that no shape is timed in a stretch of its own.
    `on_step` is called after each with what is going on."""
    found = {}
    for shape in shapes:
        found[shape] = bench.count(shape)
        on_step("counting operators")
    order = random.Random(0)
    turn = list(shapes)
    for number in range(rounds):
        order.shuffle(turn)
        for shape in turn:
            bench.time(shape, found[shape])
            on_step(f"round {number + 1} of {rounds}")
    return found


def _name(number: int) -> str:
    return f"s{number}"


def describe(engine: Engine) -> str:
    """The models, in a line."""
    target, draft = engine.target, engine.draft
    said = f"target of {target.num_layers} layers, hidden {target.hidden_size}, vocabulary {target.vocab_size}"
    if draft:
        said += f"; draft of {draft.decoder.num_layers} layers, block {draft.block_size}"
    device = torch.cuda.get_device_name(engine.device) if engine.device.startswith("cuda") else engine.device
    tokens = engine.core.scheduler.pool.num_usable * engine.sizes.page_size
    return f"{said}; {engine.dtype} on {device}, KV memory for {tokens} tokens in pages of {engine.sizes.page_size}"
