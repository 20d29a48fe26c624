"""Token ids for requests whose text nobody published.

What lives here: :class:`Tokens`, which makes the tokens of any request of a trace, the same each
time it is asked. What never lives here: state of a run.

- Equal hash ids are equal tokens: token ``j`` of an id is a function of (seed, id, j), so that
  prefixes match exactly where the trace says they do, whatever block size the MMU has. A partial
  last id is the beginning of its 512 tokens.
- Without hash ids (Azure) every token is a function of (seed, request, position): nothing matches.
- A request that continues another begins with all of its tokens.
- What a request generates is a function of (seed, request, position) as well, so a request that
  was thrown out finds the tokens again that it had generated.

Tokens are 31-bit numbers: two different ones are equal by chance once in 2 * 10^9.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .contents import GOLDEN, mix
from .traces import TRACE_BLOCK, Trace

__all__ = ["Tokens"]

_BY_ID, _BY_REQUEST, _GENERATED = (np.uint64(domain) for domain in (1, 2, 3))
_SPREAD = np.uint64(0xD6E8FEB86659FD93)


class Tokens:
    """The tokens of every request of a trace."""

    def __init__(self, trace: Trace, seed: int = 0) -> None:
        self._trace = trace
        domains = (_BY_ID, _BY_REQUEST, _GENERATED)
        pairs = (mix(np.array([seed, domain], dtype=np.uint64)) for domain in domains)
        self._keys = dict(zip(domains, pairs, strict=True))
        self._offsets = np.arange(TRACE_BLOCK, dtype=np.uint64) * GOLDEN

    def request(self, request: int) -> npt.NDArray[np.int32]:
        """int32 [prompt + output]: the prompt, then all that the request will generate."""
        prompt = int(self._trace.prompt_tokens[request])
        tokens = np.empty(prompt + int(self._trace.output_tokens[request]), dtype=np.int32)
        self._fill_prompt(request, tokens[:prompt])
        self._fill_own(_GENERATED, request, tokens[prompt:])
        return tokens

    def _fill_prompt(self, request: int, out: npt.NDArray[np.int32]) -> None:
        parent = -1 if self._trace.parents is None else int(self._trace.parents[request])
        if parent >= 0:
            before = self.request(parent)
            out[: len(before)] = before
            self._fill_own(_BY_REQUEST, request, out[len(before) :])
            return
        ids = self._trace.ids_of(request)
        if not len(ids):
            self._fill_own(_BY_REQUEST, request, out)
            return
        starts = self._starts(_BY_ID, ids)
        x = starts[:, None] + self._offsets
        out[:] = _narrow(x.reshape(-1)[: len(out)])

    def _fill_own(self, domain: np.uint64, request: int, out: npt.NDArray[np.int32]) -> None:
        x = np.arange(len(out), dtype=np.uint64)
        np.multiply(x, GOLDEN, out=x)
        np.add(x, self._starts(domain, np.array([request], dtype=np.uint64)), out=x)
        out[:] = _narrow(x)

    def _starts(self, domain: np.uint64, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Where the token sequence of each value starts."""
        first, second = self._keys[domain]
        return mix(mix(values + first) + second)


def _narrow(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A Weyl sequence to 31-bit tokens, in place. One round is enough: this is no cipher."""
    np.bitwise_xor(x, x >> np.uint64(32), out=x)
    np.multiply(x, _SPREAD, out=x)
    np.right_shift(x, 33, out=x)
    return x
