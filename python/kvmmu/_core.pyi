"""The compiled core of kvmmu. Shapes in brackets; ``B`` rows of a batch, ``W`` blocks a row,
``T`` tokens of a batch, ``m`` moves, ``c`` copies. Block ids are physical, 0 .. num_blocks - 1;
``slot = block * block_size + offset`` (64-bit).

Errors are those of :mod:`kvmmu.errors`; each is raised before anything has changed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "MMU",
    "BlockMap",
    "BlockTables",
    "DirtyRows",
    "Events",
    "Measure",
    "Moves",
    "Plan",
    "Pool",
    "Quote",
    "SequenceInfo",
    "__version__",
    "_after_fork",
    "_flush_recordings",
    "_unpack_records",
    "build",
    "copy_blocks",
    "cpu_features",
    "kernel_names",
    "kernel_source",
    "page_bytes",
    "release_pages",
]

__version__: str
build: str
"""Profile and target that the extension was built for."""

@final
class MMU:
    """Decides which sequence holds which block, and what moves where. Holds no tensor.

    Any method may be called from any thread. A sequence has one writer at a time: a second one
    gets ``ConcurrentUse``. A core panic raises ``InternalError``, after which every call does.

    Args:
        num_blocks: usable blocks, 1 .. 2**31 - 2. The null block is one more (see ``null_block``).
        block_size: tokens a block, 1 .. 4096.
        max_sequences: sequences open at once, 1 .. 262144.
        max_blocks_per_sequence: longest sequence in blocks, 1 .. 262144 and at most
            ``num_blocks``; default: the smaller of ``num_blocks`` and 261632. (With more than that a
            sequence always begins at the start of a page, wherever its cached prefix lies.)
        null_block: which of the ``num_blocks + 1`` physical blocks padding points at and nobody is
            given: ``"last"``, ``"first"`` or its number. The usable blocks are the others.
        table_nodes: page-table nodes of 4 KiB (touched on first use), 4 .. 2**22 - 1; default: enough for
            every mix of sequences, or 65,536 where that would be more (see ``OutOfTables``).
        prefix_caching: keep the blocks of closed sequences for later prompts.
        placement: ``"address"`` (lowest address first, prompts in few long runs), ``"fullest"``
            (windows that are nearly full first), ``"fifo"`` (in the order of release, as vLLM does)
            or ``"scatter"`` (pseudo-random, from ``seed``: the worst case, for tests).
        budget_blocks: most blocks that one compaction pass moves, >= 1.
        windows_below: ``plan_compaction`` starts when free windows (aligned groups of 512 blocks, each
            empty or evictable) are below this share, 0 .. 1, of those that the available blocks could
            make, and stops a little above; 0: never.
        guarantee: keep the guarantee with so many windows of slack: never more windows held than the
            live blocks need plus one plus ``guarantee``, and never more moves than frees. It takes the
            place of ``windows_below``, and of holds. None: off.
        gather_least: ``plan_compaction`` brings sequences into fewer runs as far as each moved block
            saves so many runs, 0 .. 1; 0: never.
        compaction_start, compaction_stop: fragmentation ratio over available blocks above which
            ``plan_compaction`` starts, and below which it stops again; 0 <= stop <= start <= 1. It
            takes the place of ``windows_below``. None: the ratio does not matter (as it is above .35 whenever huge pages are in use).
        anchor: share of the pool, 0 to below 1, that prompts opened with ``anchor=True`` go to
            first and all others last.
        page_orders: page sizes: order k is 2**k consecutive, aligned blocks; 0 .. 9 with 0 among
            them. ``(0,)``: single blocks alone; ``(0, 3, 9)``: for kernels with pages of 8 blocks.
        medium_from, huge_from: tokens below which a sequence is mapped by single blocks, and up to
            which it has no pages of order 9.
        hold_blocks: empty blocks kept behind a sequence to grow into, 0 .. 512; whoever needs them
            gets them (``placement="address"`` alone).
        dedup: a full block that was computed twice is kept once: when it is published the sequence
            maps the block that was known first and gives its own back. Tokens are compared; the
            KV of the two may differ by rounding.
        seed: for ``placement="scatter"``.
        eviction: which cached blocks are dropped first: ``"lru"`` (the least recently used) or
            ``"lfu"`` (the least often matched, of those the least recently used; matches count
            half after each turnover of the cache). What stands behind a prefix always goes before it.
        page_aware: of the tenth that goes first, drop the blocks whose aligned groups of 512 have
            the fewest blocks that are neither empty nor evictable, so that whole groups become
            empty.
        events: changes of the prefix index that are kept for :meth:`events`, 0 .. 2**24, each with
            the tokens of a block; 0: none are noted. Needs ``prefix_caching``.
        record: file in which all calls are recorded (see :mod:`kvmmu.recorder`); one that is there
            already is kept, and ``NAME.1``, ``NAME.2``, ... is begun. None: what the variable
            ``KVMMU_RECORD`` names, if it is set; False: none.

    Raises:
        InvalidConfig: names the argument, what was given and what is allowed.
    """

    def __new__(
        cls,
        num_blocks: int,
        block_size: int = 16,
        *,
        max_sequences: int = 1024,
        max_blocks_per_sequence: int | None = None,
        null_block: str | int = "last",
        table_nodes: int | None = None,
        prefix_caching: bool = True,
        placement: str = "address",
        budget_blocks: int = 32,
        windows_below: float = 0.8,
        guarantee: int | None = None,
        gather_least: float = 0.1,
        compaction_start: float | None = None,
        compaction_stop: float = 0.30,
        anchor: float = 0.15,
        page_orders: Sequence[int] = (0, 2, 9),
        medium_from: int = 512,
        huge_from: int = 2048,
        hold_blocks: int = 8,
        dedup: bool = False,
        seed: int = 0,
        eviction: str = "lru",
        page_aware: bool = True,
        events: int = 0,
        record: str | Literal[False] | None = None,
    ) -> MMU: ...
    @property
    def num_blocks(self) -> int:
        """Usable blocks, those given back among them. The null block is one more."""
    @property
    def block_size(self) -> int:
        """Tokens a block."""
    @property
    def budget_blocks(self) -> int:
        """Most blocks that one compaction pass moves."""
    @property
    def null_block(self) -> int:
        """The block that padding points at, by default ``num_blocks``. Storage needs
        ``num_blocks + 1`` blocks."""
    @property
    def max_sequences(self) -> int:
        """Sequences open at once, at most."""
    @property
    def max_blocks_per_sequence(self) -> int:
        """Longest sequence in blocks."""
    @property
    def page_orders(self) -> list[int]:
        """Page sizes, ascending: order k is 2**k consecutive, aligned blocks."""

    # -- sequences -------------------------------------------------------------------------
    def open(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        salt: bytes | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        anchor: bool = False,
        page_orders: Sequence[int] | None = None,
        require: str | None = None,
        contiguous: int = 0,
    ) -> int:
        """Opens a sequence for a prompt and claims all of its blocks (all or nothing).

        The longest cached prefix of full blocks is matched first; at least the last token is
        always left to compute.

        Args:
            tokens: int32 [n], C-contiguous, may be empty.
            salt: keeps tenants or adapters apart: equal tokens under different salts never match.
            extra_keys: block index -> bytes that the tokens of that block do not say (the hash of
                an image behind placeholder tokens, for instance).
            anchor: the prompt is expected to be shared and to stay (a system prompt): its new
                blocks go to the anchor region if there is room, so that they pin no holes elsewhere.
            page_orders: page sizes of this sequence whatever its length, of those of the pool;
                None: those that its length allows.
            require: ``"huge"``: each complete region of 512 blocks must be one page of order 9, or
                the prompt is refused. Only whole huge pages of a cached prefix are used then.
            contiguous: so many tokens at the start (or all) must lie in one run of blocks.

        Returns:
            the id of the sequence (int64; never reused while this MMU lives).

        Raises:
            OutOfBlocks, OutOfTables, LimitExceeded (longer than max_blocks_per_sequence),
            InvalidConfig (dtype, shape, key, a page order that the pool has not), Fragmented (the
            shape that was asked for is not to be had; cached blocks may have been dropped for it).
        """
    def append(self, sequence: int, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Extends a sequence by known tokens and makes the places that they go to writable.

        Returns:
            int32 [c, 2], (source, destination): copy-on-write copies that must be carried out
            before the next step or move.
        """
    def fork(self, sequence: int) -> int:
        """A new sequence that shares every block. Positions that a step in flight has not yet
        written are left for the child to schedule itself. Copies nothing."""
    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Shortens a sequence and releases the blocks behind it. Longer than it is: InvalidConfig."""
    def release_before(self, sequence: int, token: int) -> int:
        """Releases the blocks that lie wholly in front of a token, for attention that looks back
        only so far; returns how many. Their places in rows name the null block from then on.

        Acts as far as tokens are settled (written by steps that are over), so it may be called with
        any token up to the length; what stays is released by a later call. The last settled block
        stays, and one more while the next block is to be published behind it.
        """
    def look(self, sequence: int, block: int) -> int | None:
        """Physical block of a logical block, without any lock: None when it is not mapped (or the
        sequence is not open). True at some moment of the call."""
    def close(self, sequence: int) -> None:
        """Ends a sequence. Published blocks stay cached, the rest becomes empty, or fenced until
        the newest step prepared so far has ended."""
    def info(self, sequence: int) -> SequenceInfo:
        """Tokens, blocks and pages of a sequence at this moment."""
    def block_table(self, sequence: int) -> npt.NDArray[np.int32]:
        """int32 [ceil(num_tokens / block_size)]: the physical blocks, in order; the null block for
        those that were released from the front."""
    def regions(self, sequence: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """The complete aligned regions of 512 blocks of a sequence, in order: int32 [n], the first
        logical block of each; bool [n], whether one page of order 9 maps it."""
    def translate(self, sequence: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Token positions int64 [k] to slots int64 [k]."""
    def sequences(self) -> npt.NDArray[np.int64]:
        """Ids of all open sequences, int64 [k]."""
    def match(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        salt: bytes | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> int:
        """Tokens of this prompt that ``open`` would find cached. Changes nothing."""
    def quote(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        salt: bytes | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        page_orders: Sequence[int] | None = None,
        require: str | None = None,
        contiguous: int = 0,
    ) -> Quote:
        """Says whether ``open`` with these arguments would succeed, without changing anything.

        A required shape counts: ``"now"`` if it is there, or is once cached blocks have been dropped;
        ``"never"`` if no pool of this size, placement and page orders has it; else ``"frees"``.
        With ``require="huge"`` and a contiguous start of more than 512 blocks it is never
        ``"now"``: whether both are to be had, only ``open`` can tell.

        Raises:
            InvalidConfig: as ``open``.
        """

    # -- steps -----------------------------------------------------------------------------
    def begin_step(self) -> int:
        """Begins a step and returns its number. Any number may be in flight."""
    def prepare(
        self,
        step: int,
        sequences: npt.NDArray[np.int64],
        tables: BlockTables,
        *,
        query_lens: npt.NDArray[np.int32] | None = None,
        new_tokens: npt.NDArray[np.int32] | None = None,
    ) -> npt.NDArray[np.int32]:
        """Schedules the next tokens of each sequence in a step and writes ``tables``.

        Row ``i`` schedules ``query_lens[i]`` tokens (default 1 each) of ``sequences[i]`` from the
        first that no step has scheduled. Tokens past the end of the sequence are appended: their
        values are taken from ``new_tokens``, in row order; its length must be exactly what all
        rows lack. ``None``: the values are not known; blocks that hold them are never published.
        All or nothing over the whole batch; a step can be prepared several times.

        Args:
            sequences: int64 [B], each at most once.
            query_lens: int32 [B], each >= 0.
            new_tokens: int32 [k] or None.

        Returns:
            int32 [c, 2] copy-on-write copies (source, destination) to run before the step, and even
            if it is cancelled.

        Raises:
            OutOfBlocks, UnknownSequence, ConcurrentUse, LimitExceeded (a row, the rows or the
            slot mapping would not fit), InvalidStep, InvalidConfig. Fragmented, where entries are
            pages (``page_order``) and a row would not lie in whole ones: numbers as always, and
            ``sequence``, ``group`` (its first that is no page), ``page_order``; ``needed`` are the
            blocks of that group, ``largest_run`` those of them that are in place. Cached blocks may
            have been evicted for such a call; nothing else has changed.
        """
    def written(self, step: int) -> None:
        """All that the step scheduled has been written: publishes the blocks that are now full."""
    def cancel(self, step: int) -> None:
        """Takes back what the step scheduled: lengths as before ``prepare`` (tokens appended by it
        are dropped), nothing published. Steps that overlap in a sequence are cancelled newest first;
        InvalidStep too when tokens were appended behind those that the step appended."""
    def end_step(self, step: int) -> None:
        """The step has finished on the device. Must have been ``written`` or ``cancel``-led if it
        scheduled anything. Empties blocks that were fenced for it."""
    def steps_in_flight(self) -> int:
        """Steps that have begun and not ended."""

    # -- tables ----------------------------------------------------------------------------
    def register_tables(
        self,
        block_table: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        slot_mapping: npt.NDArray[np.int64],
        query_start_loc: npt.NDArray[np.int32],
        *,
        kernel_block_size: int | None = None,
        page_order: int | None = None,
    ) -> BlockTables:
        """Registers output buffers, whose addresses stay as they are from now on.

        What an entry names, for kernels whose blocks are not ours (at most one of the two):

        - ``kernel_block_size=4`` with blocks of 16: ``r = 16 / 4`` entries a block, ``b * r`` to
          ``b * r + r - 1``.
        - ``page_order=3``: pages of 8 blocks, consecutive and aligned in physical memory; an entry is
          the page's number, ``block >> 3``. ``prepare`` and ``export`` raise Fragmented for a row
          that does not lie in whole pages. A last page that is not full begins at an aligned place
          and lies wholly in memory; what stands in its rest may be anybody's (kernels read it and
          mask it, so it must be finite).

        A row has an entry for each kernel block (page) in which a token has a place, and no more:
        paged kernels (FlashAttention, FlashInfer, vLLM's) read none behind the row's length. All
        others hold the null entry: the null block's first kernel block, ``null_block * r``, or its
        page, ``null_block >> page_order``. Slots stay what they are: block * block_size + offset.

        Args:
            block_table: int32 [B, W], C-contiguous, writable. W counts entries.
            seq_lens: int32 [B].
            slot_mapping: int64 [T].
            query_start_loc: int32 [B + 1].
            kernel_block_size: tokens of one entry, a divisor of the block size.
            page_order: log2 of the blocks of one entry, 0 to 9.

        Raises:
            InvalidConfig: dtype, shape, layout; a kernel block size that does not divide; a page
                order for which there is no null page: the null block must be the first of its page,
                and the ``num_blocks + 1`` blocks of memory must hold all of it, so that padding can
                be read and is no row's page. ``null_block="first"`` always serves; the default,
                the last block, never does.
        """
    def export(self, sequences: npt.NDArray[np.int64], tables: BlockTables) -> None:
        """Refreshes rows and lengths (no slots) for these sequences without scheduling anything,
        for instance after a commit.

        Raises:
            UnknownSequence, ConcurrentUse, LimitExceeded, InvalidConfig; Fragmented as ``prepare``.
        """

    # -- blocks ----------------------------------------------------------------------------
    def pin(self, blocks: npt.NDArray[np.int64]) -> None:
        """Takes one reference on each block, which must be in use or cached: it stays where it is
        and what it is until ``unpin``."""
    def unpin(self, blocks: npt.NDArray[np.int64]) -> None:
        """Gives the references of ``pin`` back. InvalidBlock when there is none."""
    def lease(self, sequence: int, start: int, stop: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Holds the blocks of the tokens ``start`` to ``stop`` (exclusive) until ``end_lease``: they
        are not moved, evicted or reused, whatever happens to the sequence, and a sequence that
        writes into one copies it first. Returns the number of the lease and its blocks."""
    def end_lease(self, lease: int) -> None:
        """The transfer is done or given up. InvalidLease when it has ended already."""
    def num_leases(self) -> int:
        """Leases that have not ended."""
    def evict(self, num_blocks: int) -> int:
        """Drops up to so many cached blocks, in the order of eviction; returns how many."""
    def references(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """References (mappings + pins + moves) of each block, int64 [k]."""
    def states(self) -> dict[str, int]:
        """Blocks by state: ``empty, destined, in_use, cached, fenced, offline`` (sums to num_blocks),
        ``available`` (empty + evictable cached) and ``held`` (of the empty ones: kept behind
        sequences to grow into)."""
    def stats(self) -> dict[str, int]:
        """Counters since the start, among them: ``opened, closed, forked, appended_tokens,
        prefix_queried_blocks, prefix_hit_blocks, published_blocks, evicted_blocks, copied_on_write,
        plans_begun, plans_stopped_early, moves_begun, moves_committed, moves_dropped,
        moves_aborted, freed_blocks, left_cached, given_back, taken_back``."""
    def measure(self) -> Measure:
        """How scattered memory is at this moment. Looks at every block and every sequence; other calls
        wait meanwhile."""
    def block_map(self) -> BlockMap:
        """What every physical block is, at one moment: it waits for the verbs that are under way, and
        those that come meanwhile wait for it (about a millisecond for 90,000 blocks). What a step in
        flight has been told to do counts as done: blocks that it copies or writes are those of their
        new owners already. O(blocks), however often each is shared."""

    # -- for those who watch ---------------------------------------------------------------
    def time_operations(self, every: int) -> None:
        """Times about one call in ``every`` of each operation from now on, conversion of arguments
        included; 0: none, as when it is made. 0 .. 2**20."""
    def operation_times(self) -> dict[str, tuple[list[int], float]]:
        """Of the calls that were timed, by operation: how many took at most so long, by
        :meth:`operation_time_bounds` (and one number more: those above), and the seconds of all.
        Operations of which no call was timed are left out."""
    @staticmethod
    def operation_time_bounds() -> list[float]:
        """Upper bounds in seconds, ascending."""
    def events(self, since: int) -> Events:
        """What became of published blocks from the event number ``since`` on, as far as it is still
        known: see :class:`Events`. Begin with 0, go on with ``events.next``.

        Raises:
            InvalidConfig: it was made with ``events=0``; a number that no event has and the next
                will not have either (the reader knows another manager).
        """
    def published(self) -> Events:
        """All that is published now, as if it were stored at this moment, parents before children:
        for a reader who begins, or has lost events, and goes on with ``events.next``. Numbers are
        -1. Copies the tokens of all of it, and ``open`` and ``written`` wait meanwhile."""
    @property
    def recording(self) -> _Recording | None:
        """``file``, ``bytes`` in it so far, and ``failure``: why nothing is recorded any more. None:
        no calls are recorded."""
    def flush_recording(self) -> None:
        """Waits, at most ten seconds, until all calls so far are in the file."""

    # -- compaction ------------------------------------------------------------------------
    def plan_free_run(self, num_blocks: int, *, max_blocks: int | None = None) -> Plan:
        """A plan towards one run of so many available blocks, by the fewest moves.
        OutOfBlocks when fewer are available (fenced blocks are not; a run may be planned over
        them, and is complete once they are empty); ``plan.complete`` says whether it gets there within
        ``max_blocks`` moves (None: no limit)."""
    def plan_below(self, ratio: float, *, max_blocks: int | None = None) -> Plan:
        """A plan towards a fragmentation ratio (over available blocks) below ``ratio``."""
    def plan_huge_pages(self, num_pages: int, *, max_blocks: int | None = None) -> Plan:
        """A plan towards so many free windows (aligned groups of 512 available blocks), those that are
        free already among them, by the fewest moves.

        Raises:
            OutOfBlocks: fewer blocks are available.
            Fragmented: blocks that may not move lie in too many windows.
        """
    def plan_groups(self, size: int, groups: int, *, max_blocks: int | None = None) -> Plan:
        """A plan towards so many free aligned groups of ``size`` blocks; otherwise as
        :meth:`plan_huge_pages`. For memory that is given back by the granule."""
    def plan_gather(self, sequence: int, *, max_blocks: int | None = None) -> Plan:
        """A plan that brings a sequence into fewer runs, best runs saved a move first.
        ``plan.complete`` says that no move saves a run any more. Where no free run is long enough, the
        plan empties a window first. UnknownSequence when it is closed."""
    def plan_compaction(self, *, max_blocks: int | None = None) -> Plan | None:
        """What the default trigger finds to do with at most ``budget_blocks`` moves (and at most
        ``max_blocks``): free windows, huge pages made by moving, sequences in fewer runs. None when
        memory does not call for it."""
    def ready(self, num_blocks: int) -> bool:
        """Whether a run of so many blocks is to be had now, by evicting at most. After ``Fragmented``
        the passes that :meth:`plan_compaction` plans make what was refused first."""
    @property
    def keeps_guarantee(self) -> bool:
        """Whether it was made to keep the guarantee."""
    def guarantee(self) -> dict[str, int]:
        """How memory stands against the guarantee: ``live`` blocks (neither empty nor evictable),
        ``windows`` that hold at least one of them, ``allowed`` windows, moves that are ``owed`` to come
        down to that, and windows above it that are ``immovable``."""
    def begin(self, plan: Plan) -> Moves:
        """Destines blocks and takes a reference on sources. Moves whose source or destination is
        no longer what the plan saw are left out; the plan itself stays valid for the rest."""
    def commit(self, moves: Moves) -> int:
        """The copies are done: every mapping, the prefix index and the moves' references are
        repointed. Returns how many blocks moved; a source freed or written meanwhile drops out."""
    def abort(self, moves: Moves) -> None:
        """Gives the destinations back. Every sequence keeps its blocks."""

    # -- memory given back -------------------------------------------------------------------
    def shrink(self, num_blocks: int, *, granule: int = 1) -> npt.NDArray[np.int64]:
        """Takes blocks offline until so many or more are: whole aligned groups of ``granule`` blocks,
        all of them available. Cached blocks in them are evicted (the groups that lose the fewest go
        first), holds are broken; nothing moves. Returns the blocks, int64 [k], ascending; fewer than
        asked for when there are no more such groups. Their memory is the caller's until ``grow``."""
    def plan_shrink(
        self, num_blocks: int, *, granule: int = 1, max_blocks: int | None = None
    ) -> Plan:
        """A plan towards so many available blocks in whole aligned groups of ``granule``, or as many
        as there can be, by the fewest moves; at most ``max_blocks`` of them (None: no limit).

        Raises:
            OutOfBlocks: fewer are available than one group has.
            Fragmented: blocks that may not move lie in every group.
        """
    def offline_blocks(
        self, num_blocks: int | None = None, *, granule: int = 1
    ) -> npt.NDArray[np.int64]:
        """The blocks that come back next, int64 [k], ascending: those that are offline in the lowest
        aligned groups of ``granule`` blocks, until they are ``num_blocks`` or more (None: all)."""
    def grow(self, blocks: npt.NDArray[np.int64]) -> None:
        """Brings offline blocks back (int64 [k]); their memory is there again. All or none.

        Raises:
            InvalidBlock: the first that is not offline, or is listed twice.
        """

    # -- checks ----------------------------------------------------------------------------
    def validate(self, tables: BlockTables | None = None) -> None:
        """Recounts everything and raises InternalError with the first broken invariant
        (design: states, references, free structures, prefix index, exported rows, counters)."""
    def _panic_for_test(self) -> None: ...

@final
class Pool:
    """Hands out blocks: which of them are empty, and who holds the others. For engines that keep
    their own sequences and prefix index; :class:`MMU` has a pool of its own inside.

    Any method may be called from any thread, and none takes a lock (``placement="fifo"`` does).
    A core panic raises ``InternalError``, after which every call does.

    A block number does not say whose claim a release ends: when a block was handed out again, a
    second release by its first holder is believed. Claim and release with an ``owner`` to have that
    refused.

    Args:
        num_blocks: usable blocks, 1 .. 2**31 - 2.
        placement, seed: as for :class:`MMU`.
        null_block: which of the ``num_blocks + 1`` physical blocks nobody is given: ``"last"``,
            ``"first"`` or its number.
        anchor: share of the pool, 0 to below 1, that claims with ``anchor=True`` go to first and
            all others last.

    Raises:
        InvalidConfig: names the argument, what was given and what is allowed.
    """

    def __new__(
        cls,
        num_blocks: int,
        *,
        placement: str = "address",
        null_block: str | int = "last",
        anchor: float = 0.0,
        seed: int = 0,
    ) -> Pool: ...
    @property
    def num_blocks(self) -> int:
        """Usable blocks. The null block is one more."""
    @property
    def null_block(self) -> int:
        """The block that nobody is given, by default ``num_blocks``."""
    @property
    def anchor_from(self) -> int:
        """First block of the anchor region; the end of the pool if there is none."""
    def claim(
        self, n: int = 1, *, owner: int | None = None, anchor: bool = False
    ) -> npt.NDArray[np.int32]:
        """Claims ``n`` blocks, all or none: int32 [n], in few long runs where the placement can.

        Args:
            owner: 0 .. 2**29 - 1: only ``release(..., owner=owner)`` releases them, and they
                cannot be shared.

        Raises:
            OutOfBlocks.
        """
    def claim_page(self, order: int, *, anchor: bool = False) -> int:
        """Claims 2**order blocks that lie together, aligned to their number; returns the first.

        Args:
            order: 0 .. 9.

        Raises:
            OutOfBlocks, or Fragmented when enough are empty and no such page is.
        """
    def claim_run(self, n: int, *, anchor: bool = False) -> int:
        """Claims ``n`` consecutive blocks; returns the first.

        Raises:
            OutOfBlocks, Fragmented.
        """
    def claim_exact(self, first: int, n: int) -> bool:
        """Claims exactly ``first .. first + n - 1`` if all of them are empty."""
    def claim_like(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Claims blocks in runs of these lengths (int64 [r]), in their order, or as near as it goes:
        for the receiving end of a transfer. int32 [sum(lengths)]; all or none.

        Raises:
            OutOfBlocks.
        """
    def retain(self, blocks: npt.NDArray[np.int32]) -> None:
        """One more reference for each block (int32 [k]), by somebody who holds it. All or none.

        Raises:
            InvalidBlock: the first that is not held, is owned, or is full.
        """
    def revive(self, blocks: npt.NDArray[np.int32]) -> None:
        """One more reference for each of some published blocks (int32 [k]), by somebody who found
        them in an index of contents: in use or cached. Against an eviction at the same time exactly
        one wins. All or none.

        Raises:
            InvalidBlock: the first that is not published (any more), or is full.
        """
    def publish(self, blocks: npt.NDArray[np.int32]) -> None:
        """An index of contents knows these blocks (int32 [k]): with their last reference they become
        cached instead of empty. All or none.

        Raises:
            InvalidBlock.
        """
    def evict(self, block: int) -> bool:
        """Empties a cached block. False if it is not cached (any more)."""
    def release(self, blocks: npt.NDArray[np.int32], *, owner: int | None = None) -> None:
        """Gives one reference of each block (int32 [k]) back; listed twice, two. All or none.

        Raises:
            InvalidBlock: one that is not held, or not by this owner.
        """
    def release_page(self, first: int, order: int) -> None:
        """Releases the blocks of a page.

        Raises:
            InvalidBlock.
        """
    def destine(self, blocks: npt.NDArray[np.int32]) -> None:
        """Claims exactly these empty blocks (int32 [k]) as destinations of moves. All or none.

        Raises:
            InvalidBlock: the first that is not empty.
        """
    def undo(self, blocks: npt.NDArray[np.int32]) -> None:
        """The moves do not take place: these destinations are empty again. All or none.

        Raises:
            InvalidBlock: the first that is not destined.
        """
    def arrive(self, blocks: npt.NDArray[np.int32]) -> None:
        """The moves have taken place: these destinations are in use, with one reference each. All
        or none.

        Raises:
            InvalidBlock: the first that is not destined.
        """
    def offline(self, first: int, n: int) -> None:
        """Takes exactly these empty blocks out of the pool, so that their memory can be given back.

        Raises:
            InvalidBlock: the first that is not empty.
        """
    def online(self, first: int, n: int) -> None:
        """Brings blocks back that :meth:`offline` took out.

        Raises:
            InvalidBlock: the first that is not offline.
        """
    def references(self, block: int) -> int:
        """References of a block; 0 when it is empty or cached.

        Raises:
            InvalidBlock: not a block of this pool.
        """
    def states(self) -> dict[str, int]:
        """Blocks by state: empty, destined, in_use, cached, fenced, offline; and ``available``,
        empty and cached."""
    def free_windows(self) -> int:
        """Aligned groups of 512 blocks that are wholly empty."""
    def largest_run(self) -> int:
        """Longest run of empty blocks."""
    def validate(self) -> None:
        """Recounts everything. Only when no other thread is at work.

        Raises:
            InternalError: what is wrong.
        """

@final
class BlockTables:
    """Registered output buffers. The arrays are the caller's; they are kept alive here. Nobody else
    writes them: what has not changed is not written again.

    Unused rows and columns of ``block_table`` hold ``null_entry``; unused entries of
    ``slot_mapping`` point into the null block; unused ``seq_lens`` are 0; ``query_start_loc``
    repeats its last value.
    """

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """int32 [B, W], the array that was registered: what each entry of each row names."""
    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """int32 [B], the array that was registered: tokens of each row."""
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """int64 [T], the array that was registered: the slot of each scheduled token."""
    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        """int32 [B + 1], the array that was registered: where each row's scheduled tokens begin."""
    def csr(
        self,
        indptr: npt.NDArray[np.int32],
        indices: npt.NDArray[np.int32],
        last_page_len: npt.NDArray[np.int32],
    ) -> int:
        """Writes the rows as a CSR (FlashInfer's form) and returns the entries of ``indices`` written.

        Args:
            indptr: int32 [>= num_rows + 1].
            indices: int32 [>= entries of all scheduled tokens]; behind these it is untouched.
            last_page_len: int32 [>= num_rows], tokens in the last entry of each row (of at most
                ``kernel_block_size``), 0 for an empty row.

        Raises:
            LimitExceeded: a buffer is too small.
        """
    def dirty_rows(self) -> DirtyRows:
        """Which entries of ``block_table`` the last ``prepare`` or ``export`` that succeeded wrote,
        for whoever mirrors the rows. Lengths, slots and row starts are written by every call."""
    def generations(self) -> npt.NDArray[np.int64]:
        """int64 [B]: calls that wrote entries of each row so far. Only grows; registering counts
        as none."""
    def _prefix_groups(
        self,
        row_indptr: npt.NDArray[np.int32],
        shared_qo_indptr: npt.NDArray[np.int32],
        shared_kv_indptr: npt.NDArray[np.int32],
        shared_kv_indices: npt.NDArray[np.int32],
        shared_kv_last_page_len: npt.NDArray[np.int32],
        own_qo_indptr: npt.NDArray[np.int32],
        own_kv_indptr: npt.NDArray[np.int32],
        own_kv_indices: npt.NDArray[np.int32],
        own_kv_last_page_len: npt.NDArray[np.int32],
    ) -> tuple[int, int, int, int]: ...
    @property
    def null_entry(self) -> int:
        """What unused rows and columns of ``block_table`` hold."""
    @property
    def kernel_block_size(self) -> int:
        """Tokens of one entry of ``block_table`` (of a page too)."""
    @property
    def page_order(self) -> int:
        """log2 of the blocks of one entry; 0 unless entries are pages."""
    @property
    def num_rows(self) -> int:
        """Rows of the last ``prepare`` or ``export``."""
    @property
    def num_tokens(self) -> int:
        """Tokens of the last ``prepare``."""

@final
class DirtyRows:
    """Entries that one call wrote: of row ``rows[i]`` those from ``start[i]`` to ``stop[i]``
    (exclusive). A row occurs once, in order; one of which nothing was written, not at all.

    A mirror that had row ``rows[i]`` as of generation ``generation[i] - 1`` needs these entries only;
    one that missed a call needs the row whole, up to its width. ``len`` counts rows.
    """

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """int32 [k]."""
    @property
    def start(self) -> npt.NDArray[np.int32]:
        """int32 [k]: the first entry that was written."""
    @property
    def stop(self) -> npt.NDArray[np.int32]:
        """int32 [k]: one behind the last."""
    @property
    def generation(self) -> npt.NDArray[np.int64]:
        """Calls that wrote the row, this one included."""
    def __len__(self) -> int: ...

@final
class SequenceInfo:
    """Numbers about one sequence, at the moment of :meth:`MMU.info`."""

    @property
    def num_tokens(self) -> int:
        """Tokens that have a place (a claimed block)."""
    @property
    def num_cached_tokens(self) -> int:
        """Tokens found in the prefix index when the sequence was opened."""
    @property
    def num_scheduled(self) -> int:
        """Tokens handed to a step (or cached)."""
    @property
    def num_written(self) -> int:
        """Tokens whose KV is known to be written."""
    @property
    def num_blocks(self) -> int:
        """Blocks of its tokens: those that it maps, and those released from its front."""
    @property
    def num_runs(self) -> int:
        """Maximal groups of consecutive physical blocks among those that it maps."""
    @property
    def num_released(self) -> int:
        """Blocks released from its front."""
    @property
    def pages(self) -> dict[int, int]:
        """Pages that it maps, by order; orders without any are left out."""
    @property
    def regions(self) -> int:
        """Complete aligned regions of 512 blocks: how many pages of order 9 it could have."""
    @property
    def held(self) -> int:
        """Empty blocks kept behind it to grow into."""

@final
class Quote:
    """Whether a prompt could be opened, and what it takes; see :meth:`MMU.quote`."""

    @property
    def when(self) -> str:
        """``"now"``; ``"moves"`` (after ``moves`` moves); ``"frees"`` (when others have released
        enough); ``"grows"`` (when blocks that were given back are in the pool again); ``"never"``
        (larger than the pool or a limit, or of a shape that the pool never has)."""
    @property
    def moves(self) -> int:
        """Moves that it takes first."""
    @property
    def needed(self) -> int:
        """Blocks to claim beside the cached ones."""
    @property
    def available(self) -> int:
        """Blocks that are empty or could be evicted for it (matched ones not counted)."""
    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that are cached."""

@final
class BlockMap:
    """What every physical block is, by its number, at one moment. Each array has one entry a block:
    ``num_blocks``, and one more where the null block is not behind the last."""

    STATES: ClassVar[list[str]]
    """Names of the numbers in ``states``: empty, destined, in_use, cached, fenced, offline, null."""
    HELD: ClassVar[int]
    """Flag: empty, and kept behind a sequence to grow into."""
    PINNED: ClassVar[int]
    """Flag: pinned, by something else than a lease."""
    LEASED: ClassVar[int]
    """Flag: a transfer holds it."""
    MOVING: ClassVar[int]
    """Flag: source of a move in flight."""
    PUBLISHED: ClassVar[int]
    """Flag: in the prefix index."""
    EVICTABLE: ClassVar[int]
    """Flag: cached, and may be evicted now. Empty and evictable blocks are the available ones."""
    @property
    def states(self) -> npt.NDArray[np.uint8]:
        """uint8 [n]: places in ``STATES``."""
    @property
    def references(self) -> npt.NDArray[np.int32]:
        """int32 [n]: mappings, pins, leases and moves of each block, as of ``MMU.references``."""
    @property
    def sequences(self) -> npt.NDArray[np.int64]:
        """int64 [n]: id of a sequence that maps the block, -1 where none does. Of several it is one
        that maps it by the largest page."""
    @property
    def logical(self) -> npt.NDArray[np.int32]:
        """int32 [n]: which logical block of that sequence it is; -1."""
    @property
    def orders(self) -> npt.NDArray[np.int8]:
        """int8 [n]: log2 of the blocks of the page by which that sequence maps it; -1."""
    @property
    def flags(self) -> npt.NDArray[np.uint8]:
        """uint8 [n]: the flags of this class, added up."""
    def __len__(self) -> int: ...

@final
class Measure:
    """How scattered memory is, at the moment of :meth:`MMU.measure`."""

    @property
    def ratio_empty(self) -> float:
        """1 - largest run / count, over empty blocks; 0 when there are none."""
    @property
    def ratio_available(self) -> float:
        """The same over available blocks: those that are empty or could be evicted."""
    @property
    def empty(self) -> int:
        """Empty blocks."""
    @property
    def available(self) -> int:
        """Blocks that are empty or could be evicted."""
    @property
    def largest_run_empty(self) -> int:
        """Longest run of empty blocks."""
    @property
    def largest_run_available(self) -> int:
        """Longest run of available blocks."""
    @property
    def free_windows(self) -> int:
        """Aligned windows of 512 blocks that are wholly available."""
    @property
    def run_histogram(self) -> npt.NDArray[np.int64]:
        """Runs of available blocks by length: entry k counts lengths 2**k .. 2**(k+1) - 1; int64 [32]."""
    @property
    def sequences(self) -> int:
        """Open sequences that have tokens."""
    @property
    def runs(self) -> int:
        """Runs of all sequences added up."""
    @property
    def runs_per_sequence(self) -> float:
        """Mean over open sequences that have blocks; 0 without any."""
    @property
    def unused_slots(self) -> int:
        """Token places in last blocks that no token takes."""
    @property
    def pages(self) -> dict[int, int]:
        """Pages that open sequences map, by order; orders without any are left out."""
    @property
    def regions(self) -> int:
        """Complete aligned regions of 512 blocks of open sequences: how many pages of order 9
        there could be."""
    @property
    def table_nodes(self) -> int:
        """Nodes of the page table in use, of 4 KiB. Those that pages of order 9 keep for a split are
        among them, and untouched."""

@final
class Events:
    """A stretch of changes of the prefix index, ``k`` of them in order. Numbers count from 0 and
    have no gaps; what fell out of the ring before it was asked for is told by ``lost``, and whoever
    sees that begins again with :meth:`MMU.published`.

    Two blocks may hold the same content: a hash can be found as long as one of them does.
    """

    STORED: ClassVar[int]
    REMOVED: ClassVar[int]
    MOVED: ClassVar[int]
    @property
    def lost(self) -> int:
        """Events that were asked for and are no longer known, before the first of these."""
    @property
    def next(self) -> int:
        """Number of the next event, to ask with."""
    @property
    def number(self) -> npt.NDArray[np.int64]:
        """int64 [k]."""
    @property
    def kind(self) -> npt.NDArray[np.uint8]:
        """uint8 [k]: ``STORED`` (0), ``REMOVED`` (1) or ``MOVED`` (2)."""
    @property
    def block(self) -> npt.NDArray[np.int32]:
        """int32 [k]."""
    @property
    def moved_to(self) -> npt.NDArray[np.int32]:
        """int32 [k]; -1 unless moved."""
    @property
    def hash(self) -> npt.NDArray[np.uint64]:
        """uint64 [k, 2], low word first: 128-bit chained hash of what the block holds, equal in
        every process for equal tokens, salt and extra keys."""
    @property
    def parent(self) -> npt.NDArray[np.uint64]:
        """uint64 [k, 2]: the hash of the prefix in front; 0: first block of a prompt."""
    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [k, block_size]; zeros unless stored."""
    @property
    def keys(self) -> dict[int, tuple[bytes, bytes | None]]:
        """Index of a stored block to (salt, extra key), for those that have either."""
    def __len__(self) -> int: ...

class _Recording(TypedDict):
    file: Path
    bytes: int
    failure: str | None

@final
class Plan:
    """Proposed moves with their expected effect; a plain value."""

    @property
    def goal(self) -> str:
        """What was planned, for instance ``free_run(64)`` or ``background``."""
    @property
    def pairs(self) -> npt.NDArray[np.uint32]:
        """uint32 [m, 2]: (source, destination)."""
    @property
    def complete(self) -> bool:
        """True when these moves reach the goal; False when the limit stopped it early."""
    @property
    def remaining(self) -> int:
        """Moves still to make after these."""
    @property
    def parts(self) -> dict[str, int]:
        """What the moves of :meth:`MMU.plan_compaction` are for: ``windows`` that become free,
        ``huge_pages`` made by moving, sequences in fewer ``runs``."""
    @property
    def predicted_run(self) -> int:
        """Largest run of available blocks after the moves."""
    @property
    def predicted_ratio(self) -> float:
        """Fragmentation ratio over available blocks after the moves."""
    @property
    def predicted_windows(self) -> int:
        """Windows (aligned groups of 512 available blocks) after the moves."""
    def __len__(self) -> int: ...

@final
class Moves:
    """Moves that have begun: what a mover carries out, here or in another process."""

    @property
    def epoch(self) -> int:
        """Number of these moves, which ``commit`` and ``abort`` know them by."""
    @property
    def pairs(self) -> npt.NDArray[np.uint32]:
        """uint32 [m, 2]: (source, destination). No destination is a source or twice in it."""
    def to_bytes(self) -> bytes:
        """These moves as bytes, for a mover in another process; see :meth:`from_bytes`."""
    @staticmethod
    def from_bytes(data: bytes) -> Moves:
        """InvalidPlan when the bytes are not whole and unchanged (length and checksum)."""
    def __len__(self) -> int: ...

def page_bytes() -> int:
    """Bytes of the smallest page of host memory."""

def release_pages(ranges: npt.NDArray[np.uint64]) -> int:
    """Gives whole pages of host memory back to the system, GIL released; they read as zeros from
    now on. Returns their bytes.

    Args:
        ranges: uint64 [k, 2]: (address, bytes), each a multiple of ``page_bytes()``.

    Raises:
        NotReturnable: memory that is not private to the process and without a file behind it, or is
            locked. Nothing was given back unless the system refused (``errno``) on the way.

    The caller answers for the addresses: nobody needs what is there, and no device reads it.
    """

def copy_blocks(
    regions: npt.NDArray[np.uint64],
    pairs: npt.NDArray[np.uint32],
    num_blocks: int,
) -> None:
    """Copies block ``pairs[i, 0]`` to block ``pairs[i, 1]`` in every region, GIL released.

    Args:
        regions: uint64 [r, 3]: (address of block 0, stride in bytes, bytes a block).
        pairs: uint32 [m, 2]; destinations differ from each other and from every source.
        num_blocks: ids at or above this raise InvalidBlock.

    The caller answers for the addresses: use :class:`kvmmu.Storage`, which checked them.
    """

def _after_fork() -> None: ...
def _flush_recordings() -> None: ...
def _unpack_records(stored: bytes, raw: int) -> bytes: ...
def cpu_features() -> dict[str, Any]:
    """What the CPU mover found: ``avx2``, ``non_temporal`` (bool each)."""

def kernel_names() -> tuple[str, ...]:
    """The CUDA kernels that are embedded; see :mod:`kvmmu.kernels`."""

def kernel_source(name: str) -> str:
    """The CUDA C++ source of a kernel, with nothing left to include.

    Raises:
        InvalidConfig: there is no such kernel. Numbers: ``name``.
    """
