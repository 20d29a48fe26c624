"""A Llama in plain torch: RMS norm, rotary positions, grouped queries, SwiGLU.

What lives here: the arithmetic. What never lives here: where KV lies. :meth:`Model.forward` hands
q, k and v of each layer to its caller, and :func:`attention` is handed the keys and values of one
sequence in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, dim], k [T, kv_heads, dim], v) -> [T, heads, dim]: stores k and v, and
attends for each token of a step to its own sequence."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. ``heads`` is a multiple of ``kv_heads``."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    feed_forward: int
    vocab: int
    rope_base: float = 10_000.0
    epsilon: float = 1e-5


@dataclass(frozen=True)
class Weights:
    """float32. Matrices are [out, in]; each layer has ``attn_norm``, ``attn_q``, ``attn_k``,
    ``attn_v``, ``attn_output``, ``ffn_norm``, ``ffn_gate``, ``ffn_up`` and ``ffn_down``. The rows
    of q and k are in the order of :func:`rotate`: pairs side by side."""

    embedding: Tensor
    layers: list[dict[str, Tensor]]
    norm: Tensor


class Model:
    """Computes steps of any mix of prefill and decode."""

    def __init__(self, shape: Shape, weights: Weights) -> None:
        self.shape = shape
        self.weights = weights
        exponents = torch.arange(0, shape.dim, 2, dtype=torch.float64) / shape.dim
        self._frequencies = shape.rope_base**-exponents

    @classmethod
    def tiny(cls, seed: int) -> Model:
        """Random weights, two layers: for tests."""
        shape = Shape(2, heads=4, kv_heads=2, dim=8, hidden=32, feed_forward=48, vocab=96)
        draw = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=draw) / columns**0.5

        q, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
        layers = [
            {
                "attn_norm": torch.ones(shape.hidden),
                "attn_q": matrix(q, shape.hidden),
                "attn_k": matrix(kv, shape.hidden),
                "attn_v": matrix(kv, shape.hidden),
                "attn_output": matrix(shape.hidden, q),
                "ffn_norm": torch.ones(shape.hidden),
                "ffn_gate": matrix(shape.feed_forward, shape.hidden),
                "ffn_up": matrix(shape.feed_forward, shape.hidden),
                "ffn_down": matrix(shape.hidden, shape.feed_forward),
            }
            for _ in range(shape.layers)
        ]
        embedding = torch.randn(shape.vocab, shape.hidden, generator=draw)
        return cls(shape, Weights(embedding, layers, torch.ones(shape.hidden)))

    def forward(self, tokens: Tensor, positions: Tensor, last: Tensor, attend: Attend) -> Tensor:
        """One step over rows of any lengths, laid end to end.

        Args:
            tokens, positions: int64 [T].
            last: int64 [R], the last token of each row, as an index into ``tokens``.
            attend: called once a layer, in order.

        Returns:
            logits, float32 [R, vocab].
        """
        shape, weights = self.shape, self.weights
        turns = positions.to(torch.float64)[:, None] * self._frequencies
        cos, sin = turns.cos().float()[:, None], turns.sin().float()[:, None]
        x = weights.embedding.index_select(0, tokens)
        for index, layer in enumerate(weights.layers):
            y = self._norm(x, layer["attn_norm"])
            q = functional.linear(y, layer["attn_q"]).view(-1, shape.heads, shape.dim)
            k = functional.linear(y, layer["attn_k"]).view(-1, shape.kv_heads, shape.dim)
            v = functional.linear(y, layer["attn_v"]).view(-1, shape.kv_heads, shape.dim)
            found = attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + functional.linear(found.flatten(1), layer["attn_output"])
            y = self._norm(x, layer["ffn_norm"])
            gate = functional.silu(functional.linear(y, layer["ffn_gate"]))
            x = x + functional.linear(
                gate * functional.linear(y, layer["ffn_up"]), layer["ffn_down"]
            )
        x = self._norm(x.index_select(0, last), weights.norm)
        return functional.linear(x, weights.embedding)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.shape.epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., "RoFormer", 2021) of x [T, heads, dim]; neighbours are
    a pair, as in GGUF files of Llama models."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last n tokens of one sequence.

    Args:
        q: [n, heads, dim]. k, v: [tokens, kv_heads, dim] of all its tokens, contiguous.

    Returns:
        [n, heads, dim].
    """
    n, heads, dim = q.shape
    tokens, kv_heads, _ = k.shape
    group = heads // kv_heads
    # Query heads that share a KV head are further queries of that head.
    rows = q.view(n, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, n * group, dim)
    mask = None
    if n > 1:
        mask = torch.ones(n, tokens, dtype=torch.bool).tril(tokens - n)
        mask = mask.repeat_interleave(group, 0)
    out = functional.scaled_dot_product_attention(
        rows, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask
    )
    return out.view(kv_heads, n, group, dim).transpose(0, 1).reshape(n, heads, dim)
