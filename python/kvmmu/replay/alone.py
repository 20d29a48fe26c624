"""Each request alone, in the order of the trace: what a prefix cache of this size finds.

What lives here: :class:`Alone`. What never lives here: a clock, a queue, compaction.

A request is opened, all that was not cached is written in one step, and it is closed; its full
blocks stay cached until the space is needed. Nothing but prompts is looked up and counted. The
answer is written all the same: as in an engine its full blocks take their place in the cache,
where a trace with hash ids never finds them again. (They matter: at 30,000 blocks of 512 tokens
the published Mooncake trace finds .327 of its listed blocks with them and .331 without.)

A request that needs more blocks than the pool has is refused, leaves the cache as it was, and does
not count in the hit rates.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import OutOfBlocks, OutOfTables
from .contents import contents
from .machine import Machine
from .metrics import Totals
from .options import Options
from .policy import Policy
from .tokens import Tokens
from .traces import Trace
from .verify import Verifier

__all__ = ["Alone"]

WATCH_EVERY = 8


class Alone:
    """A run over a whole trace; arguments as for :class:`.loop.Serving`."""

    def __init__(
        self,
        trace: Trace,
        options: Options,
        machine: Machine,
        totals: Totals,
        verifier: Verifier | None,
        watch: Callable[[Totals], bool],
    ) -> None:
        self._trace = trace
        self._options = options
        self._machine = machine
        self._totals = totals
        self._verifier = verifier
        self._watch = watch
        self._policy = Policy(options)
        self._tokens = Tokens(trace, options.seed)
        self._owners = 0

    def run(self) -> None:
        for request in range(len(self._trace)):
            self._request(request)
            if request % WATCH_EVERY == 0 and self._watch(self._totals):
                self._totals.interrupted = True
                break

    def _request(self, request: int) -> None:
        machine, mmu, totals = self._machine, self._machine.mmu, self._totals
        size = self._options.block_size
        prompt = int(self._trace.prompt_tokens[request])
        positions = self._trace.positions(request)
        reason = self._policy.refusal(prompt, positions)
        if reason is not None:
            totals.refuse(request, reason)
            return
        tokens = self._tokens.request(request)[:positions]
        try:
            sequence = mmu.open(tokens[:prompt], {})
        except (OutOfBlocks, OutOfTables) as error:
            totals.refuse(request, str(error))
            return
        found = mmu.cached_tokens(sequence)
        totals.admit(prompt, found, size)
        expected = contents(tokens)
        ids = np.array([sequence], dtype=np.int64)
        lens = np.array([positions - found], dtype=np.int32)
        step = mmu.begin_step()
        mmu.prepare(step, ids, machine.tables, lens, tokens[prompt:])
        blocks = np.arange(found, positions) // size
        machine.write(positions - found, expected[found:], self._owners + blocks)
        self._owners += -(-positions // size)
        mmu.written(step)
        if self._verifier is not None:
            self._verifier.whole(0, sequence, request, expected)
        mmu.end_step(step)
        live = mmu.states()["in_use"]
        mmu.close(sequence)
        measure = mmu.measure()
        mmu.lap()

        totals.steps += 1
        totals.finished += 1
        totals.computed_tokens += prompt - found
        totals.generated_tokens += int(self._trace.output_tokens[request])
        totals.peak_running = 1
        totals.running_sum += 1
        totals.live_peak = max(totals.live_peak, live)
        totals.live_sum += live
        totals.ratio_sum += measure.ratio_available
        totals.measured += 1
