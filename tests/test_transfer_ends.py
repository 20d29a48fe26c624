"""Bytes pulled from one process to another arrive, in as many descriptors as were predicted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvmmu import pair_runs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benches"))

import transfer
from ends import EndFailed, Ends, Placed, Shape, nixl_api
from harness import Bench

BLOCKS, REGIONS = 300, 3
SHAPE = Shape(BLOCKS, 256, REGIONS)
TOKENS = 64 * 16


def open_scattered(ends: Ends) -> tuple[Placed, Placed]:
    """A request that lies in holes of three blocks at the source and of one at the target."""
    ends.ask("source", "scatter", BLOCKS, 90, 3, 2)
    ends.ask("target", "scatter", BLOCKS, 280, 1, 2)
    placed = ends.both("open", TOKENS)
    return placed["source"], placed["target"]


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    try:
        nixl_api()
    except ImportError as error:
        pytest.skip(str(error))
    with Ends(SHAPE) as started:
        yield started


@pytest.mark.needs_nixl
@pytest.mark.parametrize("by_block", [False, True])
def test_what_is_pulled_over_nixl_is_what_was_written_in_the_descriptors_predicted(
    ends: Ends, by_block: bool
) -> None:
    source, target = open_scattered(ends)
    predicted = len(pair_runs(target.blocks, source.blocks))
    assert 16 < predicted < 64  # neither all single nor all together
    ends.both("clear")
    ends.ask("source", "write", source.blocks, 5)
    assert ends.ask("target", "wrong", target.blocks, 5, REGIONS) == 64
    moved = ends.ask("target", "pull", target.blocks, source.blocks, REGIONS, by_block)
    assert moved.descriptors == (64 if by_block else predicted) * REGIONS
    assert moved.joined == predicted * REGIONS  # NIXL joins no more than we did, and no less
    assert ends.ask("target", "wrong", target.blocks, 5, REGIONS) == 0
    assert ends.ask("target", "wrong", target.blocks, 6, REGIONS) == 64  # another round
    others = np.setdiff1d(np.arange(BLOCKS), target.blocks)
    assert ends.ask("target", "written", others) == 0


@pytest.mark.needs_nixl
def test_only_the_regions_asked_for_are_pulled(ends: Ends) -> None:
    source, target = open_scattered(ends)
    ends.both("clear")
    ends.ask("source", "write", source.blocks, 1)
    ends.ask("target", "pull", target.blocks, source.blocks, REGIONS - 1)
    assert ends.ask("target", "wrong", target.blocks, 1, REGIONS - 1) == 0
    assert ends.ask("target", "wrong", target.blocks, 1, REGIONS) == 64


def test_gathering_at_both_ends_leaves_fewer_pair_runs() -> None:
    with Ends(None) as ends:
        source, target = open_scattered(ends)
        gathered = ends.both("gather")
        before = len(pair_runs(target.blocks, source.blocks))
        after = len(pair_runs(gathered["target"].blocks, gathered["source"].blocks))
        assert after < before
        assert gathered["target"].moves > 0


def test_what_fails_inside_an_end_is_told_and_the_end_goes_on() -> None:
    with Ends(None) as ends:
        with pytest.raises(EndFailed, match=r"source: (?s:.*)no_such_call"):
            ends.ask("source", "no_such_call")
        assert ends.ask("source", "scatter", BLOCKS, 90, 3, 2) == 135 / BLOCKS


@pytest.mark.slow
def test_descriptors_are_counted_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise ImportError("NIXL is not installed")

    monkeypatch.setattr(transfer, "nixl_api", nothing)
    monkeypatch.setattr(transfer, "MINUTES", 0.5)
    bench = Bench()
    rows = list(transfer.rows(bench))
    assert len(rows) == 3 * len(transfer.REGIONS)
    assert all(row.unit == "descriptors" for row in rows)
    by_default = [row for row in rows if " default:" in row.measure]
    assert all(row.ratio is not None and row.ratio < 0.5 for row in by_default)
    assert any("NIXL is not installed" in note for note in bench.notes)
