"""Whether a prompt would be admitted, with the reserve for running sequences counted.

What lives here: :class:`Admission`. What never lives here: the blocks (the MMU quotes those).
"""

from __future__ import annotations

from dataclasses import dataclass

from ._core import Quote

__all__ = ["Admission", "admission"]


@dataclass(frozen=True, slots=True)
class Admission:
    """What ``KVCache.quote`` says.

    Attributes:
        when: as ``Quote.when``; ``"frees"`` too where enough blocks are available and the reserve
            would be touched.
        moves, needed, available, num_cached_tokens: as in :class:`kvmmu.Quote`.
        reserved: blocks that must be left available; 0 where no block is in use, since there is
            nobody to keep them for.
    """

    when: str
    moves: int
    needed: int
    available: int
    num_cached_tokens: int
    reserved: int


def admission(quote: Quote, in_use: int, reserved: int) -> Admission:
    """A quote with the reserve counted."""
    reserved = reserved if in_use else 0
    short = quote.available < quote.needed + reserved
    return Admission(
        "frees" if quote.when in ("now", "moves") and short else quote.when,
        quote.moves,
        quote.needed,
        quote.available,
        quote.num_cached_tokens,
        reserved,
    )
