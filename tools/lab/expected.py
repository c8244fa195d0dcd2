"""Figures that the performance model expects of Qwen3-8B on an H200.

docs/performance.md has the same table, and what was measured, under "A GPU, expected and measured".
"""

from dataclasses import dataclass

MODEL = "qwen3-8b"
"""Only model that the figures are of."""
LAYERS = 36
LAUNCHES = 385
"""Launches of a plain step."""
PROMPT_REST_US = 1e3 * (54 - 44) / LAYERS
"""Time of a layer beside its products, for four prompts of 512 tokens. Products take 44 of the step's 54 ms."""
HOST_MS = {1: 0.35, 32: 0.7}
"""Host's part of a step by sequences, on a slow core."""


@dataclass(frozen=True, slots=True)
class Step:
    """Milliseconds of a step by stage, and tokens per second of steps in which all decode, and of a closed batch."""

    gemm: float
    small: float
    attention: float
    gaps: float
    head: float
    draft: float | None
    context: float | None
    step: float
    steady: int
    closed: int

    @property
    def of_target(self) -> float:
        """Milliseconds of the target's graph."""
        return self.step - (self.draft or 0.0)

    @property
    def parts(self) -> dict[str, float]:
        """Return the milliseconds of each part's kernels. A draft has a head of its own."""
        of_target = {"target": self.gemm + self.small + self.attention, "head": self.head}
        return of_target | ({"context": self.context, "draft": self.draft} if self.context and self.draft else {})

    @property
    def stages(self) -> dict[str, float] | None:
        """Return the milliseconds of a plain step's kernels. Those of a draft are not known one by one."""
        if self.draft is not None:
            return None
        of_products = {"attention": self.attention, "products": self.gemm + self.head}
        return of_products | {"small kernels": self.small, "gaps": self.gaps}


STEPS = {
    ("plain", 1): Step(4.17, 0.40, 0.18, 0.36, 0.33, None, None, 5.5, 182, 180),
    ("width 16", 1): Step(4.17, 0.44, 0.18, 0.36, 0.33, 1.07, 0.10, 6.7, 948, 930),
    ("plain", 32): Step(4.17, 0.48, 1.63, 0.36, 0.33, None, None, 7.0, 4550, 4290),
    ("width 16", 32): Step(12.5, 1.7, 1.6, 0.36, 1.1, 3.3, 0.27, 20.9, 9700, 8200),
    ("width 8", 32): Step(7.5, 1.1, 1.6, 0.36, 0.55, 2.0, 0.20, 13.3, 11900, 9800),
    ("width 6", 32): Step(5.6, 0.9, 1.6, 0.36, 0.42, 1.6, 0.16, 10.7, 12600, 10300),
}
CHOSEN = {("full blocks", 1): 16, ("full blocks", 32): 16, ("auto", 1): 16, ("auto", 32): 6}
"""Width that a way is expected to have."""
GAP_US = 1e3 * STEPS["plain", 1].gaps / LAUNCHES


def step(model: str, way: str, concurrency: int) -> Step | None:
    """Return what is expected of a way ("plain", "full blocks", "auto", "width 8"), or None where nothing is."""
    if (width := CHOSEN.get((way, concurrency))) is not None:
        way = f"width {width}"
    return STEPS.get((way, concurrency)) if model == MODEL else None


def of_rows(model: str, concurrency: int, width: int) -> Step | None:
    """Return what is expected of a step with `width` rows a sequence. One block of any width reads the same."""
    wide = 16 if concurrency == 1 else width
    return step(model, "plain" if width == 1 else f"width {wide}", concurrency)


def host_ms(model: str, concurrency: int) -> float | None:
    return HOST_MS.get(concurrency) if model == MODEL else None
