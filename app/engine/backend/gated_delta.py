"""Decoding rows of a Gated DeltaNet layer, as a backend's own operator gets them."""

from typing import NamedTuple

from torch import Tensor


class GatedDeltaStep(NamedTuple):
    """R rows of S decoding sequences in one layer, with its weights and slots. C, Nk, Nv, Dk, Dv and K are its sizes.

    `inputs` [R, C + 2 Nv] enter the recurrence. The fields from `slots` to `places` are those of `SequenceRows`, all on
    the device. Slot 0 belongs to padding. The last four fields are those of `LayerState`, which are written in place.
    """

    inputs: Tensor
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    slots: Tensor
    next_slots: Tensor
    starts: Tensor
    counts: Tensor
    rows: Tensor
    places: Tensor
    matrix: Tensor
    conv: Tensor
    pending: Tensor
    num_tokens: Tensor

    @property
    def first_rows(self) -> Tensor:
        """Return the first row [S] of each sequence, a strided view."""
        return self.rows[:, 0]
