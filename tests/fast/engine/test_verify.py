"""Verification equals the obvious loop, whatever is ragged, and a CPU's own equals it."""

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.cpu.backend import CpuBackend
from app.engine.verify import verify

torch.set_num_threads(1)


class Case:
    """Sequences with `widths[i]` logit rows; sequence i has drafts when `drafted[i]`, and agrees with `agree[i]`."""

    def __init__(self, block_size: int, widths: list[int], agree: list[int], random: Random | None = None) -> None:
        random = random or Random(0)
        self.drafts: list[list[int]] = []
        self.choices: list[int] = []
        self.first, self.num_drafts, self.draft_index = [], [], []
        for width, agreed in zip(widths, agree, strict=True):
            said = [random.randrange(50) for _ in range(width)]
            self.first.append(len(self.choices))
            self.choices += said
            self.num_drafts.append(width - 1)
            self.draft_index.append(len(self.drafts) if width > 1 else -1)
            if width > 1:
                # A draft is wrong at `agreed` alone; what stands behind it, and past the rows, is right or tempting.
                block = (said + [said[-1]] * block_size)[: block_size - 1]
                if agreed < block_size - 1:
                    block[agreed] = (block[agreed] + 1) % 50
                self.drafts.append(block)

    def run(self) -> list[list[int]]:
        drafts = torch.tensor(self.drafts) if self.drafts else None
        lists = (self.first, self.num_drafts, self.draft_index)
        choices, *lengths = (torch.tensor(x, dtype=torch.int64) for x in (self.choices, *lists))
        packed = verify(choices, drafts, *lengths)
        on_cpu = CpuBackend(torch.device("cpu")).verify(choices, drafts, *lengths)
        assert packed.dtype == on_cpu.dtype == torch.int64
        assert packed.tolist() == on_cpu.tolist()
        return packed.tolist()

    def check(self) -> list[int]:
        """Compares with the loop; returns the accepted counts."""
        packed = self.run()
        accepted_counts = []
        for row, first, num_drafts, draft_row in zip(
            packed, self.first, self.num_drafts, self.draft_index, strict=True
        ):
            accepted = 0
            while accepted < num_drafts and self.drafts[draft_row][accepted] == self.choices[first + accepted]:
                accepted += 1
            assert row[-1] == accepted
            assert row[: accepted + 1] == self.choices[first : first + accepted + 1]
            assert len(row) == len(packed[0])
            accepted_counts.append(accepted)
        return accepted_counts


@settings(max_examples=300)
@given(data=st.data(), block_size=st.integers(2, 8), num_seqs=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_it_equals_the_loop_for_ragged_widths_and_any_agreement(data, block_size, num_seqs, seed):
    widths = data.draw(st.lists(st.integers(1, block_size), min_size=num_seqs, max_size=num_seqs))
    agree = data.draw(st.lists(st.integers(0, block_size), min_size=num_seqs, max_size=num_seqs))
    Case(block_size, widths, agree, Random(seed)).check()


def test_sequences_without_drafts_take_the_first_choice_beside_others_that_draft():
    assert Case(4, [1, 4, 1, 2, 1], [0, 3, 0, 1, 0]).check() == [0, 3, 0, 1, 0]


def test_without_any_drafts_every_sequence_yields_its_one_choice():
    case = Case(4, [1, 1, 1], [0, 0, 0])
    assert case.run() == [[choice, 0] for choice in case.choices]


def test_a_step_that_samples_nothing_yields_nothing():
    assert Case(4, [], []).run() == []
