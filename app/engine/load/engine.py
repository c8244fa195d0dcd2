"""From an EngineConfig to a warm EngineCore: backend, weights, sizes, KV memory, checks."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.config.engine import EngineConfig
from app.engine.checkpoint.draft import refuse_foreign_tensors
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from app.engine.comm.comm import ALONE, Comm
from app.engine.compile.backend import TracedBackend
from app.engine.compile.cache import compile_cache
from app.engine.compile.packages import Shapes, compile_missing, load_kept, load_or_compile, take_up, traced_config
from app.engine.core import EngineCore
from app.engine.device.base import Backend, Heads
from app.engine.device.factory import make_backend
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.dflash.model import DFlashModel
from app.engine.errors import UnsupportedError
from app.engine.load.loader import OpenWeights, SafetensorsWeights, target_class
from app.engine.load.plan import kind_of, make_plan, name_of
from app.engine.load.ranks import Join, alone
from app.engine.load.refusals import Facts, check
from app.engine.load.self_test import check_attention
from app.engine.load.sizes import Sizes, bytes_per_token, settle_pages
from app.engine.load.states import make_state_slots, make_states
from app.engine.load.step_memory import step_memory
from app.engine.load.time_steps import measure_costs
from app.engine.models.kv_pool import KvPool
from app.engine.models.rope import RotaryTable
from app.engine.models.state_pool import StatePool
from app.engine.models.target import Target
from app.engine.models.weights import Weights
from app.engine.sampling.penalties import TokenCounts
from app.engine.sampling.sampler import Sampler
from app.engine.sampling.sharded import ShardedSampler
from app.engine.schedule.page_pool import CacheEvents, PagePool
from app.engine.schedule.policy import Policy
from app.engine.schedule.scheduler import Scheduler
from app.engine.step.forward import Forward
from app.engine.step.graph_sizes import GraphSizes
from app.engine.step.graphs import StepGraphs
from app.engine.step.inputs import Layout
from app.engine.step.runner import ModelRunner
from app.messages import Request

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total): stage "target" and "draft" in bytes, "graphs" in graphs, "compile" in
functions, "warm-up" in steps, "timing steps" in seconds."""

CPU_KV_BYTES = 4 << 30
"""KV memory on a CPU if none is given. At most half of free memory is taken, because steps and others need the rest."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine and its settled sizes. `draft` is None without a draft, `states` for one that is no hybrid."""

    core: EngineCore
    sizes: Sizes
    device: str
    dtype: str
    target: DecoderConfig
    draft: DFlashConfig | None
    states: StatePool | None
    compiles: bool
    """True if forwards are to be compiled."""
    tuned: dict[str, str]
    """Ways in which the device's operators are launched, if it has chosen some."""

    @property
    def can_be_compiled(self) -> bool:
        """Return True if forwards run by operators that could be compiled functions."""
        return self.compiles and self.core.runner.forward.compiled is None

    @property
    def forwards(self) -> str:
        """Return how the forwards run, for people."""
        return "compiled" if self.core.runner.forward.compiled else "by operators"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner over its KV memory, which no step has used yet."""

    runner: ModelRunner
    sizes: Sizes
    num_pages: int
    dtype: torch.dtype
    target: DecoderConfig
    draft: DFlashConfig | None
    states: StatePool | None
    compiles: bool
    tuned: dict[str, str]


def build_engine(
    config: EngineConfig,
    on_progress: Progress = lambda *_: None,
    open_weights: OpenWeights = SafetensorsWeights,
    join: Join = alone,
) -> Engine:
    """Load and warm up an engine. `open_weights` may get weights from elsewhere than the folders' files.

    `join` returns rank 0 of `config.tensor_parallel_size` ranks. Raises UnsupportedError for a wish that would run
    wrongly or does not fit, before weights are read if possible.
    """
    with _explained(config, rank=0) as backend:
        loaded = _load_runner(config, backend, on_progress, open_weights, join)
        if loaded.draft:
            for warning in loaded.draft.warnings:
                logger.warning("draft: %s", warning)
            logger.info("draft: %s", ", ".join(f"{name} {value}" for name, value in loaded.draft.report().items()))
        return _warm(config, loaded, on_progress)


def build_runner(
    config: EngineConfig, rank: int, join: Join, open_weights: OpenWeights = SafetensorsWeights
) -> ModelRunner:
    """Load the runner of a `rank` that is not 0. Raises UnsupportedError like rank 0."""
    with _explained(config, rank) as backend:
        return _load_runner(config, backend, lambda *_: None, open_weights, join).runner


@contextmanager
def _explained(config: EngineConfig, rank: int) -> Iterator[Backend]:
    """Yield the backend of a rank. Errors of its device get a note with their meaning."""
    check(Facts(config, kind_of(config)))
    backend = make_backend(config.device, rank=rank, batch_invariant=config.batch_invariant)
    try:
        yield backend
    except Exception as error:
        backend.annotate(error)
        raise


def _load_runner(
    config: EngineConfig, backend: Backend, on_progress: Progress, open_weights: OpenWeights, join: Join
) -> Loaded:
    plan = make_plan(config, backend)
    rank = join(backend)
    comm = rank.comm
    assert comm.size == config.tensor_parallel_size
    plan = plan.shard(comm.size, whole_draft=config.draft_tensor_parallel_size == 1)
    shape, draft_shape, dtype, sizes = plan.target, plan.draft, plan.dtype, plan.sizes
    graph_sizes, decoders, max_rows = plan.graph_sizes, plan.decoders, plan.max_rows
    if draft_shape and dtype == torch.float16:
        logger.warning("draft: features overflow in float16, so few drafts are right; --dtype bfloat16 avoids that")
    for decoder in decoders:
        backend.check(decoder.head_dim, sizes.block_size, sizes.page_size, dtype)
        check_attention(backend, decoder, sizes.page_size, sizes.block_size, dtype)
    if shape.moe:
        backend.check_experts(shape.moe, shape.hidden_size)

    def opened(folder: Path, stage: str) -> Weights:
        return open_weights(folder, backend.device, dtype, partial(on_progress, stage))

    target, draft = _load(config, target_class(plan.model_type), shape, draft_shape, backend, opened, comm)
    tuned = {}
    if config.tune == "auto" and comm.size == 1:  # ranks must launch alike, and their clocks would not agree
        heads = [Heads(decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) for decoder in decoders]
        tuned = backend.tune(heads, matrices(target), sizes.max_num_seqs, sizes.page_size)
    vocab = shape.vocab_size
    sampler = Sampler(vocab, backend) if comm.size == 1 else ShardedSampler(vocab, backend, comm)
    counts = TokenCounts(sizes.max_num_seqs, shape.vocab_size, backend)
    first_draft_row = draft_shape.first_draft_row if draft_shape else 1
    hybrid = shape.gated_delta is not None
    apart = backend.separate_prefill or hybrid  # a recurrent layer reads decoding rows and chunks as groups
    layout = Layout(sizes.page_size, apart, first_draft_row, hybrid, host_positions=backend.lengths_on_host)
    states = make_states(config, shape, sizes, dtype, backend, comm)

    def forward_over(num_pages: int) -> tuple[Forward, list[KvPool]]:
        length = max(sizes.padded_len, max_rows)
        tables = {(d.rope, d.head_dim): RotaryTable(d.rope, d.head_dim, length, dtype, backend) for d in decoders}
        rotaries = [tables[d.rope, d.head_dim] for d in decoders]  # one lookup serves a target and its draft's context
        memory = sizes.page_size, dtype, backend
        pools = [KvPool(d, num_pages, *memory, states if d is shape else None) for d in decoders]
        drafter = DFlashDrafter(draft, pools[1], rotaries[1], sampler, backend) if draft else None
        shared = sampler, backend, sizes.page_size, max_rows
        return Forward(target, pools[0], rotaries[0], *shared, drafter), pools

    def runner_of_all(num_pages: int) -> ModelRunner:
        """Return a runner for a step that every rank makes by itself."""
        forward, pools = forward_over(num_pages)
        return ModelRunner(forward, backend, counts, layout, pools)

    sharing = comm.size if backend.memory_is_host else 1
    state_bytes = sharing * states.nbytes if states else 0
    kv_bytes = _kv_bytes(config, sizes, backend, runner_of_all, state_bytes, graphs=graph_sizes is not None)
    kv_bytes = comm.minimum(kv_bytes)
    token_bytes = sharing * sum(bytes_per_token(decoder, dtype) for decoder in decoders)
    sizes, num_pages = settle_pages(config, sizes, kv_bytes, token_bytes)
    if draft_shape and (limit := draft_shape.decoder.max_position_embeddings) < sizes.max_model_len:
        logger.warning(
            "draft: its config.json allows %d positions, and --max-model-len is %d: few drafts beyond are right",
            limit,
            sizes.max_model_len,
        )
    forward, pools = forward_over(num_pages)
    graphs = None
    if graph_sizes:
        graphs = _capture(forward, layout, graph_sizes, sizes, comm, partial(on_progress, "graphs"))
    runner = ModelRunner(forward, backend, counts, layout, pools, graphs, rank.tell)
    if plan.compiles and not graphs:
        if config.compile == "auto":
            compiled = load_kept(forward)
        else:
            traced = partial(_traced, config, open_weights)
            compiled = load_or_compile(forward, traced, partial(on_progress, "compile"))
        if compiled:
            take_up(runner, compiled)
    return Loaded(runner, sizes, num_pages, dtype, shape, draft_shape, states, plan.compiles, tuned)


def compile_packages(config: EngineConfig) -> None:
    """Compile the forwards of an engine, and keep them. No weights are read."""
    with compile_cache() as folder:
        compile_missing(_traced(config, SafetensorsWeights), folder)


def _traced(config: EngineConfig, open_weights: OpenWeights) -> Forward:
    """Return a forward over shapes of weights, which torch.export can trace."""
    backend = TracedBackend(torch.device("cpu"))

    def shapes(*arguments: Any) -> Weights:
        return Shapes(open_weights(*arguments))

    return _load_runner(traced_config(config), backend, lambda *_: None, shapes, alone).runner.forward


def _warm(config: EngineConfig, loaded: Loaded, on_progress: Progress) -> Engine:
    """Run a request, time steps if their costs decide, and return the engine."""
    runner, sizes, num_pages, states = loaded.runner, loaded.sizes, loaded.num_pages, loaded.states
    block_size = sizes.block_size

    def core(policy: Policy) -> EngineCore:
        scheduler = Scheduler(
            PagePool(num_pages, sizes.page_size, sizes.scratch_pages),
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            block_size=block_size,
            prefix_caching=config.prefix_caching and (states is None or states.num_checkpoints > 0),
            policy=policy,
            states=make_state_slots(states, sizes) if states else None,
        )
        return EngineCore(scheduler, runner, overlap=_overlaps(runner))

    _warm_up(core(Policy(block_size)), sizes, on_progress)
    costs = None
    if config.verify == "auto" and block_size > 1:
        costs = measure_costs(
            runner,
            sizes,
            num_pages,
            partial(on_progress, "timing steps"),
            overlap=_overlaps(runner),
        )
    policy = Policy(block_size, costs, config.verify if isinstance(config.verify, int) else None)
    serving = core(policy)
    if config.cache_events:
        serving.scheduler.pool.events = CacheEvents()
    device = str(runner.backend.device)
    shapes = loaded.target, loaded.draft, states
    return Engine(serving, sizes, device, name_of(loaded.dtype), *shapes, loaded.compiles, loaded.tuned)


def matrices(target: Target) -> dict[str, list[Tensor]]:
    """Return the 16-bit matrices of all layers, by name, which products read."""
    named: dict[str, list[Tensor]] = {}
    for layer in target.layers:
        for name, weight in layer.named_parameters():
            if weight.dim() == 2 and weight.dtype.itemsize == 2:
                named.setdefault(name.rpartition(".")[2], []).append(weight)
    return {name: same for name, same in named.items() if len({weight.shape for weight in same}) == 1}


def _load(
    config: EngineConfig,
    family: type[Target],
    shape: DecoderConfig,
    draft_shape: DFlashConfig | None,
    backend: Backend,
    opened: Callable[[Path, str], Weights],
    comm: Comm,
) -> tuple[Target, DFlashModel | None]:
    """Load the weights of both models. The draft's files are opened, and refused if need be, before the target's."""
    target_weights = opened(config.target, "target")
    draft_weights = opened(config.draft, "draft") if config.draft else None
    biases = draft_shape is not None and draft_shape.decoder.qkv_bias
    if draft_weights:
        refuse_foreign_tensors(draft_weights.names, biases=biases)
    _check_memory(config, backend, target_weights, draft_weights, comm)
    backend.retain_allocator_memory()
    target_layer_ids = draft_shape.target_layer_ids if draft_shape else ()
    target = family(shape, target_weights, backend, target_layer_ids, comm)
    target_weights.close()
    if draft_shape is None or draft_weights is None:
        return target, None
    layers_comm = ALONE if config.draft_tensor_parallel_size == 1 else comm
    shared = target.embedding, target.lm_head, comm, layers_comm
    draft = DFlashModel(draft_shape, draft_weights, backend, *shared)
    draft_weights.close()
    return target, draft


def _check_memory(config: EngineConfig, backend: Backend, target: Weights, draft: Weights | None, comm: Comm) -> None:
    """Raise UnsupportedError with both numbers if the weights are larger than the memory that is free."""
    shares = 1 if backend.memory_is_host else comm.size  # a rank has its share, and embeddings and norms beside it
    sizes = {config.target: target.num_bytes // shares}
    if config.draft and draft:
        sizes[config.draft] = draft.num_bytes // (1 if config.draft_tensor_parallel_size == 1 else shares)
    needed, free = sum(sizes.values()), comm.minimum(backend.memory()[0])  # no rank has read weights before this
    if needed > free:
        listed = " and ".join(f"{size >> 20} MiB of {folder}" for folder, size in sizes.items())
        raise UnsupportedError(
            f"the weights take {needed >> 20} MiB in this dtype ({listed}), but {free >> 20} MiB are free on "
            f"{backend.device}: free some, or give a smaller model or a narrower --dtype"
        )


def _capture(
    forward: Forward,
    layout: Layout,
    graph_sizes: GraphSizes,
    sizes: Sizes,
    comm: Comm,
    on_graph: Callable[[int, int], None],
) -> StepGraphs:
    try:
        return StepGraphs(
            forward,
            layout,
            graph_sizes,
            pages=max(sizes.pages_per_sequence, sizes.scratch_pages),
            on_graph=on_graph,
            comm=comm,
        )
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            "graphs do not fit beside weights and KV: give a smaller --kv-cache-memory or --memory-utilization, "
            f"fewer --max-graphs, or --enforce-eager ({error})"
        ) from None


def _overlaps(runner: ModelRunner) -> bool:
    """Return True if a step may be launched before the last one is read: all of it comes from graphs, which take
    lengths from the device."""
    if runner.backend.lengths_on_host or not runner.graphs:
        return False
    return runner.graphs.has_draft or runner.forward.drafter is None


def _kv_bytes(
    config: EngineConfig,
    sizes: Sizes,
    backend: Backend,
    runner_over: Callable[[int], ModelRunner],
    state_bytes: int,
    *,
    graphs: bool,
) -> int:
    """Return the bytes for KV: as many as were asked for, or the rest beside the weights and the widest step.

    Raises UnsupportedError if the given number does not fit beside those.
    """
    step = 0
    if not backend.memory_is_host:
        step = step_memory(runner_over, backend, sizes) * (1 + graphs)
    free, total = backend.memory()
    if backend.memory_is_host:  # a host counts memory when it is first written
        free -= state_bytes
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory + step > free:
            beside = f" beside {step >> 20} MiB for a step of {sizes.max_num_batched_tokens} rows" if step else ""
            raise UnsupportedError(
                f"--kv-cache-memory {config.kv_cache_memory >> 20}MiB does not fit: {free >> 20} MiB are free on "
                f"{backend.device}; give at most {max(0, free - step) >> 20}MiB{beside}"
            )
        return config.kv_cache_memory
    if backend.memory_is_host:
        return min(CPU_KV_BYTES, free // 2)
    return int(total * config.memory_utilization) - (total - free) - step


def _warm_up(core: EngineCore, sizes: Sizes, on_progress: Progress) -> None:
    """Run a short request, because the first client should not pay for lazy initialisation.

    `core` is used for nothing else, so its cached pages and counters go with it.
    """
    num_steps = 2  # one without drafts and one with a block: another block of a slow machine takes seconds
    room = sizes.max_model_len - 1
    core.add(Request("warm-up", (0,), max_tokens=min(num_steps * sizes.block_size, room)))
    for done in range(num_steps):
        if core.has_work:
            core.step()
            if core.faults.error:
                raise core.faults.error
        on_progress("warm-up", done + 1, num_steps)
