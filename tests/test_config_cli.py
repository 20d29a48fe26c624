"""``kvmmu config`` and ``--config``: what is typed wins, what is wrong is exit status 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvmmu import Config

from .test_cli import kvmmu, said

FILE = """\
pool:
  block_size: 32
  null_block: first
  anchor: 0.5
pages: {page_orders: [0, 3], hold_blocks: 2}
paged_attention: {evict_policy: LFU, reserved_memory: 25%, preheat_pages: 3, auto_defrag: false}
compaction: {budget_blocks: 5, windows_below: 0.5, budget_us: 3}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "k.yaml"
    path.write_text(FILE)
    return path


def replayed(tmp_path: Path, *arguments: str | Path) -> tuple[dict[str, Any], str]:
    out = tmp_path / "o.json"
    done = kvmmu("replay", "--sample", "--limit", "20", "--json", out, *arguments)
    assert done.returncode == 0, said(done)
    return json.loads(out.read_text()), done.stderr


def test_a_file_is_checked_and_said_what_it_becomes(file: Path) -> None:
    done = kvmmu("config", "check", file, "--blocks", "1000")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == f"{file}: fine"
    assert "paged_attention.reserved_memory: 25% becomes 250 blocks" in lines
    assert "paged_attention.preheat_pages: 3 becomes 24 blocks, touched at start" in lines
    file.write_text("paged_attention: {page_size: 128MB, preheat_pages: 20}\n")
    done = kvmmu("config", "check", file)
    assert "paged_attention.page_size: 128MiB becomes an order, once" in done.stdout
    done = kvmmu("config", "check", file, "--bytes-per-block", "5MiB", "--blocks", "640")
    assert "becomes order 5: pages of 32 blocks, 160MiB" in done.stdout
    for arguments, text in (
        (
            ("--bytes-per-block", "5MiB", "--blocks", "639"),
            f"{file}:1: paged_attention.preheat_pages",
        ),
        (("--bytes-per-block", "five"), "--bytes-per-block: five given, allowed: a size"),
        (("--blocks", "0"), "num_blocks = 0: allowed is a whole number from 1"),
    ):
        done = kvmmu("config", "check", file, *arguments)
        assert done.returncode == 2
        assert text in done.stderr


def test_all_that_is_wrong_is_said_with_exit_status_2(file: Path) -> None:
    file.write_text("pool:\n  block_size: 0\n  blocksize: 3\n")
    for command in (("config", "check"), ("config", "show"), ("replay", "--sample", "--config")):
        done = kvmmu(*command, file)
        assert done.returncode == 2
        assert f"{file}:2: pool.block_size: 0 given" in done.stderr
        assert f"{file}:3: pool.blocksize: unknown key" in done.stderr
        assert done.stdout == ""
    done = kvmmu("config", "check", file.parent / "gone")
    assert done.returncode == 2
    assert "gone: cannot be read" in done.stderr


def test_the_whole_configuration_is_shown_and_loads_again(file: Path, tmp_path: Path) -> None:
    for arguments, config in (((), Config()), ((file,), Config.load(file))):
        done = kvmmu("config", "show", *arguments)
        assert done.returncode == 0
        (tmp_path / "again.yaml").write_text(done.stdout)
        assert Config.load(tmp_path / "again.yaml") == config


def test_a_replay_takes_the_settings_and_says_which_it_has_no_use_for(
    file: Path, tmp_path: Path
) -> None:
    figures, complaints = replayed(tmp_path, "--config", file)
    options = figures["options"]
    expected = {
        "blocks": 2048, "block_size": 32, "page_orders": [0, 3], "hold_blocks": 2,
        "eviction": "lfu", "reserved_blocks": 512, "compaction": False, "budget_blocks": 5,
        "further": {"anchor": 0.5}, "windows_below": 0.5, "guarantee": None,
        "placement": "address", "preheat_pages": 3,
    }  # fmt: skip
    assert {name: options[name] for name in expected} == expected
    assert figures["preheated"]["blocks"] == 24
    assert sorted(complaints.splitlines()) == [
        f"kvmmu: {file}:3: pool.null_block counts for nothing in a replay",
        f"kvmmu: {file}:7: compaction.budget_us counts for nothing in a replay",
    ]


def test_settings_that_are_the_default_are_no_news(file: Path, tmp_path: Path) -> None:
    """A whole file, as kvmmu writes it, names everything."""
    file.write_text(Config().to_yaml())
    assert replayed(tmp_path, "--config", file)[1] == ""
    done = kvmmu(
        *("advise", "--model", "llama-3.1-8b", "--gpu", "h100", "--write-config", file),
        COLUMNS="80",
    )
    assert done.returncode == 0, said(done)
    lines = file.read_text().splitlines()
    device = 1 + next(n for n, line in enumerate(lines) if line.strip() == "device: cuda")
    complaints = replayed(tmp_path, "--config", file)[1]
    assert complaints == f"kvmmu: {file}:{device}: kvcache.device counts for nothing in a replay\n"


def test_what_is_typed_wins_over_the_file(file: Path, tmp_path: Path) -> None:
    figures, _ = replayed(
        *(tmp_path, "--config", file, "--blocks", "1000", "--block-size", "8"),
        *("--eviction", "lru", "--compaction", "on", "--page-orders", "0,4", "--hold-blocks", "8"),
        *("--budget-blocks", "32"),
    )
    options = figures["options"]
    expected = {
        "blocks": 1000, "block_size": 8, "page_orders": [0, 4], "hold_blocks": 8,
        "eviction": "lru", "compaction": True, "reserved_blocks": 250, "budget_blocks": 32,
    }  # fmt: skip
    assert {name: options[name] for name in expected} == expected


def test_what_the_file_does_not_say_is_as_without_it(file: Path, tmp_path: Path) -> None:
    file.write_text("{}")
    bare, _ = replayed(tmp_path)
    with_file, _ = replayed(tmp_path, "--config", file)
    assert with_file["options"] == bare["options"]
    assert bare["options"]["compaction"] is True
    assert bare["options"]["reserved_blocks"] == 20
    assert bare["preheated"] is None


def test_a_pool_in_bytes_is_replayed_in_blocks(file: Path, tmp_path: Path) -> None:
    file.write_text(
        "model: {num_layers: 80, num_kv_heads: 8, head_dim: 128}\n"
        "pool: {memory: 10GiB}\npages: {page_size: 40MiB}\n"
    )
    figures, _ = replayed(tmp_path, "--config", file)
    assert figures["options"]["blocks"] == 2047
    assert figures["options"]["page_orders"] == [0, 2, 3]
    file.write_text("pages: {page_size: 40MiB}\n")
    done = kvmmu("replay", "--sample", "--config", file)
    assert done.returncode == 2
    assert f"{file}:1: pages.page_size: in bytes, needed: a section model" in done.stderr


def test_the_reserve_holds_new_requests_back(file: Path, tmp_path: Path) -> None:
    """More is kept free on average; nothing is refused for good."""
    file.write_text("memory: {reserved_memory: 70%}\n")
    options = ("--blocks", "1500", "--rate", "60", "--limit", "120")
    kept, _ = replayed(tmp_path, "--config", file, *options)
    free, _ = replayed(tmp_path, *options)
    assert kept["finished"] == free["finished"] == 120
    assert kept["peak_running"] < free["peak_running"]
