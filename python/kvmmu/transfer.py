"""What a transfer copies, in as few descriptors as there can be.

What lives here: runs of blocks, runs that are consecutive at two ends, and the byte ranges behind
either. NumPy only. What never lives here: a copy, a connection, or a reference on a block (a lease
holds those).

A transfer pays by the descriptor. One descriptor can cover several blocks only where they are
consecutive, and between two pools only where they are consecutive at both ends, in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import InvalidBlock, InvalidConfig
from .storage import Storage, _check_ids

__all__ = ["block_runs", "byte_ranges", "pair_ranges", "pair_runs"]

Ints: TypeAlias = npt.NDArray[np.int64]


def block_runs(blocks: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive ascending blocks, in the order given.

    Args:
        blocks: [n] of any integer dtype, for instance a block table.

    Returns:
        (first block, number of blocks) of each run. Written out one after another they are
        ``blocks`` again.

    Raises:
        InvalidConfig: not a one-dimensional integer array.
        InvalidBlock: a negative id (padding, for instance). Numbers: ``block``, ``index``.
    """
    ids = _blocks("blocks", blocks)
    starts = _run_starts(np.diff(ids) != 1, len(ids))
    return list(zip(ids[starts].tolist(), _lengths(starts, len(ids)), strict=True))


def byte_ranges(storage: Storage, runs: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.int64]]:
    """Where the bytes of these runs lie, region by region.

    Runs that follow one another are merged first. In a region whose blocks lie back to back
    (``stride == block_bytes``) a run is one range; in any other there is one a block, since the
    bytes between are somebody else's. Nothing is merged across regions.

    Args:
        storage: the memory; the addresses are good while it lives.
        runs: (first block, number of blocks) of each, from :func:`block_runs`. An empty run
            (0 blocks) has no range.

    Returns:
        for each region of the storage, in its order, int64 [k, 2]: (address, bytes) in the order
        of the runs.

    Raises:
        InvalidConfig: not pairs of integers, or a negative count.
        InvalidBlock: a run that leaves the usable blocks. Numbers: ``block``, ``num_blocks``.
    """
    starts, counts = _merged(storage.span, runs)
    single: Ints | None = None
    ranges: list[Ints] = []
    for region in storage.regions:
        if region.stride == region.block_bytes:
            first, size = starts, counts * region.block_bytes
        else:
            if single is None:
                single = _expanded(starts, counts)
            first, size = single, np.full(len(single), region.block_bytes, np.int64)
        ranges.append(np.stack([region.address + first * region.stride, size], axis=1))
    return ranges


def pair_runs(local: npt.NDArray[Any], remote: npt.NDArray[Any]) -> list[tuple[int, int, int]]:
    """Runs that one descriptor can copy: consecutive at both ends, in the same order.

    Args:
        local, remote: [n] of any integer dtype: block ``local[i]`` goes with block ``remote[i]``.

    Returns:
        (first local block, first remote block, number of blocks) of each, in the order given.

    Raises:
        InvalidConfig: the lengths differ (numbers: ``local``, ``remote``), or not
            one-dimensional integer arrays.
        InvalidBlock: a negative id. Numbers: ``block``, ``index``.
    """
    here, there = _blocks("local", local), _blocks("remote", remote)
    if len(here) != len(there):
        raise InvalidConfig(
            f"{len(here)} local blocks cannot be paired with {len(there)} remote ones",
            local=len(here),
            remote=len(there),
        )
    starts = _run_starts((np.diff(here) != 1) | (np.diff(there) != 1), len(here))
    lengths = _lengths(starts, len(here))
    return list(zip(here[starts].tolist(), there[starts].tolist(), lengths, strict=True))


def pair_ranges(
    local: Storage, remote: Storage, runs: Sequence[tuple[int, int, int]]
) -> list[npt.NDArray[np.int64]]:
    """The descriptors of a transfer: which bytes here go with which bytes there, region by region.

    In a region whose blocks lie back to back at both ends (``stride == block_bytes``) a run is one
    descriptor; in any other there is one a block. Runs are not merged: those of :func:`pair_runs`
    are maximal already.

    Args:
        local: the memory of this end.
        remote: that of the other end, as its own numbers describe it:
            ``Storage([Region(address, stride, block_bytes, num_blocks), ...], num_blocks)``. Its
            addresses are only computed with.
        runs: (first local block, first remote block, number of blocks) of each, from
            :func:`pair_runs`. An empty run (0 blocks) has no descriptor.

    Returns:
        for each region, in its order, int64 [k, 3]: (local address, remote address, bytes) in the
        order of the runs.

    Raises:
        InvalidConfig: not triples of integers, a negative count, or storages of another shape:
            unequally many regions (numbers: ``local``, ``remote``), or blocks of other sizes in one
            (``region``, ``local``, ``remote``).
        InvalidBlock: a run that leaves the usable blocks of its end. Numbers: ``block``,
            ``num_blocks``.
    """
    if len(local.regions) != len(remote.regions):
        raise InvalidConfig(
            f"{len(local.regions)} local regions cannot be paired with {len(remote.regions)} "
            "remote ones",
            local=len(local.regions),
            remote=len(remote.regions),
        )
    for index, (a, b) in enumerate(zip(local.regions, remote.regions, strict=True)):
        if a.block_bytes != b.block_bytes:
            raise InvalidConfig(
                f"region {index}: blocks of {a.block_bytes} bytes here, of {b.block_bytes} there",
                region=index,
                local=a.block_bytes,
                remote=b.block_bytes,
            )
    here, there, counts = _columns(
        runs, "(first local block, first remote block, number of blocks)"
    )
    _check_inside(local.span, here, counts, "the local storage")
    _check_inside(remote.span, there, counts, "the remote storage")
    here, there, counts = here[counts > 0], there[counts > 0], counts[counts > 0]
    single: tuple[Ints, Ints] | None = None
    ranges: list[Ints] = []
    for a, b in zip(local.regions, remote.regions, strict=True):
        size = a.block_bytes
        if a.stride == size == b.stride:
            first, other, sizes = here, there, counts * size
        else:
            if single is None:
                single = _expanded(here, counts), _expanded(there, counts)
            (first, other), sizes = single, np.full(len(single[0]), size, np.int64)
        from_here, from_there = a.address + first * a.stride, b.address + other * b.stride
        ranges.append(np.stack([from_here, from_there, sizes], axis=1))
    return ranges


def _blocks(name: str, blocks: npt.NDArray[Any]) -> Ints:
    """The ids as int64 [n]."""
    _check_ids(name, blocks)
    ids: Ints = blocks.astype(np.int64)
    if len(ids) and int(ids.min()) < 0:
        index = int(np.flatnonzero(ids < 0)[0])
        block = int(ids[index])
        raise InvalidBlock(
            f"{name}[{index}] is {block}, but ids start at 0", block=block, index=index
        )
    return ids


def _run_starts(breaks: npt.NDArray[np.bool_], count: int) -> Ints:
    """Index of the first element of each run; ``breaks[i]``: element i + 1 begins one."""
    starts: Ints = np.concatenate([np.zeros(min(count, 1), np.int64), np.flatnonzero(breaks) + 1])
    return starts


def _lengths(starts: Ints, count: int) -> list[int]:
    lengths: list[int] = np.diff(starts, append=count).tolist()
    return lengths


def _columns(runs: Sequence[tuple[int, ...]], of: str) -> list[Ints]:
    """The numbers of the runs, a column each; the last is how many blocks."""
    width = of.count(",") + 1
    try:
        table = np.array(list(runs)).reshape(-1, width)
    except (TypeError, ValueError):
        table = np.empty((0, width), np.object_)
    if len(table) != len(runs) or (len(table) and table.dtype.kind not in "iu"):
        groups = {2: "pairs", 3: "triples"}[width]
        raise InvalidConfig(f"runs must be {groups} {of} of integers", argument="runs")
    columns: list[Ints] = list(table.astype(np.int64).T)
    counts = columns[-1]
    if (counts < 0).any():
        index = int(np.flatnonzero(counts < 0)[0])
        raise InvalidConfig(f"run {index} has {counts[index]} blocks", argument="runs", index=index)
    return columns


def _check_inside(num_blocks: int, starts: Ints, counts: Ints, where: str) -> None:
    """Refuses a run that leaves the usable blocks."""
    # Compared without a sum that could overflow.
    outside = (starts < 0) | (counts > num_blocks) | (starts > num_blocks - counts)
    if outside.any():
        index = int(np.flatnonzero(outside)[0])
        start, count = int(starts[index]), int(counts[index])
        raise InvalidBlock(
            f"run {index} is {count} blocks from {start} on, but {where} has {num_blocks}",
            block=start if not 0 <= start < num_blocks else num_blocks,
            index=index,
            num_blocks=num_blocks,
        )


def _merged(num_blocks: int, runs: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Starts and counts of the runs, empty ones left out and neighbours merged."""
    starts, counts = _columns(runs, "(first block, number of blocks)")
    _check_inside(num_blocks, starts, counts, "the storage")
    starts, counts = starts[counts > 0], counts[counts > 0]
    heads = _run_starts(starts[:-1] + counts[:-1] != starts[1:], len(starts))
    if len(heads) == len(starts):
        return starts, counts
    return starts[heads], np.add.reduceat(counts, heads)


def _expanded(starts: Ints, counts: Ints) -> Ints:
    """Every block of the runs, in order."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    blocks: Ints = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return blocks
