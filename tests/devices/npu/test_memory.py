"""Memory of a device that holds little, each time in a process of its own, so that no other test's memory counts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fast.engine.pairs import make_pair

Run = Callable[..., str]

BUILD = """
import gc
from pathlib import Path
import app.engine.load.engine as build
from app.engine.errors import UnsupportedError
from app.config.engine import EngineConfig
from tests.devices.npu.numerics import Numerics

def engine(**config):
    sizes = {{"device": "npu:0", "dtype": "bfloat16", "kv_cache_memory": None, "max_num_seqs": 64}}
    folder = Path("{folder}")
    return build.build_engine(EngineConfig(target=folder / "target", draft=folder / "draft", **sizes | config)).core
"""


@pytest.fixture
def run(tmp_path: Path, run_python: Run) -> Run:
    """Run a program that has `engine` on a device with so many MiB, and return the lines that it printed."""
    make_pair(tmp_path, head_dim=64, num_layers=3, draft_layers=1, taps=(0, 1))

    def with_engine(program: str, mebibytes: int) -> str:
        body = "".join(f"    {line}\n" for line in program.strip().splitlines())
        whole = f"{BUILD.format(folder=tmp_path)}\nwith torch.inference_mode(), Numerics():\n{body}"
        return run_python(whole, NPU_STUB_MEMORY=str(mebibytes << 20))

    return with_engine


def test_kv_takes_what_the_weights_and_the_widest_step_leave(run: Run) -> None:
    program = """
for share in (0.6, 0.8):
    core = engine(memory_utilization=share, max_num_batched_tokens=1024, enforce_eager=True)
    free, total = torch_npu.npu.mem_get_info()
    print("pages", core.scheduler.pool.num_pages, total - free <= total * share)
    del core
    gc.collect()
    torch_npu.npu.empty_cache()
"""
    (fewer, fits), (more, fits_too) = (
        line.split()[1:] for line in run(program, 96).splitlines() if line.startswith("pages")
    )
    assert 0 < int(fewer) < int(more) and fits == fits_too == "True"


@pytest.mark.parametrize(
    ("config", "mebibytes", "named"),
    [
        ({"max_num_seqs": 256, "max_num_batched_tokens": 50_000}, 64, ["--max-num-batched-tokens 50000"]),
        ({"kv_cache_memory": 250 << 20}, 256, ["--kv-cache-memory 250MiB", "free on npu:0"]),
    ],
)
def test_memory_that_is_not_there_is_refused_with_the_settings_to_change(run, config, mebibytes, named):
    program = f"""
try:
    engine(**{config})
except UnsupportedError as error:
    print(error)
"""
    told = run(program, mebibytes)
    assert all(part in told for part in named), told
