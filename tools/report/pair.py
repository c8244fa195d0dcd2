"""A real pair on the device: `--real-pair TARGET DRAFT`. Texts with drafts against texts without.

In bfloat16 a text may leave another where the target hardly decides, which a batch changes as well: each question is
also answered alone, without drafts. A wrong kernel changes more texts, or the first tokens of one.
"""

from collections.abc import Callable
from functools import cache, cached_property, partial
from itertools import chain, cycle, islice
from pathlib import Path

from app.config.engine import EngineConfig
from app.engine.load.engine import build_engine
from app.messages import Request
from tools.lab.in_process import Run, run
from tools.lab.random_weights import free_memory
from tools.report.engine import first_difference
from tools.report.part import NotTriedError, Options, Part, Result

QUESTIONS, MAX_TOKENS = 10, 256
LENGTHS = {"prompts": (40, 200, 600, 3000), "alone": (1000, 8170)}
"""Load -> tokens of its prompts: on both sides of the longest chunk that a graph takes, and, one request at a time,
before answers that pass 1,024 and 8,192 tokens, where attention takes another kernel."""
FIRST_TOKENS = 8
"""Rounding leaves a text later than this."""
MORE_TEXTS = 2
"""Texts that drafts may change beyond those that a batch changes."""
WAYS = ("eager", "graphs")


def parts(options: Options) -> list[Part]:
    pair = Pair(options)
    return [Part(way, partial(pair.compared, way)) for way in WAYS] if options.real_pair else [without("pair")]


def without(name: str) -> Part:
    """Return the only part of a section that needs a real pair, and has none."""

    def ask() -> Result:
        raise NotTriedError("give --real-pair TARGET DRAFT")

    return Part(name, ask)


class Pair:
    """Runs of the same greedy requests, each way when it is first asked for. One engine is in memory at a time."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.texts: Callable[[str], dict[str, Run]] = cache(self._texts)

    def compared(self, way: str) -> Result:
        """Compare each load with drafts to the same without, and graphs to eager code."""
        found, cases = self.texts(way), []
        other = self.texts("eager") if way != "eager" else found
        left = [_differences(found["questions, plain"], found["questions, plain and alone"])]
        for load in ("questions", "prompts", "alone"):
            drafted, plain = found[load], found[f"{load}, plain"]
            left.append(_differences(drafted, plain))
            case = {"load": load, "texts": len(drafted.texts), "as plain": len(drafted.texts) - len(left[-1])}
            if way != "eager":
                left.append(_differences(drafted, other[load]))
                case["as eager"] = len(drafted.texts) - len(left[-1])
            cases.append(case | {"acceptance length": drafted.acceptance_length})
        by_batch = len(left[0])
        return {
            "found": f"acceptance length {cases[0]['acceptance length']:.4g} for {cases[0]['texts']} questions, "
            f"{cases[0]['as plain']} texts as without drafts; a batch changes {by_batch} without drafts",
            "cases": cases,
            "first difference": min((at for places in left for at in places), default=None),
            "passed": all(
                len(places) <= by_batch + MORE_TEXTS and all(at >= FIRST_TOKENS for at in places) for places in left
            ),
        }

    def _texts(self, way: str) -> dict[str, Run]:
        target, draft = map(Path, self._options.real_pair)
        config = EngineConfig(
            target,
            draft,
            device=self._options.device,
            enforce_eager=way == "eager",
            max_num_seqs=16,
            max_model_len=max(LENGTHS["alone"]) + 2 * MAX_TOKENS,
            prefix_caching=False,
            verify="full",
        )
        free_memory(self._options.device)
        core, (prompts, ends) = build_engine(config).core, self._prompts

        def answers(load: str, at_once: int, *, speculate: bool) -> Run:
            wanted = [
                Request(str(i), ids, MAX_TOKENS, stop_token_ids=ends, speculate=speculate)
                for i, ids in enumerate(prompts[load])
            ]
            return run(core, wanted, at_once)

        found = {"questions, plain and alone": answers("questions", 1, speculate=False)}
        for load, token_ids in prompts.items():
            at_once = 1 if load == "alone" else len(token_ids)
            found[load] = answers(load, at_once, speculate=True)
            found[f"{load}, plain"] = answers(load, at_once, speculate=False)
        return found

    @cached_property
    def _prompts(self) -> tuple[dict[str, list[tuple[int, ...]]], list[int]]:
        """Load -> prompts, and the tokens that end an answer. Prompts of given lengths are cut from all questions."""
        from app.text.tokenizer import Tokenizer  # a bare image has no pydantic
        from tools.bench.prompts import named

        tokenizer = Tokenizer(Path(self._options.real_pair[0]))
        (dataset, *_) = named(self._options.dataset, 0)
        texts = []
        for prompt in dataset.first(QUESTIONS):
            if "messages" in prompt.body:
                rendered = tokenizer.render(list(prompt.body["messages"]), switches={"enable_thinking": False})
                texts.append(tokenizer.encode(rendered.text, add_special_tokens=False, mark=rendered.mark))
            else:
                texts.append(tokenizer.encode(prompt.body["prompt"]))
        endless = cycle(chain.from_iterable(texts))
        by_length = {name: [tuple(islice(endless, n)) for n in lengths] for name, lengths in LENGTHS.items()}
        return {"questions": [*map(tuple, texts)]} | by_length, tokenizer.eos_ids


def _differences(found: Run, expected: Run) -> list[int]:
    """Return the first token that differs, of each text that does."""
    places = (first_difference(expected.texts[name], text) for name, text in found.texts.items())
    return [at for at in places if at is not None]
