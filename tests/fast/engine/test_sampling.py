"""Additions, penalties, filters and noise against the plain loops of `reference`: in every order of rows, in every
chunk, on every prefix of a block; and through the engine, with drafts accepted, refused, and sequences preempted."""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.engine.device.torch import TorchBackend
from app.engine.load.engine import Engine
from app.engine.sampling import filters
from app.engine.sampling.metadata import SHORTLIST, CountedTokens, Filters, Kind, Penalties, SamplingMetadata
from app.engine.sampling.noise import noise_states
from app.engine.sampling.penalties import TokenCounts, penalise
from app.engine.sampling.sampler import Sampler, draws_on_device
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.sequence import NOT_FINITE
from app.engine.sequence import Sequence as EngineSequence
from app.engine.step.inputs import Layout
from app.messages import Request, SamplingParams
from tests.costs import fast_ones
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.lossless import LUCKY
from tests.fast.engine.lossless import make_engine as make_plain
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.planted import PlannedRun, make_engine
from tests.fast.engine.planted_faults import engine_of as eager
from tests.fast.engine.planted_faults import overlapping
from tests.fast.engine.reference import (
    PLAIN,
    Decision,
    ReferenceTarget,
    Sampling,
    adjusted,
    decide,
    filtered,
    load_target,
    sampled,
)

torch.set_num_threads(1)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def backend() -> TorchBackend:
    return TorchBackend(CPU)


# The oracle itself


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_the_oracle_applies_min_p_then_top_k_then_top_p_each_to_what_is_left():
    logits = np.log([0.4, 0.2, 0.2, 0.1, 0.06, 0.04]).tolist()
    assert filtered(logits, Sampling(top_p=0.7)).kept.tolist() == [True, True, True, False, False, False]
    # Of the two best, which weigh 0.4 and 0.2, the first is two thirds. Top-p of all mass would keep three.
    assert filtered(logits, Sampling(top_k=1, top_p=0.99)).kept.sum() == 1
    assert filtered(logits, Sampling(top_k=2, top_p=0.49)).kept.tolist() == [True, False, False, False, False, False]
    assert filtered(logits, Sampling(top_k=2)).kept.tolist() == [True, True, True, False, False, False], "a tie stays"
    # min-p leaves 0.4, 0.2, 0.2: half of the mass is the first alone. Of all mass it is not.
    assert filtered(logits, Sampling(top_p=0.45)).kept.sum() == 3
    assert filtered(logits, Sampling(min_p=0.3, top_p=0.45)).kept.sum() == 1


def test_the_oracle_counts_presence_and_frequency_over_the_answer_alone():
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    found = adjusted([4.0, 4.0, 4.0, -4.0], sampling, prompt=[1, 2], emitted=[2, 3, 3])
    assert found == [4.0, 2.0, 2.0 - 0.25 - 0.5, -8.0 - 0.5 - 0.5]


def test_the_oracle_adds_before_it_penalises():
    sampling = Sampling(repetition_penalty=2.0, logit_bias=((0, 3.0),), min_tokens=2, stop_token_ids=frozenset([1]))
    assert adjusted([-1.0, 5.0], sampling, prompt=[0], emitted=[0]) == [1.0, -math.inf]
    assert adjusted([-1.0, 5.0], sampling, prompt=[0], emitted=[0, 0]) == [1.0, 5.0]


def distance(logits: Sequence[float], sampling: Sampling) -> list[float]:
    return filtered(logits, sampling).distance.tolist()


def test_a_margin_is_the_gap_or_the_distance_to_the_edge_that_would_have_to_move():
    scores = np.array([5.0, 4.0, 4.5, 1.0])
    free = Decision(scores, filtered([3.0, 2.0, 1.0, 0.0], PLAIN))
    assert [free.margin(token) for token in range(4)] == [0.0, 1.0, 0.5, 4.0]
    # The first two are kept. The third leads the second, and is 1e-5 from being let in.
    logits = [3.0, 2.0, 2.0 - 1e-5, 0.0]
    few = Decision(np.array([4.0, 4.5, 5.0, 1.0]), filtered(logits, Sampling(top_k=2)))
    assert few.choice == 1
    assert few.margin(2) == pytest.approx(1e-5, rel=1e-3) and few.margin(3) == pytest.approx(2.0)
    # The first has the lower score, but the second, which leads, is 1e-5 from being left out.
    edge = Decision(np.array([4.0, 9.0, 1.0]), filtered([3.0, 2.0, 2.0 - 1e-5], Sampling(top_k=2)))
    assert edge.choice == 1 and edge.margin(0) == pytest.approx(1e-5, rel=1e-3)
    assert distance([3.0, 2.0, 0.0], Sampling(top_k=2)) == [3.0, 2.0, 2.0]
    assert distance([3.0, 2.0, 0.0], Sampling(min_p=math.exp(-2))) == pytest.approx([2.0, 1.0, 1.0])
    share = np.log([0.5, 0.3, 0.2]).tolist()
    assert distance(share, Sampling(top_p=0.6)) == pytest.approx([math.inf, 0.1, 0.2])


# Filters


def rows_of(rng: Random, vocab: int) -> Iterator[list[float]]:
    """ScheduledSequence sharp and flat, with ties, with tokens that are banned, and with one token that has it all."""
    for scale in (0.01, 0.5, 3.0, 12.0):
        yield [rng.gauss(0, scale) for _ in range(vocab)]
    yield [rng.choice((-1.0, 0.0, 0.5, 2.0)) for _ in range(vocab)]
    yield [0.25] * vocab
    yield [rng.gauss(0, 2) if rng.random() < 0.5 else -math.inf for _ in range(vocab - 1)] + [0.0]
    yield [40.0 if token == vocab // 2 else rng.gauss(0, 1) for token in range(vocab)]


def samplings(vocab: int) -> list[Sampling]:
    ks = sorted({1, 2, 3, 20, SHORTLIST - 1, SHORTLIST, SHORTLIST + 1, max(1, vocab - 1), vocab, vocab + 1, 10**6})
    alone = [Sampling(top_k=k) for k in ks]
    alone += [Sampling(top_p=p) for p in (1e-30, 1e-6, 0.1, 0.501, 0.9, 0.9991)]
    alone += [Sampling(min_p=p) for p in (1e-9, 0.003, 0.13, 0.77, 1.0)]
    rng = Random(vocab)
    mixed = [
        Sampling(rng.choice((0, *ks)), rng.choice((1.0, 0.05, 0.633, 0.97)), rng.choice((0.0, 0.011, 0.29)))
        for _ in range(24)
    ]
    return [PLAIN, *alone, *mixed]


def filters_of(asked: Sequence[Sampling]) -> Filters:
    def column(values: Iterator[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32)

    return Filters(
        column(s.top_k or math.inf for s in asked),
        column(s.top_p if s.top_p < 1 else math.inf for s in asked),
        column(s.min_p for s in asked),
    )


REACH = 60.0
"""Logits below the best by which no noise lets a token win: `gumbel` lies between -2.9 and 16.7."""


def assert_kept(found: Tensor, logits: Tensor, asked: Sequence[Sampling], where: str) -> None:
    """fp32 may mistake what lies within its rounding of an edge; of tokens that tie it takes all or none."""
    for row, (kept, x, sampling) in enumerate(zip(found, logits, asked, strict=True)):
        expected = filtered(x.tolist(), sampling)
        rounding = 3e-6 + 3e-7 * float(x[x.isfinite()].abs().max())
        near = _near(x, sampling, rounding) | (x < x.max() - REACH).numpy()
        if (
            sampling.top_p < 1
            and (_near(x, replace(sampling, top_p=1.0), rounding) & (expected.distance < math.inf)).any()
        ):
            continue  # a token more or less to begin with, and the edge of top-p is elsewhere
        wrong = (kept.numpy() != expected.kept) & ~near
        assert not wrong.any(), f"{where}, row {row}, {sampling}: {wrong.nonzero()[0].tolist()}"
        for value in x[kept].unique()[:4]:
            assert kept[x == value].all(), f"{where}, row {row}, {sampling}: a tie was cut"


def _near(x: Tensor, sampling: Sampling, rounding: float) -> np.ndarray:
    """Where fp32 may err. To a tie at the edge of top-k the distance is 0, but there is nothing to mistake."""
    near = filtered(x.tolist(), sampling).distance < rounding
    if sampling.top_p < 1 or sampling.min_p > 0:
        return near
    gaps = x.unique().diff()
    return near & bool((gaps < rounding).any())


@pytest.mark.parametrize("temperature", fast_ones([0.01, 0.3, 1.0, 3.0], (1.0,)))
@pytest.mark.parametrize("vocab", [1, 2, 7, 97, SHORTLIST, SHORTLIST + 1, 700])
def test_filters_keep_what_a_full_sort_keeps(vocab: int, temperature: float):
    some_complete = some_incomplete = 0
    asked = samplings(vocab)
    of = filters_of(asked)
    for row in rows_of(Random(vocab), vocab):
        logits = (torch.tensor(row) / temperature).expand(len(asked), -1).contiguous()
        kept = filters.keep(logits, of)
        assert_kept(kept, logits, asked, "keep")
        short = filters.shortlist(logits, of, SHORTLIST)
        assert short.tokens.shape == (len(asked), min(vocab, SHORTLIST))
        assert torch.equal(short.logits, logits.gather(1, short.tokens))
        listed = torch.zeros_like(kept).scatter(1, short.tokens, short.kept)
        there = short.complete.tolist()
        assert_kept(
            listed[short.complete], logits[short.complete], [s for s, c in zip(asked, there, strict=True) if c], "short"
        )
        some_complete += sum(there)
        some_incomplete += len(there) - sum(there)
    assert some_complete
    assert bool(some_incomplete) == (vocab > SHORTLIST), "flat rows need more than the short list"


def test_tokens_that_tie_at_an_edge_stay_together_however_a_row_is_looked_at():
    rng = Random(3)
    for vocab in (9, 200):
        for asked in ([Sampling(top_k=k)] for k in (1, 2, 3, 4, 5, 8, 50)):
            for sampling in (*asked, replace(asked[0], top_p=0.6173), replace(asked[0], min_p=0.0711)):
                values = [rng.choice([0.0, -0.5, -1.5, -4.0]) for _ in range(vocab)]
                logits, of = torch.tensor([values]), filters_of([sampling])
                expected = filtered(values, sampling).kept.tolist()
                assert filters.keep(logits, of)[0].tolist() == expected, (sampling, values)
                short = filters.shortlist(logits, of, SHORTLIST)
                if short.complete[0]:
                    assert (
                        torch.zeros(1, vocab, dtype=torch.bool).scatter(1, short.tokens, short.kept)[0].tolist()
                        == expected
                    ), (sampling, values)


def test_the_best_alone_is_kept_however_near_the_next_lies():
    logits = torch.tensor([[0.0, -2e-7, -1e-3]])
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(min_p=1.0)):
        assert filters.keep(logits, filters_of([sampling])).tolist() == [[True, False, False]], sampling
        assert filters.shortlist(logits, filters_of([sampling]), SHORTLIST).kept.tolist() == [[True, False, False]]


def test_a_short_list_is_complete_where_it_holds_all_that_may_be_drawn():
    """And says so: else every row would pay for the search of its edges."""
    spread = torch.linspace(0, -30, 1000)[None]
    flat = torch.linspace(0, -0.1, 1000)[None]
    for sampling, of_spread, of_flat in (
        (Sampling(top_k=SHORTLIST - 1), True, True),
        (Sampling(top_k=SHORTLIST + 1), False, False),
        (Sampling(top_p=0.9), True, False),
        (Sampling(min_p=0.1), True, False),
        (Sampling(top_k=500, min_p=0.1), True, False),
        (Sampling(top_k=500, top_p=0.9), False, False),
        (Sampling(top_k=20, top_p=0.9, min_p=0.1), True, True),
        (PLAIN, False, False),
    ):
        of = filters_of([sampling])
        assert filters.shortlist(spread, of, SHORTLIST).complete.tolist() == [of_spread], sampling
        assert filters.shortlist(flat, of, SHORTLIST).complete.tolist() == [of_flat], sampling


# Noise


class EveryValue(Sampler):
    def noise_bits(self, state: Tensor, tokens: Tensor | None = None) -> Tensor:
        return torch.arange(2**23, dtype=torch.int32)[None]


@pytest.mark.exhaustive
def test_noise_is_finite_rises_and_is_the_logarithm_it_should_be_for_all_of_its_2_to_the_23_values(backend):
    [noise] = EveryValue(3, backend).gumbel(torch.zeros(1, dtype=torch.int32))
    assert noise.isfinite().all() and len(noise) == 2**23
    assert (noise.diff() >= 0).all()
    exact = -torch.log(-torch.log((torch.arange(2**23, dtype=torch.float64) + 0.5) * 2.0**-23))
    error = (noise.double() - exact).abs()
    assert float(error.max()) < 4e-6
    assert float(noise.min()) > -2.9 and float(noise.max()) < 16.7
    # The mean of all values is that of the distribution, but for what the coarse upper end leaves out.
    assert float(noise.double().mean()) == pytest.approx(0.5772157, abs=1e-5)


# Whole rows: from requests and drafts to choices


def random_request(rng: Random, vocab: int, number: int) -> Request:
    """Every second setting is left as it is, and every fifth request leaves all."""

    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.5 else default

    few = [rng.randrange(vocab) for _ in range(4)]
    if rng.random() < 0.2:
        return flat_request(f"r{number}", tuple(few), 64, temperature=rng.choice((0.0, 1.0)), seed=rng.getrandbits(64))
    return flat_request(
        f"r{number}",
        tuple(rng.choice(few) for _ in range(rng.randint(1, 9))),
        max_tokens=64,
        temperature=rng.choice((0.0, 1e-6, 0.01, 0.6, 1.0, 3.0)),
        seed=rng.getrandbits(64),
        stop_token_ids=frozenset(rng.sample(range(vocab), rng.randint(0, 2))),
        top_k=maybe(rng.choice((1, 2, 5, 100, SHORTLIST, 200, 10**6)), 0),
        top_p=maybe(rng.choice((1e-6, 0.4, 0.8, 0.99)), 1.0),
        min_p=maybe(rng.choice((0.001, 0.2, 1.0)), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias=maybe(tuple((token, rng.uniform(-8, 8)) for token in sorted({*few[:3]})), ()),
        min_tokens=maybe(rng.randint(1, 12), 0),
    )


class Step:
    """Sequences in the middle of their answers, with random logits for each of their rows; the logits are what an
    identity makes of hidden states."""

    def __init__(self, rng: Random, vocab: int, block: int, requests: list[Request]) -> None:
        self.vocab, self.block = vocab, block
        self.batch = Batch()
        drafts = []
        batch_slots = rng.sample(range(len(requests) + 3), len(requests))
        for request, batch_slot in zip(requests, batch_slots, strict=True):
            seq = EngineSequence(request, arrival=batch_slot, batch_slot=batch_slot, pages=array("i", range(40)))
            few = [*request.token_ids[:2], rng.randrange(vocab)]
            if rng.random() < 0.8:
                seq.token_ids += [rng.choice(few) for _ in range(rng.randint(0, 11))]
            n, num_drafts = seq.num_tokens, rng.randrange(block)
            if rng.random() < 0.2:
                self.batch.prefills.append(ScheduledSequence(seq, 0, n, needs_logits=rng.random() < 0.9))
                continue
            seq.num_computed = n - 1
            self.batch.decodes.append(
                ScheduledSequence(seq, n - 1, num_drafts + 1, needs_logits=True, num_drafts=num_drafts)
            )
            if num_drafts:
                drafts.append([rng.choice(few) for _ in range(block - 1)])
        self.drafts = torch.tensor(drafts, dtype=torch.int32) if drafts else None
        self.logits = normal(sum(r.num_drafts + 1 for r in self.batch.sampling), vocab, seed=rng.getrandbits(32))

    def alone(self, number: int) -> "Step":
        """Sampled sequence `number` without the others."""
        own, step = self.batch.sampling[number], object.__new__(Step)
        step.vocab, step.block = self.vocab, self.block
        step.batch = Batch(decodes=[own]) if own in self.batch.decodes else Batch(prefills=[own])
        drafting = [rows for rows in self.batch.decodes if rows.num_drafts]
        step.drafts = self.drafts[[drafting.index(own)]] if own in drafting else None
        first = sum(rows.num_drafts + 1 for rows in self.batch.sampling[:number])
        step.logits = self.logits[first : first + own.num_drafts + 1]
        return step

    def choices(self, backend: TorchBackend, counts: TokenCounts | None = None) -> list[int]:
        """The engine's: arrays, their copies on the device, counts, and the sampler."""
        counts = counts or TokenCounts(64, self.vocab, backend)
        self.batch.block_rows = self.block
        inputs = Layout(page_size=4).build(self.batch)
        draws, _ = draws_on_device(inputs.sampling, self.drafts, counts, backend)
        return Sampler(self.vocab, backend).choose(self.logits, torch.eye(self.vocab), draws).tolist()

    def decisions(self) -> list[tuple[Request, Decision]]:
        """The reference's, a row at a time."""
        found = []
        drafts = iter([] if self.drafts is None else self.drafts.tolist())
        logits = iter(self.logits)
        for rows in self.batch.sampling:
            request = rows.seq.request
            prompt, emitted = request.token_ids, rows.seq.token_ids[len(request.token_ids) :]
            own = next(drafts)[: rows.num_drafts] if rows.num_drafts else []
            temperature = 0.0 if request.sampling.is_greedy else request.sampling.temperature
            for place in range(rows.num_drafts + 1):
                before = [*emitted, *own[:place]]
                decision = decide(next(logits), prompt, before, temperature, request.sampling.seed, asked_of(request))
                found.append((request, decision))
        return found


def asked_of(request: Request) -> Sampling:
    own = {name: getattr(request.sampling, name) for name in vars(PLAIN) if name != "stop_token_ids"}
    return Sampling(**own, stop_token_ids=request.stop_token_ids)


def random_step(seed: int) -> Step:
    rng = Random(seed)
    vocab = rng.choice((5, 40, SHORTLIST + 70, 400))
    requests = [random_request(rng, vocab, number) for number in range(rng.randint(1, 7))]
    return Step(rng, vocab, rng.choice((1, 2, 4, 8)), requests)


STEPS = range(150)


@pytest.mark.parametrize("tens", range(0, len(STEPS), 30))
def test_every_row_of_a_step_is_chosen_as_the_oracle_does(backend, tens: int):
    rows = 0
    for seed in STEPS[tens : tens + 30]:
        step = random_step(seed)
        for choice, (request, decision) in zip(step.choices(backend), step.decisions(), strict=True):
            rows += 1
            rounding = 2e-6 * float(np.abs(decision.scores[np.isfinite(decision.scores)]).max()) + 2e-5
            assert decision.margin(choice) <= rounding, f"step {seed}: {choice}, not {decision.choice}; {request}"
    assert rows > 200


@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_of_logits_change_no_choice(backend, monkeypatch: pytest.MonkeyPatch, chunk: int):
    for seed in STEPS[::3]:
        step = random_step(seed)
        whole = step.choices(backend)
        monkeypatch.setattr("app.engine.sampling.sampler.LOGITS_CHUNK_BYTES", chunk * 4 * step.vocab + 1)
        assert step.choices(backend) == whole, f"step {seed}"
        monkeypatch.undo()


def test_company_changes_no_choice(backend):
    for seed in STEPS[::2]:
        step = random_step(seed)
        alone = [choice for number in range(len(step.batch.sampling)) for choice in step.alone(number).choices(backend)]
        assert alone == step.choices(backend), f"step {seed}"


@pytest.mark.parametrize("top_k", [1, 5, SHORTLIST])
def test_a_row_with_few_candidates_is_the_same_whether_that_is_known_or_not(backend, top_k: int):
    """Known is what lets other devices do without a look at the short lists; ties and all."""
    count, vocab = 60, 400
    sampler = Sampler(vocab, backend)
    states = torch.from_numpy(noise_states(9, 0, count))
    rows = torch.arange(count, dtype=torch.int32)
    for logits in (normal(count, vocab), normal(count, vocab).round(), normal(count, vocab, scale=0.01)):
        found = []
        for short in (True, False):
            of = replace(filters_of([Sampling(top_k=top_k, top_p=0.9)] * count), form="short" if short else "long")
            draws = SamplingMetadata(Kind("short", penalised=False), rows, torch.ones(count), states, filters=of)
            found.append(sampler.choose(logits, torch.eye(vocab), [draws]).tolist())
        assert found[0] == found[1]


def test_a_device_that_must_not_be_waited_for_chooses_the_same(backend, monkeypatch: pytest.MonkeyPatch):
    """There every row that may need more than a short list goes by thresholds."""
    for seed in STEPS[::5]:
        step = random_step(seed)
        looked = step.choices(backend)
        monkeypatch.setattr(filters, "shortlist", by_thresholds)
        assert step.choices(backend) == looked, f"step {seed}"
        monkeypatch.undo()


def by_thresholds(logits: Tensor, of: Filters, size: int) -> filters.Shortlist:
    tokens = torch.arange(logits.shape[1]).expand(logits.shape)
    return filters.Shortlist(logits, tokens, filters.keep(logits, of), torch.ones(len(logits), dtype=torch.bool))


# Penalties


def test_the_rows_of_a_block_worked_out_by_hand():
    """Token 0 is the prompt's, token 1 was emitted once; the drafts are 2, 1, 2."""
    rows = 4
    of = Penalties(
        presence=torch.full((rows,), 0.5),
        frequency=torch.full((rows,), 0.25),
        repetition=torch.full((rows,), 2.0),
        batch_slot=torch.ones(rows, dtype=torch.int32),
        num_before=torch.arange(rows, dtype=torch.int32),
        draft_index=torch.zeros(rows, dtype=torch.int32),
        counted_in=torch.empty(0, dtype=torch.int32),
        counted=[],
        seen=(
            torch.tensor([[9, 9, 9, 9], [0, 1, 0, 0]], dtype=torch.int32),
            torch.tensor([[True] * 4, [True, False, False, False]]),
            torch.tensor([[2, 1, 2]], dtype=torch.int32),
        ),
    )
    found = penalise(torch.tensor([[4.0, 4.0, -4.0, 4.0]] * rows), of)
    once, twice = 0.75, 1.0
    assert found.tolist() == [
        [2.0, 2.0 - once, -4.0, 4.0],
        [2.0, 2.0 - once, -8.0 - once, 4.0],
        [2.0, 2.0 - twice, -8.0 - once, 4.0],
        [2.0, 2.0 - twice, -8.0 - twice, 4.0],
    ]


def test_counts_are_right_while_sequences_come_go_and_change_batch_slots(backend):
    rng = Random(1)
    vocab, batch_slots = 11, 4
    counts = TokenCounts(batch_slots, vocab, backend)
    free, running, waiting = set(range(batch_slots)), [], []
    left: dict[EngineSequence, int] = {}
    moved = stayed = 0
    for number in range(3000):
        event = rng.random()
        if event < 0.15 and free:
            prompt = tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 5)))
            waiting.append(EngineSequence(Request(f"r{number}", prompt, 99), number))
        elif event < 0.25 and running:
            leaving = running.pop(rng.randrange(len(running)))
            free.add(leaving.batch_slot)
            if rng.random() < 0.6:
                waiting.append(leaving)
                left[leaving] = leaving.batch_slot
            leaving.batch_slot = -1
            leaving.num_ended_runs += 1
        if waiting and free:
            seq = waiting.pop()
            seq.batch_slot = rng.choice(sorted(free))
            free.remove(seq.batch_slot)
            running.append(seq)
            if seq in left:
                moved, stayed = moved + (left[seq] != seq.batch_slot), stayed + (left[seq] == seq.batch_slot)
        if rng.random() < 0.02:
            counts.forget()
        counts.begin(
            CountedTokens(seq.key, seq.batch_slot, len(seq.request.token_ids), seq.token_ids) for seq in running
        )
        emitted, prompted = counts.tensors
        assert (emitted.dtype, prompted.dtype) == (torch.int32, torch.bool)
        for seq in running:
            answer = Counter(seq.token_ids[len(seq.request.token_ids) :])
            assert emitted[seq.batch_slot].tolist() == [answer[token] for token in range(vocab)]
            assert prompted[seq.batch_slot].tolist() == [token in seq.request.token_ids for token in range(vocab)]
        lines = rng.sample(range(batch_slots + 2), len(running))
        slots, result = (
            [-1] * (batch_slots + 2),
            [[rng.randrange(vocab) for _ in range(4)] + [rng.randrange(4)] for _ in range(batch_slots + 2)],
        )
        for line, seq in zip(lines, running, strict=True):
            slots[line], (*tokens, accepted) = seq.batch_slot, result[line]
            if rng.random() < 0.1:  # is not finite, and is read again
                result[line][rng.randint(0, accepted)] = NOT_FINITE
                seq.num_ended_runs += 1
            else:
                seq.token_ids += tokens[: accepted + 1]
        none = torch.empty(0)
        of = Penalties(*[none] * 6, torch.tensor(slots, dtype=torch.int32), [])
        draws = SamplingMetadata(Kind("", penalised=True), none, none, none, penalties=of)
        counts.move([draws, replace(draws, penalties=None)], torch.tensor(result))
    assert moved > 30 and stayed > 10


@pytest.mark.parametrize("make", [eager, overlapping])
def test_a_sequence_that_is_read_again_is_counted_again(tmp_path, make: Callable[..., Engine]):
    """The device has counted drafts that the host dropped. The last chunk of 16 tokens ends one row before the answer's
    next token, so that row decodes."""
    pair, prompt = make_pair(tmp_path, **LUCKY), [i * 3 % 5 for i in range(24)]
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 96}
    core = make(pair, prefix_caching=True, **sizes).core
    core.run([flat_request("first", prompt, 1)])  # its pages are found, so what is not finite may be theirs
    asked = flat_request("r", prompt, 24, frequency_penalty=0.5, presence_penalty=0.3)
    launch, spoilt_at = core.launch, list[int]()

    def spoilt(batch: Batch) -> Any:
        pending = launch(batch)
        read = pending.read

        def once() -> Any:
            result = read()
            (entry,), (accepted,) = batch.sampling or [None], result.num_accepted or [0]
            if accepted and not spoilt_at and (entry.seq.num_tokens - 1) % 16 == 0:
                spoilt_at.append(entry.seq.num_tokens)
                result.tokens[0][accepted] = NOT_FINITE
            return result

        pending.read = once
        return pending

    core.launch = spoilt
    assert core.run([asked]) == make_plain(pair.target, None, **sizes).core.run([asked])
    assert spoilt_at


def test_memory_for_counts_is_taken_when_the_first_penalty_comes(engine_of, text, monkeypatch: pytest.MonkeyPatch):
    made: list[tuple[int, ...]] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **kwargs: made.append(size) or zeros(*size, **kwargs))
    engine = make_engine(engine_of.pair, max_num_seqs=3)
    of_counts = ((3, engine_of.pair.vocab_size),)
    plain = Request(
        "plain", (1, 2, 3), 4, sampling=SamplingParams(temperature=1.0, top_k=3, min_tokens=2, logit_bias=((1, 2.0),))
    )
    engine.core.run([plain])
    assert made.count(of_counts) == 0
    for _ in range(2):
        engine.core.run([replace(plain, sampling=replace(plain.sampling, presence_penalty=0.1))])
    assert made.count(of_counts) == 2, "how often, and whether"


# Through the engine


class Engines:
    """Engines of one pair are used again and again, so their counts are full of what others left behind."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._made: dict[tuple[Any, ...], Engine] = {}

    def __call__(self, **sizes: Any) -> Engine:
        key = tuple(sizes.items())
        if key not in self._made:
            self._made[key] = make_engine(self.pair, **sizes)
        return self._made[key]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(make_pair(tmp_path_factory.mktemp("pair"), seed=3, block_size=8, max_position_embeddings=128))


@pytest.fixture(scope="module")
def target(engine_of: Engines) -> ReferenceTarget:
    return load_target(engine_of.pair.target)


Text = Callable[[Request], list[int]]


@pytest.fixture(scope="module")
def text(target: ReferenceTarget) -> Text:
    """A request's prompt and what the target says after it, a block further than the answer goes."""
    known: dict[Request, list[int]] = {}

    def make(request: Request) -> list[int]:
        key = replace(request, request_id="", cache_salt="")
        if key not in known:
            temperature = 0.0 if request.sampling.is_greedy else request.sampling.temperature
            prompt, length = request.token_ids, request.max_tokens + 8
            known[key] = [
                *prompt,
                *sampled(target, prompt, length, temperature, request.sampling.seed, sampling=asked_of(request)),
            ]
        return list(known[key])

    return make


def asking(request_id: str, prompt_len: int = 6, max_tokens: int = 24, **asked: Any) -> Request:
    """One that shares no pages: the planted drafter knows the context of a run, and a page's owner, alone."""
    rng = Random(prompt_len)
    prompt = tuple(rng.randrange(97) for _ in range(prompt_len))
    return flat_request(request_id, prompt, max_tokens, cache_salt=request_id, **asked)


def run(engine: Engine, requests: Sequence[Request], text: Text, cut: Any) -> PlannedRun:
    """Every delta is held against the plan."""
    engine.core.flush_cache()
    planned = PlannedRun(engine, {request.request_id: text(request) for request in requests}, cut)
    planned.run(requests)
    return planned


HEAVY = {"repetition_penalty": 1.8, "presence_penalty": 0.7, "frequency_penalty": 0.6}
SIDE_BY_SIDE = [
    asking("greedy", 6, repetition_penalty=1.5),
    asking("drawn", 9, temperature=0.8, seed=5, frequency_penalty=1.5),
    asking("plain", 7, temperature=1.0, seed=6),
    asking("argmax", 5),
    asking("filtered", 8, temperature=1.2, seed=7, top_k=5, top_p=0.9, **HEAVY),
    asking("same prompt", 6, repetition_penalty=1.5, presence_penalty=-1.0),
    asking("few", 4, temperature=0.9, seed=8, min_p=0.1, presence_penalty=1.5),
]


@pytest.mark.parametrize("cut", fast_ones([0, 2, 7, "ragged"], (7, "ragged")))
@pytest.mark.parametrize("num_pages", [None, 14])
def test_penalties_stand_on_the_drafts_before_a_row_and_on_their_own_sequence_alone(engine_of, text, cut, num_pages):
    cuts = (lambda request_id, n: (n + len(request_id)) % 8) if cut == "ragged" else cut
    engine = engine_of(page_size=4, max_num_seqs=3, num_pages=num_pages, max_model_len=40)
    planned = run(engine, SIDE_BY_SIDE, text, cuts)
    assert (planned.num_preemptions > 0) == (num_pages is not None)
    if cut == 7:
        assert all(
            delta.steps[0].n_accepted == delta.steps[0].n_verified
            for deltas in planned.deltas.values()
            for delta in deltas
        )


def test_penalties_change_these_texts(text):
    for request in SIDE_BY_SIDE:
        if request.sampling.is_penalised:
            unpenalised = replace(
                request,
                sampling=replace(request.sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
            )
            assert text(request) != text(unpenalised)


def test_who_takes_an_aborted_requests_seat_inherits_none_of_its_counts(engine_of, text):
    engine = engine_of(page_size=4, max_num_seqs=2)
    first, second, third = (
        asking(name, 6, temperature=0.9, seed=3, max_tokens=20, **HEAVY) for name in ("first", "second", "third")
    )
    engine.core.flush_cache()
    planned = PlannedRun(engine, {request.request_id: text(request) for request in (first, second, third)}, 3)
    for request in (first, second, third):
        planned.add(request)
    for _ in range(3):
        planned.step()
    batch_slot = next(seq.batch_slot for seq in engine.core.scheduler.running if seq.request is first)
    engine.core.abort("first")
    planned.step()
    assert next(seq.batch_slot for seq in engine.core.scheduler.running if seq.request is third) == batch_slot
    while engine.core.has_work:
        planned.step()
    assert planned.emitted["third"] == planned.emitted["second"] == text(third)[6:26]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("cut", "temperature"), [(0, 0.0), pytest.param(0, 1.0, marks=pytest.mark.slow), (7, 0.0), (7, 1.0)]
)
def test_no_stop_token_comes_before_min_tokens_and_one_may_come_right_after(engine_of, text, temperature, cut):
    engine = engine_of(page_size=4, max_num_seqs=4)
    stops = frozenset(range(0, 97, 2))
    lengths: dict[int, list[int]] = {}
    across = 0
    for min_tokens in (0, 1, 2, 5, 9, 16):
        requests = [
            asking(
                f"{min_tokens} {seed}",
                5 + seed,
                temperature=temperature,
                seed=seed,
                stop_token_ids=stops,
                min_tokens=min_tokens,
            )
            for seed in range(6)
        ]
        planned = run(engine, requests, text, cut)
        for request in requests:
            emitted, position = planned.emitted[request.request_id], 0
            assert not stops.intersection(emitted[:min_tokens])
            assert emitted[-1] in stops or len(emitted) == request.max_tokens
            lengths.setdefault(min_tokens, []).append(len(emitted))
            for delta in planned.deltas[request.request_id]:
                across += position < min_tokens < position + len(delta.token_ids)
                position += len(delta.token_ids)
    for min_tokens, found in lengths.items():
        assert min_tokens + 1 in found, "the next token may be a stop token"
    assert (across > 0) == (cut > 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [0, 7])
def test_a_bias_of_100_forces_a_token_and_minus_100_bans_it(engine_of, text, temperature, cut):
    engine = engine_of(page_size=4, max_num_seqs=4)
    free, forced, few, without = (
        partial(asking, name, 6, temperature=temperature, seed=2) for name in ("free", "forced", "few", "without")
    )
    banned = [token for token, _ in Counter(text(free())[6:30]).most_common(2)]
    requests = [
        free(),
        forced(logit_bias=((41, 100.0),)),
        few(logit_bias=((41, 100.0), (banned[0], -100.0)), top_k=2),
        without(logit_bias=tuple((token, -100.0) for token in banned)),
    ]
    emitted = run(engine, requests, text, cut).emitted
    assert emitted["forced"] == emitted["few"] == [41] * 24
    assert not {*banned} & {*emitted["without"]} and {*banned} <= {*emitted["free"]}
