"""The step that tries a prompt's chunk in a graph has rows as a served one has."""

import pytest

from app.engine.load.chunk_trial import CONTEXT, _chunk
from app.engine.load.plan import Sizes
from app.engine.step.graph_plan import settle_graph_sizes
from app.engine.step.inputs import Layout

SCRATCH, PAGES, DRAFT_PAGES = 17, 400, 150


@pytest.mark.parametrize("window_pages", [0, 3])
@pytest.mark.parametrize("max_model_len", [4096, 300, 100])
def test_rows_have_slots_of_their_own_behind_a_long_context(window_pages: int, max_model_len: int) -> None:
    """A chunk spans more pages than a draft's window keeps of a decoding sequence."""
    sizes = Sizes(16, max_model_len, 16, 512, 16, SCRATCH, window_pages=window_pages)
    graphs = settle_graph_sizes(16, 16, 48, draft_graphs=True, spare=1)
    layout = Layout(16, separate_prefill=False, host_positions=True, graphs=graphs, window_pages=window_pages)
    size, rows = (16, 257), graphs.with_longest_chunks()[16, 257]
    batch = _chunk(min(rows, max_model_len), sizes, 97, [PAGES, DRAFT_PAGES], alone=False)
    inputs = layout.target(batch, size, 15)
    (group,) = inputs.groups
    assert len(inputs.token_ids) == 257 == sum(group.query_lens) and len(inputs.prev_rows) == 16
    assert max(group.host_seq_lens[: len(batch.entries)]) == min(CONTEXT + rows, max_model_len)
    assert group.positions is not None and max(group.positions) < max(max_model_len, 257)
    for slots, pages in ((group.slot_mapping, PAGES), (group.draft_slots, DRAFT_PAGES)):
        assert slots is None or (len(set(slots.tolist())) == 257 and slots.max() < pages * 16)
    assert (group.draft_slots is not None) == bool(window_pages)
