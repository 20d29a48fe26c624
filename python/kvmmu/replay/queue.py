"""Who waits to be admitted, and for what.

What lives here: :class:`Queue`: first come, first served, those that were thrown out before all
others; how long each has waited and for which cause; clients that have waited too long and leave.
What never lives here: the reason itself (the serving loop finds it when it tries the head).

Whatever keeps the head from being admitted keeps everybody behind it waiting too, so a step that
passes is one more step of that cause for all of them. One clock a cause is enough for that: a
request remembers the clocks at its arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["CAUSES", "Queue", "Waiting"]

CAUSES = ("prefill", "batch", "memory", "shape", "tables")
"""What the head waits for: prefill of others, a row of the batch, blocks, blocks in the shape that
it requires (enough of them are available), page-table nodes."""


@dataclass(slots=True)
class Waiting:
    """A request in the queue.

    Attributes:
        request: index in the trace.
        known: tokens to compute before it can decode.
        since: step in which it arrived.
        clocks: the queue's clocks then.
        reopened: it was running before and was thrown out; its client stays.
        tokens: int32, all positions that it will ever write, once they are made.
        failed: causes for which it was refused as the head so far.
    """

    request: int
    known: int
    since: int
    clocks: tuple[int, ...]
    reopened: bool = False
    tokens: npt.NDArray[np.int32] | None = None
    failed: set[str] | None = None


class Queue:
    """See the module.

    Args:
        patience: steps after which a client leaves that was never admitted; None: never.
    """

    def __init__(self, patience: int | None = None) -> None:
        self._patience = patience
        self._again: deque[Waiting] = deque()
        self._waiting: deque[Waiting] = deque()
        self._clocks = dict.fromkeys(CAUSES, 0)

    def __len__(self) -> int:
        return len(self._again) + len(self._waiting)

    @property
    def head(self) -> Waiting:
        return self._again[0] if self._again else self._waiting[0]

    def arrive(self, request: int, known: int, tick: int) -> None:
        """A request joins at the end."""
        self._waiting.append(Waiting(request, known, tick, tuple(self._clocks.values())))

    def again(self, request: int, known: int, tick: int) -> None:
        """A running request was thrown out: it is the next."""
        clocks = tuple(self._clocks.values())
        self._again.appendleft(Waiting(request, known, tick, clocks, reopened=True))

    def pop(self) -> Waiting:
        """The head is admitted, or refused for good."""
        return self._again.popleft() if self._again else self._waiting.popleft()

    def pass_step(self, cause: str | None) -> None:
        """A step passes, in which the head waits for ``cause``."""
        if cause is not None:
            self._clocks[cause] += 1

    def leave(self, tick: int) -> Iterator[Waiting]:
        """Those whose patience ends, out of the queue."""
        if self._patience is None:
            return
        while self._waiting and tick - self._waiting[0].since > self._patience:
            yield self._waiting.popleft()

    def waited(self, waiting: Waiting) -> dict[str, int]:
        """Steps that it has waited, by cause. Less than from its arrival on where it came between
        two steps."""
        pairs = zip(self._clocks.items(), waiting.clocks, strict=True)
        return {cause: now - then for (cause, now), then in pairs}
