"""`report --device npu` on the stubs: right numbers where the harness computes, and words where something fails.

Times mean nothing on the null device, so none is looked at.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from app import demo
from app.check import operators
from app.check.operators import Case, Extent
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.device.base import AttentionMask, AttentionMetadata, Backend, LayerKv
from app.engine.device.moe import MoeConfig
from app.engine.load.engine import Engine
from app.engine.npu.backend import NpuBackend
from app.messages import Request
from tests.devices.npu.launches import LAYER
from tests.devices.npu.null_device import Trace, traced
from tests.devices.npu.numerics import Numerics
from tests.fast.engine.op_count import Launches
from tools.lab.in_process import Run
from tools.report import engine, npu_costs, npu_questions, pair, roofline, step
from tools.report import operators as report_operators
from tools.report.expected import EXPECTED
from tools.report.part import Options, Part, Result, answer
from tools.report.roofline import Chip, chip_name, figures
from tools.report.sections import SECTIONS

SMALL = Extent(
    heads=((4, 2, 64), (8, 2, 128)),
    **report_operators.about_pages((1, 2, 16), (16, 127, 128, 129, 257), (513,), 40, alone=((1, 1500), (9, 1500))),
    tolerance=report_operators.BF16,
    hidden=256,
    intermediate=384,
    recurrent=(2, 4, 32),
    num_rows=(1, 20),
    batches=(16,),
)
FEW = npu_questions.QuestionSizes(
    heads=4,
    kv_heads=2,
    requests=2,
    kv=200,
    wide=(17,),
    calls=3,
    timed=1,
    repeats=2,
    graphs=4,
    recurrent=(2, 4, 32, 32),
)
TINY = roofline.RooflineSizes(copied=1 << 14, hidden=64, intermediate=96, qkv=80, weights=2, rows=(1, 16), layers=2)
UNKNOWN = ["N6", "N7", "N9", "N11", "N12"]
"""Rules that the open points break on purpose."""


@pytest.fixture
def backend() -> Iterator[NpuBackend]:
    with torch.inference_mode(), Numerics(lift=UNKNOWN):
        yield NpuBackend(torch.device("npu:0"))


# ---- operators --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", operators.cases(SMALL))
def test_every_operator_is_right_and_its_errors_are_told(backend: NpuBackend, name: str) -> None:
    found = answer(Part(name, partial(report_operators.compared, backend, operators.cases(SMALL)[name])))
    assert found["status"] == "ok", found
    for case in found["result"]["cases"]:
        assert 0 <= case["relative"] <= case["tolerance"] and case["absolute"] >= 0
    exact = {
        "write_kv",
        "argmax",
        "noise_bits",
        "integers",
        "positions_and_slots",
        "embed_blocks",
        "verify",
        "advance_by_accepted",
    }
    assert (name in exact) == all(case["tolerance"] == 0 for case in found["result"]["cases"])


class Wrong(NpuBackend):
    """Mistakes that a kernel could make."""

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
        plan = super().plan_attention(meta, mask, group)
        plan.host_seq_lens[-1] = max(1, plan.host_seq_lens[-1] - 1) if not mask.causal else plan.host_seq_lens[-1]
        return plan

    def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slot_mapping: Tensor) -> None:
        super().write_kv(k_thd, v_thd, kv, slot_mapping.flip(0))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x, weight, 0.1)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, weight, bias) * float("nan")


@pytest.mark.parametrize("name", ["bidirectional_attention", "write_kv", "rms_norm", "linear"])
def test_an_operator_that_does_something_else_has_failed_with_its_error(backend: NpuBackend, name: str) -> None:
    wrong = Wrong(torch.device("npu:0"))
    found = answer(Part(name, partial(report_operators.compared, wrong, operators.cases(SMALL)[name])))
    assert found["status"] == "failed" and "error" not in found
    worst = next(case for case in found["result"]["cases"] if not case["passed"])
    assert (worst["relative"] is None) == (name == "linear")
    assert name == "linear" or worst["relative"] > worst["tolerance"]
    assert json.loads(json.dumps(found)) == found


def test_an_operator_that_is_refused_has_failed_with_the_meaning_of_the_code(backend: NpuBackend) -> None:
    def refuse(at: Any) -> Any:
        raise RuntimeError("NPU function error: call aclnnRmsNorm failed, error code is 561002\nEZ9999")

    found = answer(Part("rms_norm", partial(report_operators.compared, backend, [Case("[1]", refuse)])))
    assert found["status"] == "failed" and "tiling" in found["error"]["meaning"]
    assert found["error"]["says"].endswith("561002") and "refuse" in found["error"]["traceback"]


def test_a_report_reaches_the_kernel_that_a_single_long_request_has_under_both_masks() -> None:
    for loads in (report_operators.NPU.causal, report_operators.NPU.both_ways):
        assert {(1, 1500), (9, 4100), (16, 8193)} <= {lens[0] for lens in loads.values() if len(lens) == 1}


# ---- open points ------------------------------------------------------------------------------------------------


def point(name: str, backend: Backend) -> Result:
    tried, ask = npu_questions.POINTS[name]
    relied_on = name in npu_questions.RELIED_ON
    return answer(Part(name, partial(npu_questions.answered, ask, lambda: backend, FEW, relied_on, tried=tried)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("combination", "chip Ascend910B3, torch 2.13.0"),
        ("float16", "Float16 is taken, and the result is right"),
        ("padding of few tokens", "for the others the result is right"),
        ("head size 256", "D 256 is taken, and the result is right"),
        ("partly filled pages", "the result is right"),
        ("more than 16 rows", "the result is right"),
        ("a chunk in a graph", "A chunk is taken, and the result is right"),
        ("sinks in a graph", "Sinks are taken, and the result is right"),
        ("recurrent states in bfloat16", "The operator is right. A layer takes"),
        ("replays in a row", "In 2 replays in a row the result is right"),
        ("order of heads", "The order by heads is taken, and the result is right"),
        ("updates of a graph", "3 updates take the host"),
        ("captures", "5 of 5 graphs were captured. They took "),
    ],
)
def test_every_open_point_is_answered_in_a_sentence(backend: NpuBackend, name: str, said: str) -> None:
    found = point(name, backend)
    assert found["status"] == "ok" and "error" not in found, found["error"]
    assert said in found["result"]["found"] and found["result"]["found"].endswith(".")
    assert set(npu_questions.POINTS) >= set(npu_questions.RELIED_ON)


class Other(NpuBackend):
    """The other answers."""

    def attention(self, *call: Any) -> Tensor:
        return super().attention(*call) * 1.5


@pytest.mark.parametrize(
    "name", ["float16", "head size 256", "partly filled pages", "more than 16 rows", "a chunk in a graph"]
)
def test_attention_that_is_taken_and_wrong_is_said_to_be_wrong(backend: NpuBackend, name: str) -> None:
    found = point(name, Other(torch.device("npu:0")))
    assert "the result is WRONG, to " in found["result"]["found"]
    assert found["status"] == ("failed" if name in npu_questions.RELIED_ON else "ok")


def test_a_recurrent_operator_that_is_wrong_is_said_to_be_wrong(backend: NpuBackend, monkeypatch) -> None:
    right = torch_npu.npu_recurrent_gated_delta_rule
    monkeypatch.setattr(torch_npu, "npu_recurrent_gated_delta_rule", lambda *call, **more: 2 * right(*call, **more))
    found = point("recurrent states in bfloat16", backend)
    assert re.search(r"The operator is WRONG: its results differ by \d+\.\d%\. A layer", found["result"]["found"])


class Refusing(NpuBackend):
    """Return the error of a card that refuses a call."""

    def attention(self, *call: Any) -> Tensor:
        raise RuntimeError("call aclnnFusedInferAttentionScoreV3 failed, error code is 561002\nmore")


@pytest.mark.parametrize("name", [name for name in npu_questions.POINTS if name not in ("combination", "captures")])
def test_a_refusal_is_an_answer_and_ends_the_process(backend, name, monkeypatch):
    refusing = Refusing(torch.device("npu:0"))
    monkeypatch.setattr(npu_questions, "attention_of_heads", lambda *call: refusing.attention(*call))
    monkeypatch.setattr(torch_npu, "npu_recurrent_gated_delta_rule", lambda *call, **more: refusing.attention(*call))
    found = point(name, refusing)
    assert found["result"]["found"].startswith("It is refused: RuntimeError: ") and "error" in found
    assert "(561002: " in found["result"]["found"]
    assert found["status"] == ("failed" if name in npu_questions.RELIED_ON else "ok")


def test_captures_stop_at_the_first_failure_with_its_words(backend, monkeypatch):
    capture, done = NpuBackend.capture, []

    def limited(self: NpuBackend, *args: Any) -> Any:
        if len(done) == 3:
            raise RuntimeError("[Error]: Alloc sq cq fail, error code is 207005")
        done.append(1)
        return capture(self, *args)

    monkeypatch.setattr(NpuBackend, "capture", limited)
    found = point("captures", backend)
    assert found["status"] == "failed" and (found["result"]["captured"], found["result"]["wanted"]) == (3, 5)
    assert "3 of 5 graphs were captured; the next one failed: " in found["result"]["found"]
    assert "--max-graphs" in found["error"]["meaning"]


class Overtaking(NpuBackend):
    """Replays that get the lengths of the next one, as where updates do not wait for the replay before them."""

    def capture(self, run: Any, metas: list[AttentionMetadata]) -> Any:
        graph = super().capture(run, metas)
        replay = graph.replay

        def overtaken() -> None:
            plans, (mask,) = metas[0].plans, metas[0].plans
            metas[0].plans = {mask: replace(plans[mask], host_seq_lens=[kv // 2 for kv in plans[mask].host_seq_lens])}
            replay()
            metas[0].plans = plans

        graph.replay = overtaken
        return graph


def test_replays_that_get_the_lengths_of_others_are_found(backend: NpuBackend) -> None:
    found = point("replays in a row", Overtaking(torch.device("npu:0")))
    assert found["status"] == "failed" and "is right" not in found["result"]["found"]


def test_every_replay_of_the_update_point_gives_all_calls_anew(backend: NpuBackend) -> None:
    with traced() as trace:
        assert point("updates of a graph", backend)["status"] == "ok"
    ways = 2  # ours and torch_npu's
    assert len(trace.of("update")) == ways * FEW.calls * FEW.repeats
    assert len(trace.of("replay")) == ways * FEW.repeats


# ---- engine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[engine.Runs]:
    monkeypatch.setattr(NpuBackend, "dtypes", (torch.float32,))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        yield engine.Runs("npu:0", 4, "float32")


def test_texts_and_acceptance_are_the_cpus_in_every_way(in_float32: engine.Runs) -> None:
    for way in engine.WAYS:
        found = answer(Part(way, partial(in_float32.against_cpu, way)))
        assert found["status"] == "ok" and found["result"]["identical"] == found["result"]["prompts"] == 4
        lengths = found["result"]["acceptance_length"]
        assert lengths["device"] == (1.0 if way == "plain" else lengths["CPU float32"])
    assert in_float32.against_eager("graphs")["same_acceptance_in_every_step"]
    assert in_float32.against_eager("plain")["identical"] == 4


def test_a_draft_that_is_not_accepted_has_failed_though_texts_are_right(in_float32, monkeypatch):
    class Causal(NpuBackend):
        def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
            return super().plan_attention(meta, mask._replace(causal=True), group)

    monkeypatch.setattr(engine.build, "check_attention", lambda *_: None)
    make = engine.build.make_backend
    monkeypatch.setattr(
        engine.build,
        "make_backend",
        lambda name, **_: Causal(torch.device(name)) if name == "npu:0" else make(name),
    )
    found = answer(Part("eager", partial(in_float32.against_cpu, "eager")))
    assert found["status"] == "failed" and found["result"]["identical"] == 4
    assert found["result"]["acceptance_length"]["device"] < found["result"]["acceptance_length"]["CPU float32"]


def test_a_text_that_leaves_the_others_is_told_with_its_place_and_gap() -> None:
    runs = engine.Runs("cpu", 1, "float32")
    text = runs._on_cpu("float32").texts["r0"]
    other = Run({"r0": [*text[:5], (text[5] + 1) % 2560, *text[6:]]})
    found = runs._compared(runs._on_cpu("float32"), other)
    assert found["identical"] == 0 and not found["passed"]
    assert [(d["prompt"], d["token"]) for d in found["cases"]] == [(0, 5)]
    assert found["cases"][0]["gap"] > engine.MAX_GAP
    shorter = runs._compared(runs._on_cpu("float32"), Run({"r0": text[:-1]}))
    assert shorter["cases"] == [{"prompt": 0, "token": len(text) - 1, "gap": None}] and not shorter["passed"]


def test_a_pair_is_compared_on_the_device_from_graphs_too(in_float32, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "LENGTHS", {"alone": (250,)})
    monkeypatch.setattr(pair, "MAX_TOKENS", 12)
    prompts = {"questions": demo.token_ids(2), "prompts": demo.token_ids(1), "alone": [demo.token_ids(1)[0] * 4]}
    monkeypatch.setattr(pair.Pair, "_prompts", (prompts, demo.stop_token_ids()))
    build, reserved = pair.build_engine, []

    def small(config: EngineConfig) -> Engine:
        reserved.append(torch.npu.memory_reserved())
        return build(replace(config, dtype="float32", max_graphs=4, kv_cache_memory=96 << 20))

    monkeypatch.setattr(pair, "build_engine", small)
    given = Options("npu:0", real_pair=(str(engine.DEMO / "target"), str(engine.DEMO / "draft")))
    for part in pair.parts(given):
        found = answer(part)
        assert found["status"] == "ok" and found["result"]["first difference"] is None, found
        assert found["result"]["cases"][0]["acceptance length"] > 2
    assert reserved[1] < reserved[0] + (32 << 20), "the first engine's memory is the second's"


# ---- step and launches ------------------------------------------------------------------------------------------


class Counted:
    """Launches at the dispatcher and on the null device, of the same code."""

    def __init__(self) -> None:
        self.launches, self.trace = Launches("npu"), Trace()

    def __enter__(self) -> None:
        self._traced = traced()
        self.trace = self._traced.__enter__()
        self.launches.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.launches.__exit__(*error)
        self._traced.__exit__(*error)


def decoding_engine(way: str) -> EngineCore:
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 544, "max_model_len": 1024, "kv_cache_memory": 256 << 20}
    return engine.demo_engine("npu:0", "bfloat16", enforce_eager=step.WAYS[way], **sizes).core


def count_decode_step(core: EngineCore, n: int, counted: Any) -> None:
    """Count the first step in which n sequences decode."""
    for i, prompt in enumerate(demo.token_ids(n)):
        core.add(Request(f"c{i}", prompt, 100))
    while (batch := core.scheduler.schedule()).kind != "decode" or len(batch.decodes) < n:
        core.scheduler.commit(batch, core.launch(batch).read())
    with counted:
        result = core.launch(batch).read()
    core.scheduler.commit(batch, result)


def test_operators_that_are_counted_are_the_kernels_of_an_eager_step() -> None:
    """But for casts that torch_npu adds: page_table[owner, page] has an int64 and an int32 index, once a forward."""
    with torch.inference_mode(), Numerics():
        core, counted = decoding_engine("eager"), Counted()
        count_decode_step(core, 2, counted)
    operators, kernels = counted.launches.operators, counted.trace.launches
    copies = ("aten.copy_", "aten.clone", "aten.contiguous", "aten._to_copy")
    casts = kernels["aclnnInplaceCopy"] - sum(operators[name] for name in copies)
    assert 0 <= casts <= 2 and counted.launches.total == kernels.total() - casts
    assert counted.launches.copies.total() == len(counted.trace.of("copy")) == 3
    assert operators["npu.npu_fused_infer_attention_score"] == kernels["aclnnFusedInferAttentionScoreV3"] == 5 + 3


@pytest.mark.parametrize("way", step.WAYS)
def test_a_step_is_timed_in_parts_and_its_launches_are_counted(way: str) -> None:
    with torch.inference_mode(), Numerics():
        found = step.measured(lambda way: step.bench("npu:0", 2, way), way, 2, repeats=2)
        counted = Launches("npu")
        count_decode_step(decoding_engine(way), 2, counted)
    assert found["steps"] >= 2 and {"median_ms", "p90_ms"} == set(found["step"]) == set(found["launch"])
    if way == "graphs":
        assert counted.operators == {"npu.npu_fused_infer_attention_score.out": 5 + 3}
    else:
        assert 100 < counted.total < 250


def test_views_memory_and_questions_are_no_launches() -> None:
    with torch.inference_mode(), Launches("cpu") as counted:
        x = torch.empty(4, 6)
        x.view(2, 12).t()[0].reshape(2, 1)
        assert x.shape[0] == 4 and not counted.total
        x.t().contiguous()
        torch.nn.functional.linear(x, x)
    assert counted.total == 2 and sum(name.startswith("aten.clone") for name in counted.operators) == 1


# ---- roofline ---------------------------------------------------------------------------------------------------


def test_shares_are_of_the_chips_assumed_figures(backend: NpuBackend) -> None:
    chip = figures(chip_name(backend))
    assert chip is not None and "assumed" in roofline.assumed(backend)["source"]
    assert roofline.assumed(backend)["GB_s"] == chip.bandwidth / 1e9
    found = roofline.matmul(backend, Chip(1e9, 1e9), TINY)
    layers = [case for case in found["cases"] if case["matrix"] == "2 layers"]
    elements = 2 * (80 * 64 + 64 * 64 + 192 * 64 + 64 * 96)
    assert found["weight_bytes"] == 2 * elements
    assert [case["rows"] for case in layers] == [1, 16]
    assert layers[0]["floor_ms"] == pytest.approx(2e3 * elements / 1e9, rel=1e-3)
    assert layers[1]["floor_ms"] == pytest.approx(2e3 * 16 * elements / 1e9, rel=1e-3)
    assert all(case["share"] == pytest.approx(case["floor_ms"] / case["ms"]) for case in found["cases"])


def test_a_chip_that_is_not_known_has_no_shares(backend: NpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "get_device_name", lambda index: "Ascend310P3")
    assert figures(chip_name(backend)) is None and "nothing is known" in roofline.assumed(backend)["source"]
    assert roofline.copy(backend, None, TINY)["share"] is None
    assert {case["share"] for case in roofline.matmul(backend, None, TINY)["cases"]} == {None}
    assert figures("Ascend910_9391") is not None and figures("Ascend910B1") is None


# ---- costs ------------------------------------------------------------------------------------------------------


LITTLE = npu_costs.CostSizes(
    hidden=64, intermediate=96, heads=4, kv_heads=2, vocab=300, layers=2, draft_layers=1, taps=2, weights=1, kv=150,
    chunk=40, batches=(1, 2), widths=(4, 8), calls=1, repeats=1, experts_hidden=64,
    experts=MoeConfig(4, 2, intermediate_size=32, norm_topk_prob=True),
)  # fmt: skip


@pytest.mark.parametrize("name", npu_costs.QUESTIONS)
def test_every_question_about_costs_has_the_figure_that_decides_it(name: str) -> None:
    with torch.inference_mode(), Numerics(lift=[*UNKNOWN, "N8", "N41"]):
        npu = NpuBackend(torch.device("npu:0"))
        found = answer(Part(name, partial(npu_questions.answered, npu_costs.QUESTIONS[name], lambda: npu, LITTLE)))
    result = found["result"]
    assert found["status"] == "ok" and json.loads(json.dumps(result)) == result, found
    assert "error" not in result and any(character.isdigit() for character in result["found"]), result
    assert result.get("error_of_largest", 0.0) < 0.02
    if name == "W8A8 experts":
        assert list(result["ms"]) == ["fused", "alone"]
    if name == "tasks of a layer":
        assert sum(case["times"] for case in result["cases"]) == len(LAYER)


def test_the_predicted_speed_follows_from_the_times() -> None:
    with torch.inference_mode(), Numerics():
        npu = NpuBackend(torch.device("npu:0"))
        result = npu_costs.prediction(npu, LITTLE)
    step, prompts = sum(result["ms"].values()), 16 * 3500 / LITTLE.chunk * result["chunk_ms"]
    assert result["tokens_per_second"] == pytest.approx(16 * 1500 / ((1500 / 5.25 * step + prompts) / 1e3))
    assert result["found"].startswith("PREDICTED, not measured: ")


# ---- the process ------------------------------------------------------------------------------------------------


def section(name: str, device: str, skip: int) -> list[Any]:
    """The lines that the section's process writes, on a device that computes nothing."""
    wishes = json.dumps({"device": device})
    command = [sys.executable, "-m", "tools.report.section", name, wishes, str(skip), "inf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    first, *parts = [json.loads(line) for line in done.stdout.splitlines()]
    return [first["parts"], *parts]


def test_a_part_with_an_error_ends_the_process_and_the_next_one_goes_on_behind_it() -> None:
    names, *parts = section("operators", "npu:4", 0)
    assert names == list(operators.cases(report_operators.NPU) | report_operators.of_torch(8))
    assert [part["name"] for part in parts] == names[:1]
    assert "sees 1 NPUs" in parts[0]["error"]["says"] and parts[0]["over"]
    again, *parts = section("operators", "npu:4", len(names) - 1)
    assert again == names and [part["name"] for part in parts] == names[-1:]


@pytest.mark.parametrize("device", ["npu", "npu:0"])
def test_a_device_without_a_number_is_the_first(device: str) -> None:
    names, first, *_ = section("roofline", device, 0)
    assert first["name"] == names[0] == "figures" and first["result"]["chip"] == "Ascend910B3", first


def test_a_section_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    names, part = section("open_points", "npu:0", 0)
    assert names == ["start"] and part["status"] == "failed" and "ImportError" in part["error"]["says"]


def test_nothing_is_made_before_it_is_asked_for() -> None:
    for name in SECTIONS["npu"]:
        parts = SECTIONS["npu"][name].make(Options("npu:9", real_pair=("target", "draft")), 60.0)
        assert len({part.name for part in parts}) == len(parts) > 0
        assert EXPECTED.get(name, {}).keys() <= {part.name for part in parts}, "an expectation of no part"


@pytest.mark.parametrize("name", ["open_points", "engine", "pair", "server"])
def test_what_the_server_relies_on_has_an_expected_answer(name: str) -> None:
    parts = {part.name for part in SECTIONS["npu"][name].make(Options("npu:9", real_pair=("target", "draft")), 60.0)}
    assert (set(npu_questions.RELIED_ON) if name == "open_points" else parts) <= EXPECTED[name].keys()
