"""The two ends of a transfer: processes with a churned MMU, memory and a NIXL agent each.

What lives here: :class:`Ends`, which starts them and speaks to them, and what runs inside one. What
never lives here: figures, and what is compared with what (see :mod:`transfer`).

An end has the memory of a whole pool, for as many regions as are moved at once. A cache of more
regions goes in rounds over the same memory, with other bytes in each: two whole ones would not fit
into a small machine.
"""

from __future__ import annotations

import importlib
import mmap
import multiprocessing
import os
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from kvmmu import MMU, Region, Storage, pair_ranges, pair_runs

MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The package of NIXL is called by the CUDA that it was built for, or has that one underneath."""

WAIT_S = 600.0


def nixl_api() -> Any:
    """The module with ``nixl_agent``.

    Raises:
        ImportError: no NIXL is installed.
    """
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
    raise ImportError("NIXL is not installed; pip install 'kvmmu[nixl]'")


@dataclass(frozen=True, slots=True)
class Shape:
    """The memory of an end.

    Attributes:
        num_blocks: usable blocks of the pool.
        piece: bytes of a block in one region.
        regions: that are moved at once.
        huge_pages: whether it lies on the host's pages of 2 MiB.
    """

    num_blocks: int
    piece: int
    regions: int
    huge_pages: bool = True


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request lies at one end.

    Attributes:
        blocks: int64 [n], its block table.
        in_use: share of the pool that others held when it was opened.
        moves: blocks that were moved for it since.
    """

    blocks: npt.NDArray[np.int64]
    in_use: float
    moves: int = 0


@dataclass(frozen=True, slots=True)
class Moved:
    """One transfer.

    Attributes:
        prepare_s: from two block tables to a request that can be posted.
        post_s: the call that starts it. UCX copies inside it where it can copy at once.
        move_s: from the beginning of that call until it is done.
        descriptors: as handed over.
        joined: descriptors that NIXL made of them.
    """

    prepare_s: float
    post_s: float
    move_s: float
    descriptors: int
    joined: int


class EndFailed(RuntimeError):
    """What went wrong in the process of an end, with its traceback."""


class Ends:
    """Two processes, ``source`` and ``target``. Closed as a context manager.

    Args:
        shape: of the memory of both. None: no memory and no NIXL, only MMUs.
    """

    def __init__(self, shape: Shape | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes: dict[str, Connection] = {}
        try:
            for name in ("source", "target"):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(name, shape, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes[name] = ours
            if shape is not None:
                known = self.both("describe")
                self.ask("target", "meet", known["source"])
        except BaseException:
            self.close()
            raise

    def ask(self, end: str, call: str, *arguments: Any) -> Any:
        """The answer of one end."""
        self._pipes[end].send((call, arguments))
        return self._answer(end)

    def both(self, call: str, *arguments: Any) -> dict[str, Any]:
        """The answers of both, which work at the same time."""
        for pipe in self._pipes.values():
            pipe.send((call, arguments))
        return {end: self._answer(end) for end in self._pipes}

    def _answer(self, end: str) -> Any:
        pipe = self._pipes[end]
        try:
            if not pipe.poll(WAIT_S):
                raise EndFailed(f"{end}: no answer within {WAIT_S:g} s")
            failed, answer = pipe.recv()
        except EOFError:
            raise EndFailed(f"{end}: the process died") from None
        if failed:
            raise EndFailed(f"{end}: {answer}")
        return answer

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()  # an end leaves when nobody speaks to it any more
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.terminate()

    def __enter__(self) -> Ends:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# -- inside of one ---------------------------------------------------------------------------


def _serve(name: str, shape: Shape | None, pipe: Connection) -> None:
    end: _End | None = None
    while True:
        try:
            call, arguments = pipe.recv()
        except EOFError:
            break
        try:
            end = end or _End(name, shape)
            answer = (False, getattr(end, call)(*arguments))
        except Exception:
            answer = (True, traceback.format_exc())
        pipe.send(answer)
    if end is not None:
        end.leave()


class _End:
    def __init__(self, name: str, shape: Shape | None) -> None:
        self._name = name
        self._mmu: Any = None
        self._sequence = -1
        self._in_use = 0.0
        self._gathered = 0
        self._agent: Any = None
        self._peer = ""
        self._remote: Any = None
        if shape is not None:
            self._begin(shape)

    def _begin(self, shape: Shape) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        self._shape = shape
        size = (shape.num_blocks + 1) * shape.piece
        self._maps = [_pages(size, huge=shape.huge_pages) for _ in range(shape.regions)]
        self._regions = [
            np.frombuffer(memory, np.uint64, size // 8).reshape(shape.num_blocks + 1, -1)
            for memory in self._maps
        ]
        self._storage = Storage.from_numpy(self._regions)
        api = nixl_api()
        self._agent = api.nixl_agent(
            self._name, api.nixl_agent_config(backends=["UCX"], capture_telemetry=True)
        )
        registered = [(region.ctypes.data, region.nbytes, 0, "") for region in self._regions]
        self._registered = self._agent.register_memory(registered, mem_type="DRAM")

    # -- the MMU

    def churn(self, policy: str, minutes: float, seeds: dict[str, int]) -> float:
        """Serves so many simulated minutes of ``article-128k`` from an empty pool; the share of
        it that is in use then."""
        from kvmmu.replay.run import serve
        from kvmmu.soak import scenario, workload
        from kvmmu.soak.policies import POLICIES
        from kvmmu.soak.run import options_of
        from kvmmu.soak.task import Task

        loaded = scenario.load("article-128k").model_copy(update={"hours": minutes / 60})
        task = Task(loaded, policy, seeds[self._name])
        trace = workload.requests(loaded, task.seed)
        served = serve(trace, options_of(task, POLICIES[policy]), until_s=minutes * 60)
        return self.adopt(served.mmu.timed(lambda mmu: mmu))

    def scatter(self, num_blocks: int, sequences: int, each: int, keep: int) -> float:
        """A small pool in which every ``keep``-th of many sequences stays."""
        mmu = MMU(num_blocks, 16, prefix_caching=False, page_orders=(0,), hold_blocks=0)
        held = [mmu.open(np.zeros(each * 16, np.int32)) for _ in range(sequences)]
        for index, sequence in enumerate(held):
            if index % keep:
                mmu.close(sequence)
        return self.adopt(mmu)

    def adopt(self, mmu: Any) -> float:
        self._mmu, self._sequence = mmu, -1
        return self._share()

    def _share(self) -> float:
        return float(self._mmu.states()["in_use"] / self._mmu.num_blocks)

    def open(self, tokens: int) -> Placed:
        """Opens a request of so many tokens. Where there is no room the oldest others end."""
        mmu = self._mmu
        needed = -(-tokens // mmu.block_size)
        oldest = iter(np.sort(mmu.sequences()).tolist())
        while mmu.states()["available"] < needed:
            mmu.close(next(oldest))
        self._in_use = self._share()
        self._sequence = mmu.open(np.zeros(tokens, np.int32))
        self._gathered = 0
        return self._placed()

    def gather(self) -> Placed:
        """Brings the request into as few runs as moves can, in passes as a server makes them.
        Nothing has been written yet, so nothing is copied."""
        mmu = self._mmu
        while True:
            plan = mmu.plan_gather(self._sequence, max_blocks=mmu.budget_blocks)
            if not len(plan):
                return self._placed()
            moved = mmu.commit(mmu.begin(plan))
            if not moved:
                return self._placed()
            self._gathered += moved

    def _placed(self) -> Placed:
        blocks = self._mmu.block_table(self._sequence).astype(np.int64)
        return Placed(blocks, self._in_use, self._gathered)

    # -- the transfer

    def describe(self) -> tuple[list[tuple[int, int, int, int]], bytes]:
        """This end's regions and the agent's own description, for the other."""
        regions = [
            (region.address, region.stride, region.block_bytes, region.num_blocks)
            for region in self._storage.regions
        ]
        return regions, self._agent.get_agent_metadata()

    def meet(self, peer: tuple[list[tuple[int, int, int, int]], bytes]) -> None:
        regions, metadata = peer
        self._remote = Storage([Region(*numbers) for numbers in regions], self._shape.num_blocks)
        name = self._agent.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._agent.make_connection(self._peer)

    def write(self, blocks: npt.NDArray[np.int64], number: int) -> None:
        """Writes the bytes of a round, different in every word, block, region and round."""
        for index, region in enumerate(self._regions):
            region[blocks] = self._words(len(blocks), index, number)

    def clear(self) -> None:
        for region in self._regions:
            region[:] = 0

    def wrong(self, blocks: npt.NDArray[np.int64], number: int, regions: int) -> int:
        """Blocks whose bytes, in the first so many regions, are not those of this round."""
        bad = np.zeros(len(blocks), bool)
        for index, region in enumerate(self._regions[:regions]):
            bad |= (region[blocks] != self._words(len(blocks), index, number)).any(axis=1)
        return int(bad.sum())

    def written(self, blocks: npt.NDArray[np.int64]) -> int:
        """Words of these blocks that are not zero."""
        return sum(int(np.count_nonzero(region[blocks])) for region in self._regions)

    def _words(self, count: int, region: int, number: int) -> npt.NDArray[np.uint64]:
        words = self._shape.piece // 8
        first = np.uint64(((number + 1) << 48) + (region << 40))
        return first + np.arange(count * words, dtype=np.uint64).reshape(count, words)

    def pull(
        self,
        local: npt.NDArray[np.int64],
        remote: npt.NDArray[np.int64],
        regions: int,
        by_block: bool = False,
    ) -> Moved:
        """Reads the blocks of the other end into those of this one, in the first so many regions.

        Args:
            by_block: hand over a descriptor a block and let NIXL join them.
        """
        if by_block:
            return self._pull_joined(local, remote, regions)
        start = time.perf_counter()
        here, there = self._descriptors(pair_runs(local, remote), regions)
        request = self._agent.initialize_xfer("READ", here, there, self._peer)
        return self._carry_out(request, time.perf_counter() - start, here.descCount())

    def _pull_joined(
        self, local: npt.NDArray[np.int64], remote: npt.NDArray[np.int64], regions: int
    ) -> Moved:
        """By lists of all blocks of the pool, which an engine makes once, so that they are not
        timed, and by the numbers of the blocks in them."""
        agent = self._agent
        here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _every_block(self._storage), "DRAM")
        there = agent.prep_xfer_dlist(self._peer, _every_block(self._remote), "DRAM")
        try:
            start = time.perf_counter()
            first = np.arange(regions)[:, None] * (self._shape.num_blocks + 1)
            mine, theirs = ((first + blocks).ravel().astype(np.int32) for blocks in (local, remote))
            request = agent.make_prepped_xfer("READ", here, mine, there, theirs)
            return self._carry_out(request, time.perf_counter() - start, len(mine))
        finally:
            agent.release_dlist_handle(here)
            agent.release_dlist_handle(there)

    def _descriptors(self, runs: list[tuple[int, int, int]], regions: int) -> tuple[Any, Any]:
        """Both sides of a transfer, as NIXL takes them."""
        ranges = np.concatenate(pair_ranges(self._storage, self._remote, runs)[:regions])
        device = np.zeros(len(ranges), np.int64)
        here, there = (
            self._agent.get_xfer_descs(
                np.stack([ranges[:, side], ranges[:, 2], device], axis=1).astype(np.uint64), "DRAM"
            )
            for side in (0, 1)
        )
        return here, there

    def _carry_out(self, request: Any, prepare_s: float, descriptors: int) -> Moved:
        agent = self._agent
        try:
            start = time.perf_counter()
            state = agent.transfer(request)
            posted = time.perf_counter()
            while state == "PROC":
                state = agent.check_xfer_state(request)
            done = time.perf_counter()
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")
            joined = int(agent.get_xfer_telemetry(request).descCount)
        finally:
            agent.release_xfer_handle(request)
        return Moved(prepare_s, posted - start, done - start, descriptors, joined)

    def leave(self) -> None:
        if self._agent is None:
            return
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)


def _every_block(storage: Storage) -> npt.NDArray[np.uint64]:
    """uint64 [regions, 5]: all blocks of each region, as NIXL takes evenly spaced descriptors:
    (address, bytes a block, device, stride, blocks)."""
    rows = [
        (region.address, region.block_bytes, 0, region.stride, region.num_blocks)
        for region in storage.regions
    ]
    return np.array(rows, np.uint64)


def _pages(size: int, *, huge: bool) -> mmap.mmap:
    """Anonymous memory, touched; on pages of 2 MiB if that is asked for and the kernel has them."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0
    return memory
