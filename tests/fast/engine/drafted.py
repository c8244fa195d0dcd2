"""Drafts that an engine made, held against those of the dense, unpaged reference."""

import random
from dataclasses import dataclass
from typing import Any

from app.engine.core import EngineCore
from app.engine.schedule.batch import Batch
from app.messages import Request
from tests.fast.engine.dialects import WINDOW
from tests.fast.engine.pairs import Pair
from tests.fast.engine.reference import ReferenceDraft, features, load_target


@dataclass(frozen=True)
class Drafted:
    """Drafts after some tokens."""

    token_ids: list[int]
    drafts: list[int]


def drafted_by(core: EngineCore, requests: list[Request]) -> list[Drafted]:
    """Run requests, and return all that was drafted: by layers, by one operator or from graphs."""
    seen: list[Drafted] = []
    runner, launch = core.runner, core.launch
    graphs, propose = getattr(runner, "graphs", None), runner.forward.draft
    proposed: list[Any] = []

    def recorded(*args: Any) -> Any:
        proposed.append(drafts := propose(*args))
        return drafts

    def launched(batch: Batch) -> Any:
        anchored = [list(rows.seq.token_ids) for rows in batch.decodes if rows.num_drafts]
        pending = launch(batch)
        if anchored:
            drafts = graphs.drafts if graphs and graphs.draft_graphs else proposed[-1]
            seen.extend(map(Drafted, anchored, drafts.tolist()))
        return pending

    runner.forward.draft, core.launch = recorded, launched
    core.run(requests)
    return seen


def share_of_right_drafts(blocks: list[Drafted], pair: Pair, block_size: int | None = None) -> float:
    draft = ReferenceDraft(pair.draft, load_target(pair.target), block_size)
    right, total = 0, 0
    for block in blocks:
        context, anchor = block.token_ids[:-1], block.token_ids[-1]
        wanted = draft.propose(features(draft.target, context, draft.taps), anchor, len(block.token_ids))
        right += sum(a == b for a, b in zip(wanted, block.drafts, strict=True))
        total += len(wanted)
    return right / total


def requests_about_the_window(count: int, max_tokens: int, *, shared: int = 0) -> list[Request]:
    """Prompts on both sides of the window; the first `shared` tokens of all are the same."""
    rng = random.Random(3)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(97) for _ in range(length))

    head, lengths = tokens(shared), (2 * WINDOW + 5, 3, WINDOW, 40)
    return [Request(str(i), head + tokens(lengths[i % 4]), max_tokens) for i in range(count)]
