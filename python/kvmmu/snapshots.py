"""The whole memory at one moment, to look at later: as JSON, and as a file for PyTorch's viewer.

What lives here: :func:`snapshot` and :class:`Snapshot`. What never lives here: looking at the pool
(``MMU.block_map`` does), pictures (see :mod:`kvmmu.pictures`), reading contents of blocks.
"""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ._core import MMU, BlockMap, __version__
from .errors import ConcurrentUse, InvalidConfig, UnknownSequence

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from .storage import Region, Storage

__all__ = ["Snapshot", "snapshot"]

FORMAT = 1
"""Of the JSON; a reader refuses others."""

_COLUMNS = {
    "states": np.uint8,
    "references": np.int32,
    "sequences": np.int64,
    "logical": np.int32,
    "orders": np.int8,
    "flags": np.uint8,
}
_ACTIVE = ("in_use", "destined", "cached")
_FLAGS = ("held", "pinned", "leased", "moving", "published", "evictable")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What every physical block was at one moment. The six arrays are those of
    :class:`kvmmu.BlockMap`, one entry a block.

    Args:
        states, references, sequences, logical, orders, flags: as there.
        about: the rest, ready for JSON: ``num_blocks``, ``block_size``, ``null_block``,
            ``page_orders``, ``blocks`` (how many in each state), ``measure``, ``stats``,
            ``tokens`` of each sequence that the arrays name, ``taken_s`` (seconds since 1970), and
            ``storage`` (``device``, ``block_bytes`` and ``regions``) or None.
    """

    states: npt.NDArray[np.uint8]
    references: npt.NDArray[np.int32]
    sequences: npt.NDArray[np.int64]
    logical: npt.NDArray[np.int32]
    orders: npt.NDArray[np.int8]
    flags: npt.NDArray[np.uint8]
    about: dict[str, Any]

    def __len__(self) -> int:
        return len(self.states)

    def run_starts(self) -> npt.NDArray[np.int64]:
        """int64 [k]: where a run begins: neighbours that are alike, and follow each other in their
        sequence where they are mapped."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        differs = np.zeros(len(self) - 1, dtype=bool)
        for name in _COLUMNS:
            column = getattr(self, name)
            if name == "logical":
                step = np.where(self.orders[1:] >= 0, 1, 0)
                differs |= column[1:] != column[:-1] + step
            else:
                differs |= column[1:] != column[:-1]
        return np.concatenate([[0], np.flatnonzero(differs) + 1]).astype(np.int64)

    # -- JSON ------------------------------------------------------------------------------

    def json(self) -> str:
        """All of it as JSON text. ``runs`` has a list for each array, with one entry a run of
        equal blocks, and ``starts``; ``logical`` is that of the first block of a run.
        :meth:`from_json` reads it back without loss."""
        starts = self.run_starts()
        runs = {name: getattr(self, name)[starts].tolist() for name in _COLUMNS}
        return json.dumps(
            {
                "kvmmu_snapshot": FORMAT,
                "version": __version__,
                **self.about,
                "state_names": list(BlockMap.STATES),
                "flag_names": {name: getattr(BlockMap, name.upper()) for name in _FLAGS},
                "span": len(self),
                "runs": {"starts": starts.tolist(), **runs},
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """What :meth:`json` wrote.

        Raises:
            InvalidConfig: it is not such a text; says what is wrong with it.
        """
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            _refuse(f"not JSON ({error})")
        if not isinstance(read, dict) or "kvmmu_snapshot" not in read:
            _refuse("it has no 'kvmmu_snapshot'")
        if read.pop("kvmmu_snapshot") != FORMAT:
            _refuse(f"its format is another one than {FORMAT}, which this version reads")
        try:
            span, runs = read.pop("span"), read.pop("runs")
            starts = np.array(runs["starts"], dtype=np.int64)
            lengths = np.diff(np.append(starts, span))
            columns = {
                name: np.repeat(np.array(runs[name], dtype=dtype), lengths)
                for name, dtype in _COLUMNS.items()
            }
        except (KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
            _refuse(f"its runs cannot be read ({type(error).__name__}: {error})")
        if (len(starts) and starts[0] != 0) or len(columns["states"]) != span:
            _refuse(f"its runs do not cover its {span} blocks")
        if span and columns["states"].max() >= len(BlockMap.STATES):
            _refuse(f"state {columns['states'].max()}: allowed is 0 to {len(BlockMap.STATES) - 1}")
        inside = np.arange(span) - np.repeat(starts, lengths)
        columns["logical"] = (
            columns["logical"] + np.where(columns["orders"] >= 0, inside, 0)
        ).astype(np.int32)
        for name in ("version", "state_names", "flag_names"):
            read.pop(name, None)
        return cls(**columns, about=read)

    # -- PyTorch ---------------------------------------------------------------------------

    def torch_snapshot(self, regions: Iterable[int] | None = None) -> dict[str, Any]:
        """As ``torch.cuda.memory._snapshot()`` tells of its own allocator.

        A segment is the memory of one region, or of several that lie within each other (K and V of
        a block side by side): then a block of it is the whole stride, of which ``requested_size``
        bytes are KV. A block is a run of blocks of the pool with one state and one sequence.

        ======== ===================== =========================================
        here     in the viewer         since
        ======== ===================== =========================================
        in use   active_allocated
        destined active_allocated      a copy is being written into it
        cached   active_allocated      it has contents, although it may be evicted
        fenced   active_pending_free   a step in flight may still touch it
        empty    inactive
        offline  inactive
        ======== ===================== =========================================

        The two frames of a block say its state, its sequence, and its first logical block as line.
        There are no traces: nobody recorded how it came to this. The states are those that PyTorch
        writes and its viewer draws; the docstring of ``_snapshot`` calls the second otherwise.

        Args:
            regions: numbers of the regions to show; None: all. They differ in addresses and sizes
                only, and a file grows with them.

        Raises:
            InvalidConfig: it was taken without a storage, or there is no such region.
        """
        storage = self.about.get("storage")
        if storage is None:
            raise InvalidConfig(
                "this snapshot was taken without a storage, so its blocks have no addresses"
            )
        every = storage["regions"]
        chosen = range(len(every)) if regions is None else list(regions)
        for index in chosen:
            if not 0 <= index < len(every):
                raise InvalidConfig(f"region {index}: there are {len(every)}", region=index)
        device = int(storage["device"].partition(":")[2] or 0)
        runs = self._torch_runs()
        segments = [
            _segment(group, runs, device) for group in _groups([every[index] for index in chosen])
        ]
        return {"segments": segments, "device_traces": [[] for _ in range(device + 1)]}

    def save(self, path: str | PathLike[str], *, regions: Iterable[int] | None = None) -> None:
        """Writes :meth:`torch_snapshot` as the pickle that PyTorch's memory viewer opens. Only
        numbers, texts, lists and dicts are in it.

        Raises:
            InvalidConfig: as there.
            OSError: the file cannot be written.
        """
        taken = self.torch_snapshot(regions)
        Path(path).write_bytes(pickle.dumps(taken, protocol=4))

    def _torch_runs(self) -> list[tuple[int, int, str, list[dict[str, Any]]]]:
        """(first block, blocks, state in PyTorch's words, frames) of each run by state and
        sequence. Regions share the frames, and so does the pickle."""
        if not len(self):
            return []
        differs = (np.diff(self.states) != 0) | (np.diff(self.sequences) != 0)
        starts = np.concatenate([[0], np.flatnonzero(differs) + 1])
        ends = np.append(starts[1:], len(self))
        runs = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            state, sequence = BlockMap.STATES[self.states[start]], int(self.sequences[start])
            there = "active_pending_free" if state == "fenced" else "inactive"
            if state in _ACTIVE:
                there = "active_allocated"
            frames = [{"filename": "state", "line": 0, "name": state}]
            if sequence >= 0:
                line = int(self.logical[start])
                frames.insert(
                    0, {"filename": "sequence", "line": line, "name": f"sequence {sequence}"}
                )
            runs.append((start, end - start, there, frames))
        return runs


def snapshot(mmu: MMU, storage: Storage | None = None) -> Snapshot:
    """The memory of an MMU as it is now; ``KVCache.snapshot`` gives the storage.

    The arrays are of one moment. ``measure``, ``stats`` and the ``tokens`` of sequences are read
    right after; a sequence that has been closed by then, or is in a call, has no ``tokens``.

    Args:
        mmu: whose memory.
        storage: where its blocks lie. Without one there is nothing that :meth:`Snapshot.save`
            could write.

    Raises:
        InvalidConfig: the storage has other blocks than the MMU. Numbers: ``num_blocks``,
            ``expected``.
    """
    if storage is not None and (
        (storage.num_blocks, storage.null_block) != (mmu.num_blocks, mmu.null_block)
    ):
        raise InvalidConfig(
            f"the storage has {storage.num_blocks} blocks and null block {storage.null_block}, the "
            f"MMU {mmu.num_blocks} and {mmu.null_block}",
            num_blocks=storage.num_blocks,
            expected=mmu.num_blocks,
        )
    taken_s = time.time()
    blocks = mmu.block_map()
    counts = np.bincount(blocks.states, minlength=len(BlockMap.STATES)).tolist()
    measure = mmu.measure()
    about: dict[str, Any] = {
        "taken_s": taken_s,
        "num_blocks": mmu.num_blocks,
        "block_size": mmu.block_size,
        "null_block": mmu.null_block,
        "page_orders": mmu.page_orders,
        "blocks": dict(zip(BlockMap.STATES, counts, strict=True)),
        "measure": {
            "ratio_empty": measure.ratio_empty,
            "ratio_available": measure.ratio_available,
            "available": measure.available,
            "largest_run_available": measure.largest_run_available,
            "free_windows": measure.free_windows,
            "sequences": measure.sequences,
            "runs_per_sequence": measure.runs_per_sequence,
            "unused_slots": measure.unused_slots,
        },
        "stats": mmu.stats(),
        "tokens": _tokens(mmu, np.unique(blocks.sequences).tolist()),
        "storage": None if storage is None else _about(storage),
    }
    columns = {name: getattr(blocks, name) for name in _COLUMNS}
    return Snapshot(**columns, about=about)


def _tokens(mmu: MMU, sequences: list[int]) -> dict[str, int]:
    """Tokens by sequence id, which JSON wants as a text."""
    tokens = {}
    for sequence in sequences:
        if sequence < 0:
            continue
        try:
            tokens[str(sequence)] = mmu.info(sequence).num_tokens
        except (UnknownSequence, ConcurrentUse):
            continue
    return tokens


def _about(storage: Storage) -> dict[str, Any]:
    def described(region: Region) -> dict[str, int]:
        names = ("address", "stride", "block_bytes", "num_blocks")
        return {name: getattr(region, name) for name in names}

    return {
        "device": storage.device,
        "block_bytes": storage.block_bytes,
        "regions": [described(region) for region in storage.regions],
    }


def _refuse(what: str) -> NoReturn:
    raise InvalidConfig(f"no snapshot of kvmmu: {what}")


def _end(region: dict[str, int]) -> int:
    return region["address"] + (region["num_blocks"] - 1) * region["stride"] + region["block_bytes"]


def _groups(regions: list[dict[str, int]]) -> list[list[dict[str, int]]]:
    """Regions whose memory lies within each other's together. Those have one stride: a storage
    refuses others."""
    groups: list[list[dict[str, int]]] = []
    end = 0
    for region in sorted(regions, key=lambda region: region["address"]):
        if groups and region["address"] < end:
            groups[-1].append(region)
        else:
            groups.append([region])
        end = max(end, _end(region))
    return groups


def _segment(
    group: list[dict[str, int]],
    runs: list[tuple[int, int, str, list[dict[str, Any]]]],
    device: int,
) -> dict[str, Any]:
    address, end = group[0]["address"], max(map(_end, group))
    stride, pieces = group[0]["stride"], sum(region["block_bytes"] for region in group)
    most = max(region["num_blocks"] for region in group)
    known = sum(blocks for _, blocks, _, _ in runs)
    if most > known:  # the null block, and what a region has beyond the pool
        runs = [*runs, (known, most - known, "inactive", [])]
    if group[-1]["address"] + group[-1]["block_bytes"] - address <= stride:
        places = [(address + first * stride, n * pieces, of) for first, n, *of in runs]
    else:
        # The pieces of a block lie further apart than its stride: each by itself.
        places = [
            (region["address"] + block * stride, region["block_bytes"], of)
            for first, n, *of in runs
            for region in group
            for block in range(first, min(first + n, region["num_blocks"]))
        ]
        places.sort(key=lambda place: place[0])
    blocks: list[dict[str, Any]] = []
    ends = [place[0] for place in places[1:]] + [end]
    for (start, requested, (state, frames)), end_of in zip(places, ends, strict=True):
        size = end_of - start
        blocks.append(
            {
                "address": start,
                "size": size,
                "requested_size": min(requested, size),
                "state": state,
                "frames": frames,
            }
        )

    def total(*states: str) -> int:
        return sum(int(block["size"]) for block in blocks if block["state"] in states)

    return {
        "device": device,
        "address": address,
        "total_size": end - address,
        "allocated_size": total("active_allocated"),
        "active_size": total("active_allocated", "active_pending_free"),
        "requested_size": sum(
            block["requested_size"] for block in blocks if block["state"] == "active_allocated"
        ),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
