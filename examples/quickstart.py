"""A KV cache for plain torch, without a serving stack: prompts, decode, a fork, attention.

The "model" is one attention layer with random weights. Its answers are compared with the same
computation over ordinary contiguous KV.

    python examples/quickstart.py
"""

from __future__ import annotations

import kvmmu
import torch

HEADS, KV_HEADS, DIM = 8, 2, 32


def project(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of tokens: a fixed random table a token id."""
    table = torch.randn(1000, (HEADS + 2 * KV_HEADS) * DIM, generator=torch.manual_seed(0))
    q, k, v = table[tokens % 1000].split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
    return q.unflatten(-1, (HEADS, DIM)), k.unflatten(-1, (-1, DIM)), v.unflatten(-1, (-1, DIM))


def main() -> None:
    cache = kvmmu.KVCache(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        num_blocks=256,
        block_size=16,
        auto_compact=True,
    )
    prompt = torch.arange(100, dtype=torch.int32)

    # Prefill: everything that was not found cached.
    seq = cache.open(prompt)
    with cache.step() as step:
        batch = step.prepare([seq], query_lens=[len(prompt) - seq.num_cached_tokens])
        _, k, v = project(prompt[seq.num_cached_tokens :])
        cache.write(0, k, v, batch)

    # Two continuations of one prompt: nothing is copied until they differ inside a block.
    other = seq.fork()
    texts = {seq: prompt.tolist(), other: prompt.tolist()}
    for turn in range(40):
        new = [(7 * turn + 1) % 1000, (11 * turn + 2) % 1000]
        with cache.step() as step:
            batch = step.prepare([seq, other], new_tokens=new)
            q, k, v = project(torch.tensor(new))
            cache.write(0, k, v, batch)
            outputs = [
                kvmmu.attend(q[row], cache.views(one, 0)) for row, one in enumerate([seq, other])
            ]
        for row, one in enumerate([seq, other]):
            texts[one].append(new[row])
            _, k, v = project(torch.tensor(texts[one]))
            expected = torch.nn.functional.scaled_dot_product_attention(
                q[row][:, None], k.transpose(0, 1), v.transpose(0, 1), enable_gqa=True
            )[:, 0]
            torch.testing.assert_close(outputs[row], expected)

    print("both continuations attend to their own tokens: yes")
    print("blocks in use:", cache.mmu.states()["in_use"], "for two sequences of 140 tokens")
    seq.close()
    other.close()

    # A later prompt with the same beginning finds it cached; its last token is always computed.
    with cache.open(prompt) as again:
        print("found cached:", again.num_cached_tokens, "of", len(prompt), "tokens")


if __name__ == "__main__":
    main()
