"""The tables that kernels read, in device memory, at addresses that never change.

What lives here: :class:`DeviceTables`, one set a cache, and how what changed gets there. What never
lives here: what stands in a table; the MMU writes that, in host memory.

The MMU fills host buffers. What differs from what the device already has goes as (index, value)
entries into page-locked memory, and one launch of ``update_tables`` in the caller's stream, which
reads them there, writes them. So a decode step sends a few hundred bytes, a captured graph goes on
reading the same addresses, and host and device cannot differ: the difference is taken against a
mirror of what was sent, not against what was meant.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..bound import Bound
from ..buffers import Buffers, Csr
from .executor import Staging
from .launches import UpdateTables
from .streams import Streams, stream_for_once

__all__ = ["DeviceTables"]

Ints = npt.NDArray[np.int32]
Change: TypeAlias = tuple[npt.NDArray[np.intp], Ints]
_ENTRIES = 16384
"""Entries of one launch (128 KiB of staging). More go in several."""


class DeviceTables(Bound):
    """One set of tables in device memory.

    Args:
        streams: the device.
        shape: rows B, blocks a row W, tokens a step T.
        parts: of staging, used in turn: steps in flight and one more.

    Attributes:
        block_table: int32 [B, W]. seq_lens: int32 [B]. query_start_loc: int32 [B + 1].
            slot_mapping: int64 [T]. Tensors on the device. Between two calls of :meth:`update` they
            hold what the first of them sent.
    """

    def __init__(self, streams: Streams, shape: tuple[int, int, int], parts: int) -> None:
        rows, width, tokens = shape
        sizes = {
            "slot_mapping": 2 * tokens,  # words of int64, first so that they are aligned
            "block_table": rows * width,
            "seq_lens": rows,
            "query_start_loc": rows + 1,
            "indptr": rows + 1,
            "indices": rows * width,
            "last_page_len": rows,
        }
        self._streams = streams
        self._width = width
        self._memory = streams.zeros(4 * sum(sizes.values()))
        self._mirror = np.zeros(sum(sizes.values()), np.int32)
        words = self._memory.view(torch.int32)
        self._start: dict[str, int] = {}
        found = {}
        for name, size in sizes.items():
            start = self._start[name] = sum(sizes[other] for other in self._start)
            found[name] = words[start : start + size]
        self.slot_mapping = found["slot_mapping"].view(torch.int64)
        self.block_table = found["block_table"].view(rows, width)
        self.seq_lens, self.query_start_loc = found["seq_lens"], found["query_start_loc"]
        self._csr = Csr(found["indptr"], found["indices"], found["last_page_len"])
        self._update = UpdateTables(
            streams.kernel("update_tables"), self._memory.data_ptr(), len(self._mirror)
        )
        self._staging = Staging(streams, 8 * _ENTRIES, parts)
        self._rows = rows  # as far as the mirror may differ from empty: all, at first
        self._columns = width
        self._tokens = tokens

    @property
    def num_bytes(self) -> int:
        """Device memory of the tables."""
        return 4 * len(self._mirror)

    def update(self, buffers: Buffers) -> None:
        """Sends what the MMU has changed in this set of host buffers, whichever set was sent last.

        Queued in the caller's stream: behind all steps that are to read the old entries, ahead of
        those that read the new ones.
        """
        table, lens, slots, starts = (
            buffers.tables.block_table,
            buffers.tables.seq_lens,
            buffers.tables.slot_mapping,
            buffers.tables.query_start_loc,
        )
        rows, tokens = buffers.tables.num_rows, buffers.tables.num_tokens
        used = _columns(table[:rows], buffers.null_entry)
        most, wide = max(rows, self._rows), max(used, self._columns)
        indices = [
            self._flat("slot_mapping", slots[: max(tokens, self._tokens)].view(np.int32)),
            self._table(table[:most, :wide]),
            self._flat("seq_lens", lens[:most]),
            self._flat("query_start_loc", starts),
        ]
        # If a launch fails, those before it have been sent: the next update empties their rows too.
        self._rows, self._columns, self._tokens = most, wide, max(tokens, self._tokens)
        self._send(indices)
        self._rows, self._columns, self._tokens = rows, used, tokens

    def update_csr(self, buffers: Buffers) -> Csr:
        """The same rows in FlashInfer's form; views of device memory."""
        host = buffers.host_csr()
        self._send([self._flat(name, array) for name, array in zip(Csr._fields, host, strict=True)])
        return Csr(*(own[: len(array)] for own, array in zip(self._csr, host, strict=True)))

    def warm_up(self) -> None:
        """Launches ``update_tables`` once without entries."""
        with self._streams.use(stream_for_once(self._streams)):
            self._update.warm_up()

    # -- within ------------------------------------------------------------------------------

    def _flat(self, name: str, now: Ints) -> Change:
        """(index, value) of what differs from the mirror."""
        start = self._start[name]
        where = np.flatnonzero(self._mirror[start : start + len(now)] != now)
        return where + start, now[where]

    def _table(self, now: Ints) -> Change:
        rows, columns = now.shape
        start = self._start["block_table"]
        mirror = self._mirror[start : start + rows * self._width].reshape(rows, self._width)
        row, column = np.nonzero(mirror[:, :columns] != now)
        return row * self._width + column + start, now[row, column]

    def _send(self, changes: list[Change]) -> None:
        count = sum(len(where) for where, _ in changes)
        if count == 0:
            return
        where = np.concatenate([where for where, _ in changes])
        values = np.concatenate([values for _, values in changes])
        caller = stream_for_once(self._streams)
        for first in range(0, count, _ENTRIES):
            size = min(_ENTRIES, count - first)
            _, part = self._staging.take()
            entries = part[: 8 * size].view(np.uint32).reshape(size, 2)
            entries[:, 0] = where[first : first + size]
            entries[:, 1] = values[first : first + size].view(np.uint32)
            with self._streams.use(caller):
                self._update(entries)
            self._staging.queued(caller)
            self._mirror[where[first : first + size]] = values[first : first + size]


def _columns(table: Ints, null_entry: int) -> int:
    """Columns that hold a block in some row. A row holds its blocks first and nothing behind them,
    so a column without any says that there is none to its right. (No block, kernel block or page of
    a row has the number of padding.)"""
    low, high = 0, table.shape[1]
    while low < high:
        middle = (low + high) // 2
        if (table[:, middle] != null_entry).any():
            low = middle + 1
        else:
            high = middle
    return low
