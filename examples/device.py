"""A device for examples: a queue that runs in order, events in it, and contents to compare."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class Device:
    """Runs what is queued, in order."""

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
    """A place in the queue of a device."""

    def __init__(self, device: Device) -> None:
        self.device, self.place = device, device.queued

    def query(self) -> bool:
        return self.device.ran >= self.place

    def synchronize(self) -> None:
        self.device.run(self.place)


def words(tokens: list[int], rank: int) -> torch.Tensor:
    """KV of a rank, [n, 1, 1]: each position depends on its whole prefix."""
    out = [rank]
    for token in tokens:
        out.append((31 * out[-1] + token + 1) % 1_000_003)
    return torch.tensor(out[1:], dtype=torch.float32).view(-1, 1, 1)
