"""Every setting, by section, with its default and what is allowed.

What lives here: the sections, whose keys are arguments of :class:`kvmmu.MMU` and
:class:`kvmmu.KVCache` under their own names, and what contradicts what. What never lives here: what
becomes of a setting once the pool is known (:mod:`.resolve`), and reading (:mod:`.files`).

The text below a key is what docs/configuration.md says about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .files import Allowed, Keys, Section
from .units import Bytes, Microseconds, parse_bytes, parse_share, show_bytes

__all__ = [
    "DTYPE_BYTES",
    "PAGED_ATTENTION",
    "Cache",
    "Compaction",
    "Memory",
    "Model",
    "PagedAttention",
    "Pages",
    "Pool",
    "Prefix",
    "Sections",
    "Start",
]

MAX_BLOCKS = 2**31 - 2
MAX_BLOCK_SIZE = 4096
MAX_SEQUENCES = 262_144
MAX_SEQUENCE_BLOCKS = 262_144
MAX_TABLE_NODES = 2**22 - 1
MAX_HOLD = 512
MAX_ORDER = 9

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""The dtypes that a KVCache takes, by their names in torch."""

Dtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Ratio = Annotated[float, Field(ge=0, le=1)]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _reserve(value: Any) -> Any:
    """A share below 1 as it is, a size as bytes."""
    try:
        if isinstance(value, float) or (isinstance(value, str) and value.rstrip().endswith("%")):
            share = parse_share(value)
            if share < 1:
                return share
        else:
            return parse_bytes(value)
    except ValueError:
        pass
    raise ValueError(f"allowed: {_RESERVE_ALLOWED}")


_RESERVE_ALLOWED = "a share of the pool below 1, such as 25% or 0.25, or a size such as 2GiB"

Eviction = Annotated[Literal["lru", "lfu"], BeforeValidator(_lower)]
Reserve = Annotated[int | float, BeforeValidator(_reserve), Allowed(_RESERVE_ALLOWED)]
Order = Annotated[int, Field(ge=0, le=MAX_ORDER)]
PageOrders = Annotated[tuple[Order, ...], Field(min_length=1, max_length=MAX_ORDER + 1)]


class Model(Section):
    """Shape of the model's KV: a `KVCache` is made from it, and sizes become blocks by it."""

    num_layers: Annotated[int, Field(ge=1, le=65_536)]
    """Layers that have KV."""
    num_kv_heads: Annotated[int, Field(ge=1, le=65_536)]
    """KV heads a layer, of this rank."""
    head_dim: Annotated[int, Field(ge=1, le=65_536)]
    """Width of K of a head."""
    v_head_dim: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """Width of V where it differs; 0: there is no V (MLA)."""
    dtype: Dtype = "bfloat16"
    """Of the KV."""

    @property
    def bytes_per_token(self) -> int:
        """Over all layers, K and V."""
        width = self.head_dim + (self.head_dim if self.v_head_dim is None else self.v_head_dim)
        return self.num_layers * self.num_kv_heads * width * DTYPE_BYTES[self.dtype]


class Pool(Section):
    """The blocks."""

    num_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)] | None = None
    """Usable blocks. Or `memory`, or told where the pool is built."""
    memory: Bytes | None = None
    """Memory for all blocks, instead of `num_blocks`: as many as fit, the null block among them."""
    block_size: Annotated[int, Field(ge=1, le=MAX_BLOCK_SIZE)] = 16
    """Tokens a block."""
    max_sequences: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] = 1024
    """Sequences open at once."""
    max_sequence_tokens: Count | None = None
    """Longest sequence in tokens; default: the whole pool."""
    max_blocks_per_sequence: Annotated[int, Field(ge=1, le=MAX_SEQUENCE_BLOCKS)] | None = None
    """The same in blocks: one of the two."""
    null_block: Literal["last", "first"] | Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = "last"
    """The block that padding points at."""
    table_nodes: Annotated[int, Field(ge=4, le=MAX_TABLE_NODES)] | None = None
    """Nodes of the page table, 4 KiB each; default: enough for most mixes."""
    placement: Literal["address", "fullest", "fifo", "scatter"] = "address"
    """Which empty blocks go first: `address` the lowest; `fifo` as vLLM; `scatter` for tests."""
    anchor: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Share of the pool that prompts opened with `anchor=True` go to first."""
    dedup: bool = False
    """Keep equal blocks once."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Of `placement: scatter`."""

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        if self.memory is not None:
            if self.num_blocks is not None:
                given = f"{show_bytes(self.memory)} given with num_blocks = {self.num_blocks}"
                yield ("memory",), f"{given}, allowed: one of them"
            elif self.memory == 0:
                yield ("memory",), "0B given, allowed: at least two blocks"
        if self.max_sequence_tokens is not None and self.max_blocks_per_sequence is not None:
            yield (
                ("max_blocks_per_sequence",),
                f"{self.max_blocks_per_sequence} given with max_sequence_tokens = "
                f"{self.max_sequence_tokens}, allowed: one of them",
            )
        if self.num_blocks is not None:
            yield from self.beyond(self.num_blocks)

    def beyond(self, num_blocks: int) -> Iterator[tuple[Keys, str]]:
        """What is larger than a pool of so many blocks."""
        longest, tokens = self.max_blocks_per_sequence, self.max_sequence_tokens
        if longest is not None and longest > num_blocks:
            yield (
                ("max_blocks_per_sequence",),
                f"{longest} given, allowed: 1 to {num_blocks}, the pool",
            )
        most = num_blocks * self.block_size
        if tokens is not None and tokens > most:
            blocks = f"{num_blocks} blocks of {self.block_size}"
            yield (
                ("max_sequence_tokens",),
                f"{tokens} given, allowed: 1 to {most}, the pool ({blocks})",
            )
        if isinstance(self.null_block, int) and self.null_block > num_blocks:
            yield ("null_block",), f"{self.null_block} given, allowed: 0 to {num_blocks}"


class Pages(Section):
    """Page sizes, and room to grow."""

    page_orders: PageOrders | None = None
    """Page sizes: order k is 2^k blocks; 0 among them. Default: `[0, 2, 9]`."""
    page_size: Bytes | None = None
    """The largest page in bytes, instead of `page_orders`: it becomes the nearest order, with
    single blocks and pages of 4 below it. Needs `model`, or bytes a block told at the building."""
    medium_from: Annotated[int, Field(ge=0, le=2**32 - 1)] = 512
    """Sequences of fewer tokens are mapped by single blocks."""
    huge_from: Annotated[int, Field(ge=0, le=2**32 - 1)] = 2048
    """Sequences of at most so many tokens have no pages of 512 blocks."""
    hold_blocks: Annotated[int, Field(ge=0, le=MAX_HOLD)] = 8
    """Empty blocks kept behind a sequence to grow into; whoever needs them gets them."""

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        if self.page_orders is not None:
            given = list(self.page_orders)
            if 0 not in given:
                yield ("page_orders",), f"{given} given, allowed: 0 (single blocks) among them"
            elif len(set(given)) < len(given):
                yield ("page_orders",), f"{given} given, allowed: each order once"
            if self.page_size is not None:
                size = show_bytes(self.page_size)
                yield (
                    ("page_size",),
                    f"{size} given with page_orders = {given}, allowed: one of them",
                )
        if self.page_size == 0:
            yield ("page_size",), "0B given, allowed: above 0"
        if self.medium_from > self.huge_from:
            yield (
                ("medium_from",),
                f"{self.medium_from} given, allowed: 0 to huge_from ({self.huge_from})",
            )


class Prefix(Section):
    """The prefix cache."""

    prefix_caching: bool = True
    """Keep the blocks of closed sequences for later prompts."""
    eviction: Eviction = "lru"
    """Which cached blocks go first: the least recently used, or the least often matched."""
    page_aware: bool = True
    """Of the oldest tenth, evict where whole windows become empty."""
    events: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Changes of the prefix index that are kept for routers to read (`mmu.events`); 0: none."""

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        if self.events and not self.prefix_caching:
            yield ("events",), f"{self.events} given without prefix_caching, allowed: 0"


class Compaction(Section):
    """When blocks move, and how many."""

    auto_compact: bool = False
    """Compact between steps without being asked (`KVCache`; on an `MMU` the engine calls)."""
    overlap: bool = False
    """`KVCache(copy="overlap")`: on a CUDA device copies run beside a step."""
    budget_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)] = 32
    """Most blocks of one pass."""
    budget_us: Microseconds | None = None
    """Most time that the copies of one pass take, by a rate that learns."""
    budget_bytes: Bytes | None = None
    """Most bytes of one pass."""
    windows_below: Ratio = 0.8
    """Start when free windows of 512 blocks are below this share of the possible; 0: never."""
    guarantee: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    """Keep the guarantee with so many windows of slack; takes the place of `windows_below`."""
    gather_least: Ratio = 0.1
    """Gather sequences as far as each moved block saves so many runs; 0: never."""
    compaction_start: Ratio | None = None
    """Fragmentation ratio that starts a pass; takes the place of `windows_below`."""
    compaction_stop: Ratio | None = None
    """Ratio below which it stops again; null: 0.3, or `compaction_start` where that is lower."""

    @property
    def stop(self) -> float:
        """What `compaction_stop` comes to."""
        if self.compaction_stop is not None:
            return self.compaction_stop
        return 0.3 if self.compaction_start is None else min(0.3, self.compaction_start)

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        start, stop = self.compaction_start, self.compaction_stop
        if start is not None and stop is not None and stop > start:
            yield (
                ("compaction_stop",),
                f"{stop:g} given, allowed: 0 to compaction_start ({start:g})",
            )
        if self.budget_us == 0:
            yield ("budget_us",), "0 given, allowed: above 0, or null for no limit"
        if self.budget_bytes == 0:
            yield ("budget_bytes",), "0B given, allowed: above 0, or null for no limit"


class Memory(Section):
    """Headroom."""

    reserved_memory: Reserve = 0
    """Kept for running sequences to grow into: `KVCache.open` refuses a new one that would leave
    less, unless none is open. A share of the pool, or bytes. An `MMU` alone keeps none: its engine
    admits."""


class Start(Section):
    """What happens once, before the first request."""

    preheat_pages: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 0
    """Claim so many of the largest pages, write to all of their bytes, and give them back
    (`cache.preheated` says what that took). An `MMU` has no bytes: its page table is walked."""
    record: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """File of the flight recorder; without one, what `KVMMU_RECORD` names, if it is set."""


class Cache(Section):
    """What only a `KVCache` has."""

    layout: Literal["NHD", "HND", "packed", "block_major"] = "NHD"
    """How KV lies in tensors (docs/layouts.md)."""
    device: Annotated[
        str,
        Field(pattern="^(cpu|cuda(:[0-9]{1,3})?)$"),
        Allowed("cpu, cuda, or cuda:N"),
    ] = "cpu"
    """Where the KV lies."""
    max_batch: Count = 256
    """Rows of the tables."""
    max_tokens: Count = 8192
    """Tokens of one step."""
    steps_in_flight: Annotated[int, Field(ge=1, le=1024)] = 1
    """Steps that may be in flight at once."""
    kernel_block_size: Annotated[int, Field(ge=1, le=MAX_BLOCK_SIZE)] | None = None
    """Tokens that an entry of the block table names, where the kernel's blocks are smaller."""
    page_order: Order | None = None
    """log2 of the blocks that an entry names, where its pages are larger. Needs the null block
    first."""
    return_memory: bool | None = None
    """Whether `shrink` gives memory back to the system; default: host memory goes."""

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        if self.kernel_block_size is not None and self.page_order is not None:
            yield (
                ("page_order",),
                f"{self.page_order} given with kernel_block_size = {self.kernel_block_size}, "
                "allowed: one of them",
            )
        if self.return_memory and self.device != "cpu":
            yield (
                ("return_memory",),
                f"true given with device = {self.device}, allowed: on cpu (on a device an object "
                "that owns the pages is needed: KVCache(return_memory=...))",
            )


class PagedAttention(Section):
    """The names that other systems give to these settings. Each stands for one above."""

    page_size: Bytes | None = None
    """`pages.page_size`"""
    block_size: Annotated[int, Field(ge=1, le=MAX_BLOCK_SIZE)] | None = None
    """`pool.block_size`"""
    preheat_pages: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] | None = None
    """`start.preheat_pages`"""
    evict_policy: Eviction | None = None
    """`prefix.eviction`"""
    reserved_memory: Reserve | None = None
    """`memory.reserved_memory`"""
    auto_defrag: bool | None = None
    """`compaction.auto_compact`"""
    large_page_prefetch: Annotated[
        bool | Annotated[int, Field(ge=0, le=MAX_HOLD)] | None,
        Allowed(f"true, false, or blocks, 0 to {MAX_HOLD}"),
    ] = None
    """`pages.hold_blocks`: true is 8, false 0"""


PAGED_ATTENTION: dict[str, Keys] = {
    "page_size": ("pages", "page_size"),
    "block_size": ("pool", "block_size"),
    "preheat_pages": ("start", "preheat_pages"),
    "evict_policy": ("prefix", "eviction"),
    "reserved_memory": ("memory", "reserved_memory"),
    "auto_defrag": ("compaction", "auto_compact"),
    "large_page_prefetch": ("pages", "hold_blocks"),
}
"""What each key of :class:`PagedAttention` stands for."""


class Sections(Section):
    """All sections, each under its own name; what is left out has its default."""

    model: Model | None = None
    """Shape of the KV."""
    pool: Pool = Pool()
    """The blocks."""
    pages: Pages = Pages()
    """Page sizes, and room to grow."""
    prefix: Prefix = Prefix()
    """The prefix cache."""
    compaction: Compaction = Compaction()
    """When blocks move, and how many."""
    memory: Memory = Memory()
    """Headroom."""
    start: Start = Start()
    """What happens once."""
    kvcache: Cache = Cache()
    """What only a `KVCache` has."""

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        placement, device = self.pool.placement, self.kvcache.device
        if self.compaction.guarantee is not None and placement != "address":
            yield (
                ("compaction", "guarantee"),
                f"{self.compaction.guarantee} given with pool.placement = {placement}, "
                "allowed: with address",
            )
        if self.compaction.overlap and device == "cpu":
            yield (
                ("compaction", "overlap"),
                "true given with kvcache.device = cpu, allowed: on a CUDA device",
            )
        kernel, size = self.kvcache.kernel_block_size, self.pool.block_size
        if kernel is not None and size % kernel:
            yield (
                ("kvcache", "kernel_block_size"),
                f"{kernel} given, allowed: a divisor of pool.block_size ({size})",
            )
        if self.kvcache.page_order and self.pool.null_block == "last":
            yield (
                ("kvcache", "page_order"),
                f"{self.kvcache.page_order} given with pool.null_block = last, allowed: with first",
            )
