"""What to load, settled from the settings, both models' configs and the device before any weight is read."""

import logging
from dataclasses import dataclass, replace

import torch

from app.config.engine import EngineConfig
from app.engine.checkpoint.read import read_checkpoints
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from app.engine.compile.packages import is_compiled
from app.engine.device.base import Backend
from app.engine.device.factory import found_device
from app.engine.load.refusals import Facts, check
from app.engine.load.sizes import Sizes, settle_sizes
from app.engine.step.graph_sizes import GraphSizes, settle_graph_sizes

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Plan:
    """Shapes, dtype and sizes of an engine, or of one rank's share of it. Without graphs `graph_sizes` is None."""

    model_type: str
    target: DecoderConfig
    draft: DFlashConfig | None
    dtype: torch.dtype
    sizes: Sizes
    graph_sizes: GraphSizes | None
    compiles: bool

    @property
    def decoders(self) -> list[DecoderConfig]:
        return [self.target, *([self.draft.decoder] if self.draft else [])]

    @property
    def max_rows(self) -> int:
        """Return the target rows of the widest step, padding included."""
        return max(self.sizes.max_num_batched_tokens, self.graph_sizes.max_rows if self.graph_sizes else 0)

    def shard(self, size: int, *, whole_draft: bool) -> "Plan":
        """Return the plan of one of `size` ranks, which has its share of the target and of a draft that is split."""
        draft = self.draft
        if draft and not whole_draft:
            draft = replace(draft, decoder=draft.decoder.shard(size))
        return replace(self, target=self.target.shard(size), draft=draft)


def kind_of(config: EngineConfig) -> str:
    """Return "cpu", "cuda" or "npu"."""
    return found_device(config.device).partition(":")[0]


def make_plan(config: EngineConfig, backend: Backend) -> Plan:
    """Return the plan of all ranks together. Raises UnsupportedError for a wish that cannot be met."""
    models = read_checkpoints(config)
    target, draft = models.target, models.draft
    dtype = dtype_of(config, target, backend)
    check(Facts(config, kind_of(config), target, draft, name_of(dtype)))
    compiles = is_compiled(config, backend, target, dtype)
    if delta := target.gated_delta:
        backend.check_gated_delta(delta.num_v_heads, delta.k_head_dim, delta.v_head_dim)
    block_size = draft.block_size if draft else 1
    sizes = settle_sizes(config, block_size, target.max_position_embeddings, backend.defaults)
    graph_sizes = _graph_sizes(config, sizes, backend)
    if graph_sizes:
        sizes = replace(sizes, scratch_pages=-(-graph_sizes.max_rows // sizes.page_size))
    return Plan(models.model_type, target, draft, dtype, sizes, graph_sizes, compiles)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(config: EngineConfig, target: DecoderConfig, backend: Backend) -> torch.dtype:
    """Return the dtype that was asked for. "auto" is the checkpoint's own, if the backend has no reason against it."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    own, default = _DTYPES.get(target.dtype, torch.float32), backend.defaults.dtype
    is_narrow, moe = own.itemsize < default.itemsize, target.moe
    inner = moe.num_experts * moe.intermediate_size if moe else target.intermediate_size
    wants_float32 = config.compile is True and is_narrow
    reason = "--compile is for float32" if wants_float32 else backend.why_not(own, 2 * inner * target.hidden_size)
    if reason:
        half = f"; --dtype {name_of(own)} takes half the memory" if is_narrow else ""
        logger.info(
            "dtype: %s, and not the checkpoint's %s, because %s%s", name_of(default), name_of(own), reason, half
        )
        return default
    if is_narrow:
        exact = "takes twice the memory, and leaves texts with drafts equal but for margins below 1e-4"
        logger.info("dtype: %s, like the checkpoint; --dtype %s %s", name_of(own), name_of(default), exact)
    return own


def _graph_sizes(config: EngineConfig, sizes: Sizes, backend: Backend) -> GraphSizes | None:
    """Return the sizes to capture, or None to run eagerly."""
    eager = not backend.captures if config.enforce_eager is None else config.enforce_eager
    if eager:
        return None
    max_graphs, limit = config.max_graphs, backend.max_graphs(config.tensor_parallel_size)
    if limit is not None and limit < max_graphs:
        logger.warning("--max-graphs %d: this device has streams for %d, so as many are captured", max_graphs, limit)
        max_graphs = limit
    return settle_graph_sizes(
        sizes.max_num_seqs,
        sizes.block_size,
        max_graphs,
        draft_graphs=config.draft is not None and not config.draft_enforce_eager,
        spare=0 if backend.allows_empty_sequences else 1,
    )
