"""One KV memory: an MMU, NumPy storage under it, a mover, and the tables that a model would read.

What lives here: :class:`Machine`, which builds the parts for a run, and writes and reads contents
only through what the MMU exported. What never lives here: requests, time, decisions.

Two regions are stored, and a move copies both: 8 bytes for each token position (``contents``) and
8 bytes a block that say which logical block was written there (``owners``; see :mod:`.sharing`).
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import numpy.typing as npt

from .._core import MMU, BlockTables
from ..errors import InvalidConfig
from ..movers import CPUMover, SupportsMove
from ..pairs import Pairs
from ..preheat import Preheated, preheat, touch_host
from ..storage import Storage
from .faults import FaultyMover
from .metrics import TimedMMU
from .options import MAX_SEQUENCE_BLOCKS, Options

__all__ = ["Machine"]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

MAX_TABLE_ENTRIES = 1 << 27
_METADATA_BYTES = 224
"""What the MMU keeps for a block beside its tokens (4 bytes each), rounded up."""


class Machine:
    """An MMU with everything around it.

    Args:
        options: pool, block size, placement, eviction, sabotage.
        rows: requests in one batch.
        longest: tokens of the longest sequence that will be opened.
        slots: most tokens written in one step.

    Raises:
        InvalidConfig: when this would not fit into the machine's memory, or the block table would
            be larger than 512 MiB.
    """

    def __init__(self, options: Options, *, rows: int, longest: int, slots: int) -> None:
        self.block_size = options.block_size
        self.num_blocks = options.blocks
        self.null_block = options.blocks
        width = min(options.blocks, MAX_SEQUENCE_BLOCKS, max(1, -(-longest // self.block_size)))
        _check_memory(options, rows, width, slots)
        mmu = MMU(
            options.blocks,
            options.block_size,
            max_sequences=rows,
            max_blocks_per_sequence=width,
            prefix_caching=options.prefix_caching,
            placement=options.placement,
            page_orders=options.page_orders,
            hold_blocks=options.hold_blocks,
            budget_blocks=options.budget_blocks,
            guarantee=options.guarantee,
            seed=options.seed,
            eviction=options.eviction,
            page_aware=options.page_aware,
            windows_below=options.windows_below,
            gather_least=options.gather_least,
            **options.further,
        )
        stored = options.blocks + 1 if options.contents else 0
        try:
            contents = np.zeros((stored, self.block_size), dtype=np.uint64)
            owners = np.zeros((stored, 1), dtype=np.uint64)
            table = np.empty((rows, width + width % 2), dtype=np.int32)
            slot_mapping = np.empty(slots, dtype=np.int64)
        except MemoryError as error:
            raise InvalidConfig(
                f"{options.blocks} blocks of {options.block_size} tokens are too many for this "
                f"machine ({error})"
            ) from None
        self.contents = contents
        self._flat = contents.reshape(-1)
        self.owners = owners.reshape(-1)
        self.block_table = table
        self.slot_mapping = slot_mapping
        self.seq_lens = np.zeros(rows, dtype=np.int32)
        mover: SupportsMove = _NoMover()
        touch = None
        if options.contents:
            storage = Storage.from_numpy([contents, owners])
            mover, touch = CPUMover(storage), partial(touch_host, storage)
        self.preheated: Preheated | None = None
        if options.preheat_pages:
            self.preheated = preheat(mmu, options.preheat_pages, touch=touch)
        if options.sabotage is not None:
            from .sabotage import Target, wrap

            mmu, mover = wrap(options.sabotage, mmu, mover, Target(contents, table))
        if options.inject_faults:
            mover = FaultyMover(mover, options.inject_faults, options.seed)
        self.tables: BlockTables = mmu.register_tables(
            self.block_table,
            self.seq_lens,
            self.slot_mapping,
            np.zeros(rows + 1, dtype=np.int32),
        )
        self.mmu = TimedMMU(mmu, mover)

    def write(self, count: int, values: U64, owners: U64 | I64) -> None:
        """Writes the first ``count`` slots of the slot mapping of the step.

        Args:
            values: uint64 [count], contents.
            owners: [count], the logical block that each slot belongs to.
        """
        slots = self.slot_mapping[:count]
        self._flat[slots] = values
        self.owners[slots // self.block_size] = owners

    def read(self, rows: I64, positions: I64) -> U64:
        """uint64 [k]: what is stored at positions of rows, looked up in the exported table."""
        blocks = self.block_table[rows, positions // self.block_size]
        return self.contents[blocks, positions % self.block_size]

    def read_row(self, row: int, tokens: int) -> U64:
        """uint64 [tokens]: the first positions of a row, looked up in the exported table."""
        blocks = self.block_table[row, : -(-tokens // self.block_size)]
        return self.contents[blocks].reshape(-1)[:tokens]

    def block_at(self, row: int, position: int) -> int:
        return int(self.block_table[row, position // self.block_size])


class _NoMover:
    """Where no bytes are stored there is nothing to copy."""

    def move(self, pairs: Pairs) -> None:
        pass


def _check_memory(options: Options, rows: int, width: int, slots: int) -> None:
    if rows * width > MAX_TABLE_ENTRIES:
        raise InvalidConfig(
            f"--max-running: {rows} rows of {width} blocks, allowed: at most "
            f"{MAX_TABLE_ENTRIES // width} rows with requests of this length and this --block-size"
        )
    stored = 12 * options.block_size + 8 if options.contents else 4 * options.block_size
    needed = (options.blocks + 1) * (stored + _METADATA_BYTES)
    needed += rows * width * 4 + slots * 24
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return
    if needed > memory:
        raise InvalidConfig(
            f"{options.blocks} blocks of {options.block_size} tokens need "
            f"{needed / 2**30:.1f} GiB, this machine has {memory / 2**30:.1f} GiB"
        )
