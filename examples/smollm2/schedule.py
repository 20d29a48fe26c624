"""What a serving loop did, as plain values: enough to do the same again on ordinary tensors.

What lives here: the record of a step. What never lives here: a block number, a logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Source(NamedTuple):
    """Where the KV of a full block was computed: logical block ``block`` of ``sequence``."""

    sequence: int
    block: int


@dataclass(frozen=True)
class Opened:
    """A prompt was admitted; its first ``len(sources)`` blocks were found in the prefix cache."""

    sequence: int
    tokens: tuple[int, ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Forked:
    """A second sequence goes on from all that its parent has computed."""

    sequence: int
    parent: int


@dataclass(frozen=True)
class Closed:
    """A sequence has ended, or was preempted."""

    sequence: int


@dataclass(frozen=True)
class Record:
    """One step.

    Attributes:
        events: what happened since the step before, in order.
        rows: of each row of the batch the sequence and the tokens that it computes.
        kept: full blocks that some later prompt may still find. All others are forgotten.
    """

    events: tuple[Opened | Forked | Closed, ...]
    rows: tuple[tuple[int, tuple[int, ...]], ...]
    kept: frozenset[Source]
