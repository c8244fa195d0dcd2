"""A real pair behind HTTP, plain and with drafts: `tools.bench` against a server of `--real-pair TARGET DRAFT`."""

import json
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.report.pair import without
from tools.report.part import Options, Part, Result

SERVED = {"plain": "", "dflash": "--num-speculative-tokens 8"}
"""Variant of the bench -> flags of its server, as in the reports of vllm-ascend."""
FLAGS = (
    *("--max-num-seqs", "16", "--max-graphs", "8"),  # a default start captures 48 and their draws, seconds each
    *("--default-chat-template-kwargs", '{"enable_thinking": false}'),  # as `pair` asks
)
LOAD = (
    *"--concurrency 1,16 --num-prompts 2,16 --max-tokens 1500 --max-rounds 1".split(),
    *("--extra-body", '{"ignore_eos": true, "skip_special_tokens": false}'),  # answers of one length, each token timed
)
BEFORE = 14_000
"""Characters of other questions in front of one, about 3,500 tokens. Drafts of random words would not be accepted."""
SECONDS, END_SECONDS = 380.0, 30.0
"""Time of a server with its load, and then to end it. It must be gone before this process is killed for being late,
which would leave it on the device beside the next one."""


def parts(options: Options, ends: float) -> list[Part]:
    if not options.real_pair:
        return [without("server")]
    return [Part(way, partial(served, options, way, ends)) for way in SERVED]


def long_questions(dataset: str, count: int = 16) -> list[str]:
    """Return lines of JSON, each a chat that asks one question of the dataset behind BEFORE characters of others."""
    from tools.bench.prompts import named

    bodies = [prompt.body for prompt in named(dataset, 0)[0].first(count)]
    asked = [body["messages"][-1]["content"] if "messages" in body else body["prompt"] for body in bodies]
    whole = "\n".join(asked)
    before = (whole * -(-BEFORE // len(whole)))[:BEFORE]
    contents = (f"{before}\n\nAnswer only this question: {question}" for question in asked)
    return [json.dumps({"messages": [{"role": "user", "content": content}]}) for content in contents]


def served(options: Options, way: str, ends: float) -> Result:
    """Run the bench against a server of this pair, and end both some time before `ends` of `time.monotonic`."""
    from tools.bench import http

    target, draft = options.real_pair
    flags = ["--device", options.device, *FLAGS, *SERVED[way].split()]
    if way != "plain":
        flags += ["--draft-model", draft]
    arguments = ["--serve-args", shlex.join([target, *flags]), "--compare", way, *LOAD]
    seconds = min(SECONDS, ends - time.monotonic() - END_SECONDS)
    with tempfile.TemporaryDirectory() as folder, interrupted_after(seconds):
        load = Path(folder) / "load.jsonl"
        load.write_text("\n".join(long_questions(options.dataset)), encoding="utf-8")
        code = http.main([*arguments, "--dataset", str(load), "--out", folder])
        if not (file := Path(folder) / "results.json").exists():
            raise RuntimeError(f"the bench measured nothing in {seconds:.0f} s, exit code {code}: see its output above")
        results = json.loads(file.read_text(encoding="utf-8"))
    speeds = [row | {"answer tokens": _mean_tokens(results, row)} for row in results["tables"]["speed"]]
    return {
        "found": ", ".join(_said(row, way) for row in speeds),
        "passed": not code,
        "cases": speeds + results["tables"]["latency"],
    }


def _mean_tokens(results: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return the mean tokens of the answers of a row's load."""
    answers = [answer for answer in results["requests"] if answer["concurrency"] == row["concurrency"]]
    tokens = [answer["tokens"] for answer in answers if answer["error"] is None]
    return fmean(tokens) if tokens else None


def _said(row: dict[str, Any], way: str) -> str:
    accepted = f", {row[name]} accepted a step" if (name := f"{way} accepted") in row else ""
    tokens = row["answer tokens"]
    return f"{row[f'{way} tok/s']} tok/s at {row['concurrency']} ({tokens or 0:.4g} tokens an answer{accepted})"


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupt this process as by Ctrl-C if it is in the context for so long. The bench ends its server then."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
