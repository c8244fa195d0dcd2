"""`--compile`: compiled forwards give the texts of single operators. They are kept, and settings without them are
refused.

Packages take g++ many seconds, so there are few: of one pair, for one size of pages and of blocks. Others are among the
slow cases of test_lossless.py.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.engine.compile import aot as compiled
from app.engine.compile.cache import load_package
from app.engine.compile.later import COMMAND
from app.engine.compile.packages import load_kept, take_up
from app.engine.core import EngineCore
from app.engine.cpu import linear
from app.engine.errors import UnsupportedError
from app.engine.load.engine import Engine, build_engine
from app.engine.sampling import sampler
from app.messages import Request, SamplingParams, StepOutput
from app.wire import encode_config
from tests import UNTIMED
from tests.fast.engine.lossless import Case, Subject, cap, covering_cases, random_prompts
from tests.fast.engine.nan_in_one import check_that_nan_ends_one_alone
from tests.fast.engine.pairs import make_pair

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here to compile with"),
    pytest.mark.usefixtures("kept"),
    pytest.mark.timeout(3600),
]
SHAPE: dict[str, Any] = {
    "seed": 99,
    "block_size": 16,
    "vocab_size": 5,
    "num_layers": 3,
    "draft_layers": 1,
    "taps": (0, 1),
    "own_head": True,
}
"""Its drafts, found by trying seeds, are accepted to every depth from 0 to the block, and its texts wander."""
CASES = covering_cases(2, path=("compiled",), page_size=(16,), block_size=(16,), speculation=("on", "half"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"), **SHAPE)


@pytest.fixture(scope="module")
def subject(pair):
    return Subject("compiled", pair.target, pair.draft, random_prompts(pair.vocab_size, 24))


def engine(pair, **settings) -> EngineCore:
    return build_engine(config(pair, **settings)).core


def config(pair, **settings) -> EngineConfig:
    wishes = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory": 8 << 20} | settings
    return EngineConfig(pair.target, pair.draft, **UNTIMED | wishes)


def requests(count: int = 6) -> list[Request]:
    """Prompts of several lengths, some drawn, some plain."""
    return [
        Request(
            f"{index}",
            tuple(token % SHAPE["vocab_size"] for token in range(3 + index, 8 + 4 * index)),
            sampling=SamplingParams(temperature=[0.0, 0.8][index % 2], seed=index),
            max_tokens=30,
            speculate=index != 3,
        )
        for index in range(count)
    ]


def by_operators(core: EngineCore) -> EngineCore:
    """The same engine before compiled code was taken up."""
    forward = core.runner.forward
    forward.compiled = forward.drafter.context_step = None
    core.runner.layout = replace(core.runner.layout, separate_prefill=True)
    return core


class Counted:
    """Counts of the calls of `function` of `holder` from now on, and of those that its compiled code takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holder, function: str, code, of_code: str) -> None:
        self.all = self.taken = 0
        run, compiled = getattr(holder, function), getattr(code, of_code)

        def counted(*arguments, **settings):
            self.all += 1
            return run(*arguments, **settings)

        def taken(*arguments, **settings):
            found = compiled(*arguments, **settings)
            self.taken += found is not None
            return found

        monkeypatch.setattr(holder, function, counted)
        monkeypatch.setattr(code, of_code, taken)

    @property
    def left(self) -> int:
        return self.all - self.taken


def assert_same_kv(core: EngineCore, other: EngineCore) -> None:
    """Compare KV of target and draft on the pages of both, because no text shows a wrong context or block."""
    for pool, expected in zip(core.runner.pools, other.runner.pools, strict=True):
        for layer, wanted in zip(pool.layers, expected.layers, strict=True):
            pages = min(len(layer.k), len(wanted.k))
            assert float(wanted.k[:pages].abs().sum()) > 1
            torch.testing.assert_close(layer.k[:pages], wanted.k[:pages], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(layer.v[:pages], wanted.v[:pages], atol=1e-4, rtol=1e-4)


def test_a_process_without_weights_compiles_what_an_engine_looks_for(pair, kept, monkeypatch):
    """It comes first, so its packages are those of the other tests. The processes have sizes and KV of their own.

    Loops have no thread but the caller's, whatever number PyTorch has there.
    """
    asked = config(pair, compile="auto")
    assert build_engine(asked).can_be_compiled
    settings = encode_config(asked) + "\n"
    pipe, environment = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "2"}
    with subprocess.Popen([*COMMAND, "0"], stdin=pipe, stderr=pipe, env=environment, text=True) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(settings)
        process.stdin.flush()
        said = process.stderr.read()
        assert process.wait() == 0, said
    for package in kept.glob("*.pt2"):
        with zipfile.ZipFile(package) as files:
            sources = [files.read(name) for name in files.namelist() if name.endswith(".cpp")]
        assert sources and not any(b"omp parallel" in source for source in sources)
    monkeypatch.setattr("torch.export.export", None)
    found = build_engine(asked)
    assert found.forwards == "compiled" and len(list(kept.glob("*.pt2"))) == 3
    assert found.core.run(requests()) == engine(pair).run(requests())


def test_kept_code_is_loaded_without_a_compilation(pair, tmp_path, monkeypatch):
    """PyTorch would have g++ try the processor's instructions, for many seconds on a busy machine."""
    version_alone = tmp_path / "g++"
    version_alone.write_text('#!/bin/sh\n[ "$*" = --version ] && exec g++ --version\nexit 1\n')
    version_alone.chmod(0o700)
    monkeypatch.setenv("CXX", str(version_alone))
    monkeypatch.setenv("SETTINGS", encode_config(config(pair, compile="auto")))
    code = (
        "import os\n"
        "from app.engine.load.engine import build_engine; from app.wire import decode_config\n"
        "print(build_engine(decode_config(os.environ['SETTINGS'])).forwards)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1700)
    assert done.stdout == "compiled\n", done.stderr


def test_code_of_other_settings_is_not_taken(pair):
    """It would read KV of pages of 16."""
    assert engine_of(pair).forwards == "compiled"
    assert engine_of(pair, page_size=4).can_be_compiled


def engine_of(pair, **settings) -> Engine:
    return build_engine(config(pair, compile="auto", **settings))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 8, 13])
def test_texts_and_drafts_do_not_change_when_code_is_taken_up_behind_some_steps(pair, num_steps):
    """Prompts are being read then, context KV is pending, and a decision about widths holds."""

    def told(core: EngineCore, steps: int | None) -> tuple[dict[str, list[int]], list[tuple[str, int]]]:
        accepted: list[tuple[str, int]] = []
        outputs: list[StepOutput] = []

        def on_step(output: StepOutput) -> None:
            outputs.append(output)
            accepted.extend((delta.request_id, delta.steps[0].n_accepted) for delta in output.deltas)
            if len(outputs) == steps:
                compiled = load_kept(core.runner.forward)
                assert compiled is not None and core.runner.forward.compiled is None
                take_up(core.runner, compiled)

        return core.run(requests(), on_step), accepted

    settings = {"max_num_batched_tokens": 70}
    core, other = (by_operators(engine(pair, compile=True, **settings)) for _ in range(2))
    assert told(core, num_steps) == told(other, None)
    assert_same_kv(core, other)


@pytest.mark.parametrize("settings", [{}, {"verify": 2}, {"verify": 3}, {"max_num_batched_tokens": 70}], ids=str)
def test_texts_and_kv_are_those_of_operators_one_by_one(pair, settings, monkeypatch):
    """Alone and together, with prompts cut, at widths of a block and less; and what is compiled is what ran."""
    core, other = engine(pair, compile=True, **settings), by_operators(engine(pair, compile=True, **settings))
    forward = core.runner.forward
    target, draft, context = (
        Counted(monkeypatch, *of)
        for of in (
            (forward, "run_target", forward.compiled, "run_target"),
            (forward, "draft", forward.compiled, "draft"),
            (forward.drafter, "write_context", forward.drafter, "context_step"),
        )
    )
    assert core.run(requests()) == other.run(requests()) == engine(pair, **settings).run(requests())
    for request in requests(2):
        assert core.run([request]) == other.run([request])
    assert_same_kv(core, other)
    assert min(target.all, draft.all, context.all) > 20 and not target.left + draft.left + context.left


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dflash_changes_no_token(subject: Subject, case: Case):
    run = subject.run(case)
    comparison = subject.compare(run.texts, case)
    assert not comparison.wrong and len(comparison.differences) <= cap(comparison.tokens), comparison.differences
    assert (run.preemptions > 0) == case.preempted
    assert (run.cached_tokens > 0) == case.cached


def test_every_step_accepts_what_it_accepts_by_operators_one_by_one(subject: Subject):
    """No text would show where drafts began, nor on what context, nor what they saw."""

    def steps(case: Case) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        subject.run(
            case, lambda step: [found.setdefault(d.request_id, []).append(d.steps[0].n_accepted) for d in step.deltas]
        )
        return found

    case = Case(concurrency=4, chunked=True, temperature=None, path="compiled", cached=True)
    found = steps(case)
    assert found == steps(replace(case, path="eager")) and max(map(max, found.values())) >= 5


@pytest.mark.slow
def test_a_target_alone_is_compiled_by_itself(pair, kept):
    """It hands out no features, and nothing else tells the two apart."""
    engine(pair, compile=True)
    before = set(kept.iterdir())
    alone = EngineConfig(
        pair.target, device="cpu", dtype="float32", compile=True, kv_cache_memory=8 << 20, verify="full"
    )
    assert build_engine(alone).core.run(requests(3)) == engine(pair).run(requests(3))
    (more,) = set(kept.iterdir()) - before
    assert more.name.startswith("target-")


def test_what_is_compiled_is_kept_whatever_the_lengths_and_the_memory(pair, kept, monkeypatch):
    """Made for short texts and few pages, it says the same far beyond them."""
    engine(pair, compile=True, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64, kv_cache_memory=1 << 20)
    before = sorted(kept.iterdir())
    monkeypatch.setattr("torch.export.export", None)
    core, other = engine(pair, compile=True), by_operators(engine(pair, compile=True))
    long = [
        Request(f"{i}", tuple(range(5)) * 54, sampling=SamplingParams(seed=i, temperature=0.7 * i), max_tokens=60)
        for i in range(2)
    ]
    assert core.run(long) == other.run(long)
    assert_same_kv(core, other)
    assert sorted(kept.iterdir()) == before and kept.stat().st_mode & 0o777 == 0o700


def test_prompts_in_pieces_and_more_logits_than_fit_at_once(pair, monkeypatch):
    """Some steps give no sequence a token, and in others tokens are chosen in chunks."""
    monkeypatch.setattr(sampler, "LOGITS_CHUNK_BYTES", 4 * pair.vocab_size * 20)
    settings = {"max_num_batched_tokens": 64}
    asked = [*requests(), Request("long", tuple(range(5)) * 36, max_tokens=9)]
    core = engine(pair, compile=True, **settings)
    forward = core.runner.forward
    target, draft = (Counted(monkeypatch, forward, name, forward.compiled, name) for name in ("run_target", "draft"))
    assert core.run(asked) == engine(pair, **settings).run(asked)
    assert target.all > 20 and not target.left
    assert 0 < draft.left < draft.all


def test_logits_that_are_not_finite_end_their_request_alone(pair):
    check_that_nan_ends_one_alone(engine(pair, compile=True, prefix_caching=False), 0.0)


def test_what_is_loaded_needs_no_file_so_that_a_killed_engine_leaves_none(pair, kept, monkeypatch, tmp_path):
    engine(pair, compile=True)
    before = sorted(kept.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("torch.export.export", None)
    core = engine(pair, compile=True)
    assert (list(tmp_path.rglob("*")), sorted(kept.iterdir())) == ([], before)
    assert "aotinductor_" in Path("/proc/self/maps").read_text(), "it is loaded from where it is looked for here"
    assert core.run(requests(2)) == engine(pair).run(requests(2))


def test_a_package_that_another_process_has_just_removed_can_be_made_again(tmp_path):
    with pytest.raises(RuntimeError):
        load_package(tmp_path / "gone.pt2")


@pytest.mark.parametrize("what", ["sources", "processor", "settings"])
def test_whatever_decides_what_is_compiled_is_part_of_its_name(monkeypatch, tmp_path, what):
    digest = partial(compiled._digest, ("settings",), [torch.zeros(2, 3)])
    before = digest()
    assert before == digest() != compiled._digest(("settings",), [torch.zeros(3, 2)])
    if what == "sources":
        (tmp_path / "any.py").write_text("pass")
        monkeypatch.setattr(compiled, "_SOURCES", tmp_path)
    elif what == "processor":
        monkeypatch.setattr(compiled, "processor", lambda: b"another")
    else:
        digest = partial(compiled._digest, ("others",), [torch.zeros(2, 3)])
    assert digest() != before


@pytest.mark.slow
def test_a_broken_package_is_made_anew(pair, kept):
    engine(pair, compile=True)
    (context,) = kept.glob("context-*.pt2")
    context.write_bytes(b"broken")
    assert engine(pair, compile=True).run(requests(2)) == engine(pair).run(requests(2))
    assert context.stat().st_size > 1000


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"dtype": "bfloat16"}, "bfloat16 is not supported yet"), ({"device": "npu"}, "captures graphs instead")],
)
def test_what_cannot_be_compiled_is_refused_by_name(pair, settings, said):
    with pytest.raises(UnsupportedError, match=f"--compile: .*{said}"):
        engine(pair, compile=True, **settings)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"batch_invariant": True}, {"enforce_eager": True}])
def test_what_cannot_be_compiled_runs_by_operators_if_nobody_asked(pair, settings):
    found = engine_of(pair, **settings)
    assert (found.forwards, found.can_be_compiled) == ("by operators", False)


@pytest.mark.parametrize(
    ("there", "said"), [(False, r"there is no g\+\+"), (True, ".* cannot make this server's operators")]
)
def test_without_a_compiler_that_makes_operators_it_is_refused_if_asked_for(pair, monkeypatch, there, said):
    """Like clang++, or where a disk is full. Forwards without a plan for PyTorch's attention could not be traced."""
    if there:
        monkeypatch.setattr(linear, "_operator", lambda: None)
    else:
        monkeypatch.setenv("CXX", "no-such-compiler")
    assert not engine_of(pair).can_be_compiled
    with pytest.raises(UnsupportedError, match=f"--compile: {said}"):
        engine(pair, compile=True)
