"""The serving loop, in simulated time.

What lives here: :class:`Serving`, the order of things in a step, from top to bottom. What never
lives here: choices (see :mod:`.policy`) and figures made of sums (see :mod:`.report`).

A step: requests that have arrived are admitted; ``begin_step``, ``prepare`` (one chunk of prefill
or one token for each row); the model's part, which is to write contents through the exported slot
mapping; ``written`` publishes; positions are read back; ``end_step``; finished requests are
closed; blocks move. A step takes ``step_ms`` whatever is in it; time without requests is skipped
and is no step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import Fragmented, OutOfBlocks, OutOfTables
from .contents import contents
from .machine import Machine
from .metrics import Totals
from .options import Options
from .policy import Policy
from .running import LONG, Running
from .seen import SeenRows
from .sharing import wasted
from .tokens import Tokens
from .traces import Trace
from .verify import Verifier

__all__ = ["Serving"]

SHARING_EVERY = 128
WATCH_EVERY = 32


@dataclass(slots=True)
class _Waiting:
    """A request in the queue. ``known``: tokens to compute before it can decode."""

    request: int
    known: int
    since: float
    """Simulated seconds."""
    reopened: bool = False
    tokens: npt.NDArray[np.int32] | None = None


class Serving:
    """A run over a whole trace.

    Args:
        watch: called every 32 steps with the totals; returns True to stop.
    """

    def __init__(
        self,
        trace: Trace,
        options: Options,
        machine: Machine,
        totals: Totals,
        verifier: Verifier | None,
        watch: Callable[[Totals], bool],
        policy: Policy | None = None,
    ) -> None:
        self._trace = trace
        self._options = options
        self._machine = machine
        self._mmu = machine.mmu
        self._totals = totals
        self._verifier = verifier
        self._watch = watch
        self._policy = policy or Policy(options)
        self._tokens = Tokens(trace, options.seed)
        self._arrivals = (trace.arrival_s / options.speed).tolist()
        self._next = 0
        self._tick = 0
        self._waiting: deque[_Waiting] = deque()
        self._head_must_wait = False
        self._held_up_by: str | None = None
        self._running = Running(machine.block_table.shape[0])
        self._seen: SeenRows | None = None
        if self._policy.compacts():
            self._seen = SeenRows(machine.block_table, machine.null_block)
            self._running.on_move = self._seen.move_row

    def run(self) -> None:
        """Until every request has finished or was refused, or ``watch`` says stop."""
        totals = self._totals
        while self._next < len(self._arrivals) or self._waiting or self._running.n:
            self._arrive()
            self._admit()
            if not self._running.n:
                self._skip_idle_time()
                continue
            self._step()
            if totals.steps % WATCH_EVERY == 0 and self._watch(totals):
                totals.interrupted = True
                break

    # -- between steps ---------------------------------------------------------------------

    def _arrive(self) -> None:
        now = self._tick * self._options.step_s
        while self._next < len(self._arrivals) and self._arrivals[self._next] <= now:
            request = self._next
            self._next += 1
            reason = self._policy.refusal(self._trace.positions(request))
            if reason is not None:
                self._totals.refuse(request, reason)
                continue
            known = int(self._trace.prompt_tokens[request])
            self._waiting.append(_Waiting(request, known, now))

    def _skip_idle_time(self) -> None:
        """Nothing runs and nothing waits: on to the step at which the next request has arrived."""
        if self._next < len(self._arrivals) and not self._waiting:
            arrival = self._arrivals[self._next]
            self._tick = max(self._tick + 1, math.ceil(arrival / self._options.step_s))

    def _admit(self) -> None:
        while self._waiting and not self._head_must_wait:
            if not self._policy.has_room(self._running):
                self._held_up_by = "batch"
                return
            if not self._open(self._waiting[0]):
                return
            since = self._waiting.popleft().since
            # Who stands behind the head waits for what the head waits for.
            if self._held_up_by is not None:
                self._totals.wait(self._held_up_by, self._tick * self._options.step_s - since)
        if not self._waiting:
            self._held_up_by = None

    def _open(self, waiting: _Waiting) -> bool:
        """Opens the head of the queue, or refuses it for good; False: it has to wait."""
        request, size = waiting.request, self._options.block_size
        positions = self._trace.positions(request)
        if waiting.tokens is None:
            waiting.tokens = self._tokens.request(request)[:positions]
        known = waiting.tokens[: waiting.known]
        if not self._may_claim(known):
            self._head_must_wait, self._held_up_by = True, "memory"
            return False
        try:
            sequence = self._mmu.open(known)
        except (OutOfBlocks, OutOfTables) as error:
            if self._running.n:
                self._head_must_wait, self._held_up_by = True, _cause(error)
                return False
            self._totals.refuse(request, str(error))
            return True
        found = self._mmu.cached_tokens(sequence)
        if not waiting.reopened:
            self._totals.admit(waiting.known, found, size)
        self._running.add(
            sequence=sequence,
            request=request,
            found=found,
            known=waiting.known,
            tokens=waiting.tokens,
            contents=contents(waiting.tokens),
            blocks=-(-positions // size),
        )
        return True

    def _may_claim(self, known: npt.NDArray[np.int32]) -> bool:
        available = self._mmu.states()["available"]
        if self._policy.fits(-(-len(known) // self._options.block_size), available, self._running):
            return True
        quote = self._mmu.quote(known)  # looks for cached blocks, which cost time to find
        return self._policy.fits(quote.needed, quote.available, self._running)

    # -- a step ----------------------------------------------------------------------------

    def _step(self) -> None:
        totals, running = self._totals, self._running
        self._tick += 1
        self._policy.begin_step()
        totals.simulated_s = self._tick * self._options.step_s
        step = self._prepare()
        if step is None:
            self._mmu.lap()
            return
        number, lens = step
        totals.steps += 1
        totals.peak_running = max(totals.peak_running, running.n)
        totals.running_sum += running.n
        if lens is None:
            self._decode()
        else:
            self._prefill_and_decode(lens)
        self._mmu.written(number)
        if self._verifier is not None:
            self._verifier.sample(running)
        if totals.steps % SHARING_EVERY == 0:
            totals.wasted_blocks = max(totals.wasted_blocks, wasted(self._machine, running))
            totals.wasted_samples += 1
        self._mmu.end_step(number)
        live = self._mmu.states()["in_use"]
        totals.live_peak = max(totals.live_peak, live)
        totals.live_sum += live
        self._finish()
        if self._policy.compacts():
            self._compact()
        self._measure()
        self._mmu.lap()

    def _compact(self) -> None:
        totals, options = self._totals, self._options
        moved = self._mmu.compact()
        if moved is None:
            totals.faults += 1
            return
        totals.compactions += moved > 0
        if options.guarantee is not None:
            stats = self._mmu.stats()
            freed = stats["freed_blocks"] + stats["left_cached"]
            # A pass ends at a page, so it may leave a part of one, and never outruns the frees.
            page = 1 << max(order for order in options.page_orders if order < 9)
            spare = min(options.budget_blocks - moved, freed - stats["moves_committed"])
            totals.add_guarantee(
                self._mmu.guarantee(),
                max(spare - page + 1, 0),
                stats["moves_committed"],
                freed,
            )

    def _prepare(self) -> tuple[int, npt.NDArray[np.int32] | None] | None:
        """Schedules the step; throws requests out until it fits. None: nobody is left."""
        running = self._running
        while running.n:
            n = running.n
            lens = self._policy.query_lens(running)
            following = running.base[:n] + running.position[:n]
            if lens is not None:
                following = following[running.position[:n] >= running.known[:n]]
            step = self._mmu.begin_step()
            try:
                self._mmu.prepare(
                    step, running.ids[:n], self._machine.tables, lens, running.tokens[following]
                )
            except (OutOfBlocks, OutOfTables):
                # Nothing is scheduled, and the step must be over before blocks that the victim
                # gives back can be claimed: until then they would be fenced.
                self._mmu.end_step(step)
                self._preempt()
                continue
            self._look_for_moves()
            return step, lens
        return None

    def _look_for_moves(self) -> None:
        if self._seen is None:
            return
        running = self._running
        blocks = -(-running.longest() // self._options.block_size)
        moved = self._seen.moved(running.n_long, running.n, min(blocks, LONG))
        if running.n_long:
            moved |= self._seen.moved(0, running.n_long, blocks)
        self._totals.moved_blocks += len(moved)

    def _decode(self) -> None:
        """Every row writes the token that it generated last, and generates the next."""
        running, n = self._running, self._running.n
        position = running.position[:n]
        self._machine.write(
            n,
            running.contents[running.base[:n] + position],
            running.owner[:n] + position // self._options.block_size,
        )
        position += 1
        self._totals.generated_tokens += n

    def _prefill_and_decode(self, lens: npt.NDArray[np.int32]) -> None:
        running, totals, n = self._running, self._totals, self._running.n
        position = running.position[:n]
        ends = np.cumsum(lens)
        count = int(ends[-1])
        offsets = np.arange(count) + np.repeat(position - ends + lens, lens)
        self._machine.write(
            count,
            running.contents[offsets + np.repeat(running.base[:n], lens)],
            np.repeat(running.owner[:n], lens) + offsets // self._options.block_size,
        )
        prefilling = position < running.known[:n]
        computed = int(lens[prefilling].sum())
        running.prefill_left -= computed
        self._policy.computed(computed)
        totals.computed_tokens += computed
        position += lens
        past_prompt = position >= running.known[:n]
        totals.generated_tokens += int(np.count_nonzero(past_prompt))
        ready = np.flatnonzero(prefilling & past_prompt)
        if len(ready):
            # Blocks were published that the head of the queue may find.
            self._head_must_wait = False
            silent = self._trace.output_tokens[running.request[ready]] == 0
            totals.generated_tokens -= int(np.count_nonzero(silent))

    def _finish(self) -> None:
        running, n = self._running, self._running.n
        done = (running.position[:n] >= running.target[:n]).nonzero()[0].tolist()
        if not done:
            return
        self._head_must_wait = False
        self._totals.finished += len(done)
        if self._verifier is not None:
            for row in done:
                self._verifier.whole(
                    row, int(running.ids[row]), int(running.request[row]), running.expected(row)
                )
        for row in reversed(done):  # from the end: a row behind moves into the gap
            sequence = int(running.ids[row])
            self._totals.add_finished(int(running.target[row]), self._mmu.runs(sequence))
            self._mmu.close(sequence)
            running.remove(row)

    def _preempt(self) -> None:
        """Throws one request out. What it generated becomes part of its prompt."""
        running, totals = self._running, self._totals
        row = self._policy.victim(running)
        request, position = int(running.request[row]), int(running.position[row])
        known, alone = int(running.known[row]), running.n == 1
        self._mmu.close(int(running.ids[row]))
        running.remove(row)
        self._head_must_wait = False
        if alone:
            totals.refuse(request, "out of blocks although nothing else runs")
            return
        totals.preempt()
        # Past its prompt it had generated one token more than it had written.
        self._waiting.appendleft(
            _Waiting(
                request,
                position + 1 if position >= known else known,
                self._tick * self._options.step_s,
                reopened=True,
            )
        )

    # -- figures ---------------------------------------------------------------------------

    def _measure(self) -> None:
        totals, measure = self._totals, self._mmu.measure()
        totals.measured += 1
        totals.ratio_sum += measure.ratio_available
        if measure.sequences:
            totals.runs_sum += measure.runs_per_sequence
            totals.runs_steps += 1
        totals.add_pages(measure)


def _cause(error: OutOfBlocks | OutOfTables) -> str:
    """Of a wait, as :mod:`kvmmu.metrics` names it."""
    if isinstance(error, Fragmented):
        return "shape"
    return "tables" if isinstance(error, OutOfTables) else "memory"
