"""The tables that kernels read: registered once, rotated with the depth of steps in flight.

What lives here: :class:`Buffers` (one set) and :class:`Rotation` (the sets of a cache). What never
lives here: what is written into them; the MMU does that.

A set must not be written while the device may still read it, so a cache that keeps ``n`` steps in
flight has ``n + 1`` sets and gives the next step the one that has rested longest. The address of
every buffer stays the same for the life of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ._core import MMU, BlockTables
from .errors import InvalidConfig, InvalidStep

__all__ = ["Buffers", "Csr", "Entries", "Rotation"]

_NAMES = ("block_table", "seq_lens", "slot_mapping", "query_start_loc")


class Csr(NamedTuple):
    """Rows in FlashInfer's form, int32 tensors over persistent memory."""

    indptr: torch.Tensor
    """[B + 1]: where each row begins in ``indices``."""
    indices: torch.Tensor
    """[n]: entries of all scheduled tokens, row after row: blocks, kernel blocks or pages."""
    last_page_len: torch.Tensor
    """[B]: tokens in the last entry of each row, 0 for an empty one."""


def _as_numpy(name: str, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise InvalidConfig(f"{name} is on {value.device}: allowed is CPU memory")
        array: npt.NDArray[Any] = value.numpy()
        return array
    if isinstance(value, np.ndarray):
        return value
    raise InvalidConfig(f"{name} is a {type(value).__name__}: allowed is a tensor or an array")


class Entries(NamedTuple):
    """What the entries of ``block_table`` name; see ``MMU.register_tables``."""

    kernel_block_size: int | None = None
    page_order: int | None = None

    def tokens(self, mmu: MMU) -> int:
        """Tokens of one entry.

        Raises:
            InvalidConfig: this MMU cannot be read by such entries.
        """
        one = _allocate((1, 1, 1))
        return mmu.register_tables(*one.values(), **self._asdict()).kernel_block_size


class Buffers:
    """One set of registered buffers.

    Attributes:
        tables: what the MMU writes.
        block_table: int32 [B, W]. seq_lens: int32 [B]. slot_mapping: int64 [T].
            query_start_loc: int32 [B + 1]. Torch tensors over the registered memory.
    """

    def __init__(self, mmu: MMU, arrays: Mapping[str, Any], entries: Entries) -> None:
        if set(arrays) != set(_NAMES):
            raise InvalidConfig(f"buffers {sorted(arrays)}: allowed are exactly {sorted(_NAMES)}")
        found = {name: _as_numpy(name, arrays[name]) for name in _NAMES}
        self.arrays = tuple(found.values())
        self.tables: BlockTables = mmu.register_tables(
            *(found[name] for name in _NAMES), **entries._asdict()
        )
        self.block_table = torch.from_numpy(found["block_table"])
        self.seq_lens = torch.from_numpy(found["seq_lens"])
        self.slot_mapping = torch.from_numpy(found["slot_mapping"])
        self.query_start_loc = torch.from_numpy(found["query_start_loc"])
        self.null_entry = self.tables.null_entry
        self._csr: tuple[npt.NDArray[np.int32], ...] | None = None
        self.step: int | None = None
        """The step that has it, or had it last."""

    def csr(self) -> Csr:
        """The rows as they are now. The memory is made at the first call and stays."""
        return Csr(*(torch.from_numpy(array) for array in self.host_csr()))

    def host_csr(self) -> tuple[npt.NDArray[np.int32], ...]:
        """The same as arrays."""
        rows, width = self.block_table.shape
        if self._csr is None:
            sizes = (rows + 1, rows * width, rows)
            self._csr = tuple(np.zeros(size, dtype=np.int32) for size in sizes)
        indptr, indices, last = self._csr
        count = self.tables.csr(indptr, indices, last)
        batch = self.tables.num_rows
        return indptr[: batch + 1], indices[:count], last[:batch]


class Rotation:
    """The sets of one cache.

    Args:
        sets: mappings with the four buffers each, or None to allocate.
        depth: steps in flight that the cache is to allow, >= 1.
        shape: rows, entries a row, tokens a step: of the buffers to allocate.
        entries: what the entries of ``block_table`` name.
    """

    def __init__(
        self,
        mmu: MMU,
        sets: Sequence[Mapping[str, Any]] | None,
        depth: int,
        shape: tuple[int, int, int],
        entries: Entries,
    ) -> None:
        if sets is None:
            sets = [_allocate(shape) for _ in range(depth + 1)]
        if len(sets) != depth + 1:
            raise InvalidConfig(
                f"{len(sets)} sets of buffers for {depth} steps in flight: allowed are {depth + 1}"
            )
        self._sets = [Buffers(mmu, arrays, entries) for arrays in sets]
        for number, one in enumerate(self._sets):
            for other in self._sets[:number]:
                if any(np.may_share_memory(a, b) for a in one.arrays for b in other.arrays):
                    raise InvalidConfig(f"the buffers of set {number} overlap those of another")
        self._order = list(self._sets)  # taken longest ago first

    def take(self, step: int, in_flight: set[int]) -> Buffers:
        """The set that was taken longest ago of those whose steps have ended, for a step.

        Raises:
            InvalidStep: the steps that had them last are all in flight.
        """
        for buffers in self._order:
            if buffers.step not in in_flight:
                break
        else:
            raise InvalidStep(
                f"step {step}: all {len(self._sets)} sets of buffers are in flight, the oldest "
                f"with step {self._order[0].step}: end that first, or allow more steps_in_flight",
                step=step,
            )
        self._order.remove(buffers)
        self._order.append(buffers)
        buffers.step = step
        return buffers

    def give_back(self, buffers: Buffers) -> None:
        """A set that was taken and not used."""
        self._order.remove(buffers)
        self._order.insert(0, buffers)
        buffers.step = None

    def __iter__(self) -> Iterator[Buffers]:
        return iter(self._sets)


def _allocate(shape: tuple[int, int, int]) -> dict[str, npt.NDArray[Any]]:
    rows, width, tokens = shape
    return {
        "block_table": np.empty((rows, width), dtype=np.int32),
        "seq_lens": np.empty(rows, dtype=np.int32),
        "slot_mapping": np.empty(tokens, dtype=np.int64),
        "query_start_loc": np.empty(rows + 1, dtype=np.int32),
    }
