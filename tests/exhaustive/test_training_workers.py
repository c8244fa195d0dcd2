"""Two processes that train together make one model: the one of their rows put together."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import itertools, json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from tools.demo_pair.loop import Plan, train, worker
from tools.demo_pair.losses import Batch

if len(sys.argv) > 2:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
rows = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(1))
mine = rows if len(sys.argv) == 2 else rows[:, 2 * worker() : 2 * worker() + 2]
batches = lambda first: itertools.islice(itertools.cycle(Batch(row, row > 0) for row in mine), first, None)
loss = lambda batch: (model(batch.ids) - 1).square().mean()
train("tiny", model, loss, batches, Plan(6, warm_up=1), Path(sys.argv[1]) / "state.pt")
if worker() == 0:
    (Path(sys.argv[1]) / "weights.json").write_text(json.dumps(model.weight.flatten().tolist()))
"""


def weights(folder: Path, *launcher: str) -> list[float]:
    folder.mkdir()
    (script := folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, *launcher, str(script), str(folder), *(["together"] if launcher else [])]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "state.pt").is_file()
    return [float(value) for value in json.loads((folder / "weights.json").read_text())]  # both workers write to stdout


def test_two_workers_learn_what_one_learns_from_all_rows(tmp_path: Path) -> None:
    alone = weights(tmp_path / "alone")
    together = weights(tmp_path / "together", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-4
