"""The memory at one moment, drawn with characters.

What lives here: :func:`memory_map`. What never lives here: taking the moment.

A character stands for a few blocks and says what most of them are; the colours say it again, so
that the picture reads the same without.
"""

from __future__ import annotations

import numpy as np
import rich.console
import rich.style
import rich.text

from .cells import CODES, Blocks, available, cell_size, cells

__all__ = ["memory_map"]

_MARKS = {
    "empty": ("·", "grey50", "empty"),
    "in_use": ("█", "dodger_blue2", "in use"),
    "cached": ("▒", "dark_orange", "cached"),
    "fenced": ("~", "magenta", "fenced: a step may still touch it"),
    "destined": ("→", "red", "destined: a move fills it"),
    "held": ("+", "green", "kept to grow into"),
    "offline": ("x", "grey50", "offline: given back"),
    "null": ("0", "default", "null block"),
}
_ORDERS = "0123456789"
_SEQUENCES = "abcdefghijkl"
_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")
_ASCII = {"·": ".", "█": "#", "▒": "%", "→": ">"}


def memory_map(
    blocks: Blocks, width: int, *, by: str = "state", rows: int = 40, ascii_only: bool = False
) -> rich.text.Text:
    """The map with its legend.

    Args:
        blocks: a :class:`kvmmu.BlockMap` or a :class:`kvmmu.Snapshot`.
        width: of the terminal, in characters; at least 24.
        by: ``state``, ``sequence`` (letters, which come again) or ``page`` (its order).
        rows: of the map, about so many.
        ascii_only: no character beyond ASCII.
    """
    n = len(blocks.states)
    digits = len(f"{n:,}")
    room = max(width - digits - 2, 8)
    power = 1 << (room.bit_length() - 1)
    across = power * 3 // 2 if power * 3 // 2 <= room else power  # rows begin at round numbers
    size = cell_size(n, across * rows)
    picture = cells(blocks, size)
    drawn = rich.text.Text()
    marks = _marks(picture, by)
    seen: dict[str, tuple[str, str]] = {}  # by meaning: all letters have one
    for first in range(0, len(marks), across):
        drawn.append(f"{first * size:>{digits},} ", style="dim")
        for mark, style, meaning in marks[first : first + across]:
            seen[meaning] = min(seen.get(meaning, (mark, style)), (mark, style))
            drawn.append(mark, style=style)
        drawn.append("\n")
    drawn.append("\n")
    for meaning, (mark, style) in sorted(seen.items()):
        drawn.append(mark, style=style)
        drawn.append(f" {meaning}\n")
    unit = "1 block" if size == 1 else f"{size:,} blocks, what most of them are"
    drawn.append(f"a character: {unit}\n")
    drawn.append(_said(blocks))
    if ascii_only:
        plain = drawn.plain
        for mark, other in _ASCII.items():
            plain = plain.replace(mark, other)
        return rich.text.Text(plain, spans=drawn.spans)
    return drawn


def _marks(
    picture: tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], ...], by: str
) -> list[tuple[str, str, str]]:
    states, sequences, orders = (plane.tolist() for plane in picture)
    by_state = [_MARKS[CODES[state & 15]] for state in states]
    if by == "state":
        return by_state
    marks = []
    for state, sequence, order in zip(by_state, sequences, orders, strict=True):
        if by == "sequence" and sequence:
            colour = _COLOURS[sequence % len(_COLOURS)]
            marks.append((_SEQUENCES[sequence - 1], colour, "sequences: a to l, then again"))
        elif by == "page" and order:
            pages = "single blocks" if order == 1 else f"in pages of {2 ** (order - 1):,}"
            marks.append((_ORDERS[order - 1], _COLOURS[(order - 1) % len(_COLOURS)], pages))
        else:
            marks.append(state)
    return marks


def _said(blocks: Blocks) -> str:
    """The counts in words: what the picture shows, exactly."""
    counts = np.bincount(blocks.states, minlength=len(CODES))
    names = [name.replace("_", " ") for name in CODES]
    parts = [f"{count:,} {name}" for name, count in zip(names, counts, strict=True) if count]
    free = available(blocks)
    whole = len(free) // 512
    windows = int(free[: whole * 512].reshape(whole, 512).all(axis=1).sum())
    return f"{', '.join(parts)}; {windows:,} of {whole:,} windows free"
