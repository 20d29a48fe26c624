"""The replay: what it serves, what it counts, and that its checks can fail."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvmmu.errors import InvalidConfig
from kvmmu.replay import sample
from kvmmu.replay.contents import contents
from kvmmu.replay.cover import separable
from kvmmu.replay.options import Options, in_range
from kvmmu.replay.run import replay
from kvmmu.replay.running import Running
from kvmmu.replay.sharing import wasted
from kvmmu.replay.tokens import Tokens
from kvmmu.replay.traces import Trace


def trace_of(requests: list[tuple[float, int, int]], ids: list[list[int]] | None = None) -> Trace:
    """Requests of (arrival in s, prompt, output)."""
    arrival, prompt, output = zip(*requests, strict=True)
    rows = ids or [[] for _ in requests]
    return Trace(
        name="made",
        kind="sample",
        arrival_s=np.array(arrival, dtype=np.float64),
        prompt_tokens=np.array(prompt, dtype=np.int64),
        output_tokens=np.array(output, dtype=np.int64),
        hash_ids=np.array([value for row in rows for value in row], dtype=np.uint64),
        hash_starts=np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64),
    )


def run(trace: Trace, **options: Any) -> dict[str, Any]:
    said: list[str] = []
    figures = replay(trace, Options(**{"verify": True, **options}), say=said.append)
    if options.get("sabotage") is None:
        assert figures["mismatches"] == 0, said
        assert figures["wasted_blocks"] == 0
    figures["said"] = said
    return figures


# -- tokens and contents -------------------------------------------------------------------


def test_equal_hash_ids_are_equal_tokens_and_a_partial_id_is_their_beginning() -> None:
    trace = trace_of([(0, 1100, 3), (0, 1024, 0), (0, 1300, 0)], [[7, 8, 9], [7, 8], [7, 3, 9]])
    tokens = Tokens(trace, seed=1)
    one, two, three = (tokens.request(i) for i in range(3))
    assert one.dtype == np.int32
    assert [len(one), len(two), len(three)] == [1103, 1024, 1300]
    assert (one[:1024] == two).all()
    assert (one[1024:1100] == three[1024:1100]).all()
    assert (one[512:1024] != three[512:1024]).all()
    assert (tokens.request(0) == one).all()
    assert (Tokens(trace, seed=2).request(0) != one).mean() > 0.99
    assert min(one.min(), two.min(), three.min()) >= 0


def test_requests_without_hash_ids_share_no_token_and_answers_are_their_own() -> None:
    trace = trace_of([(0, 1000, 50), (0, 1000, 50)])
    one, two = (Tokens(trace).request(i) for i in range(2))
    assert (one != two).all()
    assert len(np.unique(np.concatenate([one, two]))) == 2100


def test_contents_depend_on_every_token_before_and_on_none_after() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    whole = contents(tokens)
    assert whole.dtype == np.uint64
    assert (contents(tokens[:600]) == whole[:600]).all()
    changed = tokens.copy()
    changed[300] += 1
    assert (contents(changed)[:300] == whole[:300]).all()
    assert (contents(changed)[300:] != whole[300:]).all()
    swapped = tokens.copy()
    swapped[[100, 101]] = swapped[[101, 100]]
    assert (contents(swapped)[101:] != whole[101:]).all()
    assert len(contents(tokens[:0])) == 0


# -- serving -------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["address", "scatter"])
@pytest.mark.parametrize("compaction", [True, False])
def test_every_request_finishes_and_every_byte_reads_back(placement: str, compaction: bool) -> None:
    trace = sample.small(3)
    figures = run(trace, blocks=2048, placement=placement, compaction=compaction)
    assert figures["finished"] == figures["requests"] == len(trace)
    assert figures["generated_tokens"] == int(trace.output_tokens.sum())
    assert figures["verified_tokens"] >= int(trace.prompt_tokens.sum())
    assert 0 < figures["prefix_hit_rate_listed"] < figures["prefix_hit_rate"] < 1
    assert 1 < figures["peak_running"] <= 256
    assert 0 < figures["live_mean"] <= figures["live_peak"] <= 2048
    assert figures["wasted_samples"] > 0
    if not compaction:
        assert figures["moved_blocks"] == figures["compactions"] == 0


def test_compaction_lowers_fragmentation_of_a_scattered_pool() -> None:
    trace = sample.small(4)
    on, off = (
        run(trace, blocks=4096, placement="scatter", compaction=compaction)
        for compaction in (True, False)
    )
    assert on["moved_blocks"] > 0
    assert on["fragmentation_ratio_mean"] < off["fragmentation_ratio_mean"]


@pytest.mark.parametrize("block_size", [1, 7, 64, 512, 1000])
def test_any_block_size_serves(block_size: int) -> None:
    trace = sample.small(5).head(25)
    blocks = -(-40_000 // block_size)
    figures = run(trace, blocks=blocks, block_size=block_size)
    assert figures["finished"] == 25


def test_a_tiny_pool_preempts_and_every_request_still_gets_all_of_its_tokens() -> None:
    seed = 11
    print("seed", seed)
    random = np.random.default_rng(seed)
    requests = [
        (float(i) * 0.05, int(random.integers(1, 60)), int(random.integers(1, 90)))
        for i in range(60)
    ]
    trace = trace_of(requests)
    figures = run(trace, blocks=40, block_size=4, seed=seed)
    assert figures["preempted"] > 0
    assert figures["refused"] == 0
    assert figures["finished"] == 60
    assert figures["generated_tokens"] == int(trace.output_tokens.sum())


def test_hits_of_a_preempted_request_do_not_count_again() -> None:
    # Nothing is shared, so whatever is found was found by a request that came back.
    requests = [(0.0, 30, 60) for _ in range(8)]
    figures = run(trace_of(requests), blocks=36, block_size=4)
    assert figures["preempted"] > 0
    assert figures["finished"] == 8
    assert figures["prefix_hit_rate"] == figures["prefix_hit_rate_listed"] == 0
    assert figures["prompt_tokens"] == 8 * 30


def test_a_request_that_can_never_fit_is_refused_with_the_reason_and_the_others_run() -> None:
    trace = trace_of([(0, 100, 5), (0, 5000, 5), (0, 390, 20), (0, 100, 5)])
    figures = run(trace, blocks=100, block_size=4)
    assert (figures["finished"], figures["refused"]) == (2, 2)
    assert [entry["request"] for entry in figures["refusals"]] == [1, 2]
    assert figures["refusals"][0]["reason"] == "needs 1251 blocks of 4 tokens, the pool has 100"
    alone = run(trace, blocks=100, block_size=4, one_at_a_time=True)
    assert (alone["finished"], alone["refused"]) == (2, 2)


def test_a_request_that_fills_the_whole_pool_runs() -> None:
    # 397 tokens and 3 of 4 generated ones are written: 100 blocks exactly.
    figures = run(trace_of([(0, 397, 4), (0, 10, 2)]), blocks=100, block_size=4)
    assert figures["finished"] == 2
    assert figures["live_peak"] == 100


def test_requests_that_generate_nothing_or_one_token_end_with_their_prompt() -> None:
    figures = run(trace_of([(0, 20, 0), (0, 20, 1), (0, 1, 1), (0, 16, 0)]), blocks=16)
    assert figures["finished"] == 4
    assert figures["generated_tokens"] == 2


def test_no_more_requests_run_than_there_are_rows() -> None:
    figures = run(sample.small(6).head(60), blocks=8192, max_running=3)
    assert figures["finished"] == 60
    assert figures["peak_running"] == 3


def test_time_without_requests_is_skipped() -> None:
    figures = run(trace_of([(0, 10, 10), (3600, 10, 10)]), blocks=16)
    assert figures["steps"] == 20
    assert figures["simulated_s"] == pytest.approx(3600, abs=2)


def test_prefill_takes_the_steps_that_its_rate_allows() -> None:
    # 1000 tokens a second in steps of 10 ms are 10 a step: 50 steps, and 2 to decode.
    figures = run(
        trace_of([(0, 500, 3)]), blocks=64, prefill_tokens_per_s=1000, step_ms=10, speed=1
    )
    assert figures["steps"] == 52
    # Half a token a step.
    figures = run(trace_of([(0, 10, 1)]), blocks=64, prefill_tokens_per_s=50, step_ms=10)
    assert figures["simulated_s"] == pytest.approx(0.2, abs=0.02)


def test_speed_brings_requests_closer() -> None:
    trace = sample.small(8).head(80)
    slow, fast = (run(trace, blocks=8192, speed=speed) for speed in (0.5, 4))
    assert slow["steps"] > fast["steps"]
    assert slow["running_mean"] < fast["running_mean"]


def test_the_same_seed_makes_the_same_run() -> None:
    trace = sample.small(9).head(60)
    timed = ("wall_s", "mmu_s", "mmu_us_per_step")
    one, two = (run(trace, blocks=1500, placement="scatter", seed=4) for _ in range(2))
    assert {k: v for k, v in one.items() if k not in timed} == {
        k: v for k, v in two.items() if k not in timed
    }


def test_a_run_that_is_stopped_says_so_and_keeps_its_figures() -> None:
    calls = 0

    def watch(totals: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls == 3

    figures = replay(sample.small(0), Options(blocks=2048), watch=watch)
    assert figures["interrupted"]
    assert figures["steps"] == 96
    assert figures["finished"] < figures["requests"]


# -- one at a time -------------------------------------------------------------------------


def lru_hits(trace: Trace, blocks: int, block_size: int) -> int:
    """Blocks found, by an LRU cache written from the definition. Answers are cached as well."""
    tokens = Tokens(trace)
    cache: OrderedDict[bytes, None] = OrderedDict()
    found = 0
    for request in range(len(trace)):
        prompt = int(trace.prompt_tokens[request])
        row = tokens.request(request)[: trace.positions(request)]
        chain = [row[: (i + 1) * block_size].tobytes() for i in range(len(row) // block_size)]
        hits = 0
        while hits < (prompt - 1) // block_size and chain[hits] in cache:
            hits += 1
        found += hits
        for key in reversed(chain):  # the leaf is older than its parent
            cache.pop(key, None)
            cache[key] = None
        while len(cache) > blocks:
            cache.popitem(last=False)
    return found


@pytest.mark.parametrize("block_size", [64, 512, 1024])
@pytest.mark.parametrize("share", [None, 0.1, 0.4])
def test_one_at_a_time_finds_what_an_independent_lru_finds(
    block_size: int, share: float | None
) -> None:
    trace = sample.small(12)
    listed = int((-(-trace.prompt_tokens // block_size)).sum())
    blocks = listed * 2 if share is None else int(listed * share)
    figures = run(trace, blocks=blocks, block_size=block_size, one_at_a_time=True)
    assert figures["finished"] == len(trace)
    assert figures["preempted"] == 0
    expected = lru_hits(trace, blocks, block_size) / listed
    assert expected > 0
    if share is None:
        assert figures["prefix_hit_rate_listed"] == pytest.approx(expected, abs=1e-12)
    else:
        # What runs cannot be evicted, so a request may push out a little more than the LRU does.
        assert figures["prefix_hit_rate_listed"] == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "listed"),
    [(1_000, 0.0447), (10_000, 0.2123), (30_000, 0.3266), (50_000, 0.3543), (300_000, 0.366)],
)
def test_one_at_a_time_has_the_hit_rates_of_the_mooncake_trace(
    traces: Any, blocks: int, listed: float
) -> None:
    from kvmmu.replay.traces import read

    trace = read(traces / "mooncake_conversation.jsonl")
    figures = replay(trace, Options(blocks=blocks, block_size=512, one_at_a_time=True))
    assert figures["finished"] == 12_031
    assert figures["prefix_hit_rate_listed"] == pytest.approx(listed, abs=0.003)


# -- the checks can fail -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["skip-copy", "skip-commit", "early-reuse", "wrong-block"])
def test_sabotage_is_found_and_located(kind: str) -> None:
    figures = run(sample.small(0).head(80), blocks=2048, placement="scatter", sabotage=kind)
    assert figures["mismatches"] > 0
    assert figures["said"]
    for part in ("request", "sequence", "position", "block"):
        assert part in figures["said"][0]
    assert len(figures["said"]) <= 10


def test_a_block_that_is_held_twice_is_counted() -> None:
    running = Running(2)
    machine = SimpleNamespace(
        block_size=4,
        num_blocks=8,
        block_table=np.array([[0, 1, 8], [0, 2, 8]], dtype=np.int32),
        owners=np.array([10, 11, 12, 0, 0, 0, 0, 0, 0], dtype=np.uint64),
    )
    running.n = 2
    running.position[:] = (6, 8)
    fake: Any = machine
    assert wasted(fake, running) == 0
    machine.block_table[1, 0] = 3  # one of two sharers was moved ...
    machine.owners[3] = 10  # ... and the bytes with it
    assert wasted(fake, running) == 1


def test_a_region_is_separable_if_one_request_had_all_of_its_blocks() -> None:
    """Three requests of 4-token blocks: the second found 512 blocks of the first one and goes on
    alone; the third found 700 of the first one, which cut its second region in two."""
    running = Running(3)
    owned = 1600
    for request, found in enumerate((0, 512, 700)):
        size = 4 * owned
        running.add(
            sequence=request,
            request=request,
            found=found * 4,
            known=size,
            tokens=np.zeros(size, dtype=np.int32),
            contents=np.zeros(size, dtype=np.uint64),
            blocks=owned,
        )
    assert running.donors(np.array([0, 1599, 1600, 4799])).tolist() == [0, 0, 1, 2]
    # Physical block = number of the logical block; what was not written holds what was there.
    table = np.arange(3 * owned).reshape(3, owned)
    rows = {int(request): row for row, request in enumerate(running.request)}
    block_table = np.zeros((3, owned), dtype=np.int32)
    owners = np.arange(3 * owned, dtype=np.uint64)
    for request, found in enumerate((0, 512, 700)):
        block_table[rows[request]] = table[request]
        block_table[rows[request], :found] = table[0, :found]
        written = (owned, 900, 1100)[request]
        running.position[rows[request]] = written * 4 - 1
        owners[table[request, written:]] = 5
    first = np.array([0, 512, 1024], dtype=np.int32)
    regions: dict[int, Any] = {
        0: (first, np.array([True, False, True])),
        1: (first, np.array([True, True, False])),
        2: (first[:2] + 3, np.array([False, True])),
    }
    machine: Any = SimpleNamespace(
        block_size=4,
        block_table=block_table,
        owners=owners,
        mmu=SimpleNamespace(regions=regions.__getitem__),
    )
    # All of the first two requests; of the third one that lies before what it computed.
    assert separable(machine, running) == (3 + 3 + 1, 2 + 2 + 0)
    running.position[rows[2]] = 700 * 4  # it has computed nothing yet
    assert separable(machine, running) == (3 + 3 + 1, 2 + 2 + 0)
    running.known[:] = running.position[:] = 511 * 4
    assert separable(machine, running) == (0, 0)


def test_moves_are_counted_while_requests_change_their_rows() -> None:
    # Every second request is long, so rows move at both ends; nothing else moves blocks.
    requests = [(i * 0.3, 1500 if i % 2 else 40, 30 + i % 7) for i in range(40)]
    figures = run(trace_of(requests), blocks=40_000, block_size=1, placement="scatter")
    assert figures["finished"] == 40
    assert 0 < figures["moved_blocks"] <= figures["committed_moves"]
    assert figures["moved_blocks"] >= 0.9 * figures["committed_moves"]


# -- faults, and the guarantee -------------------------------------------------------------


@pytest.mark.parametrize("placement", ["address", "scatter"])
def test_passes_whose_mover_fails_are_aborted_and_every_byte_reads_back(placement: str) -> None:
    trace = sample.small(3).head(120)
    figures = run(trace, blocks=4096, placement=placement, inject_faults=0.3)
    assert figures["finished"] == 120
    assert figures["faults_injected"] > 0
    assert figures["aborted_moves"] > 0
    assert figures["committed_moves"] > 0
    calm = run(trace, blocks=4096, placement=placement)
    assert calm["faults_injected"] == calm["aborted_moves"] == 0


@pytest.mark.parametrize("faults", [0.0, 0.2])
@pytest.mark.parametrize(("slack", "budget"), [(0, 8192), (0, 32), (1, 4)])
def test_the_guarantee_is_kept_on_a_trace(slack: int, budget: int, faults: float) -> None:
    figures = run(
        sample.small(3).head(120),
        blocks=6000,
        guarantee=slack,
        budget_blocks=budget,
        inject_faults=faults,
    )
    assert figures["finished"] == 120
    assert figures["guarantee_broken"] == 0
    assert (figures["aborted_moves"] > 0) == (faults > 0)
    assert 0 < figures["committed_moves"] <= figures["freed_blocks"]
    held = figures["guarantee"]
    if budget == 8192:
        assert (held["excess_worst"], held["owed_worst"]) == (0, 0), "without a budget: no lag"
    elif slack == 0:
        assert held["owed_worst"] > 0, "with one it does"


def test_without_the_mode_nothing_is_said_of_the_guarantee() -> None:
    figures = run(sample.small(3).head(20), blocks=6000)
    assert (figures["guarantee"], figures["guarantee_broken"]) == (None, 0)


# -- options -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blocks", 0),
        ("blocks", 2**31 - 1),
        ("block_size", 0),
        ("block_size", 4097),
        ("budget_blocks", 0),
        ("max_running", 0),
        ("max_running", 65_537),
        ("prefill_tokens_per_s", 0),
        ("prefill_tokens_per_s", float("nan")),
        ("step_ms", 0),
        ("step_ms", float("inf")),
        ("speed", -1),
        ("speed", 0),
        ("seed", -1),
        ("placement", "best"),
        ("eviction", "random"),
        ("sabotage", "everything"),
    ],
)
def test_an_option_out_of_range_says_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match="allowed") as caught:
        Options(**{name: value})
    assert f"--{name.replace('_', '-')}" in str(caught.value)


def test_a_pool_larger_than_memory_is_refused_before_the_run() -> None:
    with pytest.raises(InvalidConfig, match="this machine has"):
        replay(trace_of([(0, 10, 1)]), Options(blocks=2**31 - 2, block_size=4096))
    with pytest.raises(InvalidConfig, match="--max-running"):
        replay(
            trace_of([(0, 4_000_000, 1)] * 70_000),
            Options(blocks=262_144, max_running=65_536),
        )


# -- page sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize("orders", [(0,), (0, 3, 9), (0, 2, 9)])
def test_page_sizes_are_served_and_told(orders: tuple[int, ...]) -> None:
    figures = run(sample.small(3), blocks=4096, block_size=4, page_orders=orders)
    assert figures["finished"] == figures["requests"]
    shares = {int(order): share for order, share in figures["token_share_by_page"].items()}
    assert set(shares) <= set(orders)
    assert sum(shares.values()) == pytest.approx(1)
    assert figures["huge_cover"] is None or 0 <= figures["huge_cover"] <= 1
    separable_cover = figures["huge_cover_separable"]
    assert separable_cover is None or 0 <= separable_cover <= 1
    for name in ("promotions", "splits", "holds_made", "holds_broken"):
        assert figures[name] >= 0
    if orders == (0,):
        assert not figures["huge_cover"] and figures["promotions"] == figures["splits"] == 0
    else:
        assert shares[orders[1]] > 0
    assert figures["holds_made"] > 0
    assert set(figures["runs_at_end"]) == {"short", "long"}


@pytest.mark.parametrize("orders", [(2, 9), (0, 10), (), (0, -1)])
def test_page_sizes_that_no_pool_has_are_refused(orders: tuple[int, ...]) -> None:
    with pytest.raises(InvalidConfig, match="page-orders"):
        run(sample.small(3), page_orders=orders)


def test_numbers_out_of_range_are_said_digit_by_digit() -> None:
    said = "--seed: 9223372036854775808 given, allowed: 0 to 9223372036854775807"
    with pytest.raises(InvalidConfig, match=said):
        in_range("seed", 2**63, 0, 2**63 - 1)
    with pytest.raises(InvalidConfig, match=r"--rate: nan given, allowed: 0.001 to 10"):
        in_range("rate", float("nan"), 0.001, 10)
