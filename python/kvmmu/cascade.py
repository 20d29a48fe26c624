"""Rows that begin with the same blocks, as two levels for cascade attention.

What lives here: :func:`prefix_groups` and the arrays that it fills. What never lives here: which
rows form a group (the core, ``sequence/cascade.rs``), attention.

The form is that of FlashInfer's ``MultiLevelCascadeAttentionWrapper`` with two levels (Ye et al.,
"Cascade Inference", 2024): level 0 reads what a group of neighbouring rows shares once for all of
their queries, level 1 each row's rest, and the two results are merged by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ._core import BlockTables

__all__ = ["CascadeLevel", "PrefixGroups", "prefix_groups"]

Ints: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class CascadeLevel:
    """One level, int32 arrays; n is groups (level 0) or rows (level 1)."""

    qo_indptr: Ints
    """[n + 1]: where the query tokens of each begin, in the order of the batch."""
    kv_indptr: Ints
    """[n + 1]: where its entries begin in ``kv_indices``."""
    kv_indices: Ints
    """[k]: entries, as in ``block_table``: blocks, kernel blocks or pages."""
    kv_last_page_len: Ints
    """[n]: tokens in the last entry, 0 where there is none."""

    @classmethod
    def _empty(cls, rows: int, entries: int) -> CascadeLevel:
        sizes = (rows + 1, rows + 1, entries, rows)
        return cls(*(np.empty(size, np.int32) for size in sizes))

    def _first(self, n: int, entries: int) -> CascadeLevel:
        return CascadeLevel(
            self.qo_indptr[: n + 1],
            self.kv_indptr[: n + 1],
            self.kv_indices[:entries],
            self.kv_last_page_len[:n],
        )


@dataclass(frozen=True, slots=True, eq=False)
class PrefixGroups:
    """A batch as groups of neighbouring rows that share a physical prefix."""

    row_indptr: Ints
    """int32 [G + 1]: where the rows of each group begin. A row that shares nothing with a neighbour
    is a group of its own, without entries in level 0."""
    shared: CascadeLevel
    """Level 0: what all rows of a group begin with. Needs no causal mask: it ends before the step's
    first token in each of them, and holds full entries only."""
    own: CascadeLevel
    """Level 1: what is left of each row."""

    @property
    def levels(self) -> tuple[CascadeLevel, CascadeLevel]:
        return self.shared, self.own

    @classmethod
    def allocate(cls, max_rows: int, width: int) -> PrefixGroups:
        """Arrays for every batch of so many rows of so many entries, to be given as ``out``."""
        level = CascadeLevel._empty
        entries = max_rows * width
        # Of two rows or more, at most one is in level 0.
        shared = max(entries // 2, 1)
        return cls(
            np.empty(max_rows + 1, np.int32), level(max_rows, shared), level(max_rows, entries)
        )


class _HasTables(Protocol):
    @property
    def tables(self) -> BlockTables: ...


def prefix_groups(
    batch: BlockTables | _HasTables, *, out: PrefixGroups | None = None
) -> PrefixGroups:
    """Groups the rows of the last ``prepare`` by what they share.

    Neighbouring rows form a group where they begin with the same physical blocks: at least one
    entry of ``block_table`` whose tokens were all scheduled before this step in each of them. The
    groups are cut so that the entries that need not be read again are the most there can be; rows
    that are to share must stand next to each other. Moves change ``kv_indices`` only.

    Args:
        batch: registered tables, or a ``Batch`` of a ``KVCache``.
        out: arrays to write into, large enough (see :meth:`PrefixGroups.allocate`); what lies
            behind the result in them is untouched. Default: new ones.

    Returns:
        views of ``out``, cut to what was written.

    Raises:
        InvalidConfig: an export has changed rows or lengths since the last ``prepare``, so that
            ``query_start_loc`` is not theirs; an array of ``out`` is no int32 [n], overlaps another
            or is not writable.
        LimitExceeded: an array of ``out`` is too small.
        InvalidStep: the batch's step is over.
    """
    tables = batch if isinstance(batch, BlockTables) else batch.tables
    if out is None:
        out = PrefixGroups.allocate(max(tables.num_rows, 1), tables.block_table.shape[1])
    own, shared = out.own, out.shared
    groups, rows, in_shared, in_own = tables._prefix_groups(
        out.row_indptr,
        shared.qo_indptr,
        shared.kv_indptr,
        shared.kv_indices,
        shared.kv_last_page_len,
        own.qo_indptr,
        own.kv_indptr,
        own.kv_indices,
        own.kv_last_page_len,
    )
    return PrefixGroups(
        out.row_indptr[: groups + 1], shared._first(groups, in_shared), own._first(rows, in_own)
    )
