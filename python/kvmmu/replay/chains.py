"""Requests that continue others: agents that call tools and branch.

What lives here: :class:`Chains`, which keeps the sequences of requests that have ended and whose
continuations are still to come. What never lives here: opening and closing (the serving loop).

A request with continuations does not give its KV up when it ends: it is parked until the last of
them has been opened as a fork of it. A continuation comes a pause (the tool) after its parent's
end. Parked sequences that memory is needed for are dropped, the one that has been parked longest
first; their continuations then compute the whole prompt, or find what is left of it in the cache.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from .traces import Trace

__all__ = ["Chains"]


class Chains:
    """See the module.

    Args:
        trace: its ``parents`` say who continues whom.
        step_s: simulated seconds a step.
    """

    def __init__(self, trace: Trace, step_s: float) -> None:
        self._step_s = step_s
        self._pause_s = trace.arrival_s
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        self._parents: dict[int, int] = {}
        if trace.parents is not None:
            for request, parent in enumerate(trace.parents.tolist()):
                if parent >= 0:
                    self._children[parent].append(request)
                    self._parents[request] = parent
        self._due: list[tuple[int, int]] = []
        self._parked: dict[int, int] = {}
        """Parent -> sequence, in order of parking."""
        self._tokens: dict[int, int] = {}
        self._left: dict[int, int] = {}
        """Parent -> continuations that have not been opened."""

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def pending(self) -> bool:
        """Whether a continuation is still to come."""
        return bool(self._due)

    def next_due(self) -> int | None:
        """Step of the next one."""
        return self._due[0][0] if self._due else None

    def is_root(self, request: int) -> bool:
        return request not in self._parents

    @property
    def tokens(self) -> int:
        """Tokens that parked sequences keep in memory."""
        return sum(self._tokens.values())

    def park(self, request: int, sequence: int, tokens: int, tick: int) -> bool:
        """A request of so many tokens ends. True: its sequence stays, for others continue it."""
        children = self._children.get(request)
        if not children:
            return False
        for child in children:
            due = tick + round(float(self._pause_s[child]) / self._step_s)
            heapq.heappush(self._due, (due, child))
        self._parked[request] = sequence
        self._tokens[request] = tokens
        self._left[request] = len(children)
        return True

    def due(self, tick: int) -> list[int]:
        """Continuations whose pause is over."""
        out = []
        while self._due and self._due[0][0] <= tick:
            out.append(heapq.heappop(self._due)[1])
        return out

    def parent_of(self, request: int) -> int | None:
        """The parked sequence that a request continues."""
        parent = self._parents.get(request)
        return None if parent is None else self._parked.get(parent)

    def settle(self, request: int) -> int | None:
        """A continuation has been opened, or never will be. Returns the sequence to close when it
        was the last one of its parent."""
        parent = self._parents.get(request)
        if parent is None or parent not in self._left:
            return None
        self._left[parent] -= 1
        if self._left[parent]:
            return None
        del self._left[parent]
        self._tokens.pop(parent, None)
        return self._parked.pop(parent, None)

    def drop(self) -> int | None:
        """Gives up the sequence that has been parked longest; returns it."""
        if not self._parked:
            return None
        oldest = next(iter(self._parked))
        del self._tokens[oldest]
        return self._parked.pop(oldest)

    def lost(self, request: int) -> list[int]:
        """All that would have continued a request which never ran."""
        out: list[int] = []
        rest = [request]
        while rest:
            children = self._children.get(rest.pop(), [])
            out += children
            rest += children
        return out
