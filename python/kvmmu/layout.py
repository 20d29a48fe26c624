"""Where the KV of each layer lies in torch tensors, and how an engine reads and writes it there.

What lives here: the shapes and strides of the layouts, the checks that come before a tensor is
adopted, and reads and writes by slot and by block. What never lives here: a decision about blocks,
a page table or a move; those are told by block ids and slots. ``import kvmmu`` does not come here.

Words: a tensor's *physical blocks* are the usable ones and the null block, the last one here. The
*logical* shape of K or V is ``[physical blocks, block_size, heads, dim]``, whatever the layout's
own order of axes is.

Recycled memory: :meth:`Layers.allocate` zeroes once. A block that is handed out again still holds
what its last owner wrote, in the places that no token has taken yet as well: a NaN that somebody
wrote stays until it is overwritten, and 0 x NaN is NaN. ``gather`` and ``views`` end at
``num_tokens`` and never show such a place; a kernel that reads whole blocks has to mask it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from . import cuda
from .bound import Bound
from .errors import InvalidBlock, InvalidConfig, MissingExtra
from .storage import Region, Storage, _integer

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise MissingExtra("this needs torch: pip install 'kvmmu[torch]'", extra="torch") from error

__all__ = ["CAN", "LAYOUTS", "Layer", "Layers"]

LAYOUTS = ("NHD", "HND", "packed", "block_major")
"""Names that :meth:`Layers.allocate` and :meth:`Layers.adopt` know (N tokens, H heads, D dim):

- ``NHD``: a tensor each for K and V of a layer, ``[blocks, block_size, heads, dim]``.
- ``HND``: the same, ``[blocks, heads, block_size, dim]``.
- ``packed``: a tensor a layer, ``[2, blocks, block_size, heads, dim]``, K first. Adopted as
  ``[blocks, 2, block_size, heads, dim]`` as well.
- ``block_major``: one tensor, ``[blocks, layers, 2, block_size, heads, dim]``; K and V of a layer
  are strided views of it.
"""

CAN: dict[str, dict[str, bool]] = {
    "NHD": {
        "contiguous": True,
        "write": True,
        "gather": True,
        "views": True,
        "paged": True,
        "one_descriptor": False,
    },
    "HND": {
        "contiguous": True,
        "write": True,
        "gather": True,
        "views": False,
        "paged": False,
        "one_descriptor": False,
    },
    "packed": {
        "contiguous": True,
        "write": True,
        "gather": True,
        "views": True,
        "paged": True,
        "one_descriptor": False,
    },
    "packed, K and V in each block": {
        "contiguous": False,
        "write": True,
        "gather": True,
        "views": False,
        "paged": False,
        "one_descriptor": False,
    },
    "block_major": {
        "contiguous": False,
        "write": True,
        "gather": True,
        "views": False,
        "paged": False,
        "one_descriptor": True,
    },
}
"""What each layout can do in general; docs/layouts.md shows the same table. Strides decide:
:attr:`Layers.can` says it for the tensors at hand (one head, one layer or one token a block may
do more, an engine's own strides more or less).

- ``contiguous``: ``layer.k`` and ``layer.v`` are contiguous tensors, for kernels that insist.
- ``write``, ``gather``: by slots and by blocks.
- ``views``: a run of blocks is one view ``[tokens, heads, dim]``.
- ``paged``: kernels may read pages of another size, larger or smaller than a block.
- ``one_descriptor``: a run of blocks is one range of bytes over all layers.
"""

Blocks: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor"
KV: TypeAlias = "tuple[Tensor, Tensor | None]"

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Copies go by whole words of the same width: torch has no indexed copies of fp8."""

_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.uint8,
)
_MAX_BLOCK_SIZE = 4096
_HUGE_PAGE = 2 * 2**20
_MAX_PHYSICAL = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """What a kernel of one layer reads, in the layout's own order of axes.

    Attributes:
        k: NHD, packed, block_major ``[blocks, block_size, heads, dim]``; HND ``[blocks, heads,
            block_size, dim]``.
        v: the same of V, perhaps of another dim; None when there is no V.
        packed: K and V in one tensor as it was allocated or adopted; None for other layouts.
    """

    k: Tensor
    v: Tensor | None
    packed: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Half:
    """K or V of one layer. ``flat`` is ``[blocks * block_size, heads, dim]`` where tokens of
    consecutive blocks have one stride, else None."""

    logical: Tensor
    raw: Tensor
    flat: Tensor | None

    @classmethod
    def of(cls, native: Tensor, layout: str) -> _Half:
        logical = native.detach()
        if layout == "HND":
            logical = logical.transpose(1, 2)
        blocks, block_size, heads, dim = logical.shape
        flat: Tensor | None
        try:
            flat = logical.view(blocks * block_size, heads, dim)
        except RuntimeError:
            flat = None
        return cls(logical, logical.view(_RAW[logical.element_size()]), flat)


class Layers(Bound, Sequence[Layer]):
    """K and V of every layer of one pool of blocks: made by :meth:`allocate` or :meth:`adopt`.

    A sequence of :class:`Layer`. Keeps its tensors alive, and nothing else does but ``storage``
    and what ``views`` handed out.
    """

    def __init__(
        self,
        layout: str,
        layers: Sequence[Layer],
        *,
        block_size: int,
        num_blocks: int,
        tensors: Sequence[Tensor],
        extra: Sequence[Tensor] = (),
    ) -> None:
        """For :meth:`allocate` and :meth:`adopt`, which check first."""
        self._layout = layout
        self._layers = tuple(layers)
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._tensors = (*tensors, *extra)
        named = []
        for index, layer in enumerate(self._layers):
            for name, half in (("k", layer.k), ("v", layer.v)):
                if half is not None:
                    named.append((f"layer {index} {name}", half))
        named += [(f"extra {index}", tensor) for index, tensor in enumerate(extra)]
        self._storage = _storage(named, num_blocks)
        self._halves = [
            (_Half.of(layer.k, layout), None if layer.v is None else _Half.of(layer.v, layout))
            for layer in self._layers
        ]

    # -- making ------------------------------------------------------------------------------

    @classmethod
    def allocate(
        cls,
        layout: str = "NHD",
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
    ) -> Layers:
        """Zeroed tensors (see the module about what recycled blocks hold).

        Args:
            layout: one of :data:`LAYOUTS`.
            num_blocks: physical blocks: ``MMU.num_blocks`` and the null block, >= 2.
            block_size: tokens a block.
            v_head_dim: dim of V; None: as K's; 0: there is no V.
            dtype: float32, float16, bfloat16, an 8-bit float, int8 or uint8.
            device: ``"cpu"`` or a CUDA device.

        Raises:
            CUDAUnavailable, MissingExtra: a CUDA device, and CUDA cannot be used; the message says
                what to install.
            InvalidConfig: an argument that is not allowed, or more bytes than are available now
                (numbers ``needed``, ``available``). Nothing has been allocated then.
        """
        _check_layout(layout)
        num_layers = _integer("num_layers", num_layers, 1, 2**20)
        num_blocks = _integer("num_blocks", num_blocks, 2, _MAX_PHYSICAL)
        block_size = _integer("block_size", block_size, 1, _MAX_BLOCK_SIZE)
        heads = _integer("num_kv_heads", num_kv_heads, 1, 2**20)
        dim = _integer("head_dim", head_dim, 1, 2**20)
        v_dim = dim if v_head_dim is None else _integer("v_head_dim", v_head_dim, 0, 2**20)
        _check_dtype("dtype", dtype)
        try:
            place = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise InvalidConfig(f"device = {device!r}: {error}", device=str(device)) from None
        _check_device("device", place)
        if place.type == "cuda":
            cuda.require()
            if str(place) == "cuda":  # without an index
                place = torch.device("cuda", torch.cuda.current_device())
        if layout == "packed" and v_dim != dim:
            raise InvalidConfig(
                f"packed holds K and V of one width, not head_dim {dim} and v_head_dim {v_dim}; "
                "NHD, HND and block_major hold both widths",
                head_dim=dim,
                v_head_dim=v_dim,
            )
        needed = num_layers * num_blocks * block_size * heads * (dim + v_dim) * dtype.itemsize
        available = _available_bytes(place)
        if available is not None and needed > available:
            raise InvalidConfig(
                f"the KV of {num_layers} layers x {num_blocks} blocks x {block_size} tokens needs "
                f"{needed} bytes; {available} are available",
                needed=needed,
                available=available,
            )

        def zeros(*shape: int) -> Tensor:
            with torch.inference_mode(False):  # a tensor that is good inside and outside of it
                if place.type == "cpu":
                    return _host_zeros(shape, dtype)
                return torch.zeros(shape, dtype=dtype, device=place)

        layers: list[Layer] = []
        tensors: list[Tensor] = []
        if layout == "block_major":
            half = block_size * heads
            tail = (2, block_size, heads, dim) if v_dim == dim else (half * (dim + v_dim),)
            tensors.append(zeros(num_blocks, num_layers, *tail))
            flat = tensors[0].view(num_blocks, num_layers, -1)
            for index in range(num_layers):
                k, v = flat[:, index, : half * dim], flat[:, index, half * dim :]
                layers.append(
                    Layer(
                        k.view(num_blocks, block_size, heads, dim),
                        v.view(num_blocks, block_size, heads, v_dim) if v_dim else None,
                    )
                )
        elif layout == "packed":
            for _ in range(num_layers):
                tensors.append(zeros(2, num_blocks, block_size, heads, dim))
                layers.append(Layer(tensors[-1][0], tensors[-1][1], tensors[-1]))
        else:
            inner = (heads, block_size) if layout == "HND" else (block_size, heads)
            for _ in range(num_layers):
                pair = [zeros(num_blocks, *inner, width) for width in (dim, v_dim) if width]
                tensors += pair
                layers.append(Layer(pair[0], pair[1] if v_dim else None))
        return cls(layout, layers, block_size=block_size, num_blocks=num_blocks, tensors=tensors)

    @classmethod
    def adopt(
        cls,
        tensors: Tensor | Iterable[Any],
        *,
        layout: str,
        block_size: int,
        num_blocks: int,
        extra: Iterable[Tensor] = (),
    ) -> Layers:
        """An engine's own tensors. Nothing is copied; they are kept alive.

        Args:
            tensors: one entry a layer: ``(k, v)``, or k alone (no V), in the layout's own order of
                axes; or for ``packed`` one tensor, ``[2, blocks, block_size, heads, dim]`` or
                ``[blocks, 2, block_size, heads, dim]``. For ``block_major`` also one tensor for
                all, ``[blocks, layers, 2, block_size, heads, dim]``. Strides are free, but the
                last axis has stride 1 and no two places share bytes. Layers may differ in heads,
                dim and dtype; K and V of a layer in dim.
            layout: one of :data:`LAYOUTS`.
            block_size: tokens a block.
            num_blocks: physical blocks, the null block among them; the length of each block axis.
            extra: what else belongs to a block and moves with it, ``[blocks, ...]`` of any dtype
                and any strides: scales of a quantised cache, indexer keys.

        Raises:
            InvalidConfig: names the layer, the tensor and the numbers. Numbers: ``tensor`` and
                what decided.
        """
        _check_layout(layout)
        num_blocks = _integer("num_blocks", num_blocks, 2, _MAX_PHYSICAL)
        block_size = _integer("block_size", block_size, 1, _MAX_BLOCK_SIZE)
        entries = _entries(tensors, layout, num_blocks)
        if not entries:
            raise InvalidConfig("at least one layer is needed; 0 were given", given=0)
        layers: list[Layer] = []
        owned: list[Tensor] = [tensors] if isinstance(tensors, Tensor) else []
        for index, entry in enumerate(entries):
            layer = _layer(index, entry, layout, num_blocks)
            _check_half(f"layer {index} k", layer.k, layout, block_size, num_blocks)
            if layer.v is not None:
                _check_half(f"layer {index} v", layer.v, layout, block_size, num_blocks)
                _check_pair(index, layer, layout)
            layers.append(layer)
            if layer.packed is not None:
                owned.append(layer.packed)
            elif not isinstance(tensors, Tensor):
                owned += [half for half in (layer.k, layer.v) if half is not None]
        others = list(extra)
        for index, tensor in enumerate(others):
            _check_tensor(f"extra {index}", tensor)
            if tensor.ndim < 1 or tensor.shape[0] != num_blocks or tensor.numel() == 0:
                raise InvalidConfig(
                    f"extra {index} has shape {tuple(tensor.shape)}; [{num_blocks}, ...] of at "
                    "least 1 byte a block is needed",
                    tensor=f"extra {index}",
                    shape=tuple(tensor.shape),
                    num_blocks=num_blocks,
                )
        return cls(
            layout,
            layers,
            block_size=block_size,
            num_blocks=num_blocks,
            tensors=owned,
            extra=others,
        )

    # -- what it is --------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """One of :data:`LAYOUTS`."""
        return self._layout

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Physical blocks, the null block among them."""
        return self._num_blocks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """As allocated or adopted, ``extra`` behind them: block_major allocates one, packed one a
        layer, NHD and HND K and V of each layer in turn."""
        return self._tensors

    @property
    def storage(self) -> Storage:
        """The same bytes as regions, for movers and transfers; it keeps the tensors alive.

        Pieces of a block that touch are one region: 2 a layer in NHD and HND, one in all in
        block_major.
        """
        return self._storage

    @property
    def can(self) -> dict[str, bool]:
        """What these tensors can do, by the names of :data:`CAN`."""
        halves = [half for pair in self._halves for half in pair if half is not None]
        flat = all(half.flat is not None for half in halves)
        regions = self._storage.regions
        native = [half for layer in self._layers for half in (layer.k, layer.v) if half is not None]
        return {
            "contiguous": all(tensor.is_contiguous() for tensor in native),
            "write": True,
            "gather": True,
            "views": flat,
            "paged": flat,
            "one_descriptor": len(regions) == 1 and regions[0].stride == regions[0].block_bytes,
        }

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Layer, ...]: ...
    def __getitem__(self, index: int | slice) -> Layer | tuple[Layer, ...]:
        return self._layers[index]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers)

    def __repr__(self) -> str:
        return (
            f"Layers({self._layout}, {len(self)} layers, {self._num_blocks} blocks of "
            f"{self._block_size} tokens, {self._storage.block_bytes} bytes a block)"
        )

    def logical(self, layer: int) -> KV:
        """K and V of a layer as views ``[blocks, block_size, heads, dim]``; V None without V."""
        k, v = self._of(layer)
        return k.logical, None if v is None else v.logical

    def paged(self, layer: int, page_size: int) -> KV:
        """K and V of a layer in pages of another size: views ``[pages, page_size, heads, dim]``.

        A page smaller than a block is one of ``block_size / page_size`` in a row; a larger one is
        an aligned group of blocks. Blocks at the end that fill no page are left out (the null
        block among them, so a table in larger pages pads with a page of its own).

        Args:
            page_size: tokens; it divides ``block_size`` or is a multiple of it.

        Raises:
            InvalidConfig: a size that is neither, or a layout that cannot (see :data:`CAN`).
        """
        pair = self._of(layer)
        size = _integer("page_size", page_size, 1, 2**40)
        total = self._num_blocks * self._block_size
        if (self._block_size % size and size % self._block_size) or size > total:
            raise InvalidConfig(
                f"page_size {size} neither divides the block size {self._block_size} nor is a "
                f"multiple of it within the {total} tokens of the pool",
                page_size=size,
                block_size=self._block_size,
            )
        k, v = self._flat(layer, pair)
        return _pages(k, size), None if v is None else _pages(v, size)

    # -- reading and writing -----------------------------------------------------------------

    def write(
        self,
        layer: int,
        k: Tensor,
        v: Tensor | None,
        slots: Tensor | npt.NDArray[np.int64],
    ) -> None:
        """Writes token ``i`` of ``k`` and ``v`` to slot ``slots[i]``.

        Slots of the null block are allowed (padding): whatever is written there, no sequence reads
        it. Of two tokens with one slot either may stay. Slots on a CUDA device are not looked at,
        since the host would have to wait for them: they are those that the MMU wrote.

        Args:
            k: [T, heads, dim] of the layer's dtype.
            v: [T, heads, dim of V]; None exactly when the layer has no V.
            slots: int64 [T], ``block * block_size + offset``.

        Raises:
            InvalidConfig: shape, dtype or device.
            InvalidBlock: a slot outside of the pool, -1 for instance. Numbers: ``slot``,
                ``index``, ``block``, ``num_blocks``.
            Nothing has been written then.
        """
        halves = self._of(layer)
        where = _slots(slots, halves[0].raw.device)
        for name, half, given in zip(("k", "v"), halves, (k, v), strict=True):
            _check_given(f"{name} for layer {layer}", half, given, len(where))
        if len(where) == 0:
            return
        if where.device.type == "cpu":
            self._check_slots(where)
        own = {half.raw.untyped_storage().data_ptr() for half in halves if half is not None}
        with torch.inference_mode():  # tensors of an engine may have been made in it
            pair = None
            written = []
            for half, given in zip(halves, (k, v), strict=True):
                if half is None or given is None:
                    continue
                # A source in the pool itself (a view of another sequence) is read before any write.
                shared = given.untyped_storage().data_ptr() in own
                words = (given.detach().clone() if shared else given.detach()).view(half.raw.dtype)
                written.append((half, words))
            for half, words in written:
                if half.flat is not None:
                    half.flat.view(half.raw.dtype).index_copy_(0, where, words)
                else:
                    if pair is None:
                        block = torch.div(where, self._block_size, rounding_mode="floor")
                        pair = (block, where - block * self._block_size)
                    half.raw.index_put_(pair, words)

    def gather(self, layer: int, blocks: Blocks, num_tokens: int) -> KV:
        """Copies the first ``num_tokens`` tokens of a sequence.

        Args:
            blocks: physical blocks in order, integers [n]; those behind the last token are not
                read.
            num_tokens: at most ``n * block_size``.

        Returns:
            contiguous k [num_tokens, heads, dim] and v, None without V.

        Raises:
            InvalidBlock: an id outside of the pool. Numbers: ``block``, ``index``, ``num_blocks``.
            InvalidConfig: fewer blocks than ``num_tokens`` needs.
        """
        halves = self._of(layer)
        ids = _integers("blocks", blocks, 1)
        needed = self._needed(num_tokens, len(ids))
        ids = ids[:needed]
        self._check_blocks(ids)
        starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
        runs = [(int(ids[first]), int(first)) for first in starts]
        k, v = (
            None if half is None else self._copy(half, ids, runs, num_tokens) for half in halves
        )
        assert k is not None
        return k, v

    def views(
        self,
        layer: int,
        runs: Iterable[Sequence[int]] | npt.NDArray[np.integer[Any]],
        num_tokens: int,
    ) -> list[KV]:
        """The first ``num_tokens`` tokens of a sequence without a copy.

        Args:
            runs: (first block, number of blocks) of each run of consecutive physical blocks, in
                the sequence's order.
            num_tokens: at most the tokens of all runs; the last view is cut to it, runs behind it
                are left out.

        Returns:
            (k, v) of each run, [tokens, heads, dim], v None without V. They alias the pool: good
            until the blocks move or are released.

        Raises:
            InvalidConfig: a layout that cannot (:data:`CAN`), or fewer blocks than needed.
            InvalidBlock: a run that leaves the pool. Numbers: ``block``, ``num_blocks``.
        """
        k, v = self._flat(layer, self._of(layer))
        table = [(int(first), int(count)) for first, count in runs]
        self._needed(num_tokens, sum(count for _, count in table))
        for first, count in table:
            if first < 0 or count < 0 or first + count > self._num_blocks:
                raise InvalidBlock(
                    f"a run of {count} blocks from block {first} leaves the pool of "
                    f"{self._num_blocks} blocks",
                    block=first if first < 0 or count < 0 else first + count - 1,
                    num_blocks=self._num_blocks,
                )
        found: list[KV] = []
        left = num_tokens
        for first, count in table:
            length = min(left, count * self._block_size)
            if length:
                start = first * self._block_size
                found.append(
                    (k.narrow(0, start, length), None if v is None else v.narrow(0, start, length))
                )
                left -= length
        return found

    # -- within ------------------------------------------------------------------------------

    def _of(self, layer: int) -> tuple[_Half, _Half | None]:
        return self._halves[_integer("layer", layer, 0, len(self._halves) - 1)]

    def _flat(self, layer: int, pair: tuple[_Half, _Half | None]) -> tuple[Tensor, Tensor | None]:
        """K and V as [tokens of the pool, heads, dim], or InvalidConfig."""
        flat = []
        for name, half in zip(("k", "v"), pair, strict=True):
            if half is not None and half.flat is None:
                block, token = half.logical.stride()[:2]
                raise InvalidConfig(
                    f"layout {self._layout}: tokens of consecutive blocks of layer {layer} {name} "
                    f"have no single stride ({token} elements from token to token, {block} from "
                    f"block to block of {self._block_size} tokens), so a run of blocks is not one "
                    "view; gather copies it",
                    layout=self._layout,
                    layer=layer,
                    token_stride=token,
                    block_stride=block,
                )
            flat.append(None if half is None else half.flat)
        assert flat[0] is not None
        return flat[0], flat[1]

    def _needed(self, num_tokens: int, given: int) -> int:
        """Blocks that so many tokens take, if so many were given."""
        tokens = _integer("num_tokens", num_tokens, 0, 2**62)
        needed = -(-tokens // self._block_size)
        if needed > given:
            raise InvalidConfig(
                f"{tokens} tokens need {needed} blocks of {self._block_size}; {given} were given",
                num_tokens=tokens,
                needed=needed,
                given=given,
            )
        return needed

    def _check_blocks(self, ids: npt.NDArray[np.int64]) -> None:
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._num_blocks):
            index = int(np.flatnonzero((ids < 0) | (ids >= self._num_blocks))[0])
            raise InvalidBlock(
                f"blocks[{index}] is {int(ids[index])}; there are blocks 0 .. "
                f"{self._num_blocks - 1}",
                block=int(ids[index]),
                index=index,
                num_blocks=self._num_blocks,
            )

    def _check_slots(self, where: Tensor) -> None:
        low, high = (int(bound) for bound in torch.aminmax(where))
        limit = self._num_blocks * self._block_size
        if low < 0 or high >= limit:
            index = int(torch.nonzero((where < 0) | (where >= limit))[0])
            slot = int(where[index])
            raise InvalidBlock(
                f"slots[{index}] is {slot}; there are slots 0 .. {limit - 1} (padding points into "
                f"the null block, {self._num_blocks - 1})",
                slot=slot,
                index=index,
                block=slot // self._block_size,
                num_blocks=self._num_blocks,
            )

    def _copy(
        self,
        half: _Half,
        ids: npt.NDArray[np.int64],
        runs: list[tuple[int, int]],
        num_tokens: int,
    ) -> Tensor:
        raw = half.raw
        tail = raw.shape[2:]
        if len(ids) == 0:
            return half.logical.new_empty((0, *tail))
        if len(runs) * 4 > len(ids):  # a copy for each run would be mostly calls
            found = raw.index_select(0, torch.from_numpy(ids).to(raw.device)).view(-1, *tail)
            if len(found) != num_tokens:
                found = found[:num_tokens].clone()  # hold no bytes that nobody sees
            return found.view(half.logical.dtype)
        out = torch.empty((num_tokens, *tail), dtype=raw.dtype, device=raw.device)
        ends = [position for _, position in runs[1:]] + [len(ids)]
        size = self._block_size
        for (first, position), end in zip(runs, ends, strict=True):
            whole = min(end - position, num_tokens // size - position)
            if whole > 0:
                place = out[position * size : (position + whole) * size]
                place.view(whole, size, *tail).copy_(raw[first : first + whole])
        rest = num_tokens % size
        if rest:
            out[num_tokens - rest :].copy_(raw[int(ids[-1]), :rest])
        return out.view(half.logical.dtype)


def _pages(flat: Tensor, size: int) -> Tensor:
    pages = len(flat) // size
    return flat[: pages * size].view(pages, size, *flat.shape[1:])


# -- memory ------------------------------------------------------------------------------------


def _available_bytes(place: torch.device) -> int | None:
    """Memory that can be had now; of the host, without swapping, as Linux tells it (else None)."""
    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        return int(free)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:  # inside of a container that limits it
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        return min(available, max(0, limit - int((group / "memory.current").read_text())))
    except (OSError, ValueError):
        return available


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory. From 2 MiB on they begin with a huge page and are of such, as far as
    they fill them: copies then cost fewer translations, and granules that go back are whole pages.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=kind)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    offset = -address % _HUGE_PAGE
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, offset, size // _HUGE_PAGE * _HUGE_PAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
    return flat.view(dtype).view(shape)


# -- from tensors to regions -------------------------------------------------------------------


def _storage(named: Sequence[tuple[str, Tensor]], num_blocks: int) -> Storage:
    """Every tensor's block cut into contiguous pieces, and pieces that touch put together."""
    pieces: list[npt.NDArray[np.int64]] = []  # columns: address, bytes, stride, tensor
    for index, (name, tensor) in enumerate(named):
        offsets, size = _pieces(name, tensor)
        stride = tensor.stride(0) * tensor.element_size()
        if stride < 1:
            raise InvalidConfig(
                f"{name} has a stride of {stride} bytes from block to block; its {num_blocks} "
                "blocks share bytes",
                tensor=name,
                stride=stride,
            )
        table = np.empty((len(offsets), 4), np.int64)
        table[:, 0] = offsets + tensor.data_ptr()
        table[:, 1:] = (size, stride, index)
        pieces.append(table)
    merged = [_touching(table) for table in _by_stride(np.concatenate(pieces))]
    order = [group for groups in merged for group in groups]
    regions = []
    for group in order:
        owners = tuple(named[int(index)][1] for index in dict.fromkeys(group[:, 3].tolist()))
        regions.append(
            Region(
                address=int(group[0, 0]),
                stride=int(group[0, 2]),
                block_bytes=int(group[:, 1].sum()),
                num_blocks=num_blocks,
                owner=owners[0] if len(owners) == 1 else owners,
                device=str(named[int(group[0, 3])][1].device),
            )
        )
    try:
        return Storage(regions, num_blocks - 1)
    except InvalidConfig as error:
        names = [named[int(order[at][0, 3])][0] for at in _regions_of(error)]
        if not names:
            raise
        numbers = {**error.numbers, "tensor": names[0]}
        raise InvalidConfig(f"{' and '.join(dict.fromkeys(names))}: {error}", **numbers) from None


def _regions_of(error: InvalidConfig) -> list[int]:
    return [error.numbers[name] for name in ("region", "other") if name in error.numbers]


def _pieces(name: str, tensor: Tensor) -> tuple[npt.NDArray[np.int64], int]:
    """Where the contiguous pieces of block 0 begin, bytes from its start, and how long each is."""
    size = tensor.element_size()
    axes = sorted(
        (stride * size, length)
        for length, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
        if length > 1
    )
    while axes and axes[0][0] == size:
        size *= axes.pop(0)[1]
    offsets = np.zeros(1, np.int64)
    extent = size
    for stride, length in axes:
        if stride < extent:
            raise InvalidConfig(
                f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} (elements): "
                f"a step of {stride} bytes meets the {extent} bytes of the axes within it",
                tensor=name,
                shape=tuple(tensor.shape),
                strides=tensor.stride(),
            )
        offsets = (np.arange(length, dtype=np.int64) * stride)[:, None] + offsets
        offsets = offsets.reshape(-1)
        extent += (length - 1) * stride
    return offsets, size


def _by_stride(table: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Pieces of one stride at a time, by address."""
    table = table[np.lexsort((table[:, 0], table[:, 2]))]
    cuts = np.flatnonzero(np.diff(table[:, 2])) + 1
    yield from np.split(table, cuts)


def _touching(table: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Groups of pieces each of which begins where the one before ends. A group longer than the
    stride would overlap the next block: it stays in pieces, and the storage names them."""
    cuts = np.flatnonzero(table[1:, 0] != table[:-1, 0] + table[:-1, 1]) + 1
    for group in np.split(table, cuts):
        if int(group[:, 1].sum()) <= int(group[0, 2]):
            yield group
        else:
            yield from np.split(group, len(group))


# -- checks ------------------------------------------------------------------------------------


def _check_layout(layout: object) -> None:
    if layout not in LAYOUTS:
        raise InvalidConfig(
            f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}", argument="layout"
        )


def _check_dtype(name: str, dtype: object) -> None:
    if dtype not in _DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise InvalidConfig(f"{name} must be one of {names}, not {dtype}", tensor=name)


def _check_device(name: str, device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise InvalidConfig(
            f"{name} is {str(device)!r}; KV lies in host memory, device 'cpu', or on a CUDA device",
            tensor=name,
            device=str(device),
        )


def _entries(tensors: Tensor | Iterable[Any], layout: str, num_blocks: int) -> list[Any]:
    if not isinstance(tensors, Tensor):
        return list(tensors)
    if layout != "block_major":
        raise InvalidConfig(
            f"layout {layout} takes a list with an entry a layer; one tensor for all layers is "
            "block_major",
            layout=layout,
        )
    if tensors.ndim != 6 or tensors.shape[2] != 2:
        raise InvalidConfig(
            f"a block_major tensor has shape {tuple(tensors.shape)}; [{num_blocks} blocks, layers, "
            "2, block_size, heads, dim] is needed (or a list of (k, v) views of it)",
            shape=tuple(tensors.shape),
        )
    return [(tensors[:, layer, 0], tensors[:, layer, 1]) for layer in range(tensors.shape[1])]


def _layer(index: int, entry: object, layout: str, num_blocks: int) -> Layer:
    if isinstance(entry, Tensor):
        if layout != "packed":
            return Layer(entry, None)
        halves = entry.shape[:2]
        if entry.ndim == 5 and halves == (2, 2) and num_blocks == 2:
            raise InvalidConfig(
                f"layer {index}: of the first two axes of shape {tuple(entry.shape)} either may be "
                "K and V; give (k, v) views",
                layer=index,
                shape=tuple(entry.shape),
            )
        if entry.ndim == 5 and halves == (2, num_blocks):
            return Layer(entry[0], entry[1], entry)
        if entry.ndim == 5 and halves == (num_blocks, 2):
            return Layer(entry[:, 0], entry[:, 1], entry)
        raise InvalidConfig(
            f"layer {index} packed has shape {tuple(entry.shape)}; [2, {num_blocks} blocks, "
            f"block_size, heads, dim] or [{num_blocks}, 2, ...] is needed",
            layer=index,
            shape=tuple(entry.shape),
            num_blocks=num_blocks,
        )
    if (
        isinstance(entry, (tuple, list))
        and len(entry) == 2
        and isinstance(entry[0], Tensor)
        and (entry[1] is None or isinstance(entry[1], Tensor))
    ):
        return Layer(entry[0], entry[1])
    what = (
        f"[{', '.join(type(part).__name__ for part in entry)}]"
        if isinstance(entry, (tuple, list))
        else type(entry).__name__
    )
    raise InvalidConfig(
        f"layer {index} is {what}; a pair (k, v) of tensors or a tensor is needed", layer=index
    )


def _check_tensor(name: str, tensor: object) -> None:
    """What holds for every tensor: where it is, and that its bytes are inside of its storage."""
    if not isinstance(tensor, Tensor):
        raise InvalidConfig(f"{name} is a {type(tensor).__name__}, not a tensor", tensor=name)
    if tensor.layout != torch.strided:
        raise InvalidConfig(f"{name} is {tensor.layout}, not strided", tensor=name)
    _check_device(name, tensor.device)
    strides = tensor.stride()
    if any(n > 1 and stride < 1 for n, stride in zip(tensor.shape, strides, strict=True)):
        raise InvalidConfig(
            f"{name} of shape {tuple(tensor.shape)} has strides {strides} (elements); each must be "
            "at least 1, or places share bytes",
            tensor=name,
            shape=tuple(tensor.shape),
            strides=strides,
        )
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() and end > held:
        raise InvalidConfig(
            f"{name} ends at byte {end} of a storage of {held} bytes",
            tensor=name,
            end=end,
            storage_bytes=held,
        )


def _check_half(name: str, tensor: Tensor, layout: str, block_size: int, num_blocks: int) -> None:
    """K or V in the layout's own order of axes."""
    _check_tensor(name, tensor)
    _check_dtype(f"{name}: dtype", tensor.dtype)
    shape = tuple(tensor.shape)
    inner = f"heads, {block_size}" if layout == "HND" else f"{block_size}, heads"
    token_axis = 2 if layout == "HND" else 1
    if (
        tensor.ndim != 4
        or shape[0] != num_blocks
        or shape[token_axis] != block_size
        or tensor.numel() == 0
    ):
        raise InvalidConfig(
            f"{name} has shape {shape}; layout {layout} with {num_blocks} physical blocks of "
            f"{block_size} tokens needs [{num_blocks}, {inner}, dim]",
            tensor=name,
            shape=shape,
            num_blocks=num_blocks,
            block_size=block_size,
        )
    if shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidConfig(
            f"{name} of shape {shape} has strides {tensor.stride()} (elements); the last axis "
            "needs stride 1",
            tensor=name,
            shape=shape,
            strides=tensor.stride(),
        )


def _check_pair(index: int, layer: Layer, layout: str) -> None:
    k, v = layer.k, layer.v
    assert v is not None
    if k.dtype != v.dtype:
        raise InvalidConfig(
            f"layer {index}: k is {k.dtype} and v is {v.dtype}; both need one dtype", layer=index
        )
    head_axis = 1 if layout == "HND" else 2
    if k.shape[head_axis] != v.shape[head_axis]:
        raise InvalidConfig(
            f"layer {index}: k has {k.shape[head_axis]} heads and v {v.shape[head_axis]}",
            layer=index,
            k_heads=k.shape[head_axis],
            v_heads=v.shape[head_axis],
        )


def _check_given(name: str, half: _Half | None, given: object, tokens: int) -> None:
    """What is to be written fits where it goes."""
    if half is None or given is None:
        if half is None and given is None:
            return
        raise InvalidConfig(
            f"{name}: the layer has no V, so None is needed"
            if half is None
            else f"{name} is None, but the layer has it",
            argument=name,
        )
    if not isinstance(given, Tensor):
        raise InvalidConfig(f"{name} is a {type(given).__name__}, not a tensor", argument=name)
    expected = (tokens, *half.logical.shape[2:])
    if given.shape != expected or given.dtype != half.logical.dtype:
        raise InvalidConfig(
            f"{name} is {given.dtype} {tuple(given.shape)}; {half.logical.dtype} {expected} is "
            f"needed for {tokens} slots",
            argument=name,
            shape=tuple(given.shape),
            expected=expected,
        )
    if given.device != half.logical.device:
        raise InvalidConfig(
            f"{name} is on {given.device}, the layer on {half.logical.device}",
            argument=name,
            device=str(given.device),
        )
    if given.layout is not torch.strided or given.is_neg():
        raise InvalidConfig(f"{name} is no plain strided tensor", argument=name)


def _slots(slots: object, device: torch.device) -> Tensor:
    found = slots
    if isinstance(slots, np.ndarray) and slots.dtype == np.int64:
        # torch warns of memory that it may not write and knows no negative strides.
        plain = slots.flags.writeable and all(stride >= 0 for stride in slots.strides)
        found = torch.from_numpy(slots if plain else slots.copy())
    if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.ndim != 1:
        shape = getattr(slots, "shape", None)
        what = type(slots).__name__ if shape is None else f"{getattr(slots, 'dtype', '')} {shape}"
        raise InvalidConfig(f"slots must be int64 [T], not {what}", argument="slots")
    if found.device == device:
        return found
    if found.device.type != "cpu":
        raise InvalidConfig(
            f"slots are on {found.device}, the layer on {device}",
            argument="slots",
            device=str(found.device),
        )
    return found.to(device)


def _integers(name: str, values: object, ndim: int) -> npt.NDArray[np.int64]:
    if isinstance(values, Tensor):
        _check_device(name, values.device)
        values = values.detach().cpu().numpy()
    try:
        found = np.asarray(values)
    except ValueError:
        found = np.empty(0, object)
    if found.size == 0 and found.ndim == ndim and found.dtype != object:
        return np.empty(0, np.int64)
    if found.ndim != ndim or not np.issubdtype(found.dtype, np.integer):
        raise InvalidConfig(
            f"{name} must be integers of {ndim} axis, not {found.dtype} {found.shape}",
            argument=name,
        )
    return found.astype(np.int64)
