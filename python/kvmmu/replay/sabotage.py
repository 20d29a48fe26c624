"""Breaks the manager on purpose. A check that cannot fail proves nothing.

What lives here: wrappers around the MMU and the mover that each commit one fault of real systems,
for ``kvmmu replay --sabotage`` and its tests. What never lives here: anything that a run without
``--sabotage`` imports.

- ``skip-copy``: moves are committed, their bytes are not copied.
- ``skip-commit``: bytes are copied and the sources scribbled over, as if they had been freed and
  used again, but the tables never flip (the moves are given back).
- ``early-reuse``: each source is overwritten just before it is copied, as when a block that a copy
  still reads is handed out again.
- ``wrong-block``: one entry of the exported table (first row, first block) is another block.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from .._core import MMU, BlockTables, Moves
from ..movers import SupportsMove
from ..pairs import Pairs

__all__ = ["Target", "wrap"]

GARBAGE = np.uint64(0xDEADBEEFDEADBEEF)


class Target(NamedTuple):
    """What the faults damage: the contents of the blocks and the exported table."""

    contents: npt.NDArray[np.uint64]
    block_table: npt.NDArray[np.int32]


def wrap(kind: str, mmu: MMU, mover: SupportsMove, target: Target) -> tuple[MMU, SupportsMove]:
    """The MMU and the mover, one of them broken."""
    if kind == "skip-copy":
        return mmu, _SkipCopy()
    if kind == "early-reuse":
        return mmu, _EarlyReuse(mover, target)
    broken: Any = (_SkipCommit if kind == "skip-commit" else _WrongBlock)(mmu, target)
    return cast(MMU, broken), mover


def _scribble(target: Target, blocks: npt.NDArray[Any]) -> None:
    target.contents[blocks] = GARBAGE


class _SkipCopy:
    def move(self, pairs: Pairs) -> None:
        pass


class _EarlyReuse:
    def __init__(self, mover: SupportsMove, target: Target) -> None:
        self._mover = mover
        self._target = target

    def move(self, pairs: Pairs) -> None:
        _scribble(self._target, pairs[:, 0])
        self._mover.move(pairs)


class _Broken:
    """An MMU but for what a subclass replaces."""

    def __init__(self, mmu: MMU, target: Target) -> None:
        self._mmu = mmu
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mmu, name)


class _SkipCommit(_Broken):
    def commit(self, moves: Moves) -> int:
        _scribble(self._target, moves.pairs[:, 0])
        self._mmu.abort(moves)
        return 0


class _WrongBlock(_Broken):
    def prepare(
        self,
        step: int,
        sequences: npt.NDArray[np.int64],
        tables: BlockTables,
        **rest: Any,
    ) -> npt.NDArray[np.int32]:
        copies = self._mmu.prepare(step, sequences, tables, **rest)
        self._damage()
        return copies

    def _damage(self) -> None:
        table = self._target.block_table
        right = int(table[0, 0])
        if right == self._mmu.null_block:
            return
        blocks = self._mmu.num_blocks
        table[0, 0] = (right + blocks // 2) % blocks if blocks > 1 else self._mmu.null_block
