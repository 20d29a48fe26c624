"""What each sequence of a cache should hold, kept beside it.

What lives here: tokens by handle, and steps that schedule what is left of them. What never lives
here: KV, or a check.
"""

from __future__ import annotations

from typing import Any


class Texts:
    """Sequences of a cache, with the tokens of each; no token is drawn twice."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.texts: dict[Any, list[int]] = {}
        self.next = 1

    def fresh(self, tokens: int) -> list[int]:
        text = list(range(self.next, self.next + tokens))
        self.next += tokens
        return text

    def open(self, tokens: int) -> Any:
        text = self.fresh(tokens)
        handle = self.cache.open(text)
        self.texts[handle] = text
        return handle

    def fork(self, handle: Any) -> Any:
        child = handle.fork()
        self.texts[child] = list(self.texts[handle])
        return child

    def close(self, *handles: Any) -> None:
        for handle in handles:
            handle.close()
            del self.texts[handle]

    def schedule(self, step: Any, handles: list[Any]) -> tuple[Any, list[int]]:
        """Prepares a step with what is left of each prompt, or one new token; the batch, and how
        many tokens of each it computes."""
        lens = [len(self.texts[one]) - one.num_scheduled or 1 for one in handles]
        lacking = [
            one.num_scheduled + n - one.num_tokens for one, n in zip(handles, lens, strict=True)
        ]
        new = self.fresh(sum(lacking))
        batch = step.prepare(handles, query_lens=lens, new_tokens=new)
        rest = iter(new)
        for one, count in zip(handles, lacking, strict=True):
            self.texts[one] += [next(rest) for _ in range(count)]
        return batch, lens
