"""The demo pair on the device, without drafts, eagerly and from graphs: its texts against the CPU's and one another.

In bfloat16 a text may leave another only where the target hardly decides between two tokens: `gap` is how far the worse
of the two lies below the best logit, in float32 on the CPU.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from app.doctor.report.npu import demo_pair
from app.doctor.report.npu.demo_pair import Run
from app.doctor.report.npu.part import Part, Prompts, Result, rounded
from app.engine.core import EngineCore

MAX_GAP = 0.1
"""Plain decoding on the CPU in bfloat16 leaves the float32 text at gaps up to 0.058 (200 prompts)."""
ACCEPTANCE = 0.05
"""By what share of the CPU's in float32 the acceptance length may be off where texts are the same: a draft under a
causal mask loses more, and in bfloat16 a few drafts are others."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"enforce_eager": True},
    "eager": {"enforce_eager": True},
    "graphs": {"enforce_eager": False},
}


def parts(device: str, prompts: Prompts) -> list[Part]:
    runs = Runs(device, prompts)
    return [
        *(Part(f"{way} against the CPU", partial(runs.against_cpu, way)) for way in WAYS),
        *(Part(f"{way} against eager", partial(runs.against_eager, way)) for way in ("plain", "graphs")),
    ]


class Runs:
    """Runs of the same greedy requests, each made when it is first asked for."""

    def __init__(self, device: str, prompts: Prompts, dtype: str = "bfloat16") -> None:
        self._prompts = prompts
        self._on_device: Callable[[str], Run] = cache(lambda way: self._run(way, device, dtype))
        self._on_cpu: Callable[[str], Run] = cache(lambda dtype: self._run("eager", "cpu", dtype))
        self._judge: Callable[[], EngineCore] = cache(
            lambda: demo_pair.engine("cpu", max_num_seqs=1, max_num_batched_tokens=1024, max_model_len=1024)
        )

    def against_cpu(self, way: str) -> Result:
        found, exact, rough = self._on_device(way), self._on_cpu("float32"), self._on_cpu("bfloat16")
        result = self._compared(exact, found)
        acceptance = {"device": found.acceptance_length, "CPU float32": exact.acceptance_length}
        acceptance |= {"CPU bfloat16": rough.acceptance_length}
        same = [name for name, text in exact.texts.items() if found.texts[name] == text]
        ours, theirs = (run.acceptance_length_of(same) for run in (found, exact))
        return result | {
            "identical_to_bfloat16": sum(found.texts[name] == text for name, text in rough.texts.items()),
            "acceptance_length": {name: rounded(length) for name, length in acceptance.items()},
            "of_same_texts": {"device": rounded(ours), "CPU float32": rounded(theirs)},
            "passed": result["passed"] and (way == "plain" or abs(ours - theirs) <= ACCEPTANCE * theirs),
        }

    def against_eager(self, way: str) -> Result:
        expected, found = self._on_device("eager"), self._on_device(way)
        return self._compared(expected, found) | {"same_acceptance_in_every_step": expected.accepted == found.accepted}

    def _run(self, way: str, device: str, dtype: str) -> Run:
        core = demo_pair.engine(device, dtype, **WAYS[way])
        return demo_pair.run(core, demo_pair.requests(self._prompts, greedy=True, speculate=way != "plain"))

    def _compared(self, expected: Run, found: Run) -> Result:
        """Where texts first differ, by the number of the prompt and of the token."""
        differences = []
        for number, (name, text) in enumerate(expected.texts.items()):
            at = demo_pair.first_difference(text, other := found.texts[name])
            if at is not None:
                gap = None
                if at < min(len(text), len(other)):
                    gap = rounded(demo_pair.gap(self._judge(), self._prompts.prompts[number], text, at, other[at]))
                differences.append({"prompt": number, "token": at, "gap": gap})
        count, tokens = len(expected.texts), sum(map(len, expected.texts.values()))
        return {
            "prompts": count,
            "tokens": tokens,
            "identical": count - len(differences),
            "differences": differences,
            "passed": all(d["gap"] is not None and d["gap"] <= MAX_GAP for d in differences),
        }
