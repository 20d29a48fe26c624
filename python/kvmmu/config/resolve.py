"""What settings become once the pool is known: blocks, page orders, arguments.

What lives here: :class:`Resolved` and :func:`resolve`. What never lives here: reading, and building
(:mod:`.build`).

A page size in bytes becomes the nearest order: of 2**k blocks with k from 0 to 9 the one whose
size differs from it by the smallest factor. The largest page is 512 blocks; one that would be
larger becomes that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .files import Document, Keys
from .settings import MAX_BLOCKS, MAX_ORDER, Sections
from .units import show_bytes

__all__ = ["Became", "Resolved", "resolve"]

DEFAULT_ORDERS = (0, 2, 9)


@dataclass(frozen=True, slots=True)
class Became:
    """One setting that became something else, or that counts for nothing.

    Attributes:
        key: dotted, as the file has it.
        given: what it was.
        became: what it is now, in words.
    """

    key: str
    given: str
    became: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings of a pool of known size.

    Attributes:
        num_blocks: usable blocks; None where nobody has said.
        block_bytes: bytes a block over all layers; None where nobody has said.
        mmu: arguments of :class:`kvmmu.MMU` beside ``num_blocks``.
        cache: further arguments of :class:`kvmmu.KVCache`.
        reserved_blocks: kept for running sequences; None where the pool is not known.
        preheat_pages: pages that are touched at start, of ``page_order``.
        page_order: of the largest page; None where a page size in bytes waits for bytes a block.
        became: what became of what.
    """

    num_blocks: int | None
    block_bytes: int | None
    mmu: dict[str, Any]
    cache: dict[str, Any]
    reserved_blocks: int | None
    preheat_pages: int
    page_order: int | None
    became: tuple[Became, ...]


def resolve(
    settings: Sections,
    document: Document,
    *,
    num_blocks: int | None = None,
    block_bytes: int | None = None,
) -> Resolved:
    """Settles what depends on the pool.

    Args:
        num_blocks: of the pool, where the settings do not say; it wins over them.
        block_bytes: bytes a block over all layers; it wins over ``model``.
        document: where the settings stand, for messages.

    Raises:
        InvalidConfig: what does not fit a pool of this size, all of it.
    """
    return _Resolving(settings, document, num_blocks, block_bytes).run()


class _Resolving:
    def __init__(
        self,
        settings: Sections,
        document: Document,
        num_blocks: int | None,
        block_bytes: int | None,
    ) -> None:
        self._settings = settings
        self._document = document
        self._became: list[Became] = []
        self._faults: list[tuple[Keys, str]] = []
        model, pool = settings.model, settings.pool
        if block_bytes is None and model is not None:
            block_bytes = model.bytes_per_token * pool.block_size
            self._say(
                ("model",),
                f"{model.num_layers} layers, {model.num_kv_heads} heads, {model.dtype}",
                f"{model.bytes_per_token:,} bytes a token, {block_bytes:,} a block",
            )
        self._block_bytes = block_bytes
        self._num_blocks = pool.num_blocks if num_blocks is None else num_blocks
        self._orders: tuple[int, ...] | None = DEFAULT_ORDERS

    def run(self) -> Resolved:
        settings, pool = self._settings, self._settings.pool
        self._pool()
        self._pages()
        reserved = self._reserve()
        self._preheat()
        self._without_effect()
        self._document.refuse(self._faults)
        longest = pool.max_blocks_per_sequence
        if pool.max_sequence_tokens is not None:
            longest = -(-pool.max_sequence_tokens // pool.block_size)
            given = f"{pool.max_sequence_tokens:,} tokens"
            self._say(("pool", "max_sequence_tokens"), given, f"{longest:,} blocks")
        compaction, pages, prefix = settings.compaction, settings.pages, settings.prefix
        optional = {"table_nodes": pool.table_nodes, "max_blocks_per_sequence": longest}
        mmu: dict[str, Any] = {
            "block_size": pool.block_size,
            "max_sequences": pool.max_sequences,
            "null_block": pool.null_block,
            "placement": pool.placement,
            "anchor": pool.anchor,
            "dedup": pool.dedup,
            "seed": pool.seed,
            "medium_from": pages.medium_from,
            "huge_from": pages.huge_from,
            "hold_blocks": pages.hold_blocks,
            "prefix_caching": prefix.prefix_caching,
            "eviction": prefix.eviction,
            "page_aware": prefix.page_aware,
            "events": prefix.events,
            "record": settings.start.record,
            "budget_blocks": compaction.budget_blocks,
            "windows_below": compaction.windows_below,
            "guarantee": compaction.guarantee,
            "gather_least": compaction.gather_least,
            "compaction_start": compaction.compaction_start,
            "compaction_stop": compaction.stop,
            **{name: value for name, value in optional.items() if value is not None},
        }
        if self._orders is not None:
            mmu["page_orders"] = self._orders
        cache = settings.kvcache
        return Resolved(
            num_blocks=self._num_blocks,
            block_bytes=self._block_bytes,
            mmu=mmu,
            cache={
                "layout": cache.layout,
                "device": cache.device,
                "max_batch": cache.max_batch,
                "max_tokens": cache.max_tokens,
                "steps_in_flight": cache.steps_in_flight,
                "kernel_block_size": cache.kernel_block_size,
                "page_order": cache.page_order,
                "return_memory": cache.return_memory,
                "auto_compact": compaction.auto_compact,
                "copy": "overlap" if compaction.overlap else "between_steps",
                "budget_us": compaction.budget_us,
                "budget_bytes": compaction.budget_bytes,
            },
            reserved_blocks=reserved,
            preheat_pages=settings.start.preheat_pages,
            page_order=None if self._orders is None else max(self._orders),
            became=tuple(self._became),
        )

    def _say(self, keys: Keys, given: str, became: str) -> None:
        self._became.append(Became(self._document.called(keys), given, became))

    def _pool(self) -> None:
        pool, size = self._settings.pool, self._block_bytes
        if pool.memory is not None and self._num_blocks is None:
            given = show_bytes(pool.memory)
            if size is None:
                self._say(("pool", "memory"), given, "blocks, once bytes a block are known (model)")
                return
            self._num_blocks = pool.memory // size - 1
            if not 1 <= self._num_blocks <= MAX_BLOCKS:
                text = f"{given} given, allowed: at least two blocks of {size:,} bytes"
                if self._num_blocks > MAX_BLOCKS:
                    text = (
                        f"{given} given, {self._num_blocks:,} blocks of {size:,} bytes, allowed: "
                        f"at most {MAX_BLOCKS:,}"
                    )
                self._faults.append((("pool", "memory"), text))
                self._num_blocks = None
                return
            self._say(("pool", "memory"), given, f"{self._num_blocks:,} blocks and the null block")
        if self._num_blocks is not None:
            beyond = pool.beyond(self._num_blocks)
            self._faults += [(("pool", *keys), text) for keys, text in beyond]

    def _pages(self) -> None:
        pages, size = self._settings.pages, self._block_bytes
        if pages.page_orders is not None:
            self._orders = pages.page_orders
        if pages.page_size is None:
            return
        given = show_bytes(pages.page_size)
        if size is None:
            self._orders = None
            became = "an order, once bytes a block are known (model)"
            self._say(("pages", "page_size"), given, became)
            return
        wanted = math.log2(pages.page_size / size)
        order = min(max(round(wanted), 0), MAX_ORDER)
        self._orders = tuple(sorted({0, min(2, order), order}))
        became = f"order {order}: pages of {1 << order} blocks, {show_bytes(size << order)}"
        if round(wanted) > MAX_ORDER:
            became += ", the largest there is"
        elif round(wanted) < 0:
            became += ", the smallest there is"
        self._say(("pages", "page_size"), given, became)

    def _reserve(self) -> int | None:
        keys, reserve = ("memory", "reserved_memory"), self._settings.memory.reserved_memory
        if not reserve:
            return 0
        given = f"{100 * reserve:g}%" if isinstance(reserve, float) else show_bytes(int(reserve))
        blocks, size = self._num_blocks, self._block_bytes
        if isinstance(reserve, float):
            if blocks is None:
                self._say(keys, given, "that share of the pool, once its blocks are known")
                return None
            kept = math.ceil(reserve * blocks)
        else:
            if size is None:
                self._say(keys, given, "blocks, once bytes a block are known (model)")
                return None
            kept = -(-int(reserve) // size)
        if blocks is not None and kept >= blocks:
            text = f"{given} given, {kept:,} blocks, allowed: fewer than the pool's {blocks:,}"
            self._faults.append((keys, text))
        self._say(keys, given, f"{kept:,} blocks")
        return kept

    def _preheat(self) -> None:
        pages = self._settings.start.preheat_pages
        if not pages:
            return
        keys = ("start", "preheat_pages")
        if self._orders is None or self._num_blocks is None:
            self._say(keys, f"{pages}", "pages of the largest order, touched at start")
            return
        largest = max(self._orders)
        most = self._num_blocks >> largest
        if pages > most:
            blocks = f"{self._num_blocks:,} blocks have so many pages of {1 << largest}"
            self._faults.append((keys, f"{pages} given, allowed: 0 to {most} ({blocks})"))
        self._say(keys, f"{pages}", f"{pages << largest:,} blocks, touched at start")

    def _without_effect(self) -> None:
        """What is allowed and counts for nothing beside something else."""
        for keys, given, instead in _ignored(self._settings):
            section, key = keys
            fields = type(getattr(self._settings, str(section))).model_fields
            at = getattr(getattr(self._settings, str(section)), str(key))
            if self._document.has(keys) and at != fields[str(key)].default:
                self._say(keys, given, f"nothing: {instead}")


def _ignored(settings: Sections) -> Iterator[tuple[Keys, str, str]]:
    compaction, pool, pages = settings.compaction, settings.pool, settings.pages
    windows, start = f"{compaction.windows_below:g}", compaction.compaction_start
    if compaction.guarantee is not None:
        instead = "compaction.guarantee takes its place"
        yield ("compaction", "windows_below"), windows, instead
        yield ("pages", "hold_blocks"), f"{pages.hold_blocks}", instead
    elif start is not None:
        instead = "compaction.compaction_start takes its place"
        yield ("compaction", "windows_below"), windows, instead
    if start is None:
        instead = "there is no compaction.compaction_start"
        yield ("compaction", "compaction_stop"), f"{compaction.compaction_stop}", instead
    if pool.placement != "address":
        instead = "holds need pool.placement = address"
        yield ("pages", "hold_blocks"), f"{pages.hold_blocks}", instead
    if pool.placement != "scatter":
        yield ("pool", "seed"), f"{pool.seed}", "it is of pool.placement = scatter"
    if not settings.prefix.prefix_caching:
        instead = "there is no prefix cache"
        yield ("prefix", "eviction"), settings.prefix.eviction, instead
        yield ("prefix", "page_aware"), f"{settings.prefix.page_aware}".lower(), instead
