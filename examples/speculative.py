"""Speculative and beam decoding over one cache.

A draft of k tokens is appended and written in one step, j of them are accepted, the rest is
truncated. Then n beams are forked, run, and all but one dropped, again and again. Every position is
read back through the tables, and at the end no block is lost.

    python examples/speculative.py [ROUNDS]
"""

from __future__ import annotations

import random
import sys

import kvmmu
import torch

BLOCK = 4


def words(tokens: list[int]) -> torch.Tensor:
    """What a position holds: a number that depends on its whole prefix. [n, 1, 1]"""
    value, out = 0, []
    for token in tokens:
        value = (31 * value + token + 1) % 1_000_003
        out.append(value)
    return torch.tensor(out, dtype=torch.float32)[:, None, None]


def main(rounds: int = 200, seed: int = 1) -> None:
    print("seed", seed)
    draw = random.Random(seed)
    cache = kvmmu.KVCache(
        1, 1, 1, torch.float32, 64, block_size=BLOCK, v_head_dim=0, auto_compact=True, max_batch=4
    )

    def write(seqs: list[kvmmu.Sequence], texts: list[list[int]], count: int) -> None:
        """One step in which every sequence gains its last ``count`` tokens."""
        new = [token for text in texts for token in text[-count:]]
        with cache.step() as step:
            batch = step.prepare(seqs, query_lens=[count] * len(seqs), new_tokens=new)
            cache.write(0, torch.cat([words(text)[-count:] for text in texts]), None, batch)

    def check(seq: kvmmu.Sequence, text: list[int]) -> None:
        k, _ = cache.gather(seq, 0)
        assert torch.equal(k, words(text)), (seq, text)

    seq, text = cache.open([]), []
    accepted = 0
    for _ in range(rounds):
        # Speculate: five drafts, some accepted.
        draft = [draw.randrange(100) for _ in range(5)]
        write([seq], [text + draft], 5)
        keep = draw.randrange(6)
        text += draft[:keep]
        seq.truncate(len(text))
        accepted += keep

        # Beams: four continuations of two tokens, one survives.
        beams = [seq] + [seq.fork() for _ in range(3)]
        texts = [list(text) for _ in beams]
        for _ in range(2):
            for one in texts:
                one.append(draw.randrange(100))
            write(beams, texts, 1)
        for beam, one in zip(beams, texts, strict=True):
            check(beam, one)
        best = draw.randrange(4)
        for index, beam in enumerate(beams):
            if index != best:
                beam.close()
        seq, text = beams[best], texts[best]
        if len(text) > 120:  # a new request
            seq.close()
            seq, text = cache.open([]), []
        cache.validate()

    seq.close()
    cache.mmu.evict(64)
    left = cache.mmu.states()
    print(f"{rounds} rounds, {accepted} drafts accepted, blocks empty: {left['empty']} of 64")
    assert left["empty"] == 64


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
