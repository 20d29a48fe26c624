"""The 8 bytes that stand for the KV of one token position.

What lives here: the mixing function, and :func:`contents`, which turns the tokens of a whole
sequence into the bytes that each of its positions must hold. What never lives here: blocks,
tables, storage.

As in a transformer, what a position holds depends on every token before it: a running sum
(modulo 2^64) over mixed (token, position) pairs, mixed once more. Two sequences agree at a
position exactly when they agree on the whole prefix (but for a chance of 2^-64), so a block that
was taken from the wrong prefix, moved without its bytes or overwritten never reads back right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["GOLDEN", "contents", "mix"]

U64 = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / golden ratio, odd: the step of a Weyl sequence."""
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix(x: U64, scratch: U64 | None = None) -> U64:
    """Mixes every element, in place: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    s = np.empty_like(x) if scratch is None else scratch
    np.right_shift(x, 30, out=s)
    np.bitwise_xor(x, s, out=x)
    np.multiply(x, _FIRST, out=x)
    np.right_shift(x, 27, out=s)
    np.bitwise_xor(x, s, out=x)
    np.multiply(x, _SECOND, out=x)
    np.right_shift(x, 31, out=s)
    np.bitwise_xor(x, s, out=x)
    return x


def contents(tokens: npt.NDArray[np.int32]) -> U64:
    """What each position of a sequence holds.

    Args:
        tokens: int32 [n], each >= 0, from the first token of the sequence.

    Returns:
        uint64 [n].
    """
    x = np.arange(1, len(tokens) + 1, dtype=np.uint64)
    np.multiply(x, GOLDEN, out=x)
    np.add(x, tokens.astype(np.uint64), out=x)
    scratch = np.empty_like(x)
    mix(x, scratch)
    np.cumsum(x, out=scratch)
    return mix(scratch, x)
