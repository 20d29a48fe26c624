"""The same steps on ordinary contiguous KV: a tensor of its own for each sequence.

What lives here: :class:`Reference`, which follows records and computes their logits, and the
comparison. What never lives here: kvmmu. A hit and a fork are copies here, a move is nothing.

The same bits are asked for, so the same kernels must be handed the same shapes and strides: batches
are those of the record, and :func:`~.model.attention` gets K and V of one sequence, contiguous and
from an aligned address, on either side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .model import Model, attention
from .schedule import Closed, Forked, Opened, Record, Source


class WrongHit(Exception):
    """A prompt was served from the cache by blocks of other tokens."""


class Reference:
    """Follows a schedule, one record after the other.

    Args:
        block_size: tokens of what the prefix cache finds.
        capacity: tokens of the longest sequence.
    """

    def __init__(self, model: Model, block_size: int, capacity: int) -> None:
        self._model = model
        self._block_size = block_size
        shape = model.shape
        self._shape = (2, shape.layers, capacity, shape.kv_heads, shape.dim)
        self._kv: dict[int, Tensor] = {}
        self._tokens: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}
        self._full: dict[Source, tuple[list[int], Tensor]] = {}
        self._rows: list[tuple[int, int, int, int]] = []

    def step(self, record: Record) -> Tensor:
        """Logits of the last token of each row, float32 [R, vocab].

        Raises:
            WrongHit: a prompt took blocks whose tokens are not its own.
        """
        for event in record.events:
            if isinstance(event, Opened):
                self._open(event)
            elif isinstance(event, Forked):
                self._fork(event)
            else:
                self._close(event)
        tokens: list[int] = []
        positions: list[int] = []
        self._rows = []
        for sequence, new in record.rows:
            done = self._computed[sequence]
            self._rows.append((sequence, len(tokens), done, len(new)))
            self._tokens[sequence][done:] = new
            tokens += new
            positions += range(done, done + len(new))
        last = torch.tensor([start + count - 1 for _, start, _, count in self._rows])
        logits = self._model.forward(
            torch.tensor(tokens), torch.tensor(positions), last, self._attend
        )
        for sequence, _, done, count in self._rows:
            self._computed[sequence] = done + count
            self._remember(sequence, done, done + count)
        for source in self._full.keys() - record.kept:
            del self._full[source]
        return logits

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for sequence, start, done, count in self._rows:
            keys, values = self._kv[sequence][:, layer, : done + count]
            rows = slice(start, start + count)
            keys[done:], values[done:] = k[rows], v[rows]
            out[rows] = attention(q[rows], keys, values)
        return out

    def _open(self, event: Opened) -> None:
        size, kv = self._block_size, torch.empty(self._shape)
        for block, source in enumerate(event.sources):
            place = slice(block * size, (block + 1) * size)
            if source not in self._full:
                raise WrongHit(f"block {block} of sequence {event.sequence}: {source} is not known")
            tokens, found = self._full[source]
            if tokens != list(event.tokens[: place.stop]):
                raise WrongHit(f"block {block} of sequence {event.sequence}: {source} differs")
            kv[:, :, place] = found
        self._kv[event.sequence] = kv
        self._tokens[event.sequence] = list(event.tokens)
        self._computed[event.sequence] = len(event.sources) * size

    def _fork(self, event: Forked) -> None:
        done = self._computed[event.parent]
        kv = torch.empty(self._shape)
        kv[:, :, :done] = self._kv[event.parent][:, :, :done]
        self._kv[event.sequence] = kv
        self._tokens[event.sequence] = self._tokens[event.parent][:done]
        self._computed[event.sequence] = done

    def _close(self, event: Closed) -> None:
        for book in (self._kv, self._tokens, self._computed):
            del book[event.sequence]

    def _remember(self, sequence: int, start: int, stop: int) -> None:
        """Keeps copies of the blocks that have become full, for prompts that will find them."""
        size = self._block_size
        for block in range(start // size, stop // size):
            end = (block + 1) * size
            found = self._kv[sequence][:, :, end - size : end].clone()
            self._full[Source(sequence, block)] = (self._tokens[sequence][:end], found)


def identical(left: Tensor, right: Tensor) -> bool:
    """Whether two float32 tensors are the same bits."""
    return left.shape == right.shape and torch.equal(
        left.view(torch.int32), right.view(torch.int32)
    )
