"""Who is admitted, who computes, who is thrown out, when blocks move.

What lives here: every question of the serving loop that has more than one sensible answer. What
never lives here: carrying an answer out. A later policy replaces methods of :class:`Policy`.

First come, first served: the head of the queue blocks the others. It is admitted when a row is
free, less than one step of prefill is queued, and its blocks leave the reserve (a hundredth of
the pool by default) for running requests to grow. Prefill goes in order of arrival, as far as a
step's tokens last; every request past its prompt decodes one token in every step. Out of blocks,
the request that arrived last is thrown out and computed again later: an older one never waits for
a younger one, so each run ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .metrics import Shape
from .options import MAX_SEQUENCE_BLOCKS, Options
from .running import Running

__all__ = ["Policy"]


class Policy:
    """First come, first served, on uniform blocks."""

    def __init__(self, options: Options, longest: int = 0) -> None:
        self._options = options
        self._longest = longest
        self._reserve = options.headroom
        self._per_step = options.prefill_tokens_per_step
        self._credit = 0.0

    def refusal(self, prompt: int, positions: int) -> str | None:
        """Why a request that ends with so many positions can never run, or None."""
        tokens = self.reserved(prompt, positions) or positions
        blocks = -(-tokens // self._options.block_size)
        size = self._options.block_size
        if blocks > self._options.blocks:
            return f"needs {blocks} blocks of {size} tokens, the pool has {self._options.blocks}"
        if blocks > MAX_SEQUENCE_BLOCKS:
            return f"needs {blocks} blocks of {size} tokens, a sequence has {MAX_SEQUENCE_BLOCKS}"
        return None

    def has_no_room(self, running: Running) -> str | None:
        """What one more request would wait for, blocks apart: "batch", "prefill" or None."""
        if running.n >= running.rows:
            return "batch"
        if running.n == 0 or running.prefill_left < max(1.0, self._per_step):
            return None
        return "prefill"

    def shape(self, tokens: int) -> Shape:
        """What is required of where so many tokens lie."""
        options = self._options
        if options.reserve is not None:
            return {"contiguous": tokens}
        if options.require is not None:
            return {"require": options.require}
        if options.contiguous:
            return {"contiguous": min(options.contiguous, tokens)}
        return {}

    def reserved(self, prompt: int, positions: int) -> int:
        """Tokens that are claimed for a request when it is admitted; 0: its prompt."""
        reserve = self._options.reserve
        if reserve == "oracle":
            return positions
        if reserve == "pow2":
            return prompt + (1 << (max(positions - prompt, 1) - 1).bit_length())
        if reserve == "max":
            return max(self._longest, positions)
        return 0

    def fits(self, blocks: int, available: int, running: Running) -> bool:
        """Whether so many blocks may be claimed for a new request. Whoever reserves all that it
        needs leaves nothing for others to grow."""
        reserve = 0 if self._options.reserve is not None else self._reserve
        return running.n == 0 or blocks + reserve <= available

    def begin_step(self) -> None:
        """A step passes: prefill earns its tokens, and saves none for a busier time."""
        self._credit = min(self._credit + self._per_step, max(1.0, self._per_step))

    def query_lens(self, running: Running) -> npt.NDArray[np.int32] | None:
        """int32 [n]: tokens of each row in this step; None when every row decodes one token."""
        if not running.prefill_left:
            return None
        n = running.n
        left = running.known[:n] - running.position[:n]
        prefilling = np.flatnonzero(left > 0)
        lens = np.ones(n, dtype=np.int32)
        budget = int(self._credit)
        for row in prefilling[np.argsort(running.request[prefilling])].tolist():
            lens[row] = min(budget, int(left[row]))
            budget -= int(lens[row])
        return lens

    def computed(self, tokens: int) -> None:
        """So many tokens of prefill were computed in this step."""
        self._credit -= tokens

    def victim(self, running: Running) -> int:
        """The row to throw out when there are no blocks left."""
        return int(np.argmax(running.request[: running.n]))

    def restarts(self, shape_s: float, since_last_s: float) -> bool:
        """Whether the pool is emptied, when the head has waited so long for a shape."""
        after = self._options.restart_after_s
        return (
            after is not None and shape_s >= after and since_last_s >= self._options.restart_every_s
        )

    def compacts(self) -> bool:
        """Whether a pass of compaction may follow this step."""
        return self._options.compaction
