"""Two plain allocators without a fault, made to be patched.

What lives here: :class:`BlockPool` deals in ids and :class:`CachingPool` remembers prompts beside;
:class:`Sequences` deals in sequences (fork, copy-on-write, compaction). What never lives here:
faults (see ``patches.py``), which is why every decision is a method of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

Key = tuple[int, int]
"""Prompt and number of a block in it."""


class BlockPool:
    """Ids with references."""

    def __init__(self, num_blocks: int = 6) -> None:
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks
        self.empty = list(range(num_blocks))

    def claim(self, n: int) -> list[int]:
        self.check_free(n)
        return [self.take() for _ in range(n)]

    def release(self, blocks: Sequence[int]) -> None:
        self.check_held(blocks)
        for block in blocks:
            self.drop(block)

    def retain(self, blocks: Sequence[int]) -> None:
        self.check_held(blocks)
        for block in blocks:
            self.counts[block] += 1

    def stats(self) -> dict[str, int]:
        return {"free": self.free, "used": sum(count > 0 for count in self.counts)}

    def references(self, block: int) -> int:
        return self.counts[block]

    # -- what a patch replaces -----------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self.empty)

    def check_free(self, n: int) -> None:
        if n > self.free:
            raise MemoryError

    def check_held(self, blocks: Sequence[int]) -> None:
        for block in set(blocks):
            held = 0 <= block < self.num_blocks and self.counts[block] > 0
            if not held or list(blocks).count(block) > self.counts[block]:
                raise ValueError(f"block {block} is not held")

    def take(self) -> int:
        block = self.empty.pop(0)
        self.counts[block] = 1
        return block

    def drop(self, block: int) -> None:
        self.counts[block] -= 1
        if self.counts[block] == 0:
            self.put_back(block)

    def put_back(self, block: int) -> None:
        self.empty.append(block)


class CachingPool(BlockPool):
    """With a prefix cache. A free block is empty, or cached and evictable."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__(num_blocks)
        self.evictable: list[int] = []  # oldest first
        self.index: dict[Key, int] = {}
        self.keys: dict[int, Key] = {}

    def claim_prompt(self, prompt: int, n: int) -> tuple[list[int], int]:
        found = self.match(prompt, n)
        self.hold(found)
        try:
            self.check_free(n - len(found))
        except MemoryError:
            self.release(found)
            raise
        return found + [self.take() for _ in range(n - len(found))], len(found)

    def publish(self, blocks: Sequence[int], prompt: int) -> None:
        for i, block in enumerate(blocks):
            if (prompt, i) not in self.index and block not in self.keys:
                self.index[prompt, i] = block
                self.keys[block] = (prompt, i)

    def evict(self, n: int) -> int:
        victims = self.evictable[:n]
        for block in victims:
            self.evictable.remove(block)
            self.forget(block)
            self.empty.append(block)
        return len(victims)

    def stats(self) -> dict[str, int]:
        return super().stats() | {"cached": len(self.evictable)}

    # -- what a patch replaces -----------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self.empty) + len(self.evictable)

    def take(self) -> int:
        if not self.empty:
            self.empty.append(self.take_oldest())
        return super().take()

    def take_oldest(self) -> int:
        block = self.evictable.pop(0)
        self.forget(block)
        return block

    def put_back(self, block: int) -> None:
        (self.evictable if block in self.keys else self.empty).append(block)

    def match(self, prompt: int, n: int) -> list[int]:
        found = []
        for i in range(n):
            if (prompt, i) not in self.index:
                break
            found.append(self.index[prompt, i])
        return found

    def hold(self, found: list[int]) -> None:
        for block in found:
            if self.counts[block] == 0:
                self.evictable.remove(block)
            self.counts[block] += 1

    def forget(self, block: int) -> None:
        del self.index[self.keys.pop(block)]


class Table(list[int]):
    """The blocks of a sequence."""


class Sequences:
    """Sequences that share blocks, copy on write and can be moved. References are not shown."""

    copies_on_write = True

    def __init__(self, num_blocks: int = 6) -> None:
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks
        self.tables: list[Table] = []

    def claim(self, n: int) -> Table:
        table = Table(self.take(n))
        self.tables.append(table)
        return table

    def release(self, table: Table) -> None:
        self.check_open(table)
        self.tables = [t for t in self.tables if t is not table]
        for block in table:
            self.drop(block)

    def fork(self, table: Table) -> Table:
        self.check_open(table)
        child = Table(table)
        for block in child:
            self.counts[block] += 1
        self.tables.append(child)
        return child

    def append(self, table: Table, n: int) -> list[tuple[int, int]]:
        self.check_open(table)
        shared = self.must_copy(table)
        new = self.take(n + shared)
        copies = []
        if shared:
            copies = [(table[-1], new.pop())]
            self.drop(table[-1])
            table[-1] = copies[0][1]
        table.extend(new)
        return copies

    def truncate(self, table: Table, n: int) -> None:
        for block in table[n:]:
            self.drop(block)
        del table[n:]

    def compact(self) -> list[tuple[int, int]]:
        """Moves the last block in use to the first that is free, until all lie in front."""
        moves: list[tuple[int, int]] = []
        while True:
            source = max((b for b, count in enumerate(self.counts) if count), default=-1)
            destination = self.destination()
            if destination > source:
                return moves
            self.move(source, destination)
            moves.append((source, destination))

    def stats(self) -> dict[str, int]:
        return {"free": self.counts.count(0)}

    # -- what a patch replaces -----------------------------------------------------------------

    def take(self, n: int) -> list[int]:
        free = [block for block, count in enumerate(self.counts) if count == 0]
        if n > len(free):
            raise MemoryError
        blocks = free[len(free) - n :]  # from behind, so that there is something to move
        for block in blocks:
            self.counts[block] = 1
        return blocks

    def check_open(self, table: Table) -> None:
        if not any(table is t for t in self.tables):
            raise KeyError("no open sequence")

    def must_copy(self, table: Table) -> bool:
        return bool(table) and self.counts[table[-1]] > 1

    def drop(self, block: int) -> None:
        self.counts[block] -= 1

    def destination(self) -> int:
        return next((b for b, count in enumerate(self.counts) if not count), self.num_blocks)

    def move(self, source: int, destination: int) -> None:
        self.counts[destination], self.counts[source] = self.counts[source], 0
        for table in self.tables:
            self.repoint(table, source, destination)

    def repoint(self, table: Table, source: int, destination: int) -> None:
        table[:] = [destination if block == source else block for block in table]
