"""Attention over views of a paged cache, without a paged kernel.

What lives here: one function, which reads each run of blocks where it lies and merges the runs.
What never lives here: blocks, layouts or sequences; it is handed tensors.

The merge is exact: softmax over all keys is the mean of the softmaxes over each run, weighted by
their sums of exponentials (log-sum-exp; Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018; used across blocks by FlashAttention, Dao et al., NeurIPS 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .errors import InvalidConfig, MissingExtra

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise MissingExtra("this needs torch: pip install 'kvmmu[torch]'", extra="torch") from error

__all__ = ["attend"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_FEW_SCORES = 1 << 17
"""Scores of one KV head up to which float32 goes by matrix products (512 KiB a head)."""

# The kernel behind scaled_dot_product_attention on a CPU. The public function keeps to itself the
# log-sum-exp that a merge needs. Where a torch lacks it, matrix products in float32 serve.
_FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def attend(
    q: Tensor, views: Sequence[tuple[Tensor, Tensor | None]], *, scale: float | None = None
) -> Tensor:
    """Softmax attention of new tokens over a sequence that lies in several runs.

    A float32 query is served by matrix products over the views, half precision and many queries
    by torch's fused CPU kernel on each view: matrix products of half precision are 2 to 10 times
    slower on a CPU, and those of many queries need memory for all scores. Query heads that share
    a KV head are rows of one product. No gradients.

    Args:
        q: [num_q_heads, dim], the query of one new token; or [n, num_q_heads, dim], the queries of
            the last n tokens of the sequence, each of which sees the tokens up to its own.
            float32, bfloat16, float16 or float64.
        views: (k, v) of each run in order, as ``Layers.views`` gives them: k [tokens, heads, dim],
            v [tokens, heads, dim of V], of q's dtype; together the whole sequence, the new tokens
            among them. ``num_q_heads`` is a multiple of ``heads``.
        scale: of the scores; None: 1 / sqrt(dim).

    Returns:
        [num_q_heads, dim of V] or [n, num_q_heads, dim of V] of q's dtype.

    Raises:
        InvalidConfig: shapes, dtypes or devices that do not fit; fewer keys than queries.
    """
    new = _checked(q, views)
    heads = views[0][0].shape[1]
    group = q.shape[-2] // heads
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    with torch.no_grad():
        # [heads, new * group, dim]: rows of one KV head, those of one token side by side.
        rows = q.reshape(new, heads, group, -1).transpose(0, 1).reshape(heads, new * group, -1)
        parts: list[tuple[Tensor, Tensor]] = []
        for k, v, unseen in _split(views, new):
            parts.append(_part(rows, k, v, factor, unseen, new, group))
            if new > 1 and len(parts) > 1:
                parts = [_merge(parts)]
        out = parts[0][0] if len(parts) == 1 else _merge(parts)[0]
        out = out.to(q.dtype).view(heads, new, group, -1).transpose(0, 1)
        return out.reshape(*q.shape[:-1], -1)


def _split(
    views: Sequence[tuple[Tensor, Tensor | None]], new: int
) -> list[tuple[Tensor, Tensor, int | None]]:
    """(k, v, unseen): None when every query sees all keys; else ``unseen`` is how many positions
    lie between what the first query sees last and the first key of this piece (0: none)."""
    total = sum(len(k) for k, _ in views)
    seen_by_all = total - new + 1
    pieces: list[tuple[Tensor, Tensor, int | None]] = []
    start = 0
    for k, v in views:
        assert v is not None  # _checked saw it
        cut = min(max(seen_by_all - start, 0), len(k))
        if cut:
            pieces.append((k[:cut], v[:cut], None))
        if cut < len(k):
            pieces.append((k[cut:], v[cut:], start + cut - seen_by_all))
        start += len(k)
    return pieces


def _part(
    rows: Tensor, k: Tensor, v: Tensor, scale: float, unseen: int | None, new: int, group: int
) -> tuple[Tensor, Tensor]:
    """Attention over one piece: out [heads, rows, dim of V] and log-sum-exp [heads, rows]."""
    if unseen is None:
        return _kernel(rows, k, v, scale, None)
    # Key j of this piece is seen by the queries from unseen + j + 1 on; those before see nothing.
    first = unseen + 1
    place = rows.device
    query = torch.arange(first, new, device=place).repeat_interleave(group)
    hidden = torch.arange(first, first + len(k), device=place) > query[:, None]
    mask = rows.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    some, some_lse = _kernel(rows[:, first * group :], k, v, scale, mask)
    out = some.new_zeros((rows.shape[0], rows.shape[1], some.shape[-1]))
    lse = some_lse.new_full(rows.shape[:2], -math.inf)
    out[:, first * group :] = some
    lse[:, first * group :] = some_lse
    return out, lse


def _kernel(
    rows: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As :func:`_part`, every row seeing at least one key. ``mask`` is added, [rows, keys]."""
    _, count, dim = rows.shape
    fused = (
        _FLASH is not None
        and rows.device.type == "cpu"
        and rows.dtype != torch.float64
        and not (rows.dtype == torch.float32 and count * len(k) <= _FEW_SCORES)
        and v.shape[-1] == dim
        and k.stride(-1) == 1
        and v.stride(-1) == 1
    )
    if fused:
        out, lse = _FLASH(
            rows[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            0.0,
            False,
            attn_mask=None if mask is None else mask[None, None],
            scale=scale,
        )
        return out[0].float(), lse[0]
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    scores = torch.matmul(rows.to(wide) * scale, k.to(wide).permute(1, 2, 0))
    if mask is not None:
        scores += mask
    most = scores.amax(-1, keepdim=True)
    weights = scores.sub_(most).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v.to(wide).transpose(0, 1)).div_(total)
    return out, (most + total.log_()).squeeze(-1)


def _merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One part that saw the keys of all. The first must have seen one in every row."""
    each = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(each, 0)
    weights = (each - lse).exp_().unsqueeze(-1)
    return (torch.stack([out for out, _ in parts]) * weights).sum(0), lse


def _checked(q: Tensor, views: Sequence[tuple[Tensor, Tensor | None]]) -> int:
    """Number of new tokens."""
    if not isinstance(q, Tensor) or q.ndim not in (2, 3) or q.numel() == 0:
        what = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise InvalidConfig(
            f"q must be [num_q_heads, dim] or [n, num_q_heads, dim], not {what}", argument="q"
        )
    if q.dtype not in _DTYPES or q.device.type not in ("cpu", "cuda"):
        raise InvalidConfig(
            f"q is {q.dtype} on {q.device}; float32, bfloat16, float16 or float64 on the CPU or a "
            "CUDA device is needed",
            argument="q",
        )
    q_heads, dim = q.shape[-2:]
    expected: tuple[int, int] | None = None
    for index, (k, v) in enumerate(views):
        if v is None:
            raise InvalidConfig(
                f"view {index} has no V; where V is a part of K, give (k, k[..., :width])",
                view=index,
            )
        if (
            k.ndim != 3
            or v.ndim != 3
            or k.shape[:2] != v.shape[:2]
            or k.shape[2] != dim
            or k.shape[1] == 0
            or q_heads % k.shape[1]
        ):
            raise InvalidConfig(
                f"view {index} has k {tuple(k.shape)} and v {tuple(v.shape)}, which do not fit "
                f"{q_heads} query heads of dim {dim}: [tokens, heads, {dim}] and [tokens, heads, "
                f"dim of V] with heads a divisor of {q_heads} are needed",
                view=index,
                k_shape=tuple(k.shape),
                v_shape=tuple(v.shape),
            )
        if k.dtype != q.dtype or v.dtype != q.dtype or k.device != q.device or v.device != q.device:
            raise InvalidConfig(
                f"view {index} has k {k.dtype} and v {v.dtype} on {k.device} and {v.device}; q is "
                f"{q.dtype} on {q.device}",
                view=index,
            )
        if expected not in (None, (k.shape[1], v.shape[2])):
            raise InvalidConfig(
                f"view {index} has k {tuple(k.shape)} and v {tuple(v.shape)}, unlike the views "
                "before it",
                view=index,
            )
        expected = (k.shape[1], v.shape[2])
    new = q.shape[0] if q.ndim == 3 else 1
    tokens = sum(len(k) for k, _ in views)
    if tokens < new:
        raise InvalidConfig(
            f"{new} new tokens, but the views hold {tokens} tokens with them",
            new=new,
            tokens=tokens,
        )
    return int(new)
