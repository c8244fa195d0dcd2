"""A runner whose decode steps come from graphs."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from app.engine.device.base import Backend
from app.engine.models.kv_pool import KvPool
from app.engine.sampling.metadata import SamplingMetadata
from app.engine.sampling.penalties import TokenCounts
from app.engine.step.forward import Forward
from app.engine.step.graph_sizes import GraphSizes
from app.engine.step.graphs import StepGraphs
from app.engine.step.inputs import DraftInputs, Layout, StepInputs
from app.engine.step.runner import ModelRunner


class GraphRunner(ModelRunner):
    """Runs drafts, and targets of steps without prefill, from `graphs`. The other steps run operator by operator."""

    def __init__(
        self,
        forward: Forward,
        backend: Backend,
        counts: TokenCounts,
        layout: Layout,
        pools: Sequence[KvPool],
        graphs: StepGraphs,
    ) -> None:
        layout = replace(layout, draft_columns=graphs.draft_columns, graph_sizes=graphs.sizes)
        super().__init__(forward, backend, counts, layout, pools)
        self.graphs = graphs

    @property
    def padded_to(self) -> GraphSizes:
        return self.graphs.sizes

    def _plain_sequences(self, inputs: StepInputs) -> None:
        """Return None, because a graph writes its step's context KV."""
        return

    def _draft(self, inputs: DraftInputs) -> Tensor:
        """Return drafts [D, b - 1] int32."""
        return self.graphs.draft(inputs) if self.graphs.has_draft else self.graphs.keep(super()._draft(inputs))

    def _target(self, inputs: StepInputs, drafts: Tensor | None, draws: list[SamplingMetadata]) -> Tensor:
        if inputs.has_prefill:
            return super()._target(inputs, drafts, draws)
        out = self.graphs.target(inputs.target)
        if not draws:
            return out.verified
        for kind in draws:  # the graph has chosen greedily
            rows = self.forward.row_numbers[: len(kind.host_rows)]
            own = replace(kind, host_rows=list(range(len(rows))), rows=rows)
            hidden = out.hidden[kind.rows]
            out.choices[kind.rows] = self.forward.sampler.choose(hidden, self.forward.target.lm_head, [own])
        return self.forward.verify(out.inputs, out.choices, self.graphs.drafts)
