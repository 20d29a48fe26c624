"""Five patches of the example free list, by people who had not seen the kit.

They were given the free list and its promises, and asked for faults that are easy to make and hard
to find; the faults are theirs, unchanged. What lives here: the patches, and ``BLIND_LISTS``, which
says of what kind each is. What never lives here: patches by those who wrote the kit (see
``patches.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmmu.testing.adapters import FreeList

__all__ = ["BLIND_LISTS"]


class MarksAsHeldWhatItRefuses(FreeList):
    """A claim that runs out puts its blocks back and leaves them marked as held. A release of them
    is accepted after that, and they are free twice."""

    def claim(self, n: int) -> list[int]:
        blocks: list[int] = []
        for _ in range(n):
            if not self.free:
                self.free.extend(reversed(blocks))
                raise MemoryError(f"need {n} blocks, free {len(self.free)}")
            blocks.append(self.free.pop())
            self.held.add(blocks[-1])
        return blocks


class UnmarksBlockByBlock(FreeList):
    """A release that fails at a later block has unmarked the earlier ones: neither held nor
    free."""

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block not in self.held:
                raise ValueError(f"not all held: {blocks}")
            self.held.remove(block)
        self.free.extend(blocks)


class SharesByAFlag(FreeList):
    """Two references are counted and a third is not: free while somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: set[int] = set()

    def retain(self, blocks: Sequence[int]) -> None:
        self._check(blocks)
        self.shared.update(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        self._check(blocks)
        super().release([block for block in blocks if block not in self.shared])
        self.shared.difference_update(blocks)

    def _check(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) < len(blocks) or not self.held.issuperset(blocks):
            raise ValueError(f"not all held: {blocks}")


class CutsOffNothing(FreeList):
    """Fresh blocks first, released ones for the rest, which ``[:-rest]`` strikes out. With a rest
    of 0 that is all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh = 0
        self.waiting: list[int] = []

    def claim(self, n: int) -> list[int]:
        left = self.num_blocks - self.fresh
        if n > left + len(self.waiting):
            raise MemoryError(f"need {n} blocks, free {left + len(self.waiting)}")
        take = min(n, left)
        rest = n - take
        blocks = [*range(self.fresh, self.fresh + take), *self.waiting[-rest:]][:n]
        self.fresh += take
        self.waiting = self.waiting[:-rest]
        self.held.update(blocks)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        self.waiting.extend(blocks)


class TakesTheRestForShared(FreeList):
    """A release walks from the tail to the first shared block; what stands before that is counted
    down and never looked at. A private block there is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [0] * self.num_blocks

    def claim(self, n: int) -> list[int]:
        blocks = super().claim(n)
        for block in blocks:
            self.counts[block] = 1
        return blocks

    def retain(self, blocks: Sequence[int]) -> None:
        self._check(blocks)
        for block in blocks:
            self.counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        self._check(blocks)
        end = len(blocks)
        while end and self.counts[blocks[end - 1]] == 1:
            end -= 1
        super().release(list(reversed(blocks[end:])))
        for block in blocks:
            self.counts[block] -= 1
        self.held = {block for block in self.held if self.counts[block] > 0}

    def _check(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) < len(blocks) or not self.held.issuperset(blocks):
            raise ValueError(f"not all held: {blocks}")


BLIND_LISTS: dict[type[FreeList], str] = {
    MarksAsHeldWhatItRefuses: "a refused claim changes something; a release twice",
    UnmarksBlockByBlock: "a refused release changes something; blocks are lost",
    SharesByAFlag: "a reference is not counted",
    CutsOffNothing: "blocks are lost",
    TakesTheRestForShared: "blocks are lost",
}
