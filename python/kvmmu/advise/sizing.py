"""The arithmetic of a pool: blocks that fit, granules, sequences, block size, tables, bandwidth.

What lives here: :class:`Row`, what :func:`size` works out, and how each number comes about. What
never lives here: knowledge of models and GPUs, and printing.

Where guides for serving give a rule (15 % of memory for tables, block size 128, 750 GB/s,
``max_num_seqs`` between 1.2 x the peak and capacity / mean need), the rule stands beside what comes
of computing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import InvalidConfig
from ..storage import Region, Storage
from .gpus import GPU
from .shapes import DTYPE_BYTES, Shape

__all__ = [
    "BLOCK_SIZES",
    "BlockSize",
    "Load",
    "Pool",
    "Row",
    "best",
    "block_sizes",
    "pool_of",
    "rows",
]

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
TABLE_ENTRY = 4
"""Bytes of an entry of the block table (int32)."""
NODE_ENTRIES, NODE_BYTES = 512, 4096
"""Of a node of the page table, in host memory: a word an entry."""
NODE_WORD = 8
"""Bytes beside each node."""
REVERSE_BYTES = 4
"""Bytes in the reverse map of a page that is mapped once."""
COUNTED_TOKENS = 131_072
"""Of the sequence whose page table is counted."""
COUNTED = "docs/performance.md"
KERNEL_PAGE = 128
"""Tokens of the pages that kernels with a fast path for pages read."""
_ADDRESS = 1 << 40
"""Where the regions of the arithmetic lie: a multiple of every page."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of advice.

    Attributes:
        what: the question. value: the answer. source: where the number comes from.
        note: what follows.
    """

    what: str
    value: str
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the pool.

    Attributes:
        mean_tokens: of a sequence at its end, prompt and output; None: not known.
        mean_from: where that comes from.
        peak: most requests at once that are to be served; None: not known.
        peak_from: where that comes from.
        longest: tokens of the longest sequence that is to be served.
        step_s: what a step of decoding may take.
    """

    longest: int
    mean_tokens: float | None = None
    mean_from: str = "--mean-tokens"
    peak: int | None = None
    peak_from: str = "--peak"
    step_s: float = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The pool of one rank.

    Attributes:
        shape, gpu: of the model and the device.
        ranks: of tensor parallelism.
        block_size: tokens a block.
        usable: share of the device's memory that may be used.
        weights: bytes of the weights of one rank.
        memory: bytes that are left for blocks.
        block_bytes: of one block, of one rank, over all layers.
        num_blocks: that fit beside the null block.
    """

    shape: Shape
    gpu: GPU
    ranks: int
    block_size: int
    usable: float
    weights: int
    memory: int
    block_bytes: int
    num_blocks: int

    @property
    def tokens(self) -> int:
        """That fit."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class BlockSize:
    """What a block size costs.

    Attributes:
        size: tokens.
        waste: share of a sequence's memory that holds no token: of its last block.
        again: share of a sequence that is computed again, on average, because a shared prefix is
            found in whole blocks only: half a block; 0 where prompts share nothing.
        table: bytes of both tables a byte of KV.
        piece: bytes of a block that lie together in one layer (NHD): what one descriptor copies.
        entries: of the longest sequence's row.
    """

    size: int
    waste: float
    again: float
    table: float
    piece: int
    entries: int

    @property
    def cost(self) -> float:
        """All three as shares of a sequence: memory that holds no token, tables, tokens computed
        again."""
        return self.waste + self.table + self.again


def page_table_bytes(blocks: int, *, huge: bool = False) -> float:
    """Bytes a block in host memory of the page table of a sequence of so many blocks, all in single
    blocks or in huge pages, as ``docs/performance.md`` counts them: nodes that are touched (those
    below huge pages are in reserve), a word a node, the reverse map."""
    leaves = -(-blocks // NODE_ENTRIES)
    touched, pages = (1, leaves) if huge else (1 + leaves, blocks)
    return (touched * NODE_BYTES + (1 + leaves) * NODE_WORD + pages * REVERSE_BYTES) / blocks


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what[:-1]}ies" if what.endswith("y") else f"{number:,} {what}s"


def pool_of(
    shape: Shape,
    gpu: GPU,
    *,
    ranks: int = 1,
    block_size: int = 16,
    usable: float = 0.9,
    weights: int | None = None,
) -> Pool:
    """What fits.

    Args:
        weights: bytes over all ranks, where the shape does not know or is wrong.

    Raises:
        InvalidConfig: the weights are not known, or nothing is left for blocks.
    """
    if weights is not None:
        shape = replace(shape, weights=weights, weights_from="--weights")
    total = shape.weights
    if total is None:
        raise InvalidConfig(f"--weights: missing for {shape.name}, {shape.weights_from}")
    of_rank = -(-total // ranks)
    memory = int(gpu.memory * usable) - of_rank
    block_bytes = shape.token_bytes(ranks) * block_size
    blocks = memory // block_bytes - 1
    if blocks < 1:
        raise InvalidConfig(
            f"{shape.name} on {ranks} x {gpu.name}: {of_rank / 2**30:.1f} GiB of weights a GPU "
            f"leave {memory / 2**30:.1f} GiB of {usable:.0%} of {gpu.memory / 2**30:.0f} GiB, "
            f"needed: at least two blocks of {block_bytes:,} bytes (--tensor-parallel, --weights, "
            "--block-size)",
            needed=2 * block_bytes,
            available=max(memory, 0),
        )
    return Pool(
        shape=shape,
        gpu=gpu,
        ranks=ranks,
        block_size=block_size,
        usable=usable,
        weights=of_rank,
        memory=memory,
        block_bytes=block_bytes,
        num_blocks=min(blocks, 2**31 - 2),
    )


def rows(pool: Pool, load: Load) -> Iterator[Row]:
    """Everything that follows from a pool and a load."""
    yield from _memory(pool, load)
    yield from _granules(pool)
    yield from _sequences(pool, load)
    yield from _tables(pool, load)
    yield from _bandwidth(pool, load)


def _memory(pool: Pool, load: Load) -> Iterator[Row]:
    shape, gpu = pool.shape, pool.gpu
    heads = shape.heads_of_rank(pool.ranks)
    kind = "one latent vector" if shape.latent else counted(heads, "KV head")
    width = f"({shape.head_dim} + {shape.v_head_dim})" if shape.v_head_dim else f"{shape.head_dim}"
    yield Row(
        "bytes a token",
        f"{shape.token_bytes(pool.ranks):,}",
        f"{shape.source}: {counted(shape.layers, 'layer')} x {kind} x {width} x "
        f"{DTYPE_BYTES[shape.dtype]:g} bytes",
        shape.note or ("of one rank" if pool.ranks > 1 else ""),
    )
    yield Row("bytes a block", f"{pool.block_bytes:,}", f"x {counted(pool.block_size, 'token')}")
    yield Row("memory of a GPU", f"{gpu.memory / 2**30:.1f} GiB", gpu.source, gpu.name)
    yield Row(
        "weights of a GPU",
        f"{pool.weights / 2**30:.1f} GiB",
        f"{shape.weights_from} / {pool.ranks}" if pool.ranks > 1 else shape.weights_from,
    )
    yield Row(
        "memory for blocks",
        f"{pool.memory / 2**30:.1f} GiB",
        f"{pool.usable:.0%} of the memory - weights",
        "the rest is for activations",
    )
    yield Row(
        "blocks that fit",
        f"{pool.num_blocks:,}",
        "memory for blocks / bytes a block - the null block",
        f"{pool.tokens:,} tokens, {pool.tokens / load.longest:.1f} of the longest sequences",
    )


def regions(pool: Pool, layout: str) -> list[Region]:
    """The regions of a layout as arithmetic has them; nothing lies there."""
    shape, blocks = pool.shape, pool.num_blocks + 1
    halves = 2 if shape.v_head_dim else 1
    size = DTYPE_BYTES[shape.dtype] * shape.heads_of_rank(pool.ranks) * pool.block_size
    k, v = int(size * shape.head_dim), int(size * shape.v_head_dim)
    if layout == "block_major":
        return [Region(_ADDRESS, pool.block_bytes, pool.block_bytes, blocks)]
    apart = -(-max(k, v) * blocks // _ADDRESS) * _ADDRESS
    return [
        Region(_ADDRESS + index * apart, width, width, blocks)
        for index, width in enumerate([k, v][:halves] * shape.layers)
    ]


def _granules(pool: Pool) -> Iterator[Row]:
    for layout in ("NHD", "block_major"):
        found = Storage(regions(pool, layout), pool.num_blocks).granule()
        size = found * pool.block_bytes
        yield Row(
            f"granule, {layout}",
            counted(found, "block"),
            "Storage.granule: whole pages of 2 MiB in every region",
            f"{size / 2**20:,.0f} MiB go back at once",
        )
    paged = next((k for k in range(1, 9) if pool.block_size << k == KERNEL_PAGE), None)
    yield Row(
        "page orders",
        "0, 2, 9",
        "the default; --trace fits them to lengths",
        "" if paged is None else f"0, {paged}, 9 for kernels with pages of {KERNEL_PAGE} tokens",
    )
    for order in sorted({2, paged or 2, 9}):
        tokens = pool.block_size << order
        yield Row(
            f"page of order {order}",
            f"{(pool.block_bytes << order) / 2**20:,.1f} MiB",
            f"2^{order} blocks",
            f"{tokens:,} tokens",
        )


def _advised(pool: Pool, load: Load) -> tuple[int | None, int | None]:
    """Both ends of the rule for ``max_num_seqs``; None: not known."""
    least = None if load.peak is None else math.ceil(1.2 * load.peak)
    most = None if load.mean_tokens is None else int(pool.tokens / load.mean_tokens)
    return least, most


def _sequences(pool: Pool, load: Load) -> Iterator[Row]:
    longest = pool.tokens // load.longest
    least, most = _advised(pool, load)
    yield Row(
        "sequences of the longest",
        f"{longest:,}",
        f"{pool.tokens:,} tokens / {load.longest:,}",
    )
    mean = load.mean_tokens
    if mean is None or most is None:
        yield Row("max_num_seqs", "-", "needs --mean-tokens or --trace")
        return
    source = f"capacity / mean need ({counted(round(mean), 'token')}, {load.mean_from})"
    if least is None:
        yield Row("max_num_seqs, at most", f"{most:,}", source, "the rule's other end needs --peak")
        return
    fits = f"{least:,} to {most:,}" if least <= most else f"{most:,}"
    note = "" if least <= most else f"the peak wants {least:,}: some will wait, or be preempted"
    yield Row(
        "max_num_seqs", fits, f"1.2 x peak ({load.peak:,}, {load.peak_from}) to {source}", note
    )


def _tables(pool: Pool, load: Load) -> Iterator[Row]:
    """Memory of tables, computed, beside the rule."""
    least, most = _advised(pool, load)
    sequences, rows_from = 256, "without --mean-tokens, --peak or --trace"
    if most is not None:
        sequences, rows_from = max(most, 1), "max_num_seqs, at most"
    elif least is not None:
        sequences, rows_from = least, "1.2 x peak"
    width = -(-load.longest // pool.block_size)
    device = sequences * width * TABLE_ENTRY
    blocks = max(COUNTED_TOKENS // pool.block_size, 1)
    single = page_table_bytes(blocks)
    huge = page_table_bytes(blocks, huge=True) * pool.num_blocks / 2**20
    share = device / pool.memory
    yield Row(
        "block tables on the device",
        f"{device / 2**20:,.1f} MiB, {share:.4%} of the blocks' memory",
        f"{counted(sequences, 'row')} ({rows_from}) x {counted(width, 'entry')} x "
        f"{TABLE_ENTRY} bytes",
        "a rule says 15 %",
    )
    yield Row(
        "page table in host memory",
        f"{pool.num_blocks * single / 2**20:,.1f} MiB",
        f"{single:.3g} bytes a block of a 128k sequence, mapped singly, with the reverse map: "
        f"{COUNTED}",
        f"{huge:,.2f} MiB where huge pages map it" if blocks >= NODE_ENTRIES else "",
    )


def _bandwidth(pool: Pool, load: Load) -> Iterator[Row]:
    """What a step of decoding reads, beside what the device can."""
    rule = "a rule asks for 750 GB/s"
    held = pool.num_blocks * pool.block_bytes
    read = pool.weights + held
    wanted = read / load.step_s
    yield Row(
        "bandwidth for a step",
        f"{wanted / 1e9:,.0f} GB/s",
        f"weights + a full pool, once in {load.step_s * 1e3:g} ms",
        rule,
    )
    bandwidth = pool.gpu.bandwidth
    if bandwidth is None:
        yield Row("bandwidth of the GPU", "-", "needs --gpu or --bandwidth")
        return
    fastest = read / bandwidth
    enough = "enough" if bandwidth >= wanted else "not enough with a full pool"
    if bandwidth > 750e9 and bandwidth < wanted:
        enough += ", although above the rule"
    elif bandwidth < 750e9 and bandwidth >= wanted:
        enough += ", although below the rule"
    yield Row(
        "bandwidth of the GPU",
        f"{bandwidth / 1e9:,.0f} GB/s",
        pool.gpu.source,
        f"{enough}: a step takes {fastest * 1e3:.1f} ms at least",
    )
    entries = pool.num_blocks * TABLE_ENTRY
    yield Row(
        "share of it for tables",
        f"{entries / read:.6%}",
        f"{TABLE_ENTRY} bytes a block beside {pool.block_bytes:,}",
    )
    moved = 32 * 2 * pool.block_bytes
    yield Row(
        "a full pass of compaction",
        f"{moved / bandwidth * 1e6:,.0f} us",
        "32 blocks read and written at the GPU's bandwidth",
        f"{moved / bandwidth / load.step_s:.1%} of a step of {load.step_s * 1e3:g} ms",
    )


def block_sizes(
    pool: Pool, load: Load, lengths: list[int] | None = None, *, prefixes: bool = True
) -> list[BlockSize]:
    """What each block size costs.

    Args:
        prefixes: whether prompts share prefixes.
        lengths: tokens of sequences at their end; None: half a block is wasted on average.
    """
    if lengths:
        mean = sum(lengths) / len(lengths)
    elif load.mean_tokens is not None:
        mean = load.mean_tokens
    else:
        mean = load.longest / 2
    found = []
    token = pool.shape.token_bytes(pool.ranks)
    for size in BLOCK_SIZES:
        if lengths:
            unused = sum(-length % size for length in lengths) / len(lengths)
        else:
            unused = (size - 1) / 2
        found.append(
            BlockSize(
                size=size,
                waste=unused / (mean + unused),
                again=(size - 1) / 2 / mean if prefixes else 0.0,
                table=(TABLE_ENTRY + page_table_bytes(COUNTED_TOKENS // size)) / (size * token),
                piece=size * token // (pool.shape.layers * (2 if pool.shape.v_head_dim else 1)),
                entries=-(-load.longest // size),
            )
        )
    return found


def best(found: list[BlockSize], within: float = 0.01) -> BlockSize:
    """The largest size that costs at most a hundredth more than the cheapest: fewer entries and
    longer pieces for next to nothing."""
    cheapest = min(size.cost for size in found)
    return max((one for one in found if one.cost <= cheapest + within), key=lambda one: one.size)
