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
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ..errors import Fragmented, OutOfBlocks, OutOfTables
from .chains import Chains
from .contents import contents
from .cover import separable
from .machine import Machine
from .metrics import LONG_PROMPT, Totals
from .options import Options
from .policy import Policy
from .queue import Queue, Waiting
from .returning import Returning
from .running import LONG, Running
from .seen import SeenRows
from .sharing import wasted
from .tokens import Tokens
from .traces import Trace
from .verify import Verifier

__all__ = ["Serving"]

WINDOW = 512
SHARING_EVERY = 128
COVER_EVERY = 32
WATCH_EVERY = 32


class Serving:
    """A run over a whole trace.

    Args:
        watch: called every 32 steps with the totals; returns True to stop.
        until_s: simulated seconds after which the run ends, whoever is still there; None: when all
            have finished.
        warm_up_s: simulated seconds after which the totals begin anew.
    """

    def __init__(
        self,
        trace: Trace,
        options: Options,
        machine: Machine,
        totals: Totals,
        verifier: Verifier | None,
        watch: Callable[[Totals], bool],
        *,
        until_s: float | None = None,
        warm_up_s: float = 0.0,
    ) -> None:
        self._trace = trace
        self._options = options
        self._machine = machine
        self._mmu = machine.mmu
        self._totals = totals
        self._verifier = verifier
        self._watch = watch
        self._until = None if until_s is None else math.ceil(until_s / options.step_s)
        self._warm = math.ceil(warm_up_s / options.step_s)
        longest = int((trace.prompt_tokens + trace.output_tokens).max(initial=0))
        self._policy = Policy(options, longest)
        self._tokens = Tokens(trace, options.seed)
        self._chains = Chains(trace, options.step_s)
        arrivals = enumerate((trace.arrival_s / options.speed).tolist())
        self._arrivals = [(s, request) for request, s in arrivals if self._chains.is_root(request)]
        self._next = 0
        self._tick = 0
        patience = options.timeout_s
        self._queue = Queue(None if patience is None else round(patience / options.step_s))
        self._stuck_on: str | None = None
        """What the head of the queue waits for, as long as nothing has changed."""
        self._shape_since: int | None = None
        self._restarted = -math.inf
        self._moved = 0
        """Blocks moved since the last look."""
        self._running = Running(machine.block_table.shape[0], contents=options.contents)
        self._returning = Returning(self._mmu, options) if options.spare is not None else None
        self._seen: SeenRows | None = None
        if self._policy.compacts() and options.contents:
            self._seen = SeenRows(machine.block_table, machine.null_block)
            self._running.on_move = self._seen.move_row

    def run(self) -> None:
        """Until every request has finished or was refused, or ``watch`` says stop."""
        totals = self._totals
        while self._has_work() and (self._until is None or self._tick < self._until):
            self._arrive()
            cause = self._admit()
            self._queue.pass_step(cause)
            if not self._running.n:
                self._pass_idle_time()
                continue
            self._restart_if_due(cause)
            if self._warm and self._tick >= self._warm:
                self._warm = 0
                self._begin_to_count()
            self._step(cause)
            if totals.steps % WATCH_EVERY == 0 and self._watch(totals):
                totals.interrupted = True
                break
        if self._returning is not None:
            totals.offline_sum = self._returning.offline_steps
            totals.idle_sum = self._returning.idle_steps

    def _begin_to_count(self) -> None:
        """The warm-up is over."""
        self._totals.begin_anew(self._mmu.stats())
        self._mmu.begin_anew()
        if self._returning is not None:
            self._returning.begin_anew()

    # -- between steps ---------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(
            self._next < len(self._arrivals)
            or self._queue
            or self._running.n
            or self._chains.pending
        )

    def _arrive(self) -> None:
        now = self._tick * self._options.step_s
        while self._next < len(self._arrivals) and self._arrivals[self._next][0] <= now:
            self._join(self._arrivals[self._next][1])
            self._next += 1
        for request in self._chains.due(self._tick):
            self._join(request)
        for waiting in self._queue.leave(self._tick):
            self._stuck_on = None
            waited = self._tell_wait(waiting)
            self._totals.timed_out.append((waiting.request, waited))
            self._never_runs(waiting.request)

    def _tell_wait(self, waiting: Waiting) -> dict[str, int]:
        """A wait is over: steps by cause."""
        waited = self._queue.waited(waiting)
        self._totals.waits.append((waiting.request, waited))
        for cause, steps in waited.items():
            if steps:
                self._totals.wait(cause, steps * self._options.step_s)
        return waited

    def _join(self, request: int) -> None:
        prompt = int(self._trace.prompt_tokens[request])
        reason = self._policy.refusal(prompt, self._trace.positions(request))
        if reason is not None:
            self._refuse(request, reason)
            return
        self._queue.arrive(request, prompt, self._tick)

    def _refuse(self, request: int, reason: str) -> None:
        self._totals.refuse(request, reason)
        self._never_runs(request)

    def _never_runs(self, request: int) -> None:
        """A request ended without having run: nobody will continue it."""
        for lost in self._chains.lost(request):
            self._totals.refuse(lost, f"continues request {request}, which never ran")
        self._settle(request)

    def _settle(self, request: int) -> None:
        done = self._chains.settle(request)
        if done is not None:
            self._mmu.close(done)

    def _pass_idle_time(self) -> None:
        """Nothing runs: on to the next step in which somebody may come."""
        self._stuck_on = None
        coming = [tick for tick in self._coming() if tick is not None]
        self._tick += 1
        if not self._queue and coming:
            self._tick = max(self._tick, min(coming))

    def _coming(self) -> Iterator[int | None]:
        yield self._chains.next_due()
        if self._next < len(self._arrivals):
            yield math.ceil(self._arrivals[self._next][0] / self._options.step_s)

    def _admit(self) -> str | None:
        """Admits from the head of the queue on; what the one waits for that is the head then."""
        queue = self._queue
        while queue:
            cause = self._policy.has_no_room(self._running) or self._stuck_on
            if cause is None:
                cause = self._open(queue.head)
                self._stuck_on = cause
            if cause is not None:
                return cause
            queue.pop()
        return None

    def _open(self, waiting: Waiting) -> str | None:
        """Opens the head of the queue, or refuses it for good; what it waits for, if it must."""
        request, size = waiting.request, self._options.block_size
        positions = self._trace.positions(request)
        if waiting.tokens is None:
            waiting.tokens = self._tokens.request(request)[:positions]
        known = waiting.tokens[: waiting.known]
        parent = None if waiting.reopened else self._chains.parent_of(request)
        if parent is not None:
            cause, sequence = self._continue(parent, known)
        else:
            cause, sequence = self._open_alone(waiting, known)
        if cause is not None:
            return cause
        if sequence is None:
            return None
        found = (
            self._mmu.cached_tokens(sequence) if parent is None else self._written(parent, known)
        )
        if not waiting.reopened:
            self._tell_wait(waiting)
            self._totals.admit(waiting.known, found, size)
            self._settle(request)
        self._running.add(
            sequence=sequence,
            request=request,
            found=found,
            known=waiting.known,
            tokens=waiting.tokens,
            contents=contents(waiting.tokens) if self._options.contents else None,
            blocks=-(-positions // size),
        )
        return None

    def _written(self, parent: int, known: npt.NDArray[np.int32]) -> int:
        """Tokens that a fork need not compute: all that its parent has written."""
        return min(self._mmu.timed(lambda mmu: mmu.info(parent).num_written), len(known) - 1)

    def _continue(self, parent: int, known: npt.NDArray[np.int32]) -> tuple[str | None, int | None]:
        """Forks a parked sequence and extends it: (what it waits for, sequence)."""
        tokens = self._mmu.timed(lambda mmu: mmu.info(parent).num_tokens)
        needed = -(-(len(known) - tokens) // self._options.block_size) + 1
        states = self._mmu.states()
        if self._policy.fits(needed, states["available"], self._running):
            try:
                sequence = self._mmu.fork(parent, known[tokens:])
            except (OutOfBlocks, OutOfTables):
                pass
            else:
                self._totals.continued += 1
                return None, sequence
        return self._wait_for_memory("memory"), None

    def _open_alone(
        self, waiting: Waiting, known: npt.NDArray[np.int32]
    ) -> tuple[str | None, int | None]:
        """Opens a request by its tokens: (what it waits for, sequence); neither: it was refused."""
        tokens = self._claimed(waiting, known)
        shape = self._policy.shape(len(tokens))
        if not self._may_claim(tokens):
            return self._fail(waiting, "memory"), None
        try:
            return None, self._mmu.open(tokens, shape)
        except (OutOfBlocks, OutOfTables) as error:
            cause = _cause(error)
            if self._running.n or self._chains or self._bring_back():
                return self._fail(waiting, cause), None
            self._refuse(waiting.request, str(error))
            return None, None

    def _claimed(self, waiting: Waiting, known: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Tokens of all that is claimed at admission: the prompt, or a reservation for the whole
        request (what it will generate, and zeros for what it will not need)."""
        assert waiting.tokens is not None
        prompt = int(self._trace.prompt_tokens[waiting.request])
        reserved = self._policy.reserved(prompt, len(waiting.tokens))
        if not reserved:
            return known
        tokens = np.zeros(reserved, dtype=np.int32)
        tokens[: len(waiting.tokens)] = waiting.tokens
        return tokens

    def _fail(self, waiting: Waiting, cause: str) -> str:
        """The head was refused. Counted once a request and cause."""
        waiting.failed = waiting.failed or set()
        if cause not in waiting.failed:
            waiting.failed.add(cause)
            self._totals.failures[cause] += 1
        return self._wait_for_memory(cause)

    def _wait_for_memory(self, cause: str) -> str:
        """The head waits. Where nothing runs, only a parked sequence can make room."""
        if not self._running.n:
            self._drop_parked()
        return cause

    def _bring_back(self) -> bool:
        """Blocks that were given back are needed."""
        return self._returning is not None and self._returning.bring_back(self._options.blocks)

    def _drop_parked(self) -> bool:
        dropped = self._chains.drop()
        if dropped is None:
            return False
        self._mmu.close(dropped)
        self._totals.dropped += 1
        return True

    def _may_claim(self, tokens: npt.NDArray[np.int32]) -> bool:
        available = self._mmu.states()["available"]
        if self._policy.fits(-(-len(tokens) // self._options.block_size), available, self._running):
            return True
        quote = self._mmu.quote(tokens, {})  # looks for cached blocks, which cost time to find
        return self._policy.fits(quote.needed, quote.available, self._running)

    def _restart_if_due(self, cause: str | None) -> None:
        """Empties the pool when the head has waited long enough for a shape."""
        if cause != "shape":
            self._shape_since = None
            return
        if self._shape_since is None:
            self._shape_since = self._tick
        step_s = self._options.step_s
        waited = (self._tick - self._shape_since) * step_s
        if not self._policy.restarts(waited, (self._tick - self._restarted) * step_s):
            return
        while self._running.n:
            self._throw_out(self._policy.victim(self._running))
        self._mmu.timed(lambda mmu: mmu.evict(self._options.blocks))
        self._totals.restarts += 1
        self._restarted = self._tick
        self._shape_since = None
        pause = round(self._options.restart_takes_s / step_s)
        for _ in range(pause):
            self._queue.pass_step("shape")
        self._tick += pause

    # -- a step ----------------------------------------------------------------------------

    def _step(self, cause: str | None) -> None:
        totals, running = self._totals, self._running
        self._tick += 1
        if not running.n:
            return
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
        if totals.steps % SHARING_EVERY == 0 and self._options.contents:
            totals.wasted_blocks = max(totals.wasted_blocks, wasted(self._machine, running))
            totals.wasted_samples += 1
        pages = 9 in self._options.page_orders and self._options.contents
        if pages and totals.steps % COVER_EVERY == 0:
            regions, huge = separable(self._machine, running)
            totals.separable_sum += regions
            totals.separable_huge_sum += huge
        self._mmu.end_step(number)
        states = self._mmu.states()
        live = states["in_use"]
        totals.live_peak = max(totals.live_peak, live)
        totals.live_sum += live
        look = totals.steps % self._options.measure_every == 0
        if look:
            self._look_at_tokens(live, cause)
        self._finish()
        if self._policy.compacts():
            self._compact()
        if self._returning is not None:
            needed = self._stuck_on in ("memory", "shape")
            if self._returning.step(totals.steps, self._mmu.states(), needed=needed):
                self._stuck_on = None
        if look:
            self._measure(live)
        self._mmu.lap()

    def _compact(self) -> None:
        totals, options = self._totals, self._options
        moved = self._mmu.compact()
        if moved is None:
            totals.faults += 1
            return
        totals.compactions += moved > 0
        totals.moved_by_step.append(moved)
        self._moved += moved
        if moved and self._stuck_on == "shape":
            self._stuck_on = None
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
            if self._options.reserve is not None:
                following = following[:0]  # all tokens were handed over at admission
            elif lens is not None:
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
        if self._options.contents:
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
        if self._options.contents:
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
            self._stuck_on = None
            silent = self._trace.output_tokens[running.request[ready]] == 0
            totals.generated_tokens -= int(np.count_nonzero(silent))

    def _finish(self) -> None:
        running, n = self._running, self._running.n
        done = (running.position[:n] >= running.target[:n]).nonzero()[0].tolist()
        if not done:
            return
        self._stuck_on = None
        self._totals.finished += len(done)
        if self._verifier is not None:
            for row in done:
                self._verifier.whole(
                    row, int(running.ids[row]), int(running.request[row]), running.expected(row)
                )
        for row in reversed(done):  # from the end: a row behind moves into the gap
            sequence, target = int(running.ids[row]), int(running.target[row])
            self._totals.add_finished(target, self._mmu.info(sequence))
            if target > LONG_PROMPT:
                blocks = self._mmu.blocks(sequence)
                self._totals.add_transfer(blocks[: -(-target // self._options.block_size)])
            if not self._chains.park(int(running.request[row]), sequence, target, self._tick):
                self._mmu.close(sequence)
            running.remove(row)

    def _preempt(self) -> None:
        """Makes room: a parked sequence goes, or a request is thrown out."""
        if self._drop_parked():
            return
        running, totals = self._running, self._totals
        row = self._policy.victim(running)
        request = int(running.request[row])
        if running.n == 1:
            self._mmu.close(int(running.ids[row]))
            running.remove(row)
            self._stuck_on = None
            self._refuse(request, "out of blocks although nothing else runs")
            return
        totals.preempt()
        self._throw_out(row)

    def _throw_out(self, row: int) -> None:
        """A request goes back to the queue. What it generated becomes part of its prompt."""
        running = self._running
        position, known = int(running.position[row]), int(running.known[row])
        request = int(running.request[row])
        self._mmu.close(int(running.ids[row]))
        running.remove(row)
        self._stuck_on = None
        # Past its prompt it had generated one token more than it had written.
        self._queue.again(request, position + 1 if position >= known else known, self._tick)

    # -- figures ---------------------------------------------------------------------------

    def _look_at_tokens(self, live: int, cause: str | None) -> None:
        """How much of the memory holds tokens, before those who are done leave."""
        totals, n = self._totals, self._running.n
        tokens = int(self._running.position[:n].sum()) + self._chains.tokens
        totals.tokens_sum += tokens
        totals.slots_sum += live * self._options.block_size
        if cause in ("memory", "shape"):
            totals.full_tokens_sum += tokens
            totals.full_steps += 1

    def _measure(self, live: int) -> None:
        totals, measure = self._totals, self._mmu.measure()
        totals.measured += 1
        totals.ratio_sum += measure.ratio_available
        totals.ratio_empty_sum += measure.ratio_empty
        totals.unused_sum += measure.unused_slots
        possible = measure.available // WINDOW
        if possible:
            share = measure.free_windows / possible
            totals.windows_sum += share
            totals.windows_steps += 1
            if self._options.spare is not None:
                totals.low_windows.append((live / self._options.blocks, share))
        if measure.sequences:
            totals.runs_sum += measure.runs_per_sequence
            totals.runs_steps += 1
        totals.add_pages(measure)
        if self._mmu.onlooker is not None:
            self._mmu.sample(
                totals.simulated_s,
                ratio=measure.ratio_available,
                free_windows=measure.free_windows,
                waiting=len(self._queue),
                waits_for_shape=len(self._queue) if self._stuck_on == "shape" else 0,
                waits_for_memory=len(self._queue) if self._stuck_on == "memory" else 0,
                running=self._running.n,
                moves=self._moved / self._options.measure_every,
                live=live,
                runs=measure.runs_per_sequence if measure.sequences else math.nan,
                huge_cover=measure.pages.get(9, 0) / measure.regions
                if measure.regions
                else math.nan,
            )
        self._moved = 0


def _cause(error: OutOfBlocks | OutOfTables) -> str:
    """Of a wait."""
    if isinstance(error, Fragmented):
        return "shape"
    return "tables" if isinstance(error, OutOfTables) else "memory"
