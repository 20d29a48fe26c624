"""A model of everything an MMU promises, driven by random operations.

What lives here: a device of NumPy arrays on which steps and moves run late and out of step with
each other, a plain model of sequences, steps, pins and published prefixes, and the state machine
that compares the two after every operation. What never lives here: a peek into the core. The
machine knows the contract (``_core.pyi``) and nothing else.

Every token position holds 8 bytes that depend on its whole prefix, on the salt and on the extra
keys, so any block that is in a wrong place, stale, shared by mistake or reused too early shows as
a wrong value at some position.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from kvmmu import (
    MMU,
    CPUMover,
    Fragmented,
    InvalidBlock,
    InvalidConfig,
    InvalidPlan,
    InvalidStep,
    KVCacheError,
    LimitExceeded,
    Moves,
    OutOfBlocks,
    Plan,
    Storage,
    UnknownSequence,
    run_plan,
)

Ints: TypeAlias = npt.NDArray[Any]

MAX_STEPS_IN_FLIGHT = 3
MAX_SEQUENCES = 8
MAX_MOVES_IN_FLIGHT = 2
ROWS = 6
"""Rows of the tables: less than MAX_SEQUENCES, so that a batch can be too large."""

_GUARD = 0xA5
"""Byte of every place that nobody may write."""
_GARBAGE = 0xDEAD_DEAD_DEAD_DEAD
"""What a kernel writes where the result is not wanted: padding, cancelled steps."""

_STREAMS = [np.random.default_rng(seed).integers(1, 4, 2400).tolist() for seed in range(3)]
"""Prompts are prefixes of these with a short tail, so that they share beginnings."""


def _profiles() -> None:
    common: dict[str, Any] = {
        "deadline": None,
        "print_blob": True,
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
    }
    settings.register_profile("ci", max_examples=400, stateful_step_count=50, **common)
    settings.register_profile("deep", max_examples=50_000, stateful_step_count=80, **common)


_profiles()
PROFILE = os.environ.get("KVMMU_TEST_PROFILE", "ci")
"""``ci``: about a minute. ``deep``: about an hour."""


def value_of(previous: int, identity: int, extra: bytes) -> int:
    """The 8 bytes of a position: a hash of the value before it, its token and the extra key of
    its block."""
    data = previous.to_bytes(8, "little") + identity.to_bytes(8, "little", signed=True) + extra
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def runs_of(blocks: list[int]) -> int:
    """Maximal groups of consecutive ids."""
    return sum(1 for i, b in enumerate(blocks) if i == 0 or b != blocks[i - 1] + 1)


# -- the device ------------------------------------------------------------------------------


@dataclass
class Copies:
    """Copy-on-write copies that run ahead of a step."""

    step: int
    pairs: Ints


@dataclass
class Writes:
    """What the kernels of a step write, padding included."""

    step: int
    slots: Ints
    values: Ints


@dataclass
class Reads:
    """What the kernels of a step read through the row that they were given."""

    step: int
    sequence: int
    slots: Ints
    values: Ints


Work: TypeAlias = Copies | Writes | Reads


class Device:
    """Two regions of memory, an in-order queue of the steps' work, and a mover beside it.

    Work is queued when a step is prepared and runs as late as it may: when the step is reported
    written or ended. Moves run at once; all they wait for is copy-on-write into their sources
    (which a cancelled step leaves behind). So a block that a step in flight may still write is no
    source, and one that it may still touch is no destination, or it shows.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # One block more on both sides than the storage knows: nobody may touch those.
        guarded = num_blocks + 3
        self._values = np.full((guarded, block_size), _GUARD * 0x0101_0101_0101_0101, np.uint64)
        self._tails = np.full((guarded, block_size, 3), _GUARD, np.uint8)
        self.values = self._values[1:-1]
        self.tails = self._tails[1:-1]
        self.mover = CPUMover(Storage.from_numpy([self.values, self.tails]))
        self.queue: list[Work] = []

    def flush(self, step: int | None = None) -> None:
        """Runs the queue up to the last work of a step, or all of it."""
        last = len(self.queue)
        if step is not None:
            mine = [index for index, work in enumerate(self.queue) if work.step == step]
            last = mine[-1] + 1 if mine else 0
        self._run(last)

    def copy_now(self, pairs: Ints) -> None:
        """Copy-on-write outside of a step: after all that is queued."""
        self.flush()
        self.mover.move(pairs)

    def move(self, pairs: Ints) -> None:
        """What a mover does that waits for copy-on-write into its sources and nothing else."""
        sources = set(pairs[:, 0].tolist())
        last = 0
        for index, work in enumerate(self.queue):
            if isinstance(work, Copies) and sources & self._written_by(work):
                last = index + 1
        self._run(last)
        self.mover.move(pairs)

    def cancel(self, step: int, ran: bool) -> None:
        """Forgets what a step would have written, or has it write garbage instead."""
        mine = [work for work in self.queue if work.step == step]
        if ran:
            for work in mine:
                if isinstance(work, Writes):
                    work.values = np.full_like(work.values, _GARBAGE)
        # A sequence that was closed meanwhile may have been read by a newer step as well.
        garbled = {work.sequence for work in mine if isinstance(work, Reads)}
        self.queue = [
            work
            for work in self.queue
            if not (isinstance(work, Reads) and work.step >= step and work.sequence in garbled)
            and not (isinstance(work, Writes) and work.step == step and not ran)
        ]

    def later(self) -> tuple[Ints, Ints]:
        """Copies of both regions as they will be when the queue has run."""
        values, tails = self.values.copy(), self.tails.copy()
        for work in self.queue:
            if isinstance(work, Copies):
                for region in (values, tails):
                    region[work.pairs[:, 1]] = region[work.pairs[:, 0]]
            elif isinstance(work, Writes):
                self._write(values, tails, work)
        return values, tails

    def is_queued(self, block: int) -> bool:
        """Something in the queue writes this block."""
        return any(block in self._written_by(work) for work in self.queue)

    def check_guards(self) -> None:
        """Nobody has written beside the storage."""
        for edge in (0, -1):
            assert (self._values[edge] == _GUARD * 0x0101_0101_0101_0101).all()
            assert (self._tails[edge] == _GUARD).all()

    def _run(self, count: int) -> None:
        todo, self.queue = self.queue[:count], self.queue[count:]
        for work in todo:
            if isinstance(work, Copies):
                self.mover.move(work.pairs)
            elif isinstance(work, Writes):
                self._write(self.values, self.tails, work)
            else:
                check_values(
                    self.values,
                    self.tails,
                    work.slots,
                    work.values,
                    f"step {work.step} read sequence {work.sequence} through an older row",
                )

    def _written_by(self, work: Work) -> set[int]:
        if isinstance(work, Copies):
            return {int(block) for block in work.pairs[:, 1]}
        if isinstance(work, Writes):
            return {int(slot) // self.block_size for slot in work.slots}
        return set()

    @staticmethod
    def _write(values: Ints, tails: Ints, work: Writes) -> None:
        values.reshape(-1)[work.slots] = work.values
        tails.reshape(-1, 3)[work.slots] = low_bytes(work.values)


def low_bytes(values: Ints) -> Ints:
    """The 3 low bytes of each value: what the second region holds."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, 8)[:, :3]


def check_values(values: Ints, tails: Ints, slots: Ints, expected: Ints, what: str) -> None:
    """Compares both regions at these slots with what belongs there."""
    found = values.reshape(-1)[slots]
    bad = found != expected
    bad |= (tails.reshape(-1, 3)[slots] != low_bytes(expected)).any(axis=1)
    if bad.any():
        position = int(np.flatnonzero(bad)[0])
        slot = int(slots[position])
        raise AssertionError(
            f"{what}: position {position} (slot {slot}, block {slot // values.shape[1]}) holds "
            f"{int(found[position]):#x}, expected {int(expected[position]):#x}"
        )


# -- the model -------------------------------------------------------------------------------


@dataclass
class Sequence:
    """What a sequence should be. Unknown tokens have negative identities, each its own."""

    salt: bytes
    extra: dict[int, bytes]
    block_size: int
    identities: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    cached: int = 0
    scheduled: int = 0
    written: int = 0
    released: int = 0
    """Blocks given up at the front: nobody may read them through this sequence any more."""

    def extend(self, identities: list[int]) -> None:
        for identity in identities:
            position = len(self.values)
            previous = self.values[-1] if self.values else _start(self.salt)
            extra = b""
            if position % self.block_size == 0:
                extra = self.extra.get(position // self.block_size, b"")
            self.identities.append(identity)
            self.values.append(value_of(previous, identity, extra))

    def cut(self, length: int) -> None:
        del self.identities[length:], self.values[length:]
        self.scheduled = min(self.scheduled, length)
        self.written = min(self.written, length)

    @property
    def num_blocks(self) -> int:
        return -(-len(self.values) // self.block_size)

    def fork(self) -> Sequence:
        return Sequence(
            self.salt,
            dict(self.extra),
            self.block_size,
            list(self.identities),
            list(self.values),
            self.cached,
            self.written,
            self.written,
            self.released,
        )


def _start(salt: bytes) -> int:
    return value_of(0, 0, b"salt " + salt)


@dataclass
class Entry:
    """What one step has scheduled in one sequence: positions ``start .. end`` of which those
    from ``appended`` on were added by it."""

    sequence: int
    start: int
    end: int
    appended: int


@dataclass
class Step:
    """A step in flight."""

    entries: list[Entry] = field(default_factory=list)
    prepared: bool = False
    settled: bool = False

    def touches(self) -> set[int]:
        return {entry.sequence for entry in self.entries}


@dataclass
class Flight:
    """Moves that have begun, and how many of them have been copied."""

    moves: Moves
    pairs: Ints
    copied: int = 0


class Broken(Exception):
    """What a mover that dies raises."""


class Carrier:
    """A mover over the device, which may die after some copies."""

    def __init__(self, device: Device, fails_after: int | None) -> None:
        self.device = device
        self.fails_after = fails_after

    def move(self, pairs: Ints) -> None:
        """Copies all pairs, or the first few and raises."""
        self.device.move(pairs[: self.fails_after])
        if self.fails_after is not None:
            raise Broken


# -- the machine -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """A prompt in terms of a pool: the beginning of a stream, some blocks long, and a tail."""

    stream: int
    blocks: int
    tail: list[int]
    salt: bytes
    key: tuple[int, bytes] | None


index = st.integers(0, 63)
"""Chooses one of what there is, modulo how many there are."""
few = st.integers(0, 7)
token_lists = st.lists(st.integers(1, 3), min_size=1, max_size=7)
page_sizes = st.sampled_from([(0,), (0, 1), (0, 2), (0, 1, 3), (0, 3), (0, 2, 9)])
prompts = st.builds(
    Prompt,
    stream=st.integers(0, 2),
    blocks=st.integers(0, 6),
    tail=st.lists(st.integers(1, 3), max_size=5),
    salt=st.sampled_from([b"", b"", b"", b"tenant"]),
    key=st.sampled_from([None, None, None, (0, b"x"), (1, b"x"), (1, b"y")]),
)


class MMUMachine(RuleBasedStateMachine):
    """Random operations on an MMU whose contents are checked byte by byte."""

    @initialize(
        num_blocks=st.one_of(st.integers(2, 16), st.integers(12, 64)),
        block_size=st.integers(1, 4),
        prefix_caching=st.sampled_from([True, True, True, False]),
        placement=st.sampled_from(["scatter", "scatter", "address"]),
        eviction=st.sampled_from(["lru", "lfu"]),
        page_orders=page_sizes,
        medium_from=st.sampled_from([0, 0, 5]),
        hold_blocks=st.integers(0, 8),
        dedup=st.booleans(),
        budget=st.integers(1, 8),
        thresholds=st.sampled_from([(0.35, 0.30), (0.0, 0.0), (0.1, 0.05)]),
        shorter=st.sampled_from([0, 0, 1, 5]),
        served=st.lists(
            st.tuples(prompts, st.sampled_from([False, False, True])), min_size=2, max_size=6
        ),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        placement: str,
        eviction: str,
        page_orders: tuple[int, ...],
        medium_from: int,
        hold_blocks: int,
        dedup: bool,
        budget: int,
        thresholds: tuple[float | None, float],
        shorter: int,
        served: list[tuple[Prompt, bool]],
        scale: int = 1,
        **config: Any,
    ) -> None:
        """An MMU that has served a few prompts already and closed some of them. ``config``: more
        arguments of the MMU."""
        self.n = num_blocks
        self.size = block_size
        self.scale = scale  # how much longer prompts and their parts are than is drawn
        self.page_orders = page_orders
        self.hold_blocks = hold_blocks
        self.caching = prefix_caching
        self.limit = max(1, num_blocks - shorter)
        self.budget = budget
        self.mmu = MMU(
            num_blocks,
            block_size,
            max_sequences=4 * MAX_SEQUENCES,
            max_blocks_per_sequence=self.limit,
            prefix_caching=prefix_caching,
            placement=placement,
            eviction=eviction,
            page_orders=page_orders,
            medium_from=medium_from,
            huge_from=max(medium_from, 16),
            hold_blocks=hold_blocks,
            dedup=dedup,
            budget_blocks=budget,
            compaction_start=thresholds[0],
            compaction_stop=thresholds[1],
            seed=7,
            **config,
        )
        self.device = Device(num_blocks, block_size)
        self.max_tokens = 4 * block_size + 8 if scale == 1 else num_blocks * block_size
        self.step_tables = self.register(ROWS, self.limit, self.max_tokens)
        self.read_tables = self.register(MAX_SEQUENCES, self.limit, 1)
        self.sequences: dict[int, Sequence] = {}
        self.gone: list[int] = []
        self.steps: dict[int, Step] = {}
        self.ended: list[int] = []
        self.pins: dict[int, list[dict[int, int]]] = {}
        self.plans: list[Plan] = []
        self.flights: list[Flight] = []
        self.done: list[Moves] = []
        self.published: set[int] = set()
        self.unknown = 0
        for prompt, closed in served:
            opened = self.open_prompt(prompt)
            if opened is not None:
                self.compute(opened, chunk=64)
                if closed:
                    self.close_sequence(opened)

    def register(self, rows: int, width: int, tokens: int) -> Any:
        return self.mmu.register_tables(
            np.full((rows, width), 77, np.int32),
            np.full(rows, 77, np.int32),
            np.full(tokens, 77, np.int64),
            np.full(rows + 1, 77, np.int32),
        )

    # -- helpers -----------------------------------------------------------------------------

    def pick(self, at: int) -> int:
        """One of the open sequences."""
        return sorted(self.sequences)[at % len(self.sequences)]

    def table(self, sequence: int) -> list[int]:
        return [int(block) for block in self.mmu.block_table(sequence)]

    def mapped(self, sequence: int) -> list[int]:
        """Its blocks without those that it has released at the front."""
        return self.table(sequence)[self.sequences[sequence].released :]

    def slots(self, blocks: list[int], count: int) -> Ints:
        positions = np.arange(count)
        return np.array([*blocks, 0], np.int64)[positions // self.size] * self.size + (
            positions % self.size
        )

    def fingerprint(self) -> Any:
        """All that the contract shows of the state."""
        mmu = self.mmu
        ids = [int(sequence) for sequence in mmu.sequences()]
        infos = []
        for sequence in ids:
            info = mmu.info(sequence)
            infos.append(
                (
                    sequence,
                    info.num_tokens,
                    info.num_cached_tokens,
                    info.num_scheduled,
                    info.num_written,
                    info.num_blocks,
                    info.num_runs,
                    info.num_released,
                    sorted(info.pages.items()),
                    self.table(sequence),
                )
            )
        references = mmu.references(np.arange(self.n, dtype=np.int64)).tolist()
        # A hold may be given up in vain: its blocks are empty either way.
        states = {name: count for name, count in mmu.states().items() if name != "held"}
        return sorted(infos), states, references, mmu.steps_in_flight()

    def refused(self, error: type[KVCacheError] | tuple[type[KVCacheError], ...], call: Any) -> Any:
        """The call must raise this error and change nothing; returns the error."""
        before = self.fingerprint()
        try:
            call()
        except error as caught:
            assert self.fingerprint() == before, f"{caught!r} changed something"
            return caught
        raise AssertionError(f"{error} was not raised")

    def attempt(self, call: Any, *errors: type[KVCacheError]) -> tuple[Any, KVCacheError | None]:
        """(result, None), or (None, error) with nothing changed."""
        before = self.fingerprint()
        try:
            return call(), None
        except errors as caught:
            assert self.fingerprint() == before, f"{caught!r} changed something"
            if isinstance(caught, OutOfBlocks):
                assert caught.needed > caught.available or hasattr(caught, "largest_run")
                assert caught.num_blocks == self.mmu.num_blocks - self.mmu.states()["offline"]
            return None, caught

    def known_prefix(self, sequence: Sequence) -> int:
        """Most tokens that may be found cached for these tokens: full published blocks only,
        and never the last token."""
        found = 0
        while self.caching and found + self.size < len(sequence.values):
            if sequence.values[found + self.size - 1] not in self.published:
                break
            found += self.size
        return found

    def publish(self, sequence: Sequence) -> None:
        known = next((i for i, identity in enumerate(sequence.identities) if identity < 0), None)
        stop = min(sequence.written, len(sequence.values) if known is None else known)
        for end in range(self.size, stop + 1, self.size):
            self.published.add(sequence.values[end - 1])

    def moving(self) -> set[int]:
        return {int(source) for flight in self.flights for source in flight.pairs[:, 0]}

    def destined(self) -> set[int]:
        return {int(block) for flight in self.flights for block in flight.pairs[:, 1]}

    def matches(self) -> list[int]:
        """What is found of each open sequence's own tokens."""
        found = []
        for sequence in self.sequences.values():
            known = [identity for identity in sequence.identities if identity > 0]
            extra = {k: v for k, v in sequence.extra.items() if k * self.size < len(known)}
            tokens = np.array(known, np.int32)
            found.append(self.mmu.match(tokens, salt=sequence.salt, extra_keys=extra))
        return found

    # -- sequences ---------------------------------------------------------------------------

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule(prompt=prompts)
    def open(self, prompt: Prompt) -> None:
        self.open_prompt(prompt)

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule(prompt=prompts, chunk=st.integers(1, 64), closed=st.booleans())
    def serve(self, prompt: Prompt, chunk: int, closed: bool) -> None:
        """A whole request at once: open, compute the prompt, perhaps close."""
        opened = self.open_prompt(prompt)
        if opened is not None:
            self.compute(opened, chunk)
            if closed:
                self.close_sequence(opened)

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule(stream=st.integers(0, 2), more=few)
    def open_too_long(self, stream: int, more: int) -> None:
        """About as long as the pool or the limit, or longer."""
        self.open_prompt(Prompt(stream, max(0, self.limit - 2) + more, [], b"", None), 1)

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule(prompt=prompts, contiguous=index, orders=few)
    def open_shaped(self, prompt: Prompt, contiguous: int, orders: int) -> None:
        """With a contiguous start and page sizes of its own: so it lies, or it is refused."""
        tokens, extra, expected = self.said(prompt, self.scale)
        contiguous *= self.scale
        chosen = tuple(
            order for i, order in enumerate(self.page_orders) if not i or orders >> i & 1
        )
        before, states = self.fingerprint(), self.mmu.states()
        try:
            opened = self.mmu.open(
                tokens,
                salt=prompt.salt,
                extra_keys=extra or None,
                page_orders=chosen,
                contiguous=contiguous,
            )
        except Fragmented as error:
            # Cached blocks may have been dropped in vain, and that is all. (One under a move stays,
            # in use by that, until it ends.)
            assert contiguous > 0 and error.needed <= error.available
            after = self.mmu.states()
            assert self.fingerprint()[0] == before[0] and self.fingerprint()[2] == before[2]
            assert after["available"] == states["available"]
            assert 0 <= after["in_use"] - states["in_use"] <= states["destined"]
            return
        except (OutOfBlocks, LimitExceeded):
            assert self.fingerprint() == before
            return
        self.adopt(opened, expected)
        start = self.mapped(opened)[: -(-min(contiguous, len(tokens)) // self.size)]
        assert runs_of(start) <= 1
        assert set(self.mmu.info(opened).pages) <= set(chosen)

    def said(self, prompt: Prompt, scale: int) -> tuple[Ints, dict[int, bytes], Sequence]:
        """The tokens and extra keys of a prompt, and the sequence that it should become."""
        key = prompt.key
        identities = _STREAMS[prompt.stream][: prompt.blocks * scale * self.size] + prompt.tail
        extra = dict([key]) if key and (key[0] + 1) * self.size <= len(identities) else {}
        expected = Sequence(prompt.salt, extra, self.size)
        expected.extend(identities)
        return np.array(identities, np.int32), extra, expected

    def adopt(self, opened: int, expected: Sequence) -> None:
        """A sequence that was just opened is what was expected, as far as it was found cached."""
        assert opened not in self.sequences and opened not in self.gone
        matched = self.mmu.info(opened).num_cached_tokens
        assert matched <= self.known_prefix(expected) and matched % self.size == 0
        expected.cached = expected.scheduled = expected.written = matched
        self.sequences[opened] = expected

    def open_prompt(self, prompt: Prompt, scale: int | None = None) -> int | None:
        """Opens it if that is possible, and checks every word said before and after."""
        salt = prompt.salt
        tokens, extra, expected = self.said(prompt, self.scale if scale is None else scale)

        before = self.fingerprint()
        matched = self.mmu.match(tokens, salt=salt, extra_keys=extra)
        quote = self.mmu.quote(tokens, salt=salt, extra_keys=extra)
        assert self.fingerprint() == before
        assert matched <= self.known_prefix(expected)
        assert matched % self.size == 0
        assert quote.num_cached_tokens == matched
        assert quote.needed == expected.num_blocks - matched // self.size
        assert quote.available <= self.mmu.states()["available"]
        away = self.mmu.states()["offline"]
        assert quote.when in ("now", "frees", "never", *(["grows"] if away else []))
        if expected.num_blocks > self.limit:
            assert quote.when == "never"
        else:
            assert (quote.when == "now") == (quote.needed <= quote.available)

        opened, error = self.attempt(
            lambda: self.mmu.open(tokens, salt=salt, extra_keys=extra or None),
            OutOfBlocks,
            LimitExceeded,
        )
        assert (error is None) == (quote.when == "now")
        if error is not None:
            assert isinstance(error, LimitExceeded) == (expected.num_blocks > self.limit)
            if isinstance(error, OutOfBlocks):
                assert (error.needed, error.available) == (quote.needed, quote.available)
            return None
        self.adopt(opened, expected)
        assert expected.cached == matched
        return int(opened)

    @precondition(lambda self: self.sequences)
    @rule(at=index, tokens=token_lists)
    def append(self, at: int, tokens: list[int]) -> None:
        self.append_tokens(self.pick(at), tokens)

    def append_tokens(self, sequence: int, tokens: list[int]) -> None:
        model = self.sequences[sequence]
        copies, error = self.attempt(
            lambda: self.mmu.append(sequence, np.array(tokens, np.int32)),
            OutOfBlocks,
            LimitExceeded,
        )
        if error is not None:
            needed = -(-(len(model.values) + len(tokens)) // self.size)
            assert isinstance(error, LimitExceeded) == (needed > self.limit)
            return
        assert copies.dtype == np.int32 and copies.shape[1:] == (2,)
        self.device.copy_now(copies)
        model.extend(tokens)

    @precondition(lambda self: 0 < len(self.sequences) < MAX_SEQUENCES)
    @rule(at=index)
    def fork(self, at: int) -> None:
        self.fork_sequence(self.pick(at))

    def fork_sequence(self, parent: int) -> None:
        blocks = self.table(parent)
        child = self.mmu.fork(parent)
        assert self.table(child) == blocks == self.table(parent)
        model = self.sequences[child] = self.sequences[parent].fork()
        # The contract leaves open what a child says of a look-up that it did not make.
        model.cached = self.mmu.info(child).num_cached_tokens
        assert model.cached in (0, self.mmu.info(parent).num_cached_tokens)

    @precondition(lambda self: self.sequences)
    @rule(at=index, length=index, near=st.booleans())
    def truncate(self, at: int, length: int, near: bool) -> None:
        sequence = self.pick(at)
        total = len(self.sequences[sequence].values)
        length = length * self.scale % (total + 1)
        if near:
            length = total - length % (self.size + 1) if total > self.size else length
        self.truncate_to(sequence, length)

    def truncate_to(self, sequence: int, length: int) -> None:
        model = self.sequences[sequence]
        if model.released and length <= model.released * self.size:
            self.refused(InvalidConfig, lambda: self.mmu.truncate(sequence, length))
            return
        before = self.table(sequence)
        self.mmu.truncate(sequence, length)
        model.cut(length)
        if model.cached > length:
            model.cached = self.mmu.info(sequence).num_cached_tokens
        for step in self.steps.values():
            for entry in step.entries:
                if entry.sequence == sequence:
                    entry.start = min(entry.start, length)
                    entry.end = min(entry.end, length)
                    entry.appended = min(entry.appended, length)
        assert self.table(sequence) == before[: model.num_blocks]

    @precondition(lambda self: self.sequences)
    @rule(at=index, token=index, near=st.booleans())
    def release_before(self, at: int, token: int, near: bool) -> None:
        """Gives up the front of a sequence, as far as its tokens are settled."""
        sequence = self.pick(at)
        model = self.sequences[sequence]
        total = len(model.values)
        token = total - token % (total + 1) if near else token * self.scale % (total + 1)
        before = self.table(sequence)
        count = self.mmu.release_before(sequence, token)
        settled = min(min(token, model.written) // self.size, max(0, model.num_blocks - 1))
        now = model.released + count
        assert max(model.released, settled - 1) <= now <= max(model.released, settled)
        model.released = now
        assert self.mmu.info(sequence).num_released == now
        assert self.table(sequence) == [self.mmu.null_block] * now + before[now:]

    @precondition(lambda self: self.sequences)
    @rule(at=index)
    def close(self, at: int) -> None:
        self.close_sequence(self.pick(at))

    def close_sequence(self, sequence: int) -> None:
        self.mmu.close(sequence)
        del self.sequences[sequence]
        self.gone.append(sequence)
        for step in self.steps.values():
            step.entries = [entry for entry in step.entries if entry.sequence != sequence]

    # -- steps -------------------------------------------------------------------------------

    def begin_step(self) -> int:
        step = self.mmu.begin_step()
        assert step not in self.steps and step not in self.ended
        self.steps[step] = Step()
        return step

    @precondition(lambda self: len(self.steps) < MAX_STEPS_IN_FLIGHT)
    @rule()
    def idle_step(self) -> None:
        """A step that may never schedule anything, but fences what is released."""
        self.begin_step()

    @precondition(lambda self: self.sequences)
    @rule(at=index, chunk=st.integers(1, 64))
    def catch_up(self, at: int, chunk: int) -> None:
        """Computes all that a sequence has not computed yet."""
        self.compute(self.pick(at), chunk)

    def compute(self, sequence: int, chunk: int) -> None:
        """Schedules, runs and reports the rest of a sequence, step by step."""
        model = self.sequences[sequence]
        if self.in_flight(sequence):
            return
        while model.scheduled < len(model.values):
            number = self.begin_step()
            count = min(chunk * self.scale, self.max_tokens, len(model.values) - model.scheduled)
            launched = self.schedule(number, [sequence], [count], [], plain=count == 1)
            if launched:
                self.report_written(number)
            self.finish(number)
            if not launched:
                return  # no block for a copy on write

    @precondition(lambda self: self.sequences)
    @rule(
        at=st.one_of(st.none(), index),
        chosen=st.lists(index, min_size=1, max_size=ROWS + 1),
        lengths=st.lists(st.integers(0, 6), max_size=3),
        tokens=st.one_of(st.none(), token_lists),
    )
    def prepare(
        self,
        at: int | None,
        chosen: list[int],
        lengths: list[int],
        tokens: list[int] | None,
    ) -> None:
        """One more step in flight, or one more batch in a step that is there already. One token
        each, or these lengths in turn."""
        unsettled = [number for number, step in self.steps.items() if not step.settled]
        if at is None or not unsettled:
            if len(self.steps) == MAX_STEPS_IN_FLIGHT:
                return
            number = self.begin_step()
        else:
            number = unsettled[at % len(unsettled)]
        # A step runs behind all that were prepared before it, so an older step may not schedule
        # a sequence that a newer one has already scheduled.
        newer: set[int] = set()
        for other in unsettled:
            if other > number:
                newer |= self.steps[other].touches()
        ids: list[int] = []
        for choice in chosen:
            sequence = self.pick(choice)
            if sequence not in ids and sequence not in newer:
                ids.append(sequence)
        turns = lengths or [1]
        query = [turns[k % len(turns)] for k in range(len(ids))]
        self.schedule(number, ids, query, tokens, plain=not lengths)

    def schedule(
        self, number: int, ids: list[int], query: list[int], tokens: list[int] | None, plain: bool
    ) -> bool:
        """Prepares these sequences in a step and launches it; False when it was refused.

        ``tokens`` are repeated as often as needed; None: their values are not known. ``plain``
        leaves the default of one token each out of the call.
        """
        models = [self.sequences[sequence] for sequence in ids]
        starts = [model.scheduled for model in models]
        ends = [start + count for start, count in zip(starts, query, strict=True)]
        lacking = [max(0, end - len(model.values)) for end, model in zip(ends, models, strict=True)]
        given = [tokens[k % len(tokens)] for k in range(sum(lacking))] if tokens else []

        before = {sequence: self.table(sequence) for sequence in ids}
        copies, error = self.attempt(
            lambda: self.mmu.prepare(
                number,
                np.array(ids, np.int64),
                self.step_tables,
                query_lens=None if plain else np.array(query, np.int32),
                new_tokens=np.array(given, np.int32) if tokens is not None else None,
            ),
            OutOfBlocks,
            LimitExceeded,
        )
        too_large = (
            len(ids) > ROWS
            or sum(query) > self.max_tokens
            or any(
                -(-max(end, len(model.values)) // self.size) > self.limit
                for end, model in zip(ends, models, strict=True)
            )
        )
        assert isinstance(error, LimitExceeded) == too_large
        if error is not None:
            return False
        rest = given if tokens is not None else self.unknowns(sum(lacking))
        for model, count in zip(models, lacking, strict=True):
            model.extend(rest[:count])
            rest = rest[count:]
        for sequence, model, start, end, count in zip(
            ids, models, starts, ends, lacking, strict=True
        ):
            model.scheduled = end
            entry = Entry(sequence, start, end, end - count)
            self.steps[number].entries.append(entry)
        self.steps[number].prepared = True
        self.check_prepared(ids, models, query, before, copies)
        self.launch(number, ids, models, starts, ends, copies)
        return True

    def unknowns(self, count: int) -> list[int]:
        self.unknown -= count
        return list(range(self.unknown, self.unknown + count))

    def check_prepared(
        self,
        ids: list[int],
        models: list[Sequence],
        query: list[int],
        before: dict[int, list[int]],
        copies: Ints,
    ) -> None:
        """The tables are what the sequences say, and copy-on-write replaced what it copied."""
        tables = self.step_tables
        assert (tables.num_rows, tables.num_tokens) == (len(ids), sum(query))
        assert tables.query_start_loc[: len(ids) + 1].tolist() == [0, *np.cumsum(query)]
        assert (tables.query_start_loc[len(ids) :] == sum(query)).all()
        assert tables.seq_lens.tolist() == [m.scheduled for m in models] + [0] * (ROWS - len(ids))
        self.check_rows(tables, ids, ROWS)
        expected: list[int] = []
        for sequence, model, count in zip(ids, models, query, strict=True):
            slots = self.slots(self.table(sequence), len(model.values))
            expected += slots[model.scheduled - count : model.scheduled].tolist()
        assert tables.slot_mapping[: sum(query)].tolist() == expected
        assert (tables.slot_mapping[sum(query) :] // self.size == self.n).all()
        replaced = []
        for sequence in ids:
            old, new = before[sequence], self.table(sequence)
            replaced += [[a, b] for a, b in zip(old, new, strict=False) if a != b]
        assert sorted(replaced) == sorted(copies.tolist())

    def check_rows(self, tables: Any, ids: list[int], rows: int) -> None:
        """Rows hold the page table up to their length and the null block beyond; what lies
        between the length and the end of the sequence may be either."""
        null = self.mmu.null_block
        assert null == self.n
        for row, sequence in enumerate(ids):
            blocks = self.table(sequence)
            found = tables.block_table[row].tolist()
            length = -(-int(tables.seq_lens[row]) // self.size)
            assert found[:length] == blocks[:length]
            assert found[length : len(blocks)] in (blocks[length:], [null] * (len(blocks) - length))
            assert found[len(blocks) :] == [null] * (len(found) - len(blocks))
        assert (tables.block_table[len(ids) : rows] == null).all()

    def launch(
        self,
        number: int,
        ids: list[int],
        models: list[Sequence],
        starts: list[int],
        ends: list[int],
        copies: Ints,
    ) -> None:
        """Queues what the device does for the step that was just prepared."""
        if len(copies):
            self.device.queue.append(Copies(number, copies))
        wanted = [v for m, s, e in zip(models, starts, ends, strict=True) for v in m.values[s:e]]
        slots = self.step_tables.slot_mapping.copy()
        values = np.full(len(slots), _GARBAGE, np.uint64)
        values[: len(wanted)] = wanted
        self.device.queue.append(Writes(number, slots, values))
        for row, (sequence, model, end) in enumerate(zip(ids, models, ends, strict=True)):
            blocks = self.step_tables.block_table[row, : -(-end // self.size)].tolist()
            start = model.released * self.size
            expected = np.array(model.values[start:end], np.uint64)
            slots = self.slots(blocks, end)[start:]
            self.device.queue.append(Reads(number, sequence, slots, expected))

    def settled_after(self, number: int) -> bool:
        """No older step that has yet to be settled shares a sequence with this one."""
        mine = self.steps[number].touches()
        return not any(
            other < number and not step.settled and step.touches() & mine
            for other, step in self.steps.items()
        )

    @precondition(lambda self: any(not step.settled for step in self.steps.values()))
    @rule(at=index, ended=st.booleans())
    def written(self, at: int, ended: bool) -> None:
        ready = [n for n, s in self.steps.items() if not s.settled and self.settled_after(n)]
        number = ready[at % len(ready)]
        self.report_written(number)
        if ended:
            self.finish(number)

    def report_written(self, number: int) -> None:
        self.device.flush(number)
        self.mmu.written(number)
        step = self.steps[number]
        step.settled = True
        for entry in step.entries:
            model = self.sequences[entry.sequence]
            model.written = max(model.written, entry.end)
        for sequence in step.touches():
            self.publish(self.sequences[sequence])

    @precondition(lambda self: any(not step.settled for step in self.steps.values()))
    @rule(at=index, ran=st.booleans())
    def cancel(self, at: int, ran: bool) -> None:
        ready = []
        for number, step in self.steps.items():
            newer = any(
                other > number and not later.settled and later.touches() & step.touches()
                for other, later in self.steps.items()
            )
            if not step.settled and not newer:
                ready.append(number)
        if not ready:
            return
        number = ready[at % len(ready)]
        step = self.steps[number]
        if self.has_grown_since(step):
            self.refused(InvalidStep, lambda: self.mmu.cancel(number))
            return
        self.mmu.cancel(number)
        self.device.cancel(number, ran)
        step.settled = True
        for entry in reversed(step.entries):
            model = self.sequences[entry.sequence]
            if entry.appended < entry.end:
                model.cut(entry.appended)
            model.scheduled = min(model.scheduled, entry.start)

    def has_grown_since(self, step: Step) -> bool:
        """Tokens were appended behind those that the step has appended: they cannot be taken
        back without the others, so the step can no longer be cancelled."""
        lengths = {sequence: len(self.sequences[sequence].values) for sequence in step.touches()}
        for entry in reversed(step.entries):
            if entry.appended < entry.end:
                if entry.end != lengths[entry.sequence]:
                    return True
                lengths[entry.sequence] = entry.appended
        return False

    @precondition(lambda self: any(s.settled or not s.prepared for s in self.steps.values()))
    @rule(at=index)
    def end_step(self, at: int) -> None:
        ready = [n for n, s in self.steps.items() if s.settled or not s.prepared]
        self.finish(ready[at % len(ready)])

    def finish(self, number: int) -> None:
        self.device.flush(number)
        self.mmu.end_step(number)
        del self.steps[number]
        self.ended.append(number)

    # -- blocks ------------------------------------------------------------------------------

    @rule(block=index, mapped=st.booleans(), at=index)
    def pin(self, block: int, mapped: bool, at: int) -> None:
        block %= self.n
        if mapped and self.sequences:
            blocks = self.mapped(self.pick(at))
            block = blocks[block % len(blocks)] if blocks else block
        self.pin_block(block)

    def pin_block(self, block: int) -> None:
        frozen = self.frozen_contents(block)
        held = frozen is not None or block in self.pins
        _, error = self.attempt(lambda: self.mmu.pin(np.array([block], np.int64)), InvalidBlock)
        if error is not None:
            assert not held, f"block {block} is in use but could not be pinned"
            assert error.block == block
            return
        if frozen is None:
            frozen = self.pins[block][-1] if block in self.pins else self.cached_contents(block)
        self.pins.setdefault(block, []).append(frozen)

    def frozen_contents(self, block: int) -> dict[int, int] | None:
        """What the written positions of a mapped block hold; None when nobody maps it."""
        frozen: dict[int, int] | None = None
        for sequence, model in self.sequences.items():
            for logical, physical in enumerate(self.table(sequence)):
                if physical == block:
                    frozen = frozen or {}
                    first = logical * self.size
                    written = model.values[first : min(model.written, first + self.size)]
                    frozen |= dict(enumerate(written))
        return frozen

    def cached_contents(self, block: int) -> dict[int, int]:
        """What a block holds that nobody maps; nothing can be said of one that a move still
        holds for a step in flight."""
        if self.device.is_queued(block):
            return {}
        return dict(enumerate(self.device.values[block].tolist()))

    @rule(block=index, pinned=st.booleans())
    def unpin(self, block: int, pinned: bool) -> None:
        block %= self.n
        if pinned and self.pins:
            block = sorted(self.pins)[block % len(self.pins)]
        if block not in self.pins:
            error = self.refused(InvalidBlock, lambda: self.mmu.unpin(np.array([block], np.int64)))
            assert error.block == block
            return
        self.mmu.unpin(np.array([block], np.int64))
        self.pins[block].pop()
        if not self.pins[block]:
            del self.pins[block]

    @rule(count=few)
    def evict(self, count: int) -> None:
        count *= self.scale
        before = self.mmu.states()
        dropped = self.mmu.evict(count)
        after = self.mmu.states()
        assert 0 <= dropped <= count
        assert before["cached"] - after["cached"] >= dropped
        if dropped < count:
            assert after["available"] == after["empty"]

    # -- compaction --------------------------------------------------------------------------

    def keep(self, plan: Plan) -> None:
        pairs = plan.pairs
        assert pairs.dtype == np.uint32 and pairs.shape == (len(plan), 2)
        assert (pairs < self.n).all()
        assert len(np.unique(pairs)) == pairs.size, "a block twice in one plan"
        self.plans = [*self.plans[-2:], plan]

    @rule(
        count=index,
        most=st.one_of(st.none(), st.integers(1, 8)),
        whole=st.sampled_from([True, True, False]),
        begun=st.sampled_from([True, True, False]),
    )
    def plan_free_run(self, count: int, most: int | None, whole: bool, begun: bool) -> None:
        available = self.mmu.states()["available"]
        count = available if whole and available else 1 + count % self.n
        plan, error = self.attempt(
            lambda: self.mmu.plan_free_run(count, max_blocks=most), OutOfBlocks
        )
        if error is not None:
            assert count > available or hasattr(error, "largest_run")
            return
        assert count <= available
        assert most is None or len(plan) <= most
        # A run may be planned over fenced blocks; it is complete only when it is there.
        assert plan.complete == (plan.remaining == 0 and plan.predicted_run >= count)
        self.keep(plan)
        if begun and len(self.flights) < MAX_MOVES_IN_FLIGHT:
            self.begin_plan(plan)

    @rule(
        ratio=st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.35, 0.7, 1.0])),
        most=st.one_of(st.none(), st.integers(1, 8)),
    )
    def plan_below(self, ratio: float | None, most: int | None) -> None:
        if ratio is None:
            triggered = self.mmu.plan_compaction()
            if triggered is not None:
                assert len(triggered) <= self.budget
                self.keep(triggered)
            return
        plan = self.mmu.plan_below(ratio, max_blocks=most)
        assert most is None or len(plan) <= most
        if plan.complete:
            assert plan.predicted_ratio < ratio or plan.predicted_ratio == 0.0
        self.keep(plan)

    @precondition(lambda self: self.plans and len(self.flights) < MAX_MOVES_IN_FLIGHT)
    @rule(at=index)
    def begin(self, at: int) -> None:
        self.begin_plan(self.plans[at % len(self.plans)])

    def begin_plan(self, plan: Plan) -> None:
        states, tables = self.mmu.states(), self.all_tables()
        busy = self.moving() | self.destined()
        moves = self.mmu.begin(plan)
        pairs = moves.pairs
        assert {tuple(pair) for pair in pairs.tolist()} <= {
            tuple(pair) for pair in plan.pairs.tolist()
        }
        assert len(moves) == len(pairs)
        touched = set(pairs.reshape(-1).tolist())
        assert len(touched) == pairs.size and not touched & busy
        assert not touched & set(self.pins), "a pinned block is moved or written"
        assert self.mmu.states()["destined"] == states["destined"] + len(pairs)
        assert self.all_tables() == tables
        again = Moves.from_bytes(moves.to_bytes())
        assert (again.epoch, again.pairs.tolist()) == (moves.epoch, pairs.tolist())
        self.flights.append(Flight(moves, pairs.copy()))

    def all_tables(self) -> dict[int, list[int]]:
        return {sequence: self.table(sequence) for sequence in self.sequences}

    @precondition(lambda self: self.flights)
    @rule(at=index, count=st.integers(1, 40))
    def copy(self, at: int, count: int) -> None:
        self.copy_moves(self.flights[at % len(self.flights)], count)

    def copy_moves(self, flight: Flight, count: int) -> None:
        end = min(flight.copied + count, len(flight.pairs))
        self.device.move(flight.pairs[flight.copied : end])
        flight.copied = end

    @precondition(lambda self: self.flights)
    @rule(at=index)
    def commit(self, at: int) -> None:
        flight = self.flights[at % len(self.flights)]
        self.copy_moves(flight, len(flight.pairs))
        self.commit_moves(flight)

    def commit_moves(self, flight: Flight) -> None:
        tables, matches = self.all_tables(), self.matches()
        counted = self.mmu.stats()["moves_committed"]
        moved = self.mmu.commit(flight.moves)
        assert 0 <= moved <= len(flight.pairs)
        assert self.mmu.stats()["moves_committed"] - counted == moved
        to = dict(flight.pairs.tolist())
        changed = set()
        for sequence, old in tables.items():
            new = self.table(sequence)
            assert len(new) == len(old)
            for a, b in zip(old, new, strict=True):
                assert b in (a, to.get(a, a))
                if a != b:
                    changed.add(a)
        assert len(changed) <= moved
        assert self.matches() == matches, "a commit changed what is found"
        self.flights.remove(flight)
        self.done.append(flight.moves)

    @precondition(lambda self: self.flights)
    @rule(at=index)
    def abort(self, at: int) -> None:
        self.abort_moves(self.flights[at % len(self.flights)])

    def abort_moves(self, flight: Flight) -> None:
        tables, matches = self.all_tables(), self.matches()
        self.mmu.abort(flight.moves)
        assert self.all_tables() == tables
        assert self.matches() == matches
        self.flights.remove(flight)
        self.done.append(flight.moves)

    @precondition(lambda self: not self.flights)
    @rule(fails_after=st.one_of(st.none(), st.integers(0, 3)))
    def compact_at_once(self, fails_after: int | None) -> None:
        """The whole available memory into one run, in one go; or the mover dies on the way."""
        available = self.mmu.states()["available"]
        if not available:
            return
        plan, error = self.attempt(lambda: self.mmu.plan_free_run(available), OutOfBlocks)
        if error is not None:
            return  # a pinned block or one in flight stands in the way

        tables, states = self.all_tables(), self.mmu.states()
        carrier = Carrier(self.device, fails_after)
        try:
            moved = run_plan(self.mmu, carrier, plan)
        except Broken:
            after = self.mmu.states()
            assert self.all_tables() == tables
            assert all(after[key] == states[key] for key in ("in_use", "destined"))
            return
        assert moved == len(plan)
        if not self.steps and not self.pins:
            assert self.mmu.measure().largest_run_available == plan.predicted_run == available

    @precondition(lambda self: self.sequences and not self.flights)
    @rule(
        at=index,
        what=st.sampled_from(["write", "append", "truncate", "close", "fork", "pin", "rewrite"]),
        tokens=token_lists,
        when=st.sampled_from(["planned", "begun", "copied"]),
        end=st.sampled_from(["commit", "commit", "abort", "later"]),
    )
    def race(self, at: int, what: str, tokens: list[int], when: str, end: str) -> None:
        """A sequence changes once its move is planned, has begun, or has been copied."""
        everything = self.mmu.states()["available"]
        plan, _ = self.attempt(lambda: self.mmu.plan_free_run(max(1, everything)), OutOfBlocks)
        if plan is None or not len(plan):
            return
        sources = set(plan.pairs[:, 0].tolist())
        touched = [s for s in sorted(self.sequences) if sources & set(self.table(s))]
        if when != "planned":
            self.begin_plan(plan)
        if when == "copied":
            self.copy_moves(self.flights[-1], len(plan))
        if touched:
            self.change(touched[at % len(touched)], what, tokens)
        self.everything_holds()
        if when == "planned":
            self.begin_plan(plan)
        flight = self.flights[-1]
        self.copy_moves(flight, len(flight.pairs))
        if end == "commit":
            self.commit_moves(flight)
        elif end == "abort":
            self.abort_moves(flight)

    def change(self, sequence: int, what: str, tokens: list[int]) -> None:
        """One of the things that can happen to a sequence while its blocks are on the way."""
        length = len(self.sequences[sequence].values)
        if what == "write":
            if len(self.steps) < MAX_STEPS_IN_FLIGHT and not self.in_flight(sequence):
                self.schedule(self.begin_step(), [sequence], [len(tokens)], tokens, plain=False)
        elif what == "append":
            self.append_tokens(sequence, tokens)
        elif what == "truncate":
            self.truncate_to(sequence, max(0, length - len(tokens)))
        elif what == "close":
            self.close_sequence(sequence)
        elif what == "fork":
            if len(self.sequences) < MAX_SEQUENCES:
                self.fork_sequence(sequence)
        elif what == "pin":
            self.pin_block(self.table(sequence)[-1])
        else:
            self.truncate_to(sequence, max(0, length - len(tokens)))
            self.append_tokens(sequence, tokens)
            self.compute(sequence, len(tokens))

    def in_flight(self, sequence: int) -> bool:
        """A step that is not settled has scheduled the sequence."""
        return any(not s.settled and sequence in s.touches() for s in self.steps.values())

    # -- what is not allowed -----------------------------------------------------------------

    @rule(at=index)
    def use_what_is_gone(self, at: int) -> None:
        sequence = self.gone[at % len(self.gone)] if self.gone else 2**40 + at
        none = np.zeros(0, np.int32)
        for call in (
            lambda: self.mmu.close(sequence),
            lambda: self.mmu.fork(sequence),
            lambda: self.mmu.append(sequence, none),
            lambda: self.mmu.truncate(sequence, 0),
            lambda: self.mmu.info(sequence),
            lambda: self.mmu.export(np.array([sequence], np.int64), self.read_tables),
        ):
            error = self.refused(UnknownSequence, call)
            assert error.sequence == sequence
        if self.ended:
            step = self.ended[at % len(self.ended)]
            for settle in (self.mmu.written, self.mmu.cancel, self.mmu.end_step):
                error = self.refused(InvalidStep, lambda settle=settle: settle(step))
                assert error.step == step
        if self.done:
            moves = self.done[at % len(self.done)]
            self.refused(InvalidPlan, lambda: self.mmu.commit(moves))
            self.refused(InvalidPlan, lambda: self.mmu.abort(moves))

    @precondition(lambda self: self.sequences)
    @rule(at=index)
    def ask_for_too_much(self, at: int) -> None:
        sequence = self.pick(at)
        length = len(self.sequences[sequence].values)
        self.refused(InvalidConfig, lambda: self.mmu.truncate(sequence, length + 1))
        self.refused(InvalidConfig, lambda: self.mmu.release_before(sequence, length + 1))
        if self.sequences[sequence].released:
            self.refused(InvalidConfig, lambda: self.mmu.lease(sequence, 0, length))
        for number, step in self.steps.items():
            if not step.settled and any(entry.start < entry.end for entry in step.entries):
                self.refused(InvalidStep, lambda number=number: self.mmu.end_step(number))

    # -- what must hold after every operation ------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "mmu"):
            return
        self.check_sequences()
        self.check_counts()
        self.check_contents()

    def check_sequences(self) -> None:
        assert sorted(self.mmu.sequences().tolist()) == sorted(self.sequences)
        assert self.mmu.steps_in_flight() == len(self.steps)
        runs = held = regions = 0
        pages: Counter[int] = Counter()
        for sequence, model in self.sequences.items():
            info, row = self.mmu.info(sequence), self.table(sequence)
            blocks = row[model.released :]
            found = (
                info.num_tokens,
                info.num_cached_tokens,
                info.num_scheduled,
                info.num_written,
                info.num_blocks,
                info.num_runs,
                info.num_released,
            )
            expected = (
                len(model.values),
                model.cached,
                model.scheduled,
                model.written,
                len(row),
                runs_of(blocks),
                model.released,
            )
            assert found == expected, f"sequence {sequence}"
            assert len(row) == model.num_blocks
            assert len(set(blocks)) == len(blocks)
            self.check_pages(sequence, info, row, model.released)
            pages.update(info.pages)
            held += info.held
            regions += info.regions
            runs += runs_of(blocks)
        self.check_held(self.mmu.states()["held"] - held)
        measure = self.mmu.measure()
        with_blocks = sum(1 for model in self.sequences.values() if model.num_blocks)
        assert (measure.sequences, measure.runs) == (with_blocks, runs)
        assert (measure.pages, measure.regions) == (dict(pages), regions)
        assert measure.unused_slots == sum(
            model.num_blocks * self.size - len(model.values) for model in self.sequences.values()
        )

    def check_held(self, elsewhere: int) -> None:
        """Blocks are held behind sequences, and (by passes) in one window that is being filled."""
        assert elsewhere == 0

    def check_pages(self, sequence: int, info: Any, row: list[int], released: int) -> None:
        """Pages are of the pool's sizes, map every block once, and only where blocks lie so."""
        assert set(info.pages) <= set(self.page_orders)
        assert sum(count << order for order, count in info.pages.items()) == len(row) - released
        assert 0 <= info.held <= self.hold_blocks
        blocks = np.array(row[released:], np.int64)
        steps = np.diff(blocks) == 1
        for order, count in info.pages.items():
            size = 1 << order
            together = np.concatenate([[0], np.cumsum(steps)])
            first = np.flatnonzero(blocks[: max(0, len(blocks) - size + 1)] % size == 0)
            whole = together[first + size - 1] - together[first] == size - 1
            assert count <= whole.sum(), f"sequence {sequence}: pages of order {order}"
        for logical in {0, released, released + len(blocks) // 2, max(1, len(row)) - 1, len(row)}:
            inside = released <= logical < len(row)
            assert self.mmu.look(sequence, logical) == (row[logical] if inside else None)

    def check_counts(self) -> None:
        states, measure = self.mmu.states(), self.mmu.measure()
        by_state = {key: states[key] for key in states if key not in ("available", "held")}
        assert sum(by_state.values()) == self.n
        assert states["empty"] <= states["available"] <= states["empty"] + states["cached"]
        mappings = Counter(block for s in self.sequences for block in self.mapped(s))
        held = set(mappings) | set(self.pins)
        moving = self.moving()
        if self.flights:
            assert len(held) <= states["in_use"] <= len(held | moving)
        else:
            assert states["in_use"] == len(held)
            assert states["destined"] == 0
        if not self.steps and not self.flights:
            assert states["fenced"] == 0
            assert states["available"] == states["empty"] + states["cached"]
        references = self.mmu.references(np.arange(self.n, dtype=np.int64)).tolist()
        destined = self.destined()
        for block, count in enumerate(references):
            expected = mappings[block] + len(self.pins.get(block, ()))
            if block in moving:
                assert expected <= count <= expected + 1
            elif block not in destined:
                assert count == expected, f"block {block}"
        self.check_measure(states, measure)

    def check_measure(self, states: dict[str, int], measure: Any) -> None:
        assert (measure.empty, measure.available) == (states["empty"], states["available"])
        for count, largest, ratio in (
            (measure.empty, measure.largest_run_empty, measure.ratio_empty),
            (measure.available, measure.largest_run_available, measure.ratio_available),
        ):
            assert (largest > 0) == (count > 0) and largest <= count
            assert abs(ratio - (1 - largest / count if count else 0.0)) < 1e-9
        histogram = measure.run_histogram.tolist()
        lower = sum(count << k for k, count in enumerate(histogram))
        upper = sum(count * ((2 << k) - 1) for k, count in enumerate(histogram))
        assert lower <= measure.available <= upper
        assert (
            measure.largest_run_available == 0
            or histogram[measure.largest_run_available.bit_length() - 1]
        )

    def check_contents(self) -> None:
        """Reads every written position through exported tables, and every pinned block."""
        ids = sorted(self.sequences)
        tables = self.read_tables
        self.mmu.export(np.array(ids, np.int64), tables)
        self.mmu.validate(tables)
        assert tables.num_rows == len(ids)
        for row, sequence in enumerate(ids):
            model = self.sequences[sequence]
            assert tables.seq_lens[row] in (model.scheduled, len(model.values))
        assert (tables.seq_lens[len(ids) :] == 0).all()
        self.check_rows(tables, ids, MAX_SEQUENCES)
        values, tails = self.device.later()
        for row, sequence in enumerate(ids):
            model = self.sequences[sequence]
            blocks = tables.block_table[row, : -(-model.written // self.size)].tolist()
            start = model.released * self.size
            check_values(
                values,
                tails,
                self.slots(blocks, model.written)[start:],
                np.array(model.values[start : model.written], np.uint64),
                f"sequence {sequence}",
            )
        for block, pins in self.pins.items():
            for frozen in pins:
                for offset, value in frozen.items():
                    found = int(values[block, offset])
                    assert found == value, f"pinned block {block} changed at {offset}"
        self.device.check_guards()

    def teardown(self) -> None:
        """Everything is given back, and nothing is left over."""
        if not hasattr(self, "mmu") or sys.exc_info()[0] is not None:
            return  # what has failed already must not be hidden by what follows from it
        mmu = self.mmu
        for flight in self.flights:
            mmu.abort(flight.moves)
        for sequence in self.sequences:
            mmu.close(sequence)
        for number, step in self.steps.items():
            if not step.settled:
                mmu.cancel(number)
            mmu.end_step(number)
        for block, pins in self.pins.items():
            for _ in pins:
                mmu.unpin(np.array([block], np.int64))
        mmu.validate()
        states = mmu.states()
        assert states["empty"] + states["cached"] == states["available"] == self.n
        assert mmu.evict(self.n) == states["cached"]
        assert mmu.states()["empty"] == self.n
        mmu.validate()
