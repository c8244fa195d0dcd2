"""bfloat16 on a CPU: kept where it is not slower, logits in float32, and differences within the measured margin."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.check import probes
from app.config.engine import EngineConfig
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import DEMO, read_config
from app.engine.cpu import backend as cpu_backend
from app.engine.cpu import linear
from app.engine.cpu.backend import CpuBackend
from app.engine.device.factory import make_backend
from app.engine.device.moe import MoeConfig
from app.engine.load.plan import dtype_of
from app.engine.process import _info
from app.engine.sampling.sampler import Sampler
from tests import UNTIMED
from tests.fast.engine.bf16_margin import drafted, measured
from tests.fast.engine.lossless import LUCKY, Case, Subject, make_engine, random_prompts
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.reference import load_target

torch.set_num_threads(1)
CPU = torch.device("cpu")
MULTIPLIES = b"flags : fma avx2"


def facts(monkeypatch: pytest.MonkeyPatch, processor: bytes = MULTIPLIES, *, has_operator: bool = True) -> None:
    """Fake the processor's flags, and an operator for few rows that was made or not."""
    monkeypatch.setattr(linear, "processor", lambda: processor)
    monkeypatch.setattr(linear, "compiled", lambda dtype: torch.nn.functional.linear if has_operator else None)


# The choice


def chosen(checkpoint: str, hidden_size: int = 1024, **wishes: Any) -> str:
    demo = target_config(read_config(DEMO / "target"))
    shape = replace(demo, dtype=checkpoint, hidden_size=hidden_size, intermediate_size=2 * hidden_size)
    config = EngineConfig(DEMO / "target", device="cpu", **UNTIMED | wishes)
    backend = make_backend("cpu", batch_invariant=config.batch_invariant)
    return str(dtype_of(config, shape, backend)).removeprefix("torch.")


@pytest.mark.parametrize("flags", [b"fma avx2", b"avx512f avx512_vnni", b"avx512f avx512_bf16"], ids=bytes.decode)
def test_a_checkpoint_stays_in_bfloat16_where_own_products_read_it_and_the_log_says_why_and_what_float32_gives(
    monkeypatch, caplog, flags
):
    facts(monkeypatch, b"flags\t: " + flags)
    with caplog.at_level(logging.INFO):
        assert chosen("bfloat16") == "bfloat16"
    (told,) = caplog.messages
    assert (
        "dtype bfloat16, like the checkpoint: products read half the bytes" in told
        and "--dtype float32" in told
        and "twice the memory" in told
    )


@pytest.mark.parametrize(
    ("fakes", "reason"),
    [
        ({"processor": b"flags : sse4_2 avx"}, "without AVX2"),
        ({"processor": b"Features : asimd bf16"}, "without AVX2"),
        ({"has_operator": False}, "without g++"),
    ],
    ids=str,
)
def test_without_one_of_the_facts_it_becomes_float32_and_the_log_says_why(monkeypatch, caplog, fakes, reason):
    facts(monkeypatch, **fakes)
    with caplog.at_level(logging.INFO):
        assert chosen("bfloat16") == "float32"
        assert chosen("bfloat16", dtype="bfloat16") == "bfloat16", "what was asked for is taken"
    (told,) = caplog.messages
    assert "dtype float32, not the checkpoint's bfloat16: " in told and reason in told
    assert "--dtype bfloat16 takes half the memory" in told


def test_float32_and_float16_become_float32(monkeypatch):
    facts(monkeypatch)
    assert chosen("float32") == chosen("float16") == chosen("bfloat16", dtype="float32") == "float32"


def test_a_small_target_gains_nothing_and_becomes_float32_like_the_demo_with_its_exact_texts(monkeypatch, caplog):
    facts(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert [chosen("bfloat16", hidden_size=size) for size in (192, 361, 363)] == ["float32"] * 2 + ["bfloat16"]
    assert "layers this small" in caplog.messages[0]
    demo = target_config(read_config(DEMO / "target"))
    assert dtype_of(EngineConfig(DEMO / "target", **UNTIMED), demo, CpuBackend(CPU)) == torch.float32


def test_the_experts_of_a_layer_count_together(monkeypatch):
    facts(monkeypatch)
    moe = MoeConfig(128, 8, 16, norm_topk_prob=True)
    shape = replace(target_config(read_config(DEMO / "target")), dtype="bfloat16", moe=moe)
    assert dtype_of(EngineConfig(DEMO / "target", **UNTIMED), shape, CpuBackend(CPU)) == torch.bfloat16


def test_check_tells_what_a_bfloat16_checkpoint_becomes(monkeypatch):
    facts(monkeypatch)
    assert "float32, or bfloat16 like a checkpoint" in probes.backend(CpuBackend(CPU)).found
    facts(monkeypatch, b"")
    assert "for checkpoints in bfloat16 too, because bfloat16 was not measured" in probes.backend(CpuBackend(CPU)).found


def test_target_draft_and_kv_take_half_the_memory_and_the_servers_info_has_the_dtype(monkeypatch, tmp_path):
    pair = make_pair(tmp_path, dtype=torch.bfloat16, **LUCKY)
    monkeypatch.setattr(linear, "processor", lambda: MULTIPLIES)
    monkeypatch.setattr(cpu_backend, "_SMALL_LAYER", 0)
    if not linear.operator_for(torch.bfloat16):
        pytest.skip("there is no g++")
    sizes = []
    for dtype in ("auto", "float32"):
        config = EngineConfig(pair.target, pair.draft, device="cpu", dtype=dtype, max_model_len=64, **UNTIMED)
        engine = make_engine(pair.target, pair.draft, dtype=dtype, max_model_len=64, draft_quantization="none")
        assert _info(engine, config).dtype == engine.dtype == ("bfloat16" if dtype == "auto" else "float32")
        forward = engine.core.runner.forward
        weights = [*forward.target.parameters(), *forward.drafter.model.parameters()]
        kv = [part for pool in engine.core.runner.pools for layer in pool.layers for part in (layer.k[:1], layer.v[:1])]
        sizes.append([sum(part.nbytes for part in parts) for parts in (weights, kv)])
    assert sizes[1] == [2 * size for size in sizes[0]]


# Logits


def test_logits_are_in_float32_and_decide_where_bfloat16_ties():
    hidden = torch.tensor([[256.0, 1.0], [256.0, -1.0]]).bfloat16()
    lm_head = torch.tensor([[1.0, 0.0], [1.0, 0.5]]).bfloat16()
    backend = CpuBackend(CPU)
    lm_head = backend.pack_weight(lm_head)
    logits = backend.logits(hidden, lm_head)
    assert logits.dtype == torch.float32 and logits.tolist() == [[256.0, 256.5], [256.0, 255.5]]
    assert backend.linear(hidden[:1], lm_head).tolist() == [[256.0, 256.0]], "they tie in bfloat16"
    sampler = Sampler(2, backend)
    assert sampler.choose(hidden, lm_head).tolist() == sampler.propose(hidden, lm_head).tolist() == [1, 0]


# On == off


def test_drafts_hit_and_a_text_differs_only_within_what_other_operators_change(tmp_path: Path, monkeypatch):
    """The margin is what logits differ by between our operators and PyTorch's, which a timing may choose by rows."""
    pair = make_pair(tmp_path, dtype=torch.bfloat16, **LUCKY)
    prompts = [replace(p, max_tokens=min(p.max_tokens, 28)) for p in random_prompts(pair.vocab_size, 8)]
    subject = Subject("bf16", pair.target, pair.draft, prompts, load_target)
    sizes: dict[str, Any] = {"page_size": 16, "max_model_len": subject.max_model_len, "dtype": "bfloat16"}

    found = measured(subject, monkeypatch, None, **sizes)
    runs, differences = drafted(subject, Case(concurrency=4), (1, 4), **sizes)
    print(f"logits differ by {found:.3g} between operators; {[str(each) for each in differences]}")
    assert 0 < found < 0.1 and all(each.margin <= 2 * found for each in differences)
    assert len(differences) <= len(prompts) // 2
    assert all(run.acceptance_length > 1.1 for run in runs)
