"""kvmmu inside a foreign engine: own scheduler, own tensors on four ranks, two steps in flight.

The scheduler prepares a step while the one before is still queued on the "device" (a queue that runs
in order). Requests are aborted and preempted while steps that read them are in flight, blocks move all
the while, and every answer is compared on every rank.

    python examples/embed.py [REQUESTS]
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable

import torch

import kvmmu
from kvmmu.layout import Layers

LAYERS, BLOCK, BLOCKS, RANKS, IN_FLIGHT = 2, 8, 96, 4, 2


class Device:
    """Runs what is queued, in order; an event is a place in the queue."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.queued = self.ran = 0

    def put(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.queued += 1

    def run(self, upto: int) -> None:
        while self.ran < upto:
            self.queue.popleft()()
            self.ran += 1


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.place = device, device.queued

    def query(self) -> bool:
        return self.device.ran >= self.place

    def synchronize(self) -> None:
        self.device.run(self.place)


def words(tokens: list[int], rank: int) -> torch.Tensor:
    """KV of a rank, [n, 1, 1]: each position depends on its whole prefix."""
    value, out = rank, []
    for token in tokens:
        value = (31 * value + token + 1) % 1_000_003
        out.append(value)
    return torch.tensor(out, dtype=torch.float32)[:, None, None]


class Request:
    def __init__(self, prompt: list[int], answer: int) -> None:
        self.text, self.end, self.seq = prompt, len(prompt) + answer, None

    seq: kvmmu.Sequence | None


class Engine:
    def __init__(self, seed: int) -> None:
        self.draw, self.device = random.Random(seed), Device()
        shape = (BLOCKS + 1, BLOCK, 1, 1)  # the engine's own tensors; the last block is the null block
        self.kv = [[torch.zeros(shape) for _ in range(LAYERS)] for _ in range(RANKS)]
        self.caches = [
            Layers.adopt(kv, layout="NHD", block_size=BLOCK, num_blocks=BLOCKS + 1)
            for kv in self.kv
        ]
        self.movers = [kvmmu.Mover(layers.storage) for layers in self.caches]
        self.cache = kvmmu.KVCache.attach(
            self.kv[0], layout="NHD", num_blocks=BLOCKS, block_size=BLOCK, max_batch=16,
            steps_in_flight=IN_FLIGHT, compaction_start=0.1, compaction_stop=0.05,
        )  # fmt: skip
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.events: deque[Event] = deque()
        self.finished = self.aborted = self.preempted = self.moved = 0

    def move(self, pairs: object) -> None:
        """The same copies on every rank, behind what is queued."""
        for mover in self.movers:
            self.device.put(lambda mover=mover: mover.move(pairs))

    def admit(self) -> None:
        while self.waiting and len(self.running) < 12:
            request = self.waiting[0]
            if self.cache.mmu.quote(torch.tensor(request.text, dtype=torch.int32).numpy()).when != "now":
                return
            request.seq = self.cache.open(request.text)
            self.running.append(self.waiting.popleft())

    def drop(self, request: Request) -> None:
        """Abort or preempt: safe at any time, steps in flight keep reading what they were given."""
        self.running.remove(request)
        assert request.seq is not None
        request.seq.close()

    def compact(self) -> None:
        plan = self.cache.mmu.plan_compaction()
        if plan is not None:
            moves = self.cache.mmu.begin(plan)
            self.move(kvmmu.Moves.from_bytes(moves.to_bytes()).pairs)  # as it would reach a rank
            self.moved += self.cache.mmu.commit(moves)  # its copies are queued ahead of the next step

    def step(self) -> None:
        while len(self.events) >= IN_FLIGHT:  # the device is two steps behind, never more
            self.events.popleft().synchronize()
        step = self.cache.begin_step()
        self.compact()
        self.admit()
        while True:
            lens, new = [], []
            for request in self.running:
                left = len(request.text) - request.seq.num_scheduled
                lens.append(min(left, 24) if left else 1)
                if not left:
                    new.append(self.draw.randrange(50))
            try:
                batch = step.prepare(
                    [r.seq for r in self.running], query_lens=lens, new_tokens=new, defer_copies=True
                )
                break
            except kvmmu.OutOfBlocks:
                youngest = self.running[-1]
                self.drop(youngest)
                self.waiting.appendleft(youngest)
                self.preempted += 1
                self.cache.synchronize()  # what it held is fenced until its steps have ended
        tokens = iter(new)
        chunks = []
        for request, length in zip(self.running, lens, strict=True):
            end = request.seq.num_scheduled
            if end > len(request.text):
                request.text.append(next(tokens))
            chunks.append((request.text[:end], length))
        self.move(batch.copies)
        slots = batch.slot_mapping.clone()  # a device's own copy
        for rank, layers in enumerate(self.caches):
            k = torch.cat([words(text, rank)[len(text) - n :] for text, n in chunks] or [torch.zeros(0, 1, 1)])
            for layer in range(LAYERS):
                self.device.put(lambda a=layers, i=layer, k=k: a.write(i, k, None, slots))
        step.written()
        event = Event(self.device)
        self.events.append(event)
        self.cache.end_step(step, event)
        for request in [r for r in self.running if len(r.text) >= r.end]:
            self.finish(request)
        if self.running and self.draw.random() < 0.05:
            self.drop(self.draw.choice(self.running))
            self.aborted += 1

    def finish(self, request: Request) -> None:
        """Closed at once; a lease keeps the bytes until they were compared."""
        lease = request.seq.lease()
        self.drop(request)
        self.finished += 1

        def compare() -> None:
            blocks = torch.from_numpy(lease.blocks)
            for rank, layers in enumerate(self.caches):
                for layer in range(LAYERS):
                    k, _ = layers.gather(layer, blocks, len(request.text))
                    assert torch.equal(k, words(request.text, rank)), (rank, layer)
            lease.done()

        self.device.put(compare)


def main(requests: int = 150, seed: int = 1) -> None:
    print("seed", seed)
    engine = Engine(seed)
    for _ in range(requests):
        system = list(range(20))
        own = [engine.draw.randrange(50) for _ in range(engine.draw.randrange(60))]
        engine.waiting.append(Request(system + own, engine.draw.randrange(1, 60)))
    while engine.waiting or engine.running:
        engine.step()
    engine.cache.synchronize()
    engine.device.run(engine.device.queued)
    engine.cache.validate()
    print(f"{engine.finished} finished, {engine.aborted} aborted, {engine.preempted} preempted")
    print(f"{engine.moved} blocks moved on each of {RANKS} ranks, every answer compared: equal")
    engine.cache.mmu.evict(BLOCKS)
    assert engine.cache.mmu.states()["empty"] == BLOCKS, engine.cache.mmu.states()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
