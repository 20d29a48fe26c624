"""Events: whoever replays them knows at each moment which prefix is where."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvmmu import MMU, Events, InvalidConfig, KVCacheError

BLOCK = 2
Content = tuple[int, tuple[int, ...], tuple[bytes, bytes | None] | None]
"""Hash of the prefix in front, tokens, (salt, extra key)."""


def ints(values: Any) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def words(pair: Any) -> int:
    return int(pair[0]) | int(pair[1]) << 64


@dataclass
class Router:
    """What a router keeps, from events alone."""

    next: int = 0
    blocks: dict[int, tuple[int, Content]] = field(default_factory=dict)
    """Block to (hash, content)."""

    def apply(self, events: Events) -> None:
        tokens, keys = events.tokens, events.keys
        hashes, parents = events.hash, events.parent
        for i, kind in enumerate(events.kind):
            block, hash_ = int(events.block[i]), words(hashes[i])
            if kind == Events.STORED:
                assert block not in self.blocks
                content = (words(parents[i]), tuple(tokens[i].tolist()), keys.get(i))
                self.blocks[block] = hash_, content
            elif kind == Events.REMOVED:
                assert self.blocks.pop(block)[0] == hash_
                assert not tokens[i].any()
            else:
                to = int(events.moved_to[i])
                assert to not in self.blocks
                self.blocks[to] = self.blocks.pop(block)
                assert self.blocks[to][0] == hash_
        self.next = events.next

    def match(self, tokens: list[int], salt: bytes, extra: dict[int, bytes]) -> int:
        """Tokens of a prompt that are known, of all but the last."""
        known = {content: hash_ for hash_, content in self.blocks.values()}
        parent = found = 0
        for index in range((len(tokens) - 1) // BLOCK):
            key = (salt if index == 0 else b"", extra.get(index))
            place = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
            hash_ = known.get((parent, place, None if key == (b"", None) else key))
            if hash_ is None:
                break
            parent, found = hash_, found + BLOCK
        return found


def published(mmu: MMU) -> dict[int, tuple[int, Content]]:
    router = Router()
    router.apply(mmu.published())
    return router.blocks


class RouterMachine(RuleBasedStateMachine):
    """Prompts that share prefixes in a pool that is too small, forks, moves, evictions. One router
    reads after every call; one reads seldom, and begins again where it has lost events."""

    @initialize(
        dedup=st.booleans(),
        eviction=st.sampled_from(["lru", "lfu"]),
        scatter=st.booleans(),
        events=st.sampled_from([1, 3, 8, 1000]),
    )
    def begin(self, dedup: bool, eviction: str, scatter: bool, events: int) -> None:
        self.mmu = MMU(
            24,
            BLOCK,
            dedup=dedup,
            eviction=eviction,
            placement="scatter" if scatter else "address",
            page_orders=(0, 1, 2),
            events=events,
        )
        self.tables = self.mmu.register_tables(
            np.empty((1, 24), np.int32),
            np.empty(1, np.int32),
            np.empty(64, np.int64),
            np.empty(2, np.int32),
        )
        self.open: list[int] = []
        self.prompts: list[tuple[list[int], bytes, dict[int, bytes]]] = []
        self.close_reader = Router()
        self.seldom = Router()
        self.events = events

    def prompt(self, choices: list[int], salt: bytes, image: bool) -> Any:
        tokens = [choice % 3 for choice in choices]
        return tokens, salt, {1: b"image"} if image else {}

    @rule(
        choices=st.lists(st.integers(0, 2), min_size=1, max_size=14),
        salt=st.sampled_from([b"", b"", b"tenant"]),
        image=st.booleans(),
    )
    def serve(self, choices: list[int], salt: bytes, image: bool) -> None:
        tokens, salt, extra = prompt = self.prompt(choices, salt, image)
        try:
            sequence = self.mmu.open(ints(tokens), salt=salt or None, extra_keys=extra)
        except KVCacheError:
            return
        self.prompts.append(prompt)
        self.open.append(sequence)
        self.write(sequence, len(tokens) - self.mmu.info(sequence).num_scheduled)

    def write(self, sequence: int, query: int, new: npt.NDArray[np.int32] | None = None) -> None:
        step = self.mmu.begin_step()
        try:
            self.mmu.prepare(
                step,
                np.array([sequence]),
                self.tables,
                query_lens=ints([query]),
                new_tokens=ints([]) if new is None else new,
            )
            self.mmu.written(step)
        except KVCacheError:
            pass
        finally:
            self.mmu.end_step(step)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), token=st.integers(0, 2))
    def decode(self, which: int, token: int) -> None:
        self.write(self.open[which % len(self.open)], 1, ints([token]))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        self.mmu.close(self.open.pop(which % len(self.open)))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        with suppress(KVCacheError):
            self.open.append(self.mmu.fork(self.open[which % len(self.open)]))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), keep=st.integers(0, 99))
    def truncate(self, which: int, keep: int) -> None:
        sequence = self.open[which % len(self.open)]
        tokens = self.mmu.info(sequence).num_tokens
        self.mmu.truncate(sequence, keep % (tokens + 1))

    @rule(n=st.integers(1, 6))
    def evict(self, n: int) -> None:
        self.mmu.evict(n)

    @rule(n=st.integers(2, 12), commit=st.booleans())
    def move(self, n: int, commit: bool) -> None:
        try:
            moves = self.mmu.begin(self.mmu.plan_free_run(n))
        except KVCacheError:
            return
        if commit:
            self.mmu.commit(moves)
        else:
            self.mmu.abort(moves)

    @rule()
    def read_seldom(self) -> None:
        events = self.mmu.events(self.seldom.next)
        assert len(events) == min(events.next - self.seldom.next, self.events)
        assert events.lost == max(events.next - self.seldom.next - self.events, 0)
        if events.lost:
            self.seldom = Router()
            events = self.mmu.published()
        self.seldom.apply(events)
        assert self.seldom.blocks == published(self.mmu)

    @invariant()
    def events_say_what_is_published(self) -> None:
        if not hasattr(self, "mmu"):
            return
        self.mmu.validate()
        events = self.mmu.events(self.close_reader.next)
        if events.lost:
            self.close_reader = Router()
            self.close_reader.apply(self.mmu.published())
        else:
            expected = range(self.close_reader.next, events.next)
            assert events.number.tolist() == list(expected)
            self.close_reader.apply(events)
        assert self.close_reader.blocks == published(self.mmu)
        for tokens, salt, extra in self.prompts[-4:]:
            found = self.mmu.match(ints(tokens), salt=salt or None, extra_keys=extra)
            assert self.close_reader.match(tokens, salt, extra) == found


TestEvents = RouterMachine.TestCase


def filled(mmu: MMU, tokens: Any, **keys: Any) -> int:
    sequence = mmu.open(ints(tokens), **keys)
    tables = mmu.register_tables(
        np.empty((1, 32), np.int32),
        np.empty(1, np.int32),
        np.empty(256, np.int64),
        np.empty(2, np.int32),
    )
    step = mmu.begin_step()
    lens = ints([len(tokens) - mmu.info(sequence).num_scheduled])
    mmu.prepare(step, np.array([sequence]), tables, query_lens=lens)
    mmu.written(step)
    mmu.end_step(step)
    return sequence


def test_a_stored_block_says_all_that_a_router_needs_to_know_it_again() -> None:
    mmu = MMU(16, 2, events=8)
    sequence = filled(mmu, [1, 2, 3, 4, 5], salt=b"tenant", extra_keys={1: b"image"})
    events = mmu.events(0)
    assert len(events) == 2
    assert events.number.tolist() == [0, 1]
    assert events.kind.tolist() == [Events.STORED] * 2
    assert events.block.tolist() == mmu.block_table(sequence)[:2].tolist()
    assert events.moved_to.tolist() == [-1, -1]
    assert events.tokens.tolist() == [[1, 2], [3, 4]]
    assert events.keys == {0: (b"tenant", None), 1: (b"", b"image")}
    assert events.parent.tolist() == [[0, 0], events.hash[0].tolist()]
    assert (events.lost, events.next) == (0, 2)
    again = MMU(16, 2, events=8)  # hashes are those of the content, in every manager
    filled(again, [9, 9, 9])
    filled(again, [1, 2, 3, 4, 5], salt=b"tenant", extra_keys={1: b"image"})
    assert again.events(1).hash.tolist() == events.hash.tolist()


def test_hashes_are_those_of_every_process() -> None:
    """A golden value, as the core's own: routers compare hashes of different engines."""
    mmu = MMU(16, 4, events=8)
    filled(mmu, [1, 2, 3, -4, 0])
    assert words(mmu.events(0).hash[0]) == 0xB84D5BF24C2F36D7E8126C07FE27EFBF


def test_equal_contents_in_two_blocks_are_two_events_and_one_hash() -> None:
    mmu = MMU(16, 2, events=16)
    a, b = (mmu.open(ints([1, 2, 3])) for _ in range(2))  # neither finds the other's
    tables = mmu.register_tables(
        np.empty((2, 8), np.int32),
        np.empty(2, np.int32),
        np.empty(16, np.int64),
        np.empty(3, np.int32),
    )
    step = mmu.begin_step()
    mmu.prepare(step, np.array([a, b]), tables, query_lens=ints([3, 3]))
    mmu.written(step)
    mmu.end_step(step)
    events = mmu.events(0)
    assert events.kind.tolist() == [Events.STORED] * 2
    assert events.hash[0].tolist() == events.hash[1].tolist()
    assert events.block[0] != events.block[1]


def test_a_gap_is_told_and_what_is_published_closes_it() -> None:
    mmu = MMU(16, 2, events=2)
    for start in range(0, 12, 3):
        mmu.close(filled(mmu, [start, start + 1, start + 2]))
    late = mmu.events(0)
    assert (late.lost, late.next, late.number.tolist()) == (2, 4, [2, 3])
    now = mmu.published()
    assert (len(now), now.next, now.lost, now.number.tolist()) == (4, 4, 0, [-1] * 4)
    assert len(mmu.events(now.next)) == 0


@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        (lambda: MMU(8, 2).events(0), "events = 0"),
        (lambda: MMU(8, 2, events=4).events(1), "0 to 0"),
        (lambda: MMU(8, 2, events=4).events(-1), "from 0"),
        (lambda: MMU(8, 2, events=4).events(True), "whole number"),
        (lambda: MMU(8, 2, events=-1), "events"),
        (lambda: MMU(8, 2, events=2**24 + 1), "16777216"),
        (lambda: MMU(8, 2, events=cast(Any, 1.5)), "events"),
        (lambda: MMU(8, 2, events=4, prefix_caching=False), "prefix_caching"),
    ],
)
def test_what_is_not_meant_is_refused(call: Any, allowed: str) -> None:
    with pytest.raises(InvalidConfig, match=allowed):
        call()


def test_a_ring_that_memory_has_no_room_for_is_an_error() -> None:
    code = """
import resource
import kvmmu
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
try:
    kvmmu.MMU(8, 4096, events=2**24)
except (MemoryError, kvmmu.KVCacheError) as error:
    print(type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip(), done.stderr


def test_nothing_is_published_without_a_cache_and_reading_says_so() -> None:
    mmu = MMU(8, 2, prefix_caching=False)
    filled(mmu, [1, 2, 3])
    assert len(mmu.published()) == 0
    assert repr(mmu.published()) == "Events(0 events, lost=0, next=0)"
