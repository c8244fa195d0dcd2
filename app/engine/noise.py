"""The hash behind the sampler's noise, on host numbers: no torch, so that step inputs can be made without it.

A token's noise is a hash of (the request's seed, the index of the token drawn, the token). Integers only, 32 bits,
multiply, xor and shift, so it is the same on every device. The finaliser is Wellons' lowbias32.
"""

GOLDEN = 0x9E3779B9
FACTORS = (0x7FEB352D, 0x846CA68B)
_MASK = 0xFFFFFFFF


def noise_state(seed: int, index: int) -> int:
    """The state, as a signed 32-bit number, of draws of token `index` of a request with this unsigned 64-bit seed."""
    return signed(_mix(_mix(_mix((seed & _MASK) ^ GOLDEN) ^ (seed >> 32)) ^ index))


def signed(x: int) -> int:
    """An unsigned 32-bit number as int32 stores it."""
    return x - (1 << 32) if x >> 31 else x


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * FACTORS[0] & _MASK
    x ^= x >> 15
    x = x * FACTORS[1] & _MASK
    return x ^ x >> 16
