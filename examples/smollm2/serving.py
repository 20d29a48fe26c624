"""Continuous batching over a paged KV cache that is too small, in plain torch.

What lives here: requests, who is admitted and preempted, and attention through the exported block
tables. What never lives here: which block is whose (kvmmu decides), which blocks move
(:mod:`.moves`), a comparison with anything.

First come, first served: a request is admitted as soon as its prompt fits, without a reserve, so
that running ones soon need blocks that are not there. Then the youngest is preempted: closed, and
opened again later with all it has generated as its prompt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import kvmmu
import torch
from torch import Tensor

from .model import Model, attention
from .moves import Watched
from .schedule import Closed, Forked, Opened, Record

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Limits:
    """When nobody is admitted, and what a step computes.

    Attributes:
        rows: from how many running answers on nobody is admitted.
        chunk: prompt tokens of a row in a step.
        headroom: available blocks below which the youngest is preempted. Without any, nothing
            could move.
    """

    rows: int
    chunk: int
    headroom: int


@dataclass(eq=False)
class Sample:
    """One answer to a request. The others are forked from the first one once the prompt is
    computed."""

    request: int
    text: list[int]
    prompt: int
    end: int
    draw: torch.Generator
    others: list[Sample] = field(default_factory=list)
    sequence: kvmmu.Sequence | None = None


@dataclass
class Counts:
    """What happened so far. Tokens, but for forks, preemptions and steps."""

    steps: int = 0
    rows: int = 0
    computed: int = 0
    generated: int = 0
    hits: int = 0
    forks: int = 0
    preemptions: int = 0
    pages: dict[int, int] = field(default_factory=dict)


class Paged:
    """Attention of one step through its exported tables: KV is written to the slots, and gathered
    by the rows of the block table."""

    def __init__(self, cache: kvmmu.KVCache, batch: kvmmu.Batch) -> None:
        self._cache, self._batch = cache, batch
        size = cache.mmu.block_size
        starts = batch.query_start_loc.tolist()
        lengths = batch.seq_lens.tolist()
        self._rows = [
            (slice(start, stop), length, batch.block_table[row, : -(-length // size)])
            for row, (start, stop, length) in enumerate(
                zip(starts[:-1], starts[1:], lengths, strict=True)
            )
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.write(layer, k, v, self._batch)
        kept, out = self._cache.layer(layer), torch.empty_like(q)
        assert kept.v is not None
        for rows, length, blocks in self._rows:
            keys = kept.k.index_select(0, blocks).flatten(0, 1)[:length]
            values = kept.v.index_select(0, blocks).flatten(0, 1)[:length]
            out[rows] = attention(q[rows], keys, values)
        return out


class Serving:
    """A loop over requests until all are answered.

    Args:
        cache: a KV cache of the model's shape.
        moves: called once between two steps.
        stop: the token that ends an answer; -1: none does.
    """

    def __init__(
        self, model: Model, cache: kvmmu.KVCache, moves: Watched, limits: Limits, stop: int = -1
    ) -> None:
        self._model, self._cache, self._moves = model, cache, moves
        self._limits, self._stop = limits, stop
        self._waiting: deque[Sample] = deque()
        self._running: list[Sample] = []
        self._events: list[Opened | Forked | Closed] = []
        self.counts = Counts()
        self.finished: list[Sample] = []

    def ask(self, prompt: list[int], answers: int, tokens: int, seed: int) -> None:
        """Queues a request for so many answers of at most so many tokens."""
        request = len(self._waiting)
        first, *others = (
            Sample(
                request,
                list(prompt),
                len(prompt),
                len(prompt) + tokens,
                torch.Generator().manual_seed(1_000_003 * seed + 1009 * request + answer),
            )
            for answer in range(answers)
        )
        first.others = others
        self._waiting.append(first)

    def busy(self) -> bool:
        """Whether somebody still waits for an answer."""
        return bool(self._waiting or self._running)

    def step(self) -> tuple[Record, Tensor]:
        """One step: its record, and the logits of each row's last token, float32 [R, vocab]."""
        cache, counts = self._cache, self.counts
        self._moves.compact()
        self._admit()
        while len(self._running) > 1 and self._available() < self._limits.headroom:
            self._preempt()
        step, batch, lens = self._prepare()
        starts = [
            sample.sequence.num_scheduled - n for sample, n in zip(self._running, lens, strict=True)
        ]
        rows = tuple(
            (sample.sequence.id, tuple(sample.text[start : start + n]))
            for sample, start, n in zip(self._running, starts, lens, strict=True)
        )
        ends = batch.query_start_loc[1:].to(torch.int64)
        tokens = torch.tensor([token for _, new in rows for token in new])
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lens, strict=True)])
        logits = self._model.forward(tokens, positions, ends - 1, Paged(cache, batch))
        slots = batch.slot_mapping.tolist()
        cache.end_step(step)  # written: full blocks may be found from now on
        for (sequence, new), start, end in zip(rows, starts, ends.tolist(), strict=True):
            self._moves.wrote(sequence, start, slots[end - len(new) : end], cache.mmu.block_size)
        record = Record(tuple(self._events), rows, frozenset(self._moves.source.values()))
        self._events = []
        counts.steps += 1
        counts.rows += len(rows)
        counts.computed += len(tokens)
        for order, pages in cache.mmu.measure().pages.items():
            counts.pages[order] = counts.pages.get(order, 0) + pages
        self._generate(logits)
        return record, logits

    def close(self) -> None:
        """Gives up what still runs."""
        while self._running:
            self._close(self._running.pop())

    def _available(self) -> int:
        return self._cache.mmu.states()["available"]

    # -- who runs ----------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits.rows:
            sample = self._waiting[0]
            tokens = torch.tensor(sample.text, dtype=torch.int32)
            quote = self._cache.mmu.quote(tokens.numpy())
            room = quote.available - (self._limits.headroom if self._running else 0)
            if quote.when != "now" or quote.needed > room:
                return
            sample.sequence = self._cache.open(tokens)
            self._waiting.popleft()
            self._running.append(sample)
            found = sample.sequence.num_cached_tokens
            blocks = sample.sequence.block_table()[: found // self._cache.mmu.block_size]
            sources = tuple(self._moves.source[block] for block in blocks.tolist())
            self._events.append(Opened(sample.sequence.id, tuple(sample.text), sources))
            self.counts.hits += found

    def _prepare(self) -> tuple[kvmmu.Step, kvmmu.Batch, list[int]]:
        """Schedules a chunk of prompt or one token of each; preempts the youngest until it fits."""
        while True:
            left = [len(one.text) - one.sequence.num_scheduled for one in self._running]
            lens = [min(n, self._limits.chunk) for n in left]
            # A prompt has its places already; what was drawn last has none yet.
            new = [one.text[-1] for one in self._running if len(one.text) > one.sequence.num_tokens]
            step = self._cache.begin_step()
            try:
                handles = [one.sequence for one in self._running]
                return step, step.prepare(handles, query_lens=lens, new_tokens=new), lens
            except kvmmu.OutOfBlocks:
                self._cache.end_step(step)  # nothing is scheduled in it
                if len(self._running) == 1:
                    raise
                self._preempt()

    def _preempt(self) -> None:
        sample = self._running.pop()
        self._close(sample)
        self._waiting.appendleft(sample)
        self.counts.preemptions += 1

    def _close(self, sample: Sample) -> None:
        sample.sequence.close()
        self._events.append(Closed(sample.sequence.id))
        sample.sequence = None

    # -- what they say -----------------------------------------------------------------------

    def _generate(self, logits: Tensor) -> None:
        """Draws the next token of each whose text is computed; forks, and ends who is done."""
        for sample, row in zip(list(self._running), logits, strict=True):
            if sample.sequence.num_scheduled < len(sample.text):
                continue
            likely = torch.softmax(row / TEMPERATURE, 0)
            for other in sample.others:
                other.sequence = sample.sequence.fork()
                self._events.append(Forked(other.sequence.id, sample.sequence.id))
                self._running.append(other)
                self.counts.forks += 1
            for one in (sample, *sample.others):
                one.text.append(int(torch.multinomial(likely, 1, generator=one.draw)))
                self.counts.generated += 1
                if len(one.text) >= one.end or one.text[-1] == self._stop:
                    self._running.remove(one)
                    self._close(one)
                    self.finished.append(one)
            sample.others = []
