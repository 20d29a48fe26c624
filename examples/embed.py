"""kvmmu inside a foreign engine: own scheduler, own tensors on four ranks, two steps in flight.

The scheduler prepares a step while the one before is still queued on the "device", a queue that
runs in order. Requests are aborted and preempted while steps that read them are in flight, blocks
move all the while, and every answer is compared on every rank.

    python examples/embed.py [REQUESTS [SEED [DEVICE]]]     DEVICE: cpu, or cuda for tensors there
"""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import kvmmu
import numpy as np
import torch
from device import Device, Event, words
from kvmmu.layout import Layers

LAYERS, BLOCK, BLOCKS, RANKS, IN_FLIGHT = 2, 8, 96, 4, 2


@dataclass(eq=False)
class Request:
    """What the scheduler knows of one."""

    text: list[int]
    end: int
    seq: Any = None


class Engine:
    """A scheduler with tensors of its own."""

    def __init__(self, seed: int, where: str) -> None:
        self.draw, self.device = random.Random(seed), Device()
        shape = (BLOCKS + 1, BLOCK, 1, 1)  # the engine's own tensors; the last block is for padding
        kv = [[torch.zeros(shape, device=where) for _ in range(LAYERS)] for _ in range(RANKS)]
        form = {"layout": "NHD", "block_size": BLOCK}
        self.ranks = [Layers.adopt(own, num_blocks=BLOCKS + 1, **form) for own in kv]
        self.movers = [kvmmu.Mover(rank.storage) for rank in self.ranks]
        options = {"compaction_start": 0.1, "compaction_stop": 0.05, "steps_in_flight": IN_FLIGHT}
        self.cache = kvmmu.KVCache.attach(kv[0], num_blocks=BLOCKS, **form, **options)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.events: deque[Event] = deque()
        self.finished = self.aborted = self.preempted = self.moved = 0

    def step(self) -> None:
        while len(self.events) >= IN_FLIGHT:  # the device is two steps behind, never more
            self.events.popleft().synchronize()
        step = self.cache.begin_step()
        self.compact()
        self.admit()
        batch = self.prepare(step)
        self.move(batch.copies)
        slots = batch.slot_mapping.clone()  # to the device
        lens = batch.query_start_loc.diff().tolist()
        texts, place = [one.text[: one.seq.num_scheduled] for one in self.running], slots.device
        for rank, layers in enumerate(self.ranks):
            k = torch.cat([words(t, rank)[-n:] for t, n in zip(texts, lens, strict=True)]).to(place)
            for layer in range(LAYERS):
                self.device.put(lambda to=layers, i=layer, k=k: to.write(i, k, None, slots))
        step.written()  # queued ahead of whatever will read it
        self.events.append(Event(self.device))
        self.cache.end_step(step, self.events[-1])
        for request in [one for one in self.running if len(one.text) >= one.end]:
            self.finish(request)
        if self.running and self.draw.random() < 0.05:
            self.drop(self.draw.choice(self.running))
            self.aborted += 1

    def compact(self) -> None:
        plan = self.cache.mmu.plan_compaction()
        if plan is not None:
            moves = self.cache.mmu.begin(plan)
            self.move(kvmmu.Moves.from_bytes(moves.to_bytes()).pairs)  # as ranks would get it
            self.moved += self.cache.mmu.commit(moves)  # the copies are queued ahead of the step

    def move(self, pairs: np.ndarray) -> None:
        for mover in self.movers:
            self.device.put(lambda mover=mover: mover.move(pairs))

    def admit(self) -> None:
        while self.waiting and len(self.running) < 12:
            tokens = np.array(self.waiting[0].text, dtype=np.int32)
            if self.cache.mmu.quote(tokens).when != "now":
                return
            self.running.append(self.waiting.popleft())
            self.running[-1].seq = self.cache.open(tokens)

    def prepare(self, step: kvmmu.Step) -> kvmmu.Batch:
        """Up to 24 tokens of a prompt or one new token each; preempts the youngest if it must."""
        while True:
            left = [len(one.text) - one.seq.num_scheduled for one in self.running]
            new = [self.draw.randrange(50) for n in left if n == 0]
            form = {"query_lens": [min(n, 24) or 1 for n in left], "new_tokens": new}
            try:
                seqs = [request.seq for request in self.running]
                batch = step.prepare(seqs, defer_copies=True, **form)
                break
            except kvmmu.OutOfBlocks:
                self.waiting.appendleft(self.running[-1])
                self.drop(self.running[-1])
                self.preempted += 1
                self.cache.synchronize()  # what it held is fenced until its steps have ended
        for request in [one for one, n in zip(self.running, left, strict=True) if n == 0]:
            request.text.append(new.pop(0))
        return batch

    def drop(self, request: Request) -> None:
        self.running.remove(request)
        request.seq.close()  # safe at any time: steps in flight keep reading what they were given

    def finish(self, request: Request) -> None:
        lease = request.seq.lease()  # keeps the bytes until they were compared
        self.drop(request)
        self.finished += 1

        def compare() -> None:
            for rank, layers in enumerate(self.ranks):
                for layer in range(LAYERS):
                    k, _ = layers.gather(layer, torch.from_numpy(lease.blocks), len(request.text))
                    assert torch.equal(k.cpu(), words(request.text, rank)), (rank, layer)
            lease.done()

        self.device.put(compare)


def main(requests: str = "150", seed: str = "1", where: str = "cpu") -> None:
    engine = Engine(int(seed), where)
    for _ in range(int(requests)):
        own = [engine.draw.randrange(50) for _ in range(engine.draw.randrange(60))]
        text = list(range(20)) + own  # a system prompt, shared, and the user's
        engine.waiting.append(Request(text, len(text) + engine.draw.randrange(1, 60)))
    while engine.waiting or engine.running:
        engine.step()
    engine.device.run(engine.device.queued)
    engine.cache.poll()
    engine.cache.validate()
    print(f"{engine.finished} finished, {engine.aborted} aborted, {engine.preempted} preempted")
    print(f"{engine.moved} blocks moved on {RANKS} ranks, all answers equal (seed {seed})")


if __name__ == "__main__":
    main(*sys.argv[1:])
