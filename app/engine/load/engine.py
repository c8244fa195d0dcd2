"""From an EngineConfig to a warm EngineCore: plan, weights, memory, checks."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from app.config.engine import EngineConfig
from app.engine.checkpoint.read import read_checkpoints
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from app.engine.comm.comm import ALONE, Comm
from app.engine.core import EngineCore
from app.engine.device.base import Backend
from app.engine.device.comparison import check_attention
from app.engine.device.factory import found_device, make_backend
from app.engine.device.gated_delta import CHUNK
from app.engine.dflash.draft_pages import DraftPages, num_draft_pages
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.dflash.model import DFlashModel
from app.engine.dflash.report import log_draft
from app.engine.errors import GraphsRefusedError, UnsupportedError
from app.engine.load.chunk_trial import chunks_are_right
from app.engine.load.loader import CheckpointWeights, OpenWeights
from app.engine.load.made_up_steps import made_up_texts, measure_costs, step_memory
from app.engine.load.memory import kv_bytes, make_state_slots, make_states, with_pages
from app.engine.load.models import Progress, read_models
from app.engine.load.plan import Plan, Sizes, make_plan, name_of
from app.engine.load.refusals import Facts, check
from app.engine.models.kv_pool import KvPool
from app.engine.models.page_pool import PagePool
from app.engine.models.rope import RotaryTable
from app.engine.models.state_pool import StatePool
from app.engine.models.target import Target
from app.engine.sampling.penalties import TokenCounts
from app.engine.sampling.sampler import Sampler, ShardedSampler
from app.engine.schedule.cache_events import CacheEvents
from app.engine.schedule.pace import FEWEST_ROWS, Pace
from app.engine.schedule.policy import Policy
from app.engine.schedule.scheduler import Scheduler
from app.engine.step.forward import Forward
from app.engine.step.graphs import StepGraphs
from app.engine.step.inputs import Layout
from app.engine.step.runner import ModelRunner, Tell
from app.messages import Request

logger = logging.getLogger(__name__)


class Rank(NamedTuple):
    """One of the processes that share a model. Rank 0 of several has `tell`, which sends its calls to the others."""

    comm: Comm = ALONE
    tell: Tell | None = None


Join = Callable[[Backend], Rank]
"""Function that returns this process's rank on its device, once the others have come."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine and its settled sizes."""

    core: EngineCore
    sizes: Sizes
    device: str
    dtype: str
    target: DecoderConfig
    draft: DFlashConfig | None
    states: StatePool | None  # of a hybrid target


def build_engine(
    config: EngineConfig,
    on_progress: Progress = lambda *_: None,
    open_weights: OpenWeights = CheckpointWeights,
    join: Join = lambda backend: Rank(),
) -> Engine:
    """Load and warm up an engine. `open_weights` opens a checkpoint's weights, and `join` returns rank 0.
    Raises UnsupportedError for what would run wrongly or does not fit, before weights are read if possible."""
    backend = _backend(config, rank=0)
    with _annotated(backend):
        runner, plan = _load(config, backend, on_progress, open_weights, join)
        if plan.draft:
            log_draft(plan.draft, plan.dtype, plan.sizes.max_model_len, str(config.draft))
        return _warm(runner, plan, on_progress)


def build_runner(
    config: EngineConfig, rank: int, join: Join, open_weights: OpenWeights = CheckpointWeights
) -> ModelRunner:
    """Load the runner of a `rank` that is not 0. Raises UnsupportedError like rank 0."""
    backend = _backend(config, rank)
    with _annotated(backend):
        return _load(config, backend, lambda *_: None, open_weights, join)[0]


def _backend(config: EngineConfig, rank: int) -> Backend:
    """Return the backend of a rank. Raises UnsupportedError, also for settings that its kind of device refuses."""
    device = found_device(config.device)
    check(Facts(config, kind=device.partition(":")[0]))
    return make_backend(device, rank=rank, batch_invariant=config.batch_invariant)


@contextmanager
def _annotated(backend: Backend) -> Iterator[None]:
    """Add to errors of the device a note with their meaning."""
    try:
        yield
    except Exception as error:
        backend.annotate(error)
        raise


def _load(
    config: EngineConfig, backend: Backend, on_progress: Progress, open_weights: OpenWeights, join: Join
) -> tuple[ModelRunner, Plan]:
    """Return a runner over its KV memory, which no step has used yet, and its settled plan."""
    backend.make_operators(partial(on_progress, "compiling for this CPU, once"))
    models = read_checkpoints(config)
    plan = make_plan(config, models, backend)
    comm, tell = join(backend)
    assert comm.size == config.tensor_parallel_size
    plan = plan.shard(comm.size)
    for decoder in plan.decoders:
        backend.check(decoder, plan.sizes.block_size, plan.sizes.page_size, plan.dtype)
        check_attention(backend, decoder, plan.sizes.page_size, plan.sizes.block_size, plan.dtype)
    if plan.target.gated_delta:
        backend.check_states(plan.target.gated_delta, plan.sizes.block_size, plan.state_dtype)
    target, draft = read_models(plan, models, backend, comm, open_weights, on_progress)
    backend.end_of_load(tune=config.tune == "auto" and comm.size == 1)  # ranks launch alike
    states = make_states(plan, backend, comm)
    runner_over = partial(_runner, backend, comm, target, draft, states)
    step = 0 if backend.memory_is_host else step_memory(partial(runner_over, plan), backend, plan.sizes)
    taken = 2 * step + backend.graph_bytes(plan.decoders) if plan.graph_sizes else step
    kv = comm.minimum(kv_bytes(plan, backend, states, taken))
    plan = with_pages(plan, kv)
    return runner_over(plan, plan.num_pages, tell, partial(on_progress, "graphs")), plan


def _runner(
    backend: Backend,
    comm: Comm,
    target: Target,
    draft: DFlashModel | None,
    states: StatePool | None,
    plan: Plan,
    num_pages: int,
    tell: Tell | None = None,
    on_graph: Callable[[int, int], None] | None = None,
) -> ModelRunner:
    """Return a runner over new KV memory. With `on_graph` it captures graphs if planned."""
    sizes, vocab = plan.sizes, plan.target.vocab_size
    sampler = Sampler(vocab, backend) if comm.size == 1 else ShardedSampler(vocab, backend, comm)
    counts = TokenCounts(sizes.max_num_seqs, vocab, backend)
    hybrid = states is not None
    separate_prefill = backend.separate_prefill or hybrid  # a recurrent layer reads decoding rows and chunks as groups
    graph_sizes = plan.graph_sizes if on_graph else None
    layout = Layout(
        sizes.page_size,
        separate_prefill=separate_prefill,
        first_draft_row=plan.draft.first_draft_row if plan.draft else 1,
        hybrid=hybrid,
        host_positions=backend.lengths_on_host,
        graphs=graph_sizes,
        draws_in_graphs=graph_sizes is not None and comm.size == 1 and not backend.batch_invariant,
        window_pages=sizes.window_pages,
    )
    length = max(sizes.padded_len, plan.max_rows)
    ropes = [(replace(d.rope, adjacent_pairs=False), d.head_dim) for d in plan.decoders]  # the same angles either way
    tables = {rope: RotaryTable(*rope, length, plan.dtype, backend) for rope in ropes}
    rotaries = [tables[rope] for rope in ropes]  # one lookup for target and context KV
    pools = [KvPool(plan.target, num_pages, sizes.page_size, plan.dtype, backend, states)]
    drafter = None
    if plan.draft and draft:
        separate = num_draft_pages(sizes) if plan.num_pages else 0  # made-up sequences have the same pages in both
        pools.append(KvPool(plan.draft.decoder, separate or num_pages, sizes.page_size, plan.dtype, backend))
        drafter = DFlashDrafter(draft, pools[1], rotaries[1], sampler, backend)
    forward = Forward(target, pools[0], rotaries[0], sampler, backend, sizes.page_size, plan.max_rows, drafter)
    graphs = None
    pages = max(sizes.pages_per_sequence, sizes.scratch_pages)
    try:
        if on_graph and graph_sizes:
            free = backend.memory()[0]
            graphs = StepGraphs(forward, layout, counts, pages=pages, on_graph=on_graph, comm=comm)
            captured = graphs.captured_sizes
            if captured.chunks and not separate_prefill:
                chunks = chunks_are_right(graphs, layout, sizes, pools, backend, comm)
                captured = replace(captured, chunks=chunks)
            layout = replace(layout, graphs=captured)
            left = backend.memory()[0]
            logger.info("graphs take %d MiB, and %d MiB are free on %s", free - left >> 20, left >> 20, backend.device)
    except GraphsRefusedError as error:
        logger.warning("steps run without graphs: %s", error)
        graphs, layout = None, replace(layout, graphs=None, draws_in_graphs=False)
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            "graphs do not fit next to weights and KV: give a smaller --kv-cache-memory or --memory-utilization, "
            f"fewer --max-graphs, or --enforce-eager ({error})"
        ) from None
    return ModelRunner(forward, backend, counts, layout, pools, graphs, tell)


def _warm(runner: ModelRunner, plan: Plan, on_progress: Progress) -> Engine:
    """Run a request, time steps if their costs decide, and return the engine."""
    config, sizes, backend, states = plan.config, plan.sizes, runner.backend, runner.pools[0].states
    # A step may be launched before the last one is read if all of it comes from graphs, with lengths from the device.
    graphs = None if backend.lengths_on_host else runner.graphs
    overlap = graphs is not None and (bool(graphs.draft_graphs) or runner.forward.drafter is None)

    def core(policy: Policy) -> EngineCore:
        num_separate = num_draft_pages(sizes)
        scheduler = Scheduler(
            PagePool(plan.num_pages, sizes.page_size, sizes.scratch_pages),
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            block_size=sizes.block_size,
            prefix_caching=config.prefix_caching and (states is None or states.num_checkpoints > 0),
            policy=policy,
            pace=Pace(CHUNK if states else FEWEST_ROWS) if backend.defaults.is_slow else None,
            states=make_state_slots(states, sizes) if states else None,
            draft_pages=DraftPages(num_separate, sizes.page_size, sizes.scratch_pages, sizes.draft_window)
            if num_separate
            else None,
        )
        return EngineCore(scheduler, runner, overlap=overlap)

    # The first client should not pay for lazy initialisation. The cached pages and counters go with this core.
    first = core(Policy(sizes.block_size))
    num_steps = 2  # one without drafts and one with a block, which may be slow
    first.add(Request("warm-up", (0,), max_tokens=min(num_steps * sizes.block_size, sizes.max_model_len - 1)))
    for done in range(num_steps):
        if first.has_work:
            first.step()
            if first.scheduler.last_fault:
                raise first.scheduler.last_fault
        on_progress("warm-up", done + 1, num_steps)
    costs = None
    if config.verify == "auto" and sizes.block_size > 1:
        texts = made_up_texts(core(Policy(sizes.block_size, width=1)), sizes) if plan.target.moe else ()
        timing = partial(on_progress, "timing steps")
        costs = measure_costs(runner, sizes, plan.num_pages, timing, overlap=overlap, texts=texts)
    serving = core(Policy(sizes.block_size, costs, config.verify if isinstance(config.verify, int) else None))
    if config.cache_events:
        serving.scheduler.events = CacheEvents()
    return Engine(serving, sizes, str(backend.device), name_of(plan.dtype), plan.target, plan.draft, states)
