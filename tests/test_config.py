"""Files of settings: what they become, and what is said about every kind of wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import kvmmu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmmu import MMU, Config, InvalidConfig, OutOfBlocks
from kvmmu.config import check, read
from kvmmu.config.files import MAX_BYTES, Document, Keys, Section
from kvmmu.config.settings import (
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_SEQUENCE_BLOCKS,
    MAX_SEQUENCES,
    PAGED_ATTENTION,
    PagedAttention,
    Sections,
)
from kvmmu.config.units import parse_bytes, parse_seconds, parse_share, show_bytes
from kvmmu.preheat import preheat
from kvmmu.replay.options import Options
from pydantic import Field

DOCS = Path(__file__).parent.parent / "docs"
SAMPLE = 'paged_attention: {page_size: 128MB, preheat_pages: 20, evict_policy: "LFU"}\n'
OTHER_SAMPLE = "paged_attention: {page_size: 512MB, block_size: 256, reserved_memory: 25%}\n"
MODEL = "model: {num_layers: 80, num_kv_heads: 8, head_dim: 128}\n"


class Files:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "k.yaml"

    def load(self, text: str | bytes) -> Config:
        self.path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return Config.load(self.path)

    def faults(self, text: str | bytes) -> list[str]:
        """What is said, a fault a line, without the folder; and the numbers agree with the text."""
        with pytest.raises(InvalidConfig) as error:
            self.load(text)
        said = str(error.value).replace(f"{self.path}:", "")
        assert error.value.numbers["file"] == str(self.path)
        for line, fault in zip(
            said.splitlines(), error.value.numbers.get("faults", ()), strict=False
        ):
            assert line == f"{fault['line']}: {fault['text']}"
            assert fault["key"] in fault["text"]
        return said.splitlines()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


# -- the samples ---------------------------------------------------------------------------


def test_the_first_sample_loads_as_it_stands(files: Files) -> None:
    config = files.load(SAMPLE)
    assert config.pages.page_size == 128 * 2**20
    assert config.start.preheat_pages == 20
    assert config.prefix.eviction == "lfu"
    resolved = config.resolve(num_blocks=1000, bytes_per_block=5 * 2**20)
    assert resolved.mmu["page_orders"] == (0, 2, 5)  # 25.6 blocks: nearer to 32 than to 16
    said = {became.key: became.became for became in resolved.became}
    assert "160MiB" in said["paged_attention.page_size"]
    assert said["paged_attention.preheat_pages"].startswith("640 blocks")
    mmu = config.mmu(1000, bytes_per_block=5 * 2**20)
    assert mmu.page_orders == [0, 2, 5]
    assert mmu.states()["empty"] == 1000
    mmu.validate()


def test_the_second_sample_loads_as_it_stands(files: Files) -> None:
    config = files.load(OTHER_SAMPLE)
    assert config.pool.block_size == 256
    assert config.memory.reserved_memory == 0.25
    assert config.resolve(num_blocks=1001).reserved_blocks == 251
    mmu = config.mmu(1000, bytes_per_block=2**26)
    assert mmu.block_size == 256
    assert mmu.page_orders == [0, 2, 3]


def test_defrag_and_prefetch_stand_for_the_trigger_and_the_hold(files: Files) -> None:
    for written, hold in (("true", 8), ("false", 0), ("5", 5)):
        config = files.load(
            f"paged_attention: {{auto_defrag: true, large_page_prefetch: {written}}}"
        )
        assert config.compaction.auto_compact is True
        assert config.pages.hold_blocks == hold
    mmu = files.load("paged_attention: {large_page_prefetch: 5}").mmu(64)
    mmu.open(np.zeros(20, dtype=np.int32))
    assert mmu.states()["held"] == 5


def test_every_name_of_other_systems_stands_for_a_setting() -> None:
    assert set(PAGED_ATTENTION) == set(PagedAttention.model_fields)
    for name, (section, key) in PAGED_ATTENTION.items():
        assert PagedAttention.model_fields[name].description is not None
        assert f"`{section}.{key}`" in str(PagedAttention.model_fields[name].description)
        assert key in type(getattr(Sections(), str(section))).model_fields


@pytest.mark.parametrize(
    ("size", "order"),
    [
        ("1KiB", 0),
        ("4MiB", 0),
        ("5MiB", 0),
        ("7MiB", 0),
        ("8MiB", 1),
        ("14MiB", 1),
        ("15MiB", 2),
        ("2560MiB", 9),
        ("1TiB", 9),
    ],
)
def test_a_page_size_becomes_the_nearest_order_and_it_is_said(
    files: Files, size: str, order: int
) -> None:
    resolved = files.load(f"pages: {{page_size: {size}}}").resolve(bytes_per_block=5 * 2**20)
    assert resolved.page_order == order
    (became,) = resolved.became
    assert became.given == size.replace("1024KiB", "1MiB")
    assert f"order {order}: pages of {1 << order} blocks" in became.became
    assert ("largest" in became.became) == (size == "1TiB")
    assert ("smallest" in became.became) == (size == "1KiB")


def test_memory_becomes_blocks_with_the_null_block_counted(files: Files) -> None:
    config = files.load(MODEL + "pool: {memory: 160GiB}\nmemory: {reserved_memory: 1GiB}\n")
    resolved = config.resolve()
    assert resolved.block_bytes == 80 * 2 * 8 * 128 * 2 * 16
    assert resolved.num_blocks == 160 * 2**30 // resolved.block_bytes - 1
    assert resolved.reserved_blocks == -(-(2**30) // resolved.block_bytes)


# -- what does not fit -----------------------------------------------------------------------

VALUES = [
    ("pool.block_size", "0", "0 given, allowed: a whole number, 1 to 4096"),
    ("pool.block_size", "-1", "-1 given, allowed: a whole number, 1 to 4096"),
    ("pool.block_size", "3.5", "3.5 given, allowed: a whole number, 1 to 4096"),
    ("pool.block_size", "3.0", "3.0 given, allowed: a whole number, 1 to 4096 (3)"),
    ("pool.block_size", "1e2", "100.0 given, allowed: a whole number, 1 to 4096 (100)"),
    ("pool.block_size", "true", "true given, allowed: a whole number, 1 to 4096"),
    ("pool.block_size", '"16"', '"16" given, allowed: a whole number, 1 to 4096 (without quotes)'),
    ("pool.block_size", "null", "null given, allowed: a whole number, 1 to 4096"),
    ("pool.block_size", "[16]", "[16] given, allowed: a whole number, 1 to 4096"),
    ("pool.num_blocks", "0", f"0 given, allowed: a whole number, 1 to {MAX_BLOCKS}, or null"),
    ("pool.anchor", "1", "1 given, allowed: a number, 0 to below 1"),
    ("pool.anchor", "1.5", "1.5 given, allowed: a number, 0 to below 1"),
    ("pool.anchor", "true", "true given, allowed: a number, 0 to below 1"),
    ("compaction.windows_below", "1.5", "1.5 given, allowed: a number, 0 to 1"),
    ("compaction.windows_below", ".nan", ".nan given, allowed: a number, 0 to 1"),
    ("compaction.windows_below", "-.inf", "-.inf given, allowed: a number, 0 to 1"),
    ("compaction.auto_compact", "1", "1 given, allowed: true or false"),
    ("compaction.auto_compact", "on", '"on" given, allowed: true or false'),
    ("compaction.budget_us", "0", "0 given, allowed: above 0, or null for no limit"),
    ("compaction.budget_us", "9" * 399, "999... given, allowed: a duration such as 200us"),
    ("prefix.eviction", "arc", '"arc" given, allowed: "lru" or "lfu"'),
    ("pages.page_orders", "[0, 10]", "10 given, allowed: a whole number, 0 to 9"),
    ("pages.page_orders", "[2]", "[2] given, allowed: 0 (single blocks) among them"),
    ("pages.page_orders", "[0, 2, 2]", "[0, 2, 2] given, allowed: each order once"),
    ("pages.page_size", "0", "0B given, allowed: above 0"),
    ("pages.page_size", "12mb", '"12mb" given, allowed: a size such as 128MiB'),
    ("memory.reserved_memory", "100%", '"100%" given, allowed: a share of the pool below 1'),
    ("memory.reserved_memory", "1.0", "1.0 given, allowed: a share of the pool below 1"),
    ("memory.reserved_memory", "true", "true given, allowed: a share of the pool below 1"),
    ("kvcache.device", "tpu", '"tpu" given, allowed: cpu, cuda, or cuda:N'),
    ("pool.null_block", "middle", '"middle" given, allowed: "last" or "first" or a whole number'),
    ("pool", "16", "16 given, allowed: a mapping"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "said"), VALUES)
def test_a_wrong_value_is_named_with_its_line_and_what_is_allowed(
    files: Files, key: str, value: str, said: str
) -> None:
    section, _, name = key.partition(".")
    text = (
        f"# a comment\n{section}:\n  {name}: {value}\n" if name else f"#\n#\n{section}: {value}\n"
    )
    (fault,) = files.faults(text)
    assert re.match(rf"3: {key}(\[\d\])?: ", fault)
    assert said in fault


CONTRADICTIONS = [
    (
        "pool: {placement: fifo}\ncompaction:\n  guarantee: 0",
        "3: compaction.guarantee: 0 given with",
    ),
    ("pool:\n  num_blocks: 10\n  memory: 1GiB", "3: pool.memory: 1GiB given with num_blocks = 10"),
    (
        "pool:\n  num_blocks: 10\n  max_sequence_tokens: 161",
        "3: pool.max_sequence_tokens: 161 given, allowed: 1 to 160, the pool (10 blocks of 16)",
    ),
    (
        "pool:\n  num_blocks: 10\n  max_blocks_per_sequence: 11",
        "3: pool.max_blocks_per_sequence: 11 given, allowed: 1 to 10",
    ),
    (
        "pool:\n  max_sequence_tokens: 9\n  max_blocks_per_sequence: 1",
        "3: pool.max_blocks_per_sequence",
    ),
    (
        "pool: {num_blocks: 10,\n\n null_block: 11}",
        "3: pool.null_block: 11 given, allowed: 0 to 10",
    ),
    ("pages:\n  page_orders: [0]\n  page_size: 1MiB", "3: pages.page_size: 1MiB given with"),
    (
        "pages:\n  huge_from: 100\n  medium_from: 101",
        "3: pages.medium_from: 101 given, allowed: 0 to",
    ),
    (
        "compaction:\n  compaction_start: .5\n  compaction_stop: .6",
        "3: compaction.compaction_stop: 0.6",
    ),
    (
        "compaction:\n\n  overlap: true",
        "3: compaction.overlap: true given with kvcache.device = cpu",
    ),
    (
        "kvcache:\n  kernel_block_size: 4\n  page_order: 3\npool: {null_block: first}",
        "3: kvcache.page_order: 3 given with kernel_block_size",
    ),
    (
        "kvcache:\n\n  kernel_block_size: 3",
        "3: kvcache.kernel_block_size: 3 given, allowed: a divisor",
    ),
    ("kvcache:\n\n  page_order: 3", "3: kvcache.page_order: 3 given with pool.null_block = last"),
    (
        "kvcache:\n  device: cuda\n  return_memory: true",
        "3: kvcache.return_memory: true given with",
    ),
    (
        "pool: {num_blocks: 600}\nstart:\n  preheat_pages: 2",
        "3: start.preheat_pages: 2 given, allowed: 0 to 1",
    ),
    (
        f"pool: {{num_blocks: 10}}\n{MODEL}memory: {{reserved_memory: 1GiB}}",
        "3: memory.reserved_memory: 1GiB given, 205 blocks, allowed: fewer than the pool's 10",
    ),
    (
        f"{MODEL}\npool: {{memory: 9MiB}}",
        "3: pool.memory: 9MiB given, allowed: at least two blocks",
    ),
    (
        f"{MODEL}\npool: {{memory: 99999999TiB}}",
        "3: pool.memory: 99999999TiB given, 20,971,519,790,283 blocks of 5,242,880 "
        f"bytes, allowed: at most {MAX_BLOCKS:,}",
    ),
    (
        "paged_attention:\n\n  auto_defrag: true\ncompaction: {auto_compact: true}",
        "3: paged_attention.auto_defrag: given twice, as compaction.auto_compact in line 4 too",
    ),
    (
        "paged_attention:\n  evict_policy: LRU\n  block_size: 6\nkvcache: {kernel_block_size: 4}",
        "4: kvcache.kernel_block_size: 4 given, allowed: a divisor of pool.block_size (6)",
    ),
    (
        "pool: {num_blocks: 16}\npaged_attention:\n  preheat_pages: 20",
        "3: paged_attention.preheat_pages: 20 given",
    ),
]


@pytest.mark.parametrize(("text", "said"), CONTRADICTIONS)
def test_what_does_not_go_together_is_named_as_the_file_has_it(
    files: Files, text: str, said: str
) -> None:
    (fault,) = files.faults(text)
    assert fault.startswith(said)
    assert "allowed: " in fault or "given twice" in fault


def test_every_fault_of_a_file_is_told_at_once_in_order(files: Files) -> None:
    faults = files.faults(
        "pool:\n  blocksize: 16\n  block_size: 0\nprefixes: {}\n"
        "paged_attention:\n  evict_polcy: LFU\n  auto_defrag: 1\nmodel: {num_layers: 2}\n"
    )
    assert [fault.split(": ", 2)[:2] for fault in faults] == [
        ["2", "pool.blocksize"],
        ["3", "pool.block_size"],
        ["4", "prefixes"],
        ["6", "paged_attention.evict_polcy"],
        ["7", "paged_attention.auto_defrag"],
        ["8", "model.num_kv_heads"],
        ["8", "model.head_dim"],
    ]
    assert "did you mean block_size or num_blocks?" in faults[0] and "max_sequences" in faults[0]
    assert "did you mean prefix?" in faults[2]
    assert "did you mean evict_policy?" in faults[3]
    assert faults[5].endswith("missing, needed: a whole number, 1 to 65536")


def test_a_dict_has_the_same_faults_without_lines() -> None:
    with pytest.raises(InvalidConfig) as error:
        Config.from_dict({"pool": {"block_size": True}}, name="engine.toml")
    assert str(error.value) == (
        "engine.toml: pool.block_size: true given, allowed: a whole number, 1 to 4096"
    )
    with pytest.raises(InvalidConfig, match=r"block_size: given twice, as pool\.block_size too$"):
        Config.from_dict({"pool": {"block_size": 8}, "paged_attention": {"block_size": 8}})
    for wrong in ({1: 2}, {"pool": object()}, {"pool": {"block_size": np.int64(3)}}):
        with pytest.raises(InvalidConfig, match=r"configuration: .*allowed"):
            Config.from_dict(wrong)  # type: ignore[arg-type]
    deep: dict[str, Any] = {}
    deep["pool"] = deep
    with pytest.raises(InvalidConfig, match="deeper than"):
        Config.from_dict(deep)


def test_what_the_settings_allow_the_core_allows_and_no_more() -> None:
    """The limits are written twice, here and in Rust."""
    cases = {
        "block_size": (1, MAX_BLOCK_SIZE),
        "max_sequences": (1, MAX_SEQUENCES),
        "hold_blocks": (0, 512),
        "budget_blocks": (1, MAX_BLOCKS),
        "windows_below": (0.0, 1.0),
        "gather_least": (0.0, 1.0),
        "compaction_stop": (0.0, 1.0),
        "anchor": (0.0, None),
    }
    fields = {
        name: field
        for section in (kvmmu.config.settings.Pool, kvmmu.config.settings.Pages,
                        kvmmu.config.settings.Compaction)
        for name, field in section.model_fields.items()
    }  # fmt: skip
    for name, (low, high) in cases.items():
        nodes: dict[str, Any] = {"table_nodes": 4, "max_blocks_per_sequence": 8}
        for value in (low, high):
            if value is not None:
                MMU(8, **{**nodes, name: value})
                assert accepted(fields[name], value)
        step = 1 if isinstance(low, int) else 0.001
        for value in (low - step, (1.0 if high is None else high + step)):
            with pytest.raises((InvalidConfig, OverflowError)):
                MMU(8, **{**nodes, name: value})
            assert not accepted(fields[name], value)
    for order in (-1, 10):
        with pytest.raises(InvalidConfig):
            MMU(8, page_orders=[0, order])
    with pytest.raises(InvalidConfig):
        MMU(MAX_BLOCKS + 1)
    with pytest.raises(InvalidConfig, match=str(MAX_SEQUENCE_BLOCKS)):
        MMU(MAX_SEQUENCE_BLOCKS + 8, max_blocks_per_sequence=MAX_SEQUENCE_BLOCKS + 1)


def accepted(field: Any, value: Any) -> bool:
    from pydantic import TypeAdapter, ValidationError

    try:
        # Of a setting that may be null the limits stand inside of its annotation.
        limited: Any = field.annotation
        if field.metadata:
            limited = Annotated[field.annotation, *field.metadata]
        TypeAdapter(limited).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def test_every_setting_of_the_mmu_and_the_defaults_are_those_of_the_mmu() -> None:
    import inspect

    signature = inspect.signature(MMU)
    resolved = Config().resolve(num_blocks=1000)
    for name, parameter in signature.parameters.items():
        if name in ("num_blocks", "table_nodes", "max_blocks_per_sequence"):
            continue
        assert resolved.mmu[name] == parameter.default, name
    for start in (0.2, 0.3, 0.5):  # an MMU lowers what it was not given, and so does a file
        alone = Config.from_dict({"compaction": {"compaction_start": start}})
        assert alone.resolve(num_blocks=8).mmu["compaction_stop"] == min(start, 0.3)
        alone.mmu(8)
    named = Config.from_dict({"pool": {"table_nodes": 9, "max_blocks_per_sequence": 3}})
    assert set(named.resolve(num_blocks=8).mmu) | {"num_blocks"} == set(signature.parameters)


# -- hostile files ---------------------------------------------------------------------------

HOSTILE = [
    (b"", "1: the file is empty, allowed: a mapping"),
    (b"# nothing\n", "1: the file is empty"),
    (b"- a\n", "1: [\"a\"] given, allowed: a mapping"),
    (b"just text\n", "1: \"just text\" given, allowed: a mapping"),
    (b"pool: {}\n\npool: {}\n", "3: pool: given twice, first in line 1"),
    (b"a: 1\n---\nb: 1\n", "2: a second document begins"),
    (b"a: 1\nb: [1\n", "this is not YAML"),
    (b"a: 1\n\tb: 2\n", "2: this is not YAML"),
    (b"a: &a [*a]\n", "1: alias *a: stands within what it stands for"),
    (b"a: 1\nb: *c\n", "2: alias *c: nothing above is called so"),
    (b"a: 1\nb: !!python/object/apply:os.system [ls]\n", "2: tag "),
    (b"a: 1\nb: !mine 3\n", "2: tag !mine"),
    (b"a: !!binary aGk=\n", "1: tag "),
    (b"a: !!int x\n", "1: tag "),
    (b"pool: !!set {}\n", "1: tag "),
    (b"a: &x {b: 1}\nc: {<<: *x}\n", "2: merge keys"),
    (b"1: 2\n", "1: key 1: is no text"),
    (b"true: 2\n", "1: key true: is no text"),
    (b"? [a]\n: 2\n", "1: a key that is no plain text"),
    (b"a: 1\nb: \x01\n", "2: character U+0001"),
    (b"a: 1\nb: \xff\n", "2: not UTF-8 (byte 0xff)"),
    ("a: 1\n".encode("utf-16"), "1: not UTF-8"),
    (b"[" * 60_000, "1: nested deeper than 32 levels"),
    (b"a: " + b"9" * 5000, "1: a number of 5000 characters"),
    (b"a: " + b"9" * 400 + b".5", "1: a number of 402 characters"),
    (b"#" * (MAX_BYTES + 1), " larger than 262144 bytes"),
    (b"a: !" + b"x" * 100_000 + b" 1", "1: tag !xxx"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), HOSTILE)
def test_a_hostile_file_is_refused_by_line(files: Files, text: bytes, said: str) -> None:
    (fault,) = files.faults(text)
    assert fault.startswith(said) or said in fault.partition(": ")[2]
    assert len(fault) < 600


def test_aliases_cannot_blow_a_file_up(files: Files) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (fault,) = files.faults("\n".join(lines))
    assert fault == "5: more than 50000 values, aliases written out"


def test_an_alias_may_stand_for_a_value_and_its_faults_are_where_they_were_written(
    files: Files,
) -> None:
    config = files.load("pool:\n  block_size: &n 32\nkvcache:\n  kernel_block_size: *n\n")
    assert config.kvcache.kernel_block_size == 32
    faults = files.faults("pool: &p\n  block_size: 0\npages: *p\n")
    assert faults[0].startswith("2: pool.block_size: 0 given")
    assert faults[1].startswith("2: pages.block_size: unknown key")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"), ("NO", "NO"), ("on", "on"), ("12:30", "12:30"), ("1_000", "1_000"),
        ("2001-01-01", "2001-01-01"), ("010", 10), ("0o10", 8), ("0x10", 16), ("1e3", 1000.0),
        (".5", 0.5), ("-7", -7), ("~", None), ("'1'", "1"), ("!!str 1", "1"), ("!!float 1", 1.0),
        ("=", "="), ("0b1", "0b1"), ("1.e2", 100.0), ("+.inf", float("inf")),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: Any) -> None:
    (tmp_path / "s").write_text(f"a: {text}\n")
    found = read(tmp_path / "s").data["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("what", ["gone.yaml", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, what: str) -> None:
    path = str(tmp_path / what)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Config.load(path)


@given(st.text(max_size=300) | st.binary(max_size=300))
def test_no_file_ends_otherwise_than_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    try:
        Config.load(path)
    except InvalidConfig as error:
        assert str(error).startswith(str(path))


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3)
    | st.dictionaries(st.sampled_from([*Sections.model_fields, "block_size", "page_size", "x",
                                       "num_layers", "paged_attention"]), below, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_no_data_ends_otherwise_than_taken_or_refused(data: Any) -> None:
    try:
        Config.from_dict(data)
    except InvalidConfig as error:
        assert "allowed" in str(error) or "needed" in str(error)


# -- lines -----------------------------------------------------------------------------------


def test_lines_are_those_of_the_keys_and_of_the_items(tmp_path: Path) -> None:
    path = tmp_path / "l.yaml"
    path.write_text(
        "# one\n\na:\n  b: 1\n  c: {d: 2,\n      e: 3}\n\n"
        "list:\n- 1\n-\n  x: >\n    long\n    text\n  y: 2\n"
    )
    document = read(path)
    expected: dict[Keys, int] = {
        (): 3, ("a",): 3, ("a", "b"): 4, ("a", "c"): 5, ("a", "c", "d"): 5, ("a", "c", "e"): 6,
        ("list",): 8, ("list", 0): 9, ("list", 1): 11, ("list", 1, "x"): 11, ("list", 1, "y"): 14,
        ("a", "gone"): 3, ("gone", "b"): 3, ("list", 7): 8,
    }  # fmt: skip
    assert {keys: document.line(keys) for keys in expected} == expected
    assert document.place(("a", "b")) == f"{path}:4"
    assert Document.of({"a": 1}).line(("a",)) == 0


class Arrival(Section):
    rate: Annotated[float, Field(gt=0)]
    kind: Literal["steady", "bursts"] = "steady"


class Scenario(Section):
    name: Annotated[str, Field(min_length=1)]
    arrivals: Annotated[tuple[Arrival, ...], Field(min_length=1)]
    shares: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        if self.shares and sum(self.shares.values()) != 1:
            yield ("shares",), f"{sum(self.shares.values()):g} together, allowed: 1"


def test_any_model_is_held_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: x\narrivals:\n- rate: 3\n- {rate: 1, kind: bursts}\nshares: {a: .5, b: .5}\n"
    )
    scenario = check(Scenario, read(path))
    assert scenario.arrivals[1].kind == "bursts"
    assert scenario.arrivals[0].rate == 3.0
    path.write_text(
        "name: ''\narrivals:\n- rate: 0\n- {rate: 1, kind: burst}\n- {}\nshares:\n  a: 2\n  b: x\n"
    )
    with pytest.raises(InvalidConfig) as error:
        check(Scenario, read(path))
    assert str(error.value).replace(f"{path}:", "").splitlines() == [
        '1: name: "" given, allowed: text of 1 or more characters',
        "3: arrivals[0].rate: 0 given, allowed: a number, above 0",
        '4: arrivals[1].kind: "burst" given, allowed: "steady" or "bursts"',
        "5: arrivals[2].rate: missing, needed: a number, above 0",
        "7: shares.a: 2 given, allowed: a number, 0 to 1",
        '8: shares.b: "x" given, allowed: a number, 0 to 1',
    ]
    path.write_text("name: x\narrivals: [{rate: 1}]\nshares: {a: .5}\n")
    with pytest.raises(InvalidConfig, match=r"s\.yaml:3: shares: 0\.5 together, allowed: 1"):
        check(Scenario, read(path))


# -- units -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [("128MB", 2**27), ("128MiB", 2**27), ("1.5GiB", 3 * 2**29), ("2 kB", 2048), ("3K", 3072),
     ("7B", 7), (1073741824, 2**30), (0, 0), ("1TiB", 2**40)],
)  # fmt: skip
def test_sizes_are_powers_of_1024_however_they_are_written(text: Any, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["128", "1.3B", "-1MB", "MB", "1e3MB", "128mb", "", "²MB", 1.5, True]
)
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="allowed: a size"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_sizes_are_shown_as_they_are_read(count: int) -> None:
    assert parse_bytes(show_bytes(count)) == count


def test_shares_and_durations() -> None:
    assert [parse_share(x) for x in ("25%", 0.25, 1, "0.5 %", 0)] == [0.25, 0.25, 1.0, 0.005, 0.0]
    assert [parse_seconds(x) for x in ("200us", "200µs", "30s", "5min", 2, "1.5h", "10ms")] == (
        [0.0002, 0.0002, 30.0, 300.0, 2.0, 5400.0, 0.01]
    )
    for wrong in ("101%", -0.1, 1.1, "25", True, float("nan"), None):
        with pytest.raises(ValueError, match="allowed: a share"):
            parse_share(wrong)
    for wrong in ("5", "5 weeks", -1, True, float("inf"), None):
        with pytest.raises(ValueError, match="allowed: a duration"):
            parse_seconds(wrong)


# -- there and back --------------------------------------------------------------------------

_SIZES = st.integers(1, 2**45) | st.sampled_from(["1MiB", "512MB", "3GiB"])
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.fixed_dictionaries(
            {"num_layers": st.integers(1, 200), "num_kv_heads": st.integers(1, 128),
             "head_dim": st.integers(1, 1024)},
            optional={"v_head_dim": st.none() | st.integers(0, 1024),
                      "dtype": st.sampled_from(["float16", "float8_e4m3fn"])},
        ),
        "pool": st.fixed_dictionaries({}, optional={
            "num_blocks": st.integers(512 * 9, MAX_BLOCKS), "block_size": st.integers(1, 4096),
            "max_sequences": st.integers(1, 262_144), "anchor": st.floats(0, 1, exclude_max=True),
            "seed": st.integers(0, 2**63 - 1), "null_block": st.sampled_from(["last", "first", 7]),
            "dedup": st.booleans(),
        }),
        "pages": st.fixed_dictionaries({}, optional={"page_size": _SIZES}) | st.fixed_dictionaries(
            {"page_orders": st.sets(st.integers(1, 9)).map(lambda orders: [0, *orders])}),
        "compaction": st.fixed_dictionaries({}, optional={
            "windows_below": st.floats(0, 1), "gather_least": st.floats(0, 1),
            "budget_us": st.none() | st.floats(0.001, 1e9) | st.sampled_from(["200us", "1ms"]),
            "budget_bytes": st.none() | _SIZES, "guarantee": st.none() | st.integers(0, 9),
            "compaction_start": st.floats(0.3, 1),
        }),
        "memory": st.fixed_dictionaries(
            {"reserved_memory": st.floats(0, 0.9) | st.sampled_from(["25%", "12.5%", 0])}),
        "start": st.fixed_dictionaries({"preheat_pages": st.integers(0, 9)}),
        "paged_attention": st.fixed_dictionaries({}, optional={
            "evict_policy": st.sampled_from(["LRU", "lfu"]), "auto_defrag": st.none(),
        }),
    },
)  # fmt: skip


@given(SETTINGS)
def test_yaml_read_back_is_the_same_configuration(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]
) -> None:
    config = Config.from_dict(data)
    path = tmp_path_factory.getbasetemp() / "back.yaml"
    path.write_text(config.to_yaml())
    again = Config.load(path)
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_yaml() == config.to_yaml()
    assert Config.from_dict(config.to_dict()) == config
    for section in data:
        if section != "paged_attention":
            for name in data[section]:
                assert config.says(section, name)


def test_configurations_differ_when_a_setting_does() -> None:
    one = Config.from_dict({"pool": {"block_size": 8}})
    assert one != Config()
    assert one == Config.from_dict({"paged_attention": {"block_size": 8}})
    assert Config() == Config.from_dict({})


# -- what is built ---------------------------------------------------------------------------


def test_what_is_missing_for_a_pool_is_named(files: Files) -> None:
    config = files.load("\npaged_attention: {page_size: 1MiB, reserved_memory: 1MiB}\n")
    with pytest.raises(InvalidConfig) as error:
        config.mmu()
    said = str(error.value)
    assert "pool.num_blocks: missing" in said
    assert "2: paged_attention.page_size: in bytes, needed: a section model" in said
    assert "2: paged_attention.reserved_memory: in bytes" in said
    for wrong in (0, -1, True, 2.0, "8"):
        with pytest.raises(InvalidConfig, match="allowed is a whole number from 1"):
            config.mmu(wrong)  # type: ignore[arg-type]


def test_settings_reach_the_mmu_and_arguments_win_over_them() -> None:
    config = Config.from_dict(
        {"pool": {"num_blocks": 64, "null_block": "first", "max_sequence_tokens": 100},
         "pages": {"page_orders": [0, 3]}, "compaction": {"budget_blocks": 7}}
    )  # fmt: skip
    mmu = config.mmu()
    assert (mmu.num_blocks, mmu.null_block, mmu.budget_blocks) == (64, 0, 7)
    assert (mmu.page_orders, mmu.max_blocks_per_sequence) == ([0, 3], 7)
    assert config.mmu(32, budget_blocks=9).budget_blocks == 9
    assert config.mmu(32).num_blocks == 32


def test_preheating_an_mmu_leaves_it_as_it_was() -> None:
    mmu, fresh = MMU(2048, 4), MMU(2048, 4)
    found = preheat(mmu, 3)
    assert (found.pages, found.whole, found.order, found.blocks, found.bytes) == (3, 3, 9, 1536, 0)
    assert mmu.states() == fresh.states()
    mmu.validate()
    tokens = np.arange(3000, dtype=np.int32)
    assert mmu.match(np.zeros(3000, dtype=np.int32)) == 0
    assert (mmu.block_table(mmu.open(tokens)) == fresh.block_table(fresh.open(tokens))).all()
    with pytest.raises(OutOfBlocks) as error:
        preheat(mmu, 4)
    assert error.value.numbers == {"needed": 2048, "available": 1298, "num_blocks": 2048}
    for arguments in ((-1,), (True,), (1.0,), (1, 3), (1, True)):
        with pytest.raises(InvalidConfig):
            preheat(mmu, *arguments)
    short = MMU(2048, 4, max_blocks_per_sequence=100)
    with pytest.raises(InvalidConfig, match="max_blocks_per_sequence"):
        preheat(short, 1)
    few = MMU(2048, 4, max_blocks_per_sequence=512, max_sequences=2)
    with pytest.raises(kvmmu.OutOfTables):
        preheat(few, 3)
    assert few.states()["empty"] == 2048
    few.validate()


def test_importing_kvmmu_and_its_help_need_neither_pydantic_nor_yaml() -> None:
    assert "Config" in dir(kvmmu)
    code = (
        "import sys; sys.modules.update(pydantic=None, yaml=None)\n"
        "import inspect, kvmmu, pydoc; kvmmu.MMU(8)\n"
        "'Config' in dir(kvmmu) and sys.exit('listed')\n"
        "inspect.getmembers(kvmmu); pydoc.render_doc(kvmmu)\n"
        "try: kvmmu.Config\n"
        "except kvmmu.MissingExtra as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kvmmu[config]" in done.stdout


# -- the replay ------------------------------------------------------------------------------


def test_the_replay_has_the_same_names_for_what_is_the_same() -> None:
    options = Options()
    resolved = Config().resolve(num_blocks=1000)
    for name in ("placement", "page_orders", "hold_blocks", "eviction", "page_aware", "seed",
                 "block_size", "budget_blocks", "guarantee"):  # fmt: skip
        assert getattr(options, name) == resolved.mmu[name], name


# -- the document ----------------------------------------------------------------------------


def test_the_document_lists_every_key_with_its_default_and_what_is_allowed() -> None:
    text = (DOCS / "configuration.md").read_text()
    assert kvmmu.config.reference() in text, "docs: paste kvmmu.config.reference() again"


def test_the_files_in_the_document_load(files: Files) -> None:
    text = (DOCS / "configuration.md").read_text()
    found = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(found) >= 3
    for example in found:
        files.load(example)
