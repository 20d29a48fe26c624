"""Random operations on a KVCache, contents and all, in every layout.

The device runs late: the kernels of a step, copies on write and moves are queued, in order, and
run when a rule says so or an event is waited for. After every rule what the memory will hold once
the queue has run is compared with what each sequence and each lease should read, and everything is
recounted. What the core decides is modelled in ``machine.py``; here the numbers that it reports are
believed, and bytes are checked.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

torch = pytest.importorskip("torch")

from kvmmu import (  # noqa: E402
    InvalidLease,
    InvalidStep,
    LimitExceeded,
    OutOfBlocks,
    UnknownSequence,
)

from .small_cache import Broken, SmallCache  # noqa: E402

MAX_SEQUENCES = 6
LAYOUTS = ("NHD", "HND", "packed", "block_major")

index = st.integers(0, 63)
few = st.integers(0, 7)


class CacheMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
        num_blocks=st.integers(4, 32),
        block_size=st.integers(1, 4),
        depth=st.sampled_from([1, 2, 4]),
        placement=st.sampled_from(["scatter", "scatter", "address"]),
        caching=st.sampled_from([True, True, False]),
        auto=st.booleans(),
        null=st.sampled_from(["last", "last", "first", 2]),
        page_orders=st.sampled_from([(0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 9)]),
        hold_blocks=st.integers(0, 8),
        dedup=st.booleans(),
        page_bytes=st.sampled_from([1, 16, 64, 256]),
        opened=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    )
    def build(
        self,
        layout: str,
        dtype: Any,
        num_blocks: int,
        block_size: int,
        depth: int,
        placement: str,
        caching: bool,
        auto: bool,
        null: str | int,
        page_orders: tuple[int, ...],
        hold_blocks: int,
        dedup: bool,
        page_bytes: int,
        opened: list[int],
    ) -> None:
        self.pool = SmallCache(
            num_blocks,
            block_size,
            late=True,
            layout=layout,
            dtype=dtype,
            steps_in_flight=depth,
            placement=placement,
            prefix_caching=caching,
            auto_compact=auto,
            null_block=null,
            page_orders=page_orders,
            medium_from=0,
            hold_blocks=hold_blocks,
            dedup=dedup,
            page_bytes=page_bytes,
            compaction_start=0.0,
            compaction_stop=0.0,
            budget_blocks=5,
            max_tokens=128,
        )
        self.cache = self.pool.cache
        self.depth = depth
        self.stem = self.pool.fresh(3 * block_size)
        self.open_steps: list[tuple[Any, set[int]]] = []  # begun, neither written nor cancelled
        self.leases: list[tuple[Any, list[Any]]] = []
        self.gone: list[Any] = []
        for at, length in enumerate(opened):
            self.open_prompt((self.stem if at % 2 else []) + self.pool.fresh(length), True)

    # -- helpers -----------------------------------------------------------------------------

    def pick(self, at: int) -> Any:
        return self.pool.handles[sorted(self.pool.handles)[at % len(self.pool.handles)]]

    def busy(self) -> set[int]:
        """Sequences that an unsettled step has scheduled."""
        return set().union(*(touched for _, touched in self.open_steps))

    def attempt(self, call: Callable[[], Any], *allowed: type[Exception]) -> bool:
        """Whether it was done; if not, nothing has changed."""
        before = self.pool.everything()
        try:
            call()
        except allowed:
            assert self.pool.everything() == before
            return False
        return True

    def later(self, check: Callable[[], None]) -> None:
        """``check`` over the memory as it will be when the queue has run. The queue stays."""
        if not self.pool.device.queue:
            check()
            return
        tensors = self.cache.layers.tensors
        saved = [tensor.clone() for tensor in tensors]
        try:
            for work in self.pool.device.queue:
                work()
            check()
        finally:
            for tensor, was in zip(tensors, saved, strict=True):
                tensor.copy_(was)

    # -- sequences ---------------------------------------------------------------------------

    @precondition(lambda self: len(self.pool.handles) < MAX_SEQUENCES)
    @rule(length=st.integers(0, 12), shared=st.booleans(), write=st.booleans())
    def open(self, length: int, shared: bool, write: bool) -> None:
        tokens = self.stem[:length] + self.pool.fresh(1) if shared else self.pool.fresh(length)
        self.open_prompt(tokens, write)

    def open_prompt(self, tokens: list[int], write: bool) -> None:
        handles: list[Any] = []
        self.attempt(
            lambda: handles.append(self.pool.open(tokens, write=False)), OutOfBlocks, LimitExceeded
        )
        if handles and write and self.cache.poll() <= self.depth:
            step = self.pool.launch(handles, [handles[0].num_tokens - handles[0].num_scheduled])
            step.written()
            self.cache.end_step(step, self.pool.device.event())

    @precondition(lambda self: len(self.pool.handles) < MAX_SEQUENCES)
    @rule(keep=st.booleans())
    def load(self, keep: bool) -> None:
        """Takes every block that can be had, and fills them at once, past the queue: what steps in
        flight or leases still need must not be among them."""
        length = self.pool.states()["available"] * self.pool.block_size
        if self.cache.poll() > self.depth or not length:
            return
        try:
            handle = self.pool.open(self.pool.fresh(length), write=False)
        except OutOfBlocks:
            return
        step = self.cache.begin_step()
        batch = step.prepare([handle], query_lens=[length])
        self.pool.device.run(max(self.pool.device.copies, self.pool.device.ran))
        self.pool.write(batch.slot_mapping.clone(), self.pool.texts[handle.id].values)
        step.written()
        self.cache.end_step(step)
        if not keep:
            self.pool.close(handle)

    @precondition(lambda self: 0 < len(self.pool.handles) < MAX_SEQUENCES)
    @rule(at=index)
    def fork(self, at: int) -> None:
        self.pool.fork(self.pick(at))

    @precondition(lambda self: self.pool.handles)
    @rule(at=index, count=st.integers(0, 6))
    def append(self, at: int, count: int) -> None:
        handle = self.pick(at)
        self.attempt(lambda: self.pool.append(handle, count), OutOfBlocks, LimitExceeded)

    @precondition(lambda self: self.pool.handles)
    @rule(at=index, less=st.integers(0, 9))
    def truncate(self, at: int, less: int) -> None:
        handle = self.pick(at)
        self.pool.truncate(handle, max(0, handle.num_tokens - less))

    @precondition(lambda self: self.pool.handles)
    @rule(at=index)
    def close(self, at: int) -> None:
        """An abort or a preemption as well: steps in flight may read it."""
        handle = self.pick(at)
        self.pool.close(handle)
        self.gone.append(handle)

    @precondition(lambda self: self.gone)
    @rule(at=index)
    def use_what_is_gone(self, at: int) -> None:
        handle = self.gone[at % len(self.gone)]
        handle.close()
        assert not self.attempt(handle.fork, UnknownSequence)
        assert not self.attempt(handle.lease, UnknownSequence)

    # -- steps -------------------------------------------------------------------------------

    @precondition(lambda self: self.pool.handles)
    @rule(
        chosen=st.lists(index, min_size=1, max_size=4),
        lens=st.lists(st.integers(0, 5), max_size=3),
        known=st.sampled_from([True, True, False]),
        defer=st.booleans(),
        then=st.sampled_from(["written", "written", "ended", "open"]),
    )
    def launch(
        self, chosen: list[int], lens: list[int], known: bool, defer: bool, then: str
    ) -> None:
        handles = {self.pick(at).id: self.pick(at) for at in chosen}
        counts = [lens[k % len(lens)] if lens else 1 for k in range(len(handles))]
        rows = list(handles.values())
        before = self.cache.poll()
        try:
            step = self.pool.launch(rows, counts, known=known, defer=defer)
        except InvalidStep:
            assert before > self.depth, "a set of buffers was free"
            return
        except (OutOfBlocks, LimitExceeded):
            return
        self.open_steps.append((step, set(handles)))
        if then != "open":
            self.settle(len(self.open_steps) - 1, True, then == "ended")

    @precondition(lambda self: self.open_steps)
    @rule(at=index, written=st.booleans(), ended=st.booleans())
    def settle(self, at: int, written: bool, ended: bool) -> None:
        """Written: the oldest first of those that share a sequence; cancelled: the newest."""
        at %= len(self.open_steps)
        step, touched = self.open_steps[at]
        others = self.open_steps[:at] if written else self.open_steps[at + 1 :]
        if any(touched & more for _, more in others):
            return
        if written:
            step.written()
        else:
            try:
                step.cancel()
            except InvalidStep:  # it was appended to meanwhile
                return
            for number in touched & set(self.pool.handles):
                handle = self.pool.handles[number]
                self.pool.texts[number].cut(handle.num_tokens)
        del self.open_steps[at]
        event = self.pool.device.event()
        if ended:
            event.synchronize()
        self.cache.end_step(step, None if ended else event)

    @rule(count=st.integers(1, 12))
    def run_some(self, count: int) -> None:
        device = self.pool.device
        device.run(min(device.queued, device.ran + count))

    @rule()
    def poll(self) -> None:
        assert self.cache.poll() == self.cache.mmu.steps_in_flight()

    @rule()
    def synchronize(self) -> None:
        self.cache.synchronize()
        assert self.cache.mmu.steps_in_flight() == len(self.open_steps)

    @precondition(lambda self: self.pool.handles)
    @rule(at=index, count=st.integers(1, 4))
    def fail_in_a_step(self, at: int, count: int) -> None:
        """An exception within ``with``: lengths as before, every byte as before."""
        handle = self.pick(at)
        if handle.id in self.busy():
            return
        before = handle.num_tokens, handle.num_scheduled, handle.num_written
        try:
            with self.cache.step() as step:
                step.prepare([handle], query_lens=[count])
                raise ZeroDivisionError
        except (ZeroDivisionError, OutOfBlocks, LimitExceeded, InvalidStep):
            pass
        assert (handle.num_tokens, handle.num_scheduled, handle.num_written) == before

    # -- moves -------------------------------------------------------------------------------

    @rule(passes=st.integers(1, 3))
    def compact(self, passes: int) -> None:
        """Its copies are queued behind what runs already, ahead of the next step."""
        for _ in range(passes):
            self.cache.compact()

    @rule(after=st.integers(0, 4))
    def compact_with_a_mover_that_dies(self, after: int) -> None:
        tables = self.pool.everything()[1:]
        self.pool.mover.fails_after = after
        try:
            self.cache.compact()
        except Broken:
            assert self.pool.everything()[1:] == tables
        finally:
            self.pool.mover.fails_after = None

    # -- memory given back -------------------------------------------------------------------

    @rule(blocks=st.integers(0, 40), granule=st.sampled_from([1, 1, 2, 3, 4, 8]))
    def shrink(self, blocks: int, granule: int) -> None:
        before = self.pool.states()
        gone = self.cache.bytes_given_back
        found = self.cache.shrink(blocks, granule=granule)
        after = self.pool.states()
        assert found.blocks % granule == 0 and found.blocks < found.wanted + granule
        assert (found.blocks >= found.wanted) == (found.stopped is None)
        assert after["offline"] == before["offline"] + found.blocks
        assert after["in_use"] <= before["in_use"]
        assert self.cache.bytes_given_back == gone + found.bytes
        assert found.bytes <= self.cache.storage.block_bytes * after["offline"]
        if found.stopped == "live":
            assert after["available"] < granule
        if found.stopped not in (None, "steps"):
            assert len(self.cache.mmu.shrink(1, granule=granule)) == 0

    @rule(blocks=st.integers(1, 40), granule=st.sampled_from([1, 2, 4]), mover=st.booleans())
    def shrink_with_a_part_that_dies(self, blocks: int, granule: int, mover: bool) -> None:
        before, gone = self.pool.states()["offline"], self.cache.bytes_given_back
        tables = self.pool.everything()[1:]
        self.pool.mover.fails_after = 1 if mover else None
        self.pool.landlord.fails = not mover
        try:
            self.cache.shrink(blocks, granule=granule)
        except Broken:
            assert self.pool.states()["offline"] == before
            assert self.cache.bytes_given_back == gone
            assert not mover or self.pool.everything()[1:] == tables
        finally:
            self.pool.mover.fails_after = None
            self.pool.landlord.fails = False

    @rule(
        blocks=st.one_of(st.none(), st.integers(0, 40)),
        granule=st.sampled_from([1, 2, 4, 8]),
        dies=st.booleans(),
    )
    def grow(self, blocks: int | None, granule: int, dies: bool) -> None:
        before = self.pool.states()
        offline = self.cache.mmu.offline_blocks().tolist()
        self.pool.landlord.fails = dies
        try:
            found = self.cache.grow(blocks, granule=granule)
        except Broken:
            assert self.pool.states() == before
            return
        finally:
            self.pool.landlord.fails = False
        after = self.pool.states()
        assert after["offline"] == before["offline"] - found
        assert after["empty"] == before["empty"] + found
        assert self.cache.mmu.offline_blocks().tolist() == offline[found:]
        assert found == len(offline) if blocks is None else found >= min(blocks, len(offline))

    @rule(count=few)
    def evict(self, count: int) -> None:
        self.cache.mmu.evict(count)

    # -- leases ------------------------------------------------------------------------------

    @precondition(lambda self: self.pool.handles and len(self.leases) < 3)
    @rule(at=index, start=few, length=st.integers(1, 12))
    def lease(self, at: int, start: int, length: int) -> None:
        """Over what is written: that does not change any more."""
        handle = self.pick(at)
        size = self.pool.block_size
        start = min(start, handle.num_written)
        stop = min(start + length, handle.num_written)
        if start == stop:
            return
        lease = handle.lease(range(start, stop))
        assert lease.blocks.tolist() == (
            handle.block_table()[start // size : -(-stop // size)].tolist()
        )
        self.leases.append((lease, self.pool.texts[handle.id].values[:stop]))

    @precondition(lambda self: self.leases)
    @rule(at=index, cancel=st.booleans())
    def end_lease(self, at: int, cancel: bool) -> None:
        lease, _ = self.leases.pop(at % len(self.leases))
        (lease.cancel if cancel else lease.done)()
        for again in (lease.done, lease.cancel):
            assert not self.attempt(again, InvalidLease)

    # -- what must hold after every rule -----------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "pool"):
            self.later(self.read_everything)
            states = self.pool.states()
            assert sum(n for name, n in states.items() if name not in ("available", "held")) == (
                self.pool.num_blocks
            )
            null = self.cache.mmu.null_block
            tables = [handle.block_table().tolist() for handle in self.pool.handles.values()]
            assert null not in set(itertools.chain(*tables))

    def read_everything(self) -> None:
        self.pool.check()
        for lease, values in self.leases:
            size = self.pool.block_size
            first = lease.start // size * size
            row = torch.from_numpy(lease.blocks)
            for layer in range(2):
                k, v = self.cache.layers.gather(layer, row, len(values) - first)
                skip = lease.start - first
                self.pool.compare(layer, (k[skip:], v[skip:]), values[lease.start :])

    def teardown(self) -> None:
        """Everything is given back, and nothing is left over."""
        if not hasattr(self, "pool") or sys.exc_info()[0] is not None:
            return
        for lease, _ in self.leases:
            lease.done()
        self.pool.close(*list(self.pool.handles.values()))
        for step, _ in reversed(self.open_steps):
            step.cancel()
            self.cache.end_step(step, self.pool.device.event())
        self.cache.synchronize()
        self.pool.device.run()
        self.cache.grow()
        assert not self.pool.landlord.gone
        self.cache.validate()
        states = self.pool.states()
        assert states["empty"] + states["cached"] == states["available"] == self.pool.num_blocks
        assert self.cache.mmu.evict(self.pool.num_blocks) == states["cached"]
        assert self.pool.references() == [0] * self.pool.num_blocks


TestKVCache = CacheMachine.TestCase
