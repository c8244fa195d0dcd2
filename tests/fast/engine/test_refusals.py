"""Every combination of the table is refused before weights are read, with its setting named first."""

import re
from pathlib import Path
from typing import Any

import pytest

from app.config.engine import EngineConfig
from app.engine.device.factory import make_backend
from app.engine.errors import UnsupportedError
from app.engine.load.engine import build_engine
from app.engine.load.refusals import REFUSALS, Facts, check
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.pairs import make_pair

EXAMPLES: list[tuple[str, dict[str, Any]]] = [  # a target and wishes for each row of the table
    ("dense", {"batch_invariant": True, "device": "npu"}),
    ("dense", {"batch_invariant": True, "tensor_parallel_size": 2}),
    ("experts", {"batch_invariant": True}),
    ("hybrid", {"batch_invariant": True}),
    ("hybrid", {"dtype": "float16"}),
    ("hybrid", {"state_cache_memory": 1 << 20, "prefix_caching": False}),
    ("dense", {"state_cache_memory": 1 << 20}),
    ("dense", {"mamba_ssm_cache_dtype": "bfloat16"}),
    ("dense", {"verify": 99}),
    ("dense", {"draft_tensor_parallel_size": 4, "tensor_parallel_size": 2}),
    ("dense", {"tensor_parallel_size": 3}),
]


@pytest.mark.parametrize(("row", "example"), [*zip(REFUSALS, EXAMPLES, strict=True)], ids=lambda value: str(value[:2]))
def test_a_combination_is_refused_by_name_before_weights_are_read(row, example, tmp_path):
    model, wishes = example
    if model == "hybrid":
        pair = make_hybrid_pair(tmp_path)
    else:
        pair = make_pair(tmp_path, **({"experts": 4} if model == "experts" else {}))
    config = EngineConfig(pair.target, pair.draft, **{"device": "cpu", "verify": "full"} | wishes)

    def opened(*args: Any) -> Any:
        raise AssertionError("weights were opened")

    with pytest.raises(UnsupportedError) as refused:
        build_engine(config, open_weights=opened)
    flag, why, instead = (text.partition(" {")[0] for text in (row.flag, *row.why.rsplit("; ", 1)))
    assert str(refused.value).startswith(flag)
    assert (why.partition("{")[0] in str(refused.value)) and instead in str(refused.value)


def test_the_defaults_are_refused_nowhere() -> None:
    for kind in ("cpu", "cuda", "npu"):
        check(Facts(EngineConfig(Path("target"), device=kind)))


def test_a_backend_made_without_a_start_refuses_what_a_start_refuses() -> None:
    with pytest.raises(UnsupportedError) as at_start:
        check(Facts(EngineConfig(Path("target"), batch_invariant=True), kind="npu"))
    with pytest.raises(UnsupportedError, match=re.escape(str(at_start.value))):
        make_backend("npu", batch_invariant=True)
