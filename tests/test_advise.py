"""``kvmmu advise``: shapes, arithmetic, rules, and a policy advised only where it did better."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmmu import MMU, Config, InvalidConfig
from kvmmu.advise import fitting, gpus, paying, shapes, sizing
from kvmmu.advise.paying import RULES, Situation, judge
from kvmmu.replay import sample
from kvmmu.replay.traces import Trace

from .test_cli import kvmmu, said

DENSE = {
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "hidden_size": 8192, "torch_dtype": "bfloat16", "max_position_embeddings": 131_072,
}  # fmt: skip


def config(tmp_path: Path, **keys: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in {**DENSE, **keys}.items() if v is not None}))
    return path


# -- shapes ------------------------------------------------------------------------------------


def test_a_config_file_gives_the_same_shape_as_the_built_in_one(tmp_path: Path) -> None:
    read, known = shapes.find(str(config(tmp_path))), shapes.find("meta/Llama-3.1-70B-Instruct")
    for name in ("layers", "kv_heads", "head_dim", "v_head_dim", "dtype", "longest", "latent"):
        assert getattr(read, name) == getattr(known, name), name
    assert read.token_bytes() == 80 * 8 * 256 * 2 == 327_680
    assert shapes.find(str(tmp_path)).layers == 80
    assert read.weights is None


def test_ranks_share_heads_and_repeat_them_where_there_are_fewer() -> None:
    shape = shapes.find("llama-3.1-70b")
    assert [shape.heads_of_rank(n) for n in (1, 2, 3, 8, 16)] == [8, 4, 3, 1, 1]
    latent = shapes.find("DeepSeek-V3")
    assert latent.token_bytes() == latent.token_bytes(8) == 61 * 576 * 2


def test_latent_attention_stores_one_vector_and_no_v(tmp_path: Path) -> None:
    shape = shapes.read(
        config(tmp_path, num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64)
    )
    assert (shape.kv_heads, shape.head_dim, shape.v_head_dim, shape.latent) == (1, 576, 0, True)


def test_layers_without_kv_are_left_out_and_windows_are_told(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 60 + ["full_attention"] * 15 + ["sliding_attention"] * 5
    shape = shapes.read(config(tmp_path, layer_types=kinds, head_dim=256))
    assert (shape.layers, shape.head_dim) == (20, 256)
    assert "60 of 80 layers are linear" in shape.note
    assert "5 layers have windows" in shape.note
    nested = tmp_path / "nested.json"
    nested.write_text(json.dumps({"text_config": DENSE, "torch_dtype": "float16"}))
    assert shapes.read(nested).dtype == "bfloat16"


def test_weights_are_read_beside_the_file(tmp_path: Path) -> None:
    path = config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1234)
    assert shapes.read(path).weights == 1234
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 141_107_412_992}}))
    shape = shapes.read(path)
    assert (shape.weights, shape.weights_from) == (141_107_412_992, str(index))
    index.write_text('{"metadata": {"total_size": 1e999}}')
    assert shapes.read(path).weights == 1234


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({"num_hidden_layers": "80"}, "num_hidden_layers: '80' given"),
        ({"num_hidden_layers": True}, "num_hidden_layers: True given"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: 0 given"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"torch_dtype": "int4"}, "torch_dtype: int4 given, allowed: float32"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim: missing"),
        ({"text_config": 3}, "text_config: 3 given"),
        ({"hidden_size": 8, "num_attention_heads": 16}, "head_dim: 0 given, allowed"),
        (
            {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2},
            "layers that store KV: 0 given, allowed",
        ),
    ],
)
def test_a_config_file_that_lacks_something_is_named(
    tmp_path: Path, keys: dict[str, Any], text: str
) -> None:
    path = config(tmp_path, **keys)
    with pytest.raises(InvalidConfig) as error:
        shapes.read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert text in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"a": NaN'])
def test_what_is_no_config_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=r"config\.json: "):
        shapes.find(str(path))


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match=r"llama-3\.1-80b given.*Llama-3\.1-70B"):
        shapes.find("llama-3.1-80b")
    with pytest.raises(InvalidConfig, match=r"h10 given, did you mean H100"):
        gpus.find("h10")
    assert gpus.find("h100 pcie").name == "H100-PCIe"


# -- arithmetic --------------------------------------------------------------------------------


def test_blocks_that_fit_leave_room_for_weights_and_the_null_block() -> None:
    shape, gpu = shapes.find("llama-3.1-70b"), gpus.find("h100")
    pool = sizing.pool_of(shape, gpu, ranks=8)
    used = (pool.num_blocks + 1) * pool.block_bytes + pool.weights
    assert used <= 0.9 * gpu.memory < used + pool.block_bytes
    assert pool.weights == -(-141_200_000_000 // 8)
    with pytest.raises(InvalidConfig, match="least two blocks") as error:
        sizing.pool_of(shape, gpu)
    assert error.value.numbers["available"] == 0
    read = shapes.Shape(name="x", layers=1, kv_heads=1, head_dim=1, v_head_dim=1)
    with pytest.raises(InvalidConfig, match="--weights: missing"):
        sizing.pool_of(read, gpu)
    given = sizing.pool_of(read, gpu, weights=1)
    assert given.weights == 1
    (row,) = (
        row
        for row in sizing.rows(given, sizing.Load(longest=1000))
        if row.what == "weights of a GPU"
    )
    assert row.source == "--weights"


def test_granules_are_those_that_the_layouts_have() -> None:
    torch = pytest.importorskip("torch")
    from kvmmu.layout import Layers

    shape = shapes.Shape(
        name="x", layers=3, kv_heads=2, head_dim=64, v_head_dim=64, dtype="float16"
    )
    pool = sizing.pool_of(shape, gpus.GPU("g", 2**26, None, ""), weights=0)
    for layout in ("NHD", "block_major"):
        layers = Layers.allocate(
            layout, num_layers=3, num_blocks=pool.num_blocks + 1, block_size=16, num_kv_heads=2,
            head_dim=64, dtype=torch.float16,
        )  # fmt: skip
        from kvmmu import Storage

        made = Storage(sizing.regions(pool, layout), pool.num_blocks)
        assert made.block_bytes == layers.storage.block_bytes == pool.block_bytes
        assert made.granule() == layers.storage.granule()


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=50))
def test_waste_of_a_block_size_is_that_of_a_pool(lengths: list[int]) -> None:
    pool = sizing.pool_of(shapes.find("llama-3.1-8b"), gpus.find("h100"))
    load = sizing.Load(longest=131_072)
    for size in sizing.block_sizes(pool, load, lengths):
        places = sum(-(-length // size.size) * size.size for length in lengths)
        assert size.waste == pytest.approx(1 - sum(lengths) / places)


def test_the_unused_slots_that_the_core_counts_are_those() -> None:
    lengths = [1, 15, 16, 17, 100, 1000]
    pool = sizing.pool_of(shapes.find("llama-3.1-8b"), gpus.find("h100"))
    mmu = MMU(200, 16)
    for number, length in enumerate(lengths):
        mmu.open(np.full(length, number, dtype=np.int32))
    unused = mmu.measure().unused_slots
    (found,) = (
        size for size in sizing.block_sizes(pool, sizing.Load(longest=1000), lengths)
        if size.size == 16
    )  # fmt: skip
    assert found.waste == pytest.approx(unused / (sum(lengths) + unused))


def test_a_larger_block_is_advised_for_long_sequences_only() -> None:
    pool = sizing.pool_of(shapes.find("llama-3.1-8b"), gpus.find("h100"))
    load = sizing.Load(longest=131_072)
    chosen = [
        sizing.best(sizing.block_sizes(pool, load, [tokens] * 9 + [tokens + 1])).size
        for tokens in (100, 1_001, 10_001, 100_001)
    ]
    assert chosen == sorted(chosen)
    assert chosen[0] < 16 < chosen[-1]


def test_every_row_says_where_it_comes_from() -> None:
    pool = sizing.pool_of(shapes.find("deepseek-v3"), gpus.find("h200"), ranks=8)
    for load in (
        sizing.Load(longest=1000),
        sizing.Load(longest=1000, mean_tokens=500, peak=10),
        sizing.Load(longest=1000, mean_tokens=500.0),
    ):
        rows = list(sizing.rows(pool, load))
        assert len(rows) >= 15
        for row in rows:
            assert row.source, row.what
            assert row.value


@pytest.mark.parametrize("blocks", [1, 128, 512, 513, 1024, 8192])
@pytest.mark.parametrize("orders", [(0,), (0, 9)])
def test_the_page_table_takes_what_is_advised(blocks: int, orders: tuple[int, ...]) -> None:
    """Nodes as the core counts them, of one more sequence."""
    mmu = MMU(3 * 8192, 1, max_blocks_per_sequence=8192, page_orders=orders)
    nodes = []
    for tokens in (np.zeros(blocks), np.ones(blocks)):
        sequence = mmu.open(tokens.astype(np.int32))
        nodes.append(mmu.measure().table_nodes)
    pages = mmu.info(sequence).pages
    more, huge = nodes[1] - nodes[0], pages.get(9, 0)
    if huge in (0, -(-blocks // 512)):
        found = ((more - huge) * 4096 + more * 8 + sum(pages.values()) * 4) / blocks
        assert sizing.page_table_bytes(blocks, huge=huge > 0) == found
    else:
        assert blocks == 513
    assert sizing.page_table_bytes(8192) == pytest.approx(12.5, abs=0.05)


@pytest.mark.parametrize(
    ("mean", "peak", "said"),
    [
        (None, None, "256 rows (without --mean-tokens, --peak or --trace)"),
        (None, 40, "48 rows (1.2 x peak)"),
        (3000.0, 40, "485 rows (max_num_seqs, at most)"),
        (3000.0, None, "485 rows (max_num_seqs, at most)"),
        (3000.0, 1000, "485 rows (max_num_seqs, at most)"),
        (1e9, None, "1 row (max_num_seqs, at most)"),
    ],
)
def test_tables_are_of_as_many_sequences_as_are_advised(
    mean: float | None, peak: int | None, said: str
) -> None:
    pool = sizing.pool_of(shapes.find("llama-3.1-70b"), gpus.find("h100"), ranks=8)
    load = sizing.Load(longest=131_072, mean_tokens=mean, peak=peak)
    found = {row.what: row for row in sizing.rows(pool, load)}
    assert found["block tables on the device"].source.startswith(f"{said} x 8,192 entries")
    assert found["bytes a token"].source.endswith("80 layers x 1 KV head x (128 + 128) x 2 bytes")
    assert "12.5 bytes a block" in found["page table in host memory"].source


@pytest.mark.parametrize("size", [1, 16, 256, 4096])
def test_numbers_of_one_are_told_as_one(size: int) -> None:
    pool = sizing.pool_of(shapes.find("llama-3.1-70b"), gpus.find("h200"), ranks=8, block_size=size)
    load = sizing.Load(longest=size, mean_tokens=float(size), peak=1)
    for row in sizing.rows(pool, load):
        text = f"{row.value} {row.source} {row.note}"
        assert not re.search(r"(?<![\d.,])1 (blocks|rows|entries|KV heads|layers|tokens)\b", text)


def test_max_num_seqs_lies_between_the_peak_and_the_capacity() -> None:
    pool = sizing.pool_of(shapes.find("llama-3.1-8b"), gpus.find("h100"))

    def row(peak: int | None) -> sizing.Row:
        load = sizing.Load(longest=1000, mean_tokens=1000.0, peak=peak)
        (found,) = (row for row in sizing.rows(pool, load) if row.what.startswith("max_num_seqs"))
        return found

    most = pool.tokens // 1000
    assert row(100).value == f"120 to {most}"
    assert row(most).value == f"{most}"
    assert "some will wait" in row(most).note
    assert row(None).value == f"{most}"


# -- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("situation", "verdict"),
    [
        (Situation(), "unknown"),
        (Situation(live=0.2, huge_share=0.9), "nothing"),
        (Situation(live=0.2, prefixes=True), "nothing"),
        (Situation(live=0.6, huge_share=0.9), "nothing"),
        (Situation(live=0.6, huge_share=0.9, prefixes=True), "little"),
        (Situation(live=0.9, huge_share=0.9), "pays"),
        (Situation(live=0.9, huge_share=0.0), "nothing"),
        (Situation(live=0.6, shifts=True), "pays"),
        (Situation(live=0.92, prefixes=True), "pays"),
        (Situation(live=0.6, returns_memory=True), "pays"),
        (Situation(live=0.3, returns_memory=True), "nothing"),
        (Situation(live=0.6, transfers=True), "little"),
        (Situation(live=0.9, transfers=True), "pays"),
        (Situation(views=True), "pays"),
        (Situation(strict=True), "pays"),
    ],
)
def test_the_rules_say_when_compaction_pays(situation: Situation, verdict: str) -> None:
    found, rules = judge(situation)
    assert found == verdict
    assert ("concurrency" in {rule.name for rule in rules}) == (not situation.strict)


def test_every_rule_has_a_source_and_holds_somewhere() -> None:
    situations = [
        Situation(live=live, huge_share=huge, shifts=a, prefixes=b, returns_memory=c, transfers=d,
                  views=e, strict=e)
        for live in (None, 0.2, 0.5, 0.9) for huge in (0.0, 0.5)
        for a in (False, True) for b in (False, True) for c in (False, True)
        for d in (False, True) for e in (False, True)
    ]  # fmt: skip
    for rule in RULES:
        assert rule.source.startswith(paying.PROOF)
        assert any(rule.holds(one) for one in situations), rule.name
        assert not all(rule.holds(one) for one in situations), rule.name
    assert len({rule.name for rule in RULES}) == len(RULES)


# -- page sizes fitted to a trace --------------------------------------------------------------


def trace_of(lengths: list[int], gap: float = 0.05, output: int = 1) -> Trace:
    count = len(lengths)
    return Trace(
        name="made", kind="sample", arrival_s=np.arange(count, dtype=np.float64) * gap,
        prompt_tokens=np.array(lengths, dtype=np.int64) - output,
        output_tokens=np.full(count, output, dtype=np.int64), hash_ids=np.empty(0, dtype=np.uint64),
        hash_starts=np.zeros(count + 1, dtype=np.int64),
    )  # fmt: skip


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.sampled_from([1, 16]))
def test_the_fitted_policy_has_the_fewest_entries_of_all(lengths: list[int], size: int) -> None:
    policy = fitting.fit(np.array(lengths, dtype=np.int64), size)
    blocks = np.array([-(-length // size) for length in lengths], dtype=np.int64)
    top = policy.page_orders[2:]
    others = [fitting.entries(blocks, (0, order, *top)).sum() for order in range(1, 9)]
    assert fitting.entries(blocks, policy.page_orders).sum() == min(others)
    huge = sum(block // 512 * 512 for block in blocks.tolist())
    assert (top == (9,)) == (huge >= 0.01 * blocks.sum())
    MMU(64, size, page_orders=policy.page_orders, medium_from=policy.medium_from,
        huge_from=policy.huge_from)  # fmt: skip


def test_entries_are_those_that_an_empty_pool_maps() -> None:
    for length in (1, 5, 511, 512, 700, 1500):
        mmu = MMU(4096, 1, page_orders=(0, 3, 9), medium_from=0, huge_from=0, hold_blocks=0)
        pages = mmu.info(mmu.open(np.zeros(length, dtype=np.int32))).pages
        (expected,) = fitting.entries(np.array([length]), (0, 3, 9)).tolist()
        assert sum(pages.values()) == expected


def test_a_policy_that_fits_is_advised_and_its_replay_shows_it() -> None:
    trace = trace_of([16 * 32] * 200, output=15)
    compared = fitting.compare(trace, blocks=4096, block_size=16)
    assert compared.policy.page_orders == (0, 5)
    assert compared.better, compared.why
    before = fitting.entries_a_block(compared.default)
    assert fitting.entries_a_block(compared.fitted) < 0.5 * before
    assert compared.fitted["finished"] == compared.default["finished"] == 200


def test_a_policy_that_does_no_better_is_not_advised() -> None:
    compared = fitting.compare(trace_of([16] * 100, output=10), blocks=512, block_size=16)
    assert compared.policy.page_orders == (0, 1)  # nobody has two blocks: all orders are the same
    assert not compared.better
    assert "no better in the replay" in compared.why
    too_short = fitting.compare(trace_of([16 * 32] * 9), blocks=4096, block_size=16)
    assert not too_short.better
    assert "nothing ran long enough" in too_short.why
    stopped = fitting.compare(
        trace_of([16 * 32] * 300), blocks=4096, block_size=16, watch=lambda totals: True
    )
    assert not stopped.better
    assert "stopped early" in stopped.why


def test_a_trace_tells_its_load() -> None:
    seen = fitting.looked_at(trace_of([16 * 600] * 60 + [100] * 60, gap=6.0), 16)
    assert seen.shifts
    assert seen.huge_share == pytest.approx(60 * 512 / (60 * 600 + 60 * 7))
    assert not seen.prefixes
    steady = fitting.looked_at(trace_of([16 * 600, 100] * 60, gap=6.0), 16)
    assert not steady.shifts
    assert fitting.looked_at(sample.small(0), 16).prefixes


# -- the command -------------------------------------------------------------------------------


def test_the_command_tells_all_and_writes_settings_that_load(tmp_path: Path) -> None:
    lines = [
        json.dumps({"timestamp": 100 * i, "input_length": 500 + 20 * i, "output_length": 12,
                    "hash_ids": [1, 100 + i]})
        for i in range(60)
    ]  # fmt: skip
    for i, line in enumerate(lines):
        row = json.loads(line)
        row["hash_ids"] = [1, *(1000 * i + k for k in range(1, -(-row["input_length"] // 512)))]
        lines[i] = json.dumps(row)
    trace, out, settings = (tmp_path / name for name in ("t.jsonl", "o.json", "k.yaml"))
    trace.write_text("\n".join(lines) + "\n")
    done = kvmmu(
        *("advise", "--model", "llama-3.1-8b", "--gpu", "l4", "--trace", trace, "--json", out),
        *("--write-config", settings),
        COLUMNS="300",
    )
    assert done.returncode == 0, said(done)
    for text in ("blocks that fit", "NVIDIA's datasheet", "a rule says 15 %", "750 GB/s",
                 "max_num_seqs", "block size:", "docs/proof.md", "granule"):  # fmt: skip
        assert text in said(done), text
    figures = json.loads(out.read_text())
    assert figures["num_blocks"] == (int(24 * 2**30 * 0.9) - 16_060_000_000) // 2**21 - 1
    assert all(row["source"] for row in figures["rows"])
    assert figures["situation"]["prefixes"] is True
    assert figures["pages"]["why"]
    config = Config.load(settings)
    assert config.pool.num_blocks == figures["num_blocks"]
    assert config.resolve().block_bytes == figures["block_bytes"]
    assert (config.pages.page_orders is not None) == figures["pages"]["better"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--model", "nothing", "--gpu", "h100"), "--model: nothing given"),
        ((), "--model: none given, allowed: a config.json, or SmolLM2-135M, Llama"),
        (("--model", "phi-4", "--gpu", "h100", "--limit", "3"), "3 given without --trace"),
        (("--model", "phi-4", "--gpu", "h100", "--speed", "3"), "3 given without --trace"),
        (("--model", "phi-4"), "--gpu, --memory: none given"),
        (("--model", "phi-4", "--gpu", "x"), "--gpu: x given"),
        (("--model", "phi-4", "--memory", "80 bananas"), "--memory: 80 bananas given, allowed: a"),
        (("--model", "phi-4", "--gpu", "l4"), "at least two blocks"),
        (("--model", "phi-4", "--gpu", "h100", "--usable", "1.5"), "--usable: 1.5 given"),
        (("--model", "phi-4", "--gpu", "h100", "--live", "nan"), "--live: nan given"),
        (("--model", "phi-4", "--gpu", "h100", "--kv-dtype", "fp8"), "--kv-dtype: fp8 given"),
        (("--model", "phi-4", "--gpu", "h100", "--json", "/gone/x"), "--json: /gone/x cannot be"),
        (("--model", "phi-4", "--gpu", "h100", "--trace", "/gone/x"), "/gone/x"),
    ],
)
def test_bad_input_is_told_with_exit_status_2(arguments: tuple[str, ...], text: str) -> None:
    done = kvmmu("advise", *arguments)
    assert done.returncode == 2
    assert text in said(done)


def test_memory_and_bandwidth_may_be_told() -> None:
    done = kvmmu("advise", "--model", "phi-4", "--memory", "80GiB", "--bandwidth", "700",
                 "--kv-dtype", "float8_e4m3fn", "--live", "0.9", COLUMNS="300")  # fmt: skip
    assert done.returncode == 0
    assert "700 GB/s" in said(done)
    assert "--memory, --bandwidth" in said(done)
    assert "compaction pays for this load" in said(done)


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_a_narrow_page_loses_nothing_of_what_is_told(columns: str) -> None:
    done = kvmmu(
        *("advise", "--model", "llama-3.1-70b", "--gpu", "h100", "--tensor-parallel", "8"),
        *("--live", "0.9", "--shifts"),
        COLUMNS=columns,
    )
    assert done.returncode == 0
    assert "…" not in done.stdout
    assert done.stdout.count("(") == done.stdout.count(")")
    assert "compaction pays for this load" in said(done)
