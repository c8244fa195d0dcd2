"""Drafts of DFlash2 and DSpark for the demo's target keep hitting, and change no text.

They are the demo's own draft with heads that were trained for it, of which the repository has the tensors only. The
trainer last stood in commit 8788056:

    python -m tools.demo_pair.train --stage draft --head dspark --start-from app/demo/checkpoint --drills 0 --minutes 9

Prose depends most on a head: the same draft with the table of candidates turned around falls below the floor.
"""

from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from app.messages import Request
from tests.exhaustive.acceptance import MAX_TOKENS, engine
from tests.fast.engine.lossless import Run, demo_folder, demo_prompts, make_engine, run_engine

HEADS = Path(__file__).with_name("path_drafts")
FLOOR = {"dflash2": 6.1, "dspark": 6.4}
"""Acceptance length in prose, a little below what each shows on these prompts; 6.27 with neither."""


@cache
def requests() -> list[Request]:
    prompts = demo_prompts("prose", 60, MAX_TOKENS)
    return [Request(str(i), p.token_ids, p.max_tokens, stop_token_ids=p.stop_token_ids) for i, p in enumerate(prompts)]


@cache
def plain() -> Run:
    return run_engine(make_engine(demo_folder("target"), None, max_num_seqs=16), requests())


@pytest.mark.parametrize("kind", FLOOR)
def test_acceptance_is_above_the_floor_and_below_it_with_a_head_turned_around(tmp_path: Path, kind: str):
    tensors = load_file(demo_folder("draft") / "model.safetensors") | load_file(HEADS / kind / "head.safetensors")
    (tmp_path / "config.json").write_text((HEADS / kind / "config.json").read_text())
    (table,) = (name for name in tensors if name.endswith(("successor_codebook", "markov_w2.weight")))
    for tensor, is_above in ((tensors[table], True), (-tensors[table], False)):
        save_file(tensors | {table: tensor}, tmp_path / "model.safetensors")
        run = run_engine(engine(tmp_path), requests())
        print(f"{kind}: acceptance length {run.acceptance_length:.2f} over {run.verify_steps} steps")
        assert run.texts == plain().texts
        assert (run.acceptance_length >= FLOOR[kind]) == is_above
