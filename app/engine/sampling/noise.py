"""Hash of the sampler's noise, on host numbers. Imports no torch, because step inputs need none.

A token's noise is a hash of (the request's seed, the index of the token drawn, the token). It has 32-bit integers only,
so it is the same on every device. It multiplies and takes the xor with the high half. The factors come from Wellons'
lowbias32.
"""

import numpy as np

from app.engine.arrays import Ints

GOLDEN = 0x9E3779B9
FACTORS = (0x7FEB352D, 0x846CA68B)
NOISE_BITS = 23
_MASK = 0xFFFFFFFF


def noise_key(seed: int) -> Ints:
    """Return the key [1] int32 of an unsigned 64-bit seed. The state of a draw is a mix of it and the token's index."""
    return np.asarray(_mix(_mix(np.uint32(seed & _MASK ^ GOLDEN)) ^ np.uint32(seed >> 32))).view(np.int32)


def noise_states(seed: int, first: int, count: int) -> Ints:
    """Return the states [count] int32 of draws of tokens `first`, `first` + 1 ... for an unsigned 64-bit seed."""
    states = _mix(noise_key(seed).view(np.uint32) ^ np.arange(first, first + count, dtype=np.uint32))
    return np.asarray(states).view(np.int32)


def signed(x: int) -> int:
    """Return an unsigned 32-bit number as int32 stores it."""
    return x - (1 << 32) if x >> 31 else x


def _mix(x: "np.uint32 | np.typing.NDArray[np.uint32]") -> "np.typing.NDArray[np.uint32]":
    mixed = np.atleast_1d(x)
    for factor in FACTORS:
        mixed = (mixed ^ mixed >> np.uint32(16)) * np.uint32(factor)
    return mixed ^ mixed >> np.uint32(16)
