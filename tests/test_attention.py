"""Attention over runs is attention over the whole, however the runs are cut."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvmmu import InvalidConfig, attend, attention  # noqa: E402

CLOSE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}


def random(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_one_call(q: Any, k: Any, v: Any, scale: float | None = None) -> Any:
    """The textbook in float64: [n, q heads, dim], keys seen up to the query's own."""
    n, total = len(q), len(k)
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2)
    scores *= 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    hidden = torch.arange(total) > torch.arange(total - n, total)[:, None]
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1)


def cut(k: Any, v: Any, cuts: Any) -> list[Any]:
    ends = [0, *sorted(cuts), len(k)]
    return [(k[a:b], v[a:b]) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("q_heads", "heads", "dim"), [(32, 8, 128), (9, 3, 64), (5, 1, 24)])
@pytest.mark.parametrize("runs", [1, 4, 16])
def test_one_query_over_runs_is_one_call(
    dtype: Any, q_heads: int, heads: int, dim: int, runs: int
) -> None:
    k, v = (random(611, heads, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    q = random(q_heads, dim, dtype=dtype)
    found = attend(q, cut(k, v, [611 * run // runs for run in range(1, runs)]))
    assert found.dtype == dtype
    assert found.shape == (q_heads, dim)
    error = (found.double() - in_one_call(q[None], k, v)[0]).abs().max()
    assert error <= CLOSE[dtype]


@pytest.mark.parametrize("fused", [True, False])
@given(data=st.data())
def test_new_tokens_see_what_comes_before_them_and_no_more(fused: bool, data: Any) -> None:
    total = data.draw(st.integers(1, 40))
    new = data.draw(st.integers(1, total))
    cuts = data.draw(st.lists(st.integers(0, total), max_size=5))
    heads, group = data.draw(st.sampled_from([(1, 1), (2, 3), (3, 1)]))
    dtype = data.draw(st.sampled_from(list(CLOSE)))
    scale = data.draw(st.sampled_from([None, 0.3]))
    v_dim = data.draw(st.sampled_from([16, 5]))
    k, v = random(total, heads, 16, dtype=dtype), random(total, heads, v_dim, dtype=dtype, seed=1)
    q = random(new, heads * group, 16, dtype=dtype, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(attention, "_FEW_SCORES", 0)  # float32 by the fused kernel as well
        else:
            patch.setattr(attention, "_FLASH", None)
        found = attend(q, cut(k, v, cuts), scale=scale)
    assert found.shape == (new, heads * group, v_dim)
    error = (found.double() - in_one_call(q, k, v, scale)).abs().max()
    assert error <= 2 * CLOSE[dtype]


def test_the_fused_kernel_is_there() -> None:
    """Without it half precision falls back to float32 products: correct, several times slower."""
    assert attention._FLASH is not None


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    k = random(64, 2, 16)
    k[:32] *= 1e4
    v = random(64, 2, 16, seed=1)
    q = random(4, 16, seed=2)
    for cuts in ([], [32], [5, 32, 60]):
        found = attend(q, cut(k, v, cuts))
        assert (found.double() - in_one_call(q[None], k, v)[0]).abs().max() < 1e-3


def test_views_with_strides_and_queries_with_gradients_are_read_as_they_are() -> None:
    both = random(50, 2, 3, 16)  # K and V side by side in each token
    k, v = both[:, 0], both[:, 1]
    q = random(6, 16, seed=3).requires_grad_()
    found = attend(q, [(k[:20], v[:20]), (k[20:], v[20:])])
    assert not found.requires_grad
    assert (found.double() - in_one_call(q.detach()[None], k, v)[0]).abs().max() < 2e-6
    by_heads = random(3, 16, 50).permute(2, 0, 1)  # last axis strided: not for the fused kernel
    for dtype in (torch.float32, torch.bfloat16):
        key, value, query = by_heads.to(dtype), v.to(dtype), q.detach().to(dtype)
        assert key.stride(-1) != 1
        found = attend(query, [(key, value)])
        expected = in_one_call(query[None], key, value)[0]
        assert (found.double() - expected).abs().max() < CLOSE[dtype]


def pair(tokens: int = 8, heads: int = 2, dim: int = 16, dtype: Any = torch.float32) -> Any:
    return random(tokens, heads, dim, dtype=dtype), random(tokens, heads, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "views", "sentence"),
    [
        (random(16), [pair()], r"q must be .* not \(16,\)"),
        ([1.0], [pair()], "not list"),
        (random(4, 16).to(torch.int32), [pair()], "q is torch.int32"),
        (random(4, 16), [], "1 new tokens, but the views hold 0 tokens"),
        (random(9, 4, 16), [pair()], "9 new tokens, but the views hold 8"),
        (random(3, 16), [pair()], "do not fit 3 query heads"),
        (random(4, 8), [pair()], "do not fit 4 query heads of dim 8"),
        (random(4, 16), [pair(), pair(heads=4)], "view 1 .* unlike the views before"),
        (random(4, 16), [(pair()[0], None)], "view 0 has no V"),
        (random(4, 16), [(pair()[0], pair(9)[1])], "view 0 .* do not fit"),
        (random(4, 16), [pair(dtype=torch.float16)], "view 0 has k torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(q: Any, views: Any, sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        attend(q, views)
