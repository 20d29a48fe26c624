"""A small pool with contents: an MMU, NumPy storage, a mover, and what each position should hold.

For tests that tell a story in a few lines. ``machine.py`` is the same idea driven at random.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from kvmmu import MMU, CPUMover, Plan, Storage, run_plan

Ints: TypeAlias = npt.NDArray[Any]

ROWS = 8


def prefix_values(tokens: Sequence[int], seed: int = 0) -> Ints:
    """uint64 [n]: the value of each position, which depends on all tokens up to it."""
    value = 0x9E37_79B9_7F4A_7C15 ^ seed
    values = []
    for token in tokens:
        value = (value ^ (token + 1)) * 0xBF58_476D_1CE4_E5B9 % 2**64
        value ^= value >> 31
        values.append(value)
    return np.array(values, np.uint64)


class SmallPool:
    """``SmallPool(n, t)``: n blocks of t tokens, 8 bytes a token."""

    def __init__(self, num_blocks: int, block_size: int, width: int = 0, **config: Any) -> None:
        # Stories about block numbers are told with single blocks.
        config = {"page_orders": (0,), "hold_blocks": 0, **config}
        self.mmu = MMU(num_blocks, block_size, **config)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.memory = np.zeros((num_blocks + 1, block_size), np.uint64)
        self.mover = CPUMover(Storage.from_numpy([self.memory]))
        width = width or self.mmu.max_blocks_per_sequence
        self.tables = self.register(ROWS, width, max(64, 2 * width * block_size))
        self.tokens: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
        self._fresh = itertools.count(1)

    def register(self, rows: int, width: int, slots: int) -> Any:
        """Tables with memory of their own."""
        return self.mmu.register_tables(
            np.zeros((rows, width), np.int32),
            np.zeros(rows, np.int32),
            np.zeros(slots, np.int64),
            np.zeros(rows + 1, np.int32),
        )

    def fresh(self, count: int) -> list[int]:
        """Tokens that no other sequence has."""
        return list(itertools.islice(self._fresh, count))

    # -- sequences ---------------------------------------------------------------------------

    def open(self, tokens: int | Sequence[int], seed: int = 0, **keys: Any) -> int:
        """Opens a sequence without writing it. ``seed`` stands for what the salt and the extra
        keys do to its contents."""
        tokens = self.fresh(tokens) if isinstance(tokens, int) else list(tokens)
        sequence = self.mmu.open(np.array(tokens, np.int32), **keys)
        self.tokens[sequence] = tokens
        self.seeds[sequence] = seed
        return sequence

    def alloc(self, tokens: int | Sequence[int], seed: int = 0, **keys: Any) -> int:
        """Opens a sequence and writes all of it."""
        sequence = self.open(tokens, seed, **keys)
        self.write(sequence)
        return sequence

    def fork(self, sequence: int) -> int:
        child = self.mmu.fork(sequence)
        self.tokens[child] = list(self.tokens[sequence])
        self.seeds[child] = self.seeds[sequence]
        return child

    def append(self, sequence: int, tokens: int | Sequence[int]) -> Ints:
        """Appends tokens, carries out the copies that this takes and writes the tokens. Returns
        the copies."""
        tokens = self.fresh(tokens) if isinstance(tokens, int) else list(tokens)
        copies = self.mmu.append(sequence, np.array(tokens, np.int32))
        self.mover.move(copies)
        self.tokens[sequence] += tokens
        return np.concatenate([copies, self.write(sequence)])

    def truncate(self, sequence: int, length: int) -> None:
        self.mmu.truncate(sequence, length)
        del self.tokens[sequence][length:]

    def free(self, *sequences: int) -> None:
        for sequence in sequences:
            self.mmu.close(sequence)
            del self.tokens[sequence]

    # -- steps -------------------------------------------------------------------------------

    def begin_writing(self, *sequences: int) -> tuple[int, Ints]:
        """Schedules and writes what is left of these sequences; the step stays open."""
        step = self.mmu.begin_step()
        infos = [self.mmu.info(sequence) for sequence in sequences]
        left = [info.num_tokens - info.num_scheduled for info in infos]
        copies = self.mmu.prepare(
            step,
            np.array(sequences, np.int64),
            self.tables,
            query_lens=np.array(left, np.int32),
        )
        self.mover.move(copies)
        values = [
            self.values(sequence)[info.num_scheduled :]
            for sequence, info in zip(sequences, infos, strict=True)
        ]
        slots = self.tables.slot_mapping[: self.tables.num_tokens]
        self.memory.reshape(-1)[slots] = np.concatenate([*values, np.zeros(0, np.uint64)])
        return step, copies

    def write(self, *sequences: int) -> Ints:
        """Writes what is left of these sequences in a step of its own; returns its copies."""
        step, copies = self.begin_writing(*sequences)
        self.mmu.written(step)
        self.mmu.end_step(step)
        return copies

    # -- blocks and moves --------------------------------------------------------------------

    def blocks(self, sequence: int) -> list[int]:
        return [int(block) for block in self.mmu.block_table(sequence)]

    def refs(self, sequence: int) -> list[int]:
        """References of each block of a sequence."""
        blocks = self.mmu.block_table(sequence).astype(np.int64)
        return [int(count) for count in self.mmu.references(blocks)]

    def pin(self, *blocks: int) -> None:
        self.mmu.pin(np.array(blocks, np.int64))

    def unpin(self, *blocks: int) -> None:
        self.mmu.unpin(np.array(blocks, np.int64))

    def run(self, plan: Plan) -> int:
        return run_plan(self.mmu, self.mover, plan)

    def state(self, name: str) -> int:
        return self.mmu.states()[name]

    @property
    def free_blocks(self) -> int:
        """Available ones: empty, or cached and evictable."""
        return self.state("available")

    def match(self, tokens: Sequence[int], **keys: Any) -> int:
        return self.mmu.match(np.array(tokens, np.int32), **keys)

    # -- checks ------------------------------------------------------------------------------

    def first(self, sequence: int) -> int:
        """The first position that a sequence has not released."""
        return self.mmu.info(sequence).num_released * self.block_size

    def values(self, sequence: int) -> Ints:
        """What each position of a sequence should hold."""
        return prefix_values(self.tokens[sequence], self.seeds[sequence])

    def read(self, sequence: int, count: int | None = None) -> Ints:
        """What the written positions of a sequence hold, read through an exported row; without
        those that it has released at the front."""
        written = self.mmu.info(sequence).num_written if count is None else count
        self.mmu.export(np.array([sequence], np.int64), self.tables)
        row = self.tables.block_table[0]
        positions = np.arange(self.first(sequence), written)
        found: Ints = self.memory[row[positions // self.block_size], positions % self.block_size]
        return found

    def check(self) -> None:
        """Every open sequence reads its own bytes, and all invariants hold."""
        for sequence in self.tokens:
            written = self.mmu.info(sequence).num_written
            expected = self.values(sequence)[self.first(sequence) : written]
            np.testing.assert_array_equal(self.read(sequence), expected)
        for group in batches(sorted(self.tokens), ROWS):
            self.mmu.export(np.array(group, np.int64), self.tables)
            self.mmu.validate(self.tables)
        self.mmu.validate()

    def snapshot(self) -> Any:
        """All that can be seen of the state."""
        every = np.arange(self.num_blocks, dtype=np.int64)
        return (
            self.mmu.states(),
            {sequence: self.blocks(sequence) for sequence in self.tokens},
            sorted(self.mmu.sequences().tolist()),
            self.mmu.references(every).tolist(),
        )


def batches(items: list[int], size: int) -> Iterator[list[int]]:
    """The items in groups of a size."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
