"""The command line: exit codes, messages, JSON, Ctrl-C."""

from __future__ import annotations

import gzip
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kvmmu import cli
from kvmmu.commands.around import show

from .ctrl_c import press

FIELDS = {
    "requests", "finished", "refused", "preempted", "prefix_hit_rate", "prefix_hit_rate_listed",
    "generated_tokens", "steps", "moved_blocks", "aborted_moves", "verified_tokens", "mismatches",
    "fragmentation_ratio_mean", "runs_per_sequence_mean", "wasted_blocks", "live_peak",
    "live_mean", "wall_s", "mmu_s", "mmu_us_per_step", "peak_running",
}  # fmt: skip
COMMAND = [sys.executable, "-m", "kvmmu.cli"]


def kvmmu(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user would; no traceback, whatever happens."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "100", "TERM": "dumb", **environment},
    )
    assert "Traceback" not in done.stderr
    return done


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What a command said, boxes and line breaks taken out."""
    return " ".join((done.stdout + done.stderr).translate({0x2502: " "}).split())


# -- fine ----------------------------------------------------------------------------------


def test_a_sample_runs_clean_under_the_guarantee_and_with_faults(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    done = kvmmu(
        *("replay", "--sample", "--limit", "80", "--blocks", "6000", "--verify", "--json", file),
        *("--guarantee", "--inject-faults", "0.2"),
    )
    assert done.returncode == 0, said(done)
    for word in ("moves aborted", "guarantee", "no mismatch"):
        assert word in said(done)
    figures = json.loads(file.read_text())
    assert figures["aborted_moves"] > 0 and figures["faults_injected"] > 0
    assert figures["guarantee_broken"] == figures["mismatches"] == 0


def test_a_sample_runs_clean_and_its_json_has_every_field(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    done = kvmmu(
        "replay", "--sample", "--limit", "80", "--placement", "scatter", "--verify", "--json", file
    )
    assert done.returncode == 0, said(done)
    assert done.stderr == ""
    for word in ("requests", "prefix cache", "moved blocks", "no mismatch"):
        assert word in said(done)
    figures = json.loads(file.read_text())
    assert figures.keys() >= FIELDS
    assert figures["finished"] == 80
    assert figures["mismatches"] == figures["wasted_blocks"] == 0
    assert figures["moved_blocks"] > 0
    assert figures["verified_tokens"] > 64 * figures["steps"]
    assert set(figures["mmu_us_per_step"]) == {"mean", "p50", "p99"}


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    done = kvmmu("replay", "--sample", "--limit", "20", "--quiet", "--json", tmp_path / "r.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "r.json").exists()


def test_trace_files_of_both_formats_run_plain_and_packed(tmp_path: Path) -> None:
    mooncake = tmp_path / "a"
    mooncake.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n' * 3
    )
    azure = tmp_path / "b"
    azure.write_bytes(
        gzip.compress(
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
            b"2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:48.68,20,1"
        )
    )
    for file, count in ((mooncake, 3), (azure, 2)):
        done = kvmmu("replay", file, "--blocks", "500", "--verify", "--json", tmp_path / "r.json")
        assert done.returncode == 0, said(done)
        assert json.loads((tmp_path / "r.json").read_text())["finished"] == count


def test_the_article_sample_takes_a_rate(tmp_path: Path) -> None:
    counts = []
    for rate in ("1", "4"):
        file = tmp_path / "r.json"
        done = kvmmu(
            "replay",
            "--sample",
            "article",
            "--rate",
            rate,
            "--minutes",
            "0.5",
            "--json",
            file,
            "-q",
        )
        assert done.returncode == 0, said(done)
        counts.append(json.loads(file.read_text())["requests"])
    assert counts[1] > counts[0]


def test_an_optional_sample_value_is_told_from_the_next_argument() -> None:
    spell = cli._with_optional_values
    assert spell(["replay", "--sample"]) == ["replay", "--sample=small"]
    assert spell(["--sample", "article", "-q"]) == ["--sample=article", "-q"]
    assert spell(["--sample", "--rate", "2"]) == ["--sample=small", "--rate", "2"]
    assert spell(["--sample=article"]) == ["--sample=article"]
    assert spell(["--", "--sample"]) == ["--", "--sample"]


def test_version_and_help_are_no_errors() -> None:
    done = kvmmu("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("kvmmu ")
    done = kvmmu("replay", "--help")
    assert done.returncode == 0
    assert "--one-at-a-time" in done.stdout
    assert "sabotage" not in done.stdout
    assert "90000" in done.stdout
    assert "kvmmu[html]" in done.stdout  # no markup to rich


# -- a check failed ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["skip-copy", "skip-commit", "early-reuse", "wrong-block"])
def test_each_sabotage_exits_1_and_names_the_place(kind: str) -> None:
    done = kvmmu(
        "replay", "--sample", "--limit", "80", "--placement", "scatter", "--sabotage", kind
    )
    assert done.returncode == 1
    for word in ("mismatch: request", "sequence", "position", "block", "check failed"):
        assert word in done.stderr


# -- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--blocks", "0"], "--blocks: 0 given, allowed: 1 to"),
        (["--blocks", "-5"], "allowed"),
        (["--blocks", "many"], "kvmmu: --blocks: 'many' given, allowed: a whole number"),
        (["--blocks", "1.5"], "--blocks: '1.5' given, allowed: a whole number"),
        (["--step-ms", "long"], "kvmmu: --step-ms: 'long' given, allowed: a number"),
        (["--block-size", "0"], "allowed: 1 to 4096"),
        (["--budget-blocks", "0"], "allowed"),
        (["--max-running", "0"], "allowed: 1 to"),
        (["--prefill-tokens-per-s", "nan"], "allowed"),
        (["--step-ms", "0"], "allowed"),
        (["--speed", "0"], "allowed"),
        (["--speed", "inf"], "allowed"),
        (["--limit", "0"], "--limit: 0 given, allowed: 1 to"),
        (["--rate", "0"], "allowed"),
        (["--minutes", "0"], "allowed"),
        (["--seed", "-1"], "allowed"),
        (["--compaction", "maybe"], "kvmmu: --compaction: 'maybe' given, allowed: on or off"),
        (["--placement", "best"], "allowed: address, fullest, fifo or scatter"),
        (["--eviction", "fifo"], "allowed: lru or lfu"),
        (["--page-aware", "some"], "--page-aware: 'some' given, allowed: on or off"),
        (["--guarantee", "--placement", "fifo"], "--guarantee: given with --placement fifo, allo"),
        (["--guarantee-slack", "2"], "--guarantee-slack: 2 given without --guarantee, allowed: "),
        (["--minutes", "2"], "--minutes: 2 given without --sample article, allowed: with"),
        (["--skip-bad-lines"], "--skip-bad-lines: given with --sample, allowed: with TRACE"),
        (["--sabotage", "all"], "allowed: skip-copy"),
        (["--page-orders", "2,9"], "0 among them"),
        (["--page-orders", "0,10"], "0 to 9"),
        (["--page-orders", "0,two"], "--page-orders"),
        (["--page-orders", ""], "--page-orders"),
        (["--unknown", "1"], "No such option"),
        (["trace.jsonl"], "TRACE (trace.jsonl) and --sample given"),
    ],
)
def test_a_bad_option_exits_2_and_says_what_is_allowed(arguments: list[str], words: str) -> None:
    done = kvmmu("replay", "--sample", *arguments)
    assert done.returncode == 2
    assert words in said(done)


@pytest.mark.parametrize("option", ["--rate", "--minutes"])
def test_what_a_sample_is_made_with_is_refused_with_a_trace(option: str, tmp_path: Path) -> None:
    done = kvmmu("replay", tmp_path / "t", option, "4", COLUMNS="300")
    assert done.returncode == 2
    assert f"{option}: 4 given with TRACE ({tmp_path / 't'}), allowed: with --sample" in done.stderr


OFF = ("--compaction off", "with compaction off, allowed: with --compaction on")
ALONE = ("--one-at-a-time", "with --one-at-a-time, allowed: without it")


@pytest.mark.parametrize("option", ["--budget-blocks 8", "--inject-faults 0.2", "--guarantee"])
@pytest.mark.parametrize(("beside", "where"), [OFF, ALONE])
def test_what_only_moves_take_is_refused_without_them(
    option: str, beside: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(option, beside, where, capsys)


@pytest.mark.parametrize(
    "option",
    [
        *("--compaction on", "--max-running 8", "--speed 2", "--prefill-tokens-per-s 9"),
        *("--step-ms 3", "--hold-blocks 1", "--page-orders 0", "--page-aware off"),
    ],
)
def test_what_only_a_clock_takes_is_refused_without_one(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(option, *ALONE, capsys)


def refused(option: str, beside: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "--sample", *beside.split(), *option.split()]) == 2
    name, _, value = option.partition(" ")
    given = f"{value} given" if value else "given"
    assert capsys.readouterr().err == f"kvmmu: {name}: {given} {where}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["map", "x", "--by", "foo"], "--by: 'foo' given, allowed: state, sequence or page"),
        (["map"], "FILE: none given; kvmmu map --help says what it is"),
        (["fuzz", "a:b", "--driver", "x"], "--driver: 'x' given, allowed: random or hypothesis"),
        (["soak", "drop", "--hours", "x"], "--hours: 'x' given, allowed: a number"),
        (["config", "check", "x", "--blocks", "y"], "--blocks: 'y' given, allowed: a whole number"),
        (["replay", "--sample=foo"], "--sample: 'foo' given, allowed: small or article"),
    ],
)
def test_every_command_says_a_value_it_does_not_take_in_the_same_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"kvmmu: {words}\n"


@pytest.mark.parametrize("further", [[], ["--verify"], ["--one-at-a-time"]])
def test_a_replay_that_refused_every_request_is_no_success(
    further: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    done = kvmmu("replay", "--sample", "--blocks", "10", "--limit", "9", "--json", file, *further)
    figures = json.loads(file.read_text())
    assert done.returncode == 1 and figures["refused"] == figures["requests"] == 9
    needs = "request 0 needs 199 blocks of 16 tokens, the pool has 10"
    assert done.stderr.startswith(f"kvmmu: check failed: every request was refused: {needs}\n")
    assert ("nothing was verified" in done.stderr) == ("--verify" in further)


def test_huge_pages_that_were_missed_are_told_where_there_could_be_any(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    for orders, told in (("0,2,9", True), ("0,2", False)):
        done = kvmmu(
            *("replay", "--sample", "--limit", "40", "--page-orders", orders, "--json", file)
        )
        missed = json.loads(file.read_text())["huge_missed"]
        assert (f"huge pages missed {missed:,} regions" in said(done)) == told


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("120", 120), ("", 150), ("x", 150)])
def test_columns_win_over_the_width_of_what_is_piped(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    show("word " * 100, piped_width=150)
    longest = max(len(line) for line in capsys.readouterr().out.splitlines())
    assert width - 5 <= longest <= width


def test_no_trace_exits_2() -> None:
    done = kvmmu("replay")
    assert done.returncode == 2
    assert "--sample" in done.stderr


def test_a_bad_trace_exits_2_with_file_line_and_field(tmp_path: Path) -> None:
    good = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}'
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{good}\n{good.replace('600', '-600')}\n{good[:20]}\n{good}\n")
    done = kvmmu("replay", file)
    assert done.returncode == 2
    assert f"{file}, line 2, input_length: -600 given, allowed" in done.stderr
    done = kvmmu("replay", file, "--skip-bad-lines", "--json", tmp_path / "r.json")
    assert done.returncode == 0
    assert "bad lines 2 skipped" in said(done)
    assert json.loads((tmp_path / "r.json").read_text())["skipped_lines"] == 2


@pytest.mark.parametrize("kind", ["missing", "directory", "empty", "cut gzip", "10 MB line"])
def test_a_file_that_is_no_trace_exits_2(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "trace"
    if kind == "directory":
        file.mkdir()
    elif kind == "empty":
        file.touch()
    elif kind == "cut gzip":
        file.write_bytes(gzip.compress(os.urandom(5000).hex().encode())[:2000])
    elif kind == "10 MB line":
        file.write_bytes(b"{" + b" " * 10_000_000 + b"}\n")
    done = kvmmu("replay", file)
    assert done.returncode == 2
    assert str(file) in done.stderr


def test_an_output_that_cannot_be_written_is_said_before_the_run(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "no" / "r.json", Path("/proc/r.json")):
        done = kvmmu("replay", tmp_path / "no trace is looked at", "--json", file)
        assert done.returncode == 2
        assert f"--json: {file} cannot be written" in done.stderr
    kvmmu("replay", tmp_path / "missing", "--json", tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists(), "the check leaves no file behind"


def test_figures_are_kept_when_the_table_cannot_be_printed(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "replay", "--sample", "--limit", "5", "--json", str(file)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert "standard output cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(file.read_text())["finished"] == 5


@pytest.mark.parametrize("stdout", ["/dev/full", "closed"])
@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("--help",), ("doctor",), ("soak", "drop", "--show")],
    ids=" ".join,
)
def test_what_cannot_be_printed_is_a_sentence(arguments: tuple[str, ...], stdout: str) -> None:
    """Every way in which commands print: ours, and libraries' (silent when it is closed)."""
    command = shlex.join([*COMMAND, *arguments])
    to = ">&-" if stdout == "closed" else f"> {stdout}"
    done = subprocess.run(
        f"{command} {to}", shell=True, stderr=subprocess.PIPE, text=True, timeout=60
    )
    if stdout == "closed" and arguments[0].startswith("--"):
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 2
    assert done.stderr.startswith("kvmmu: the standard output cannot be written: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named_with_its_extra(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from kvmmu.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert package in done.stderr
    assert "kvmmu[cli]" in done.stderr


# -- Ctrl-C and the terminal ---------------------------------------------------------------


def test_ctrl_c_prints_the_table_so_far_and_exits_130(tmp_path: Path) -> None:
    # Sabotage makes it speak as soon as the loop runs, which is when Ctrl-C is sent.
    arguments = ["--sample", "article", "--minutes", "600", "--sabotage", "wrong-block"]
    running = subprocess.Popen(
        [*COMMAND, "replay", *arguments, "--json", str(tmp_path / "r.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    assert "mismatch" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    out, error = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in error
    assert "(interrupted)" in out
    assert "requests" in out
    assert json.loads((tmp_path / "r.json").read_text())["interrupted"] is True


def test_ctrl_c_while_a_benchmark_warms_the_cores_is_heard_once() -> None:
    """A terminal sends it to every process."""
    status, error = press([*COMMAND, "bench", "step"], children=2)
    assert status == 130, error
    assert "Traceback" not in error


def test_a_progress_bar_is_drawn_on_a_terminal_only() -> None:
    master, slave = pty.openpty()
    running = subprocess.Popen(
        [*COMMAND, "replay", "--sample", "--limit", "100", "--verify"],
        stdout=subprocess.PIPE,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(slave)
    drawn = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # how Linux says that the other end is gone
            break
        if not piece:
            break
        drawn += piece
    os.close(master)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert b"requests" in drawn
    assert b"100" in drawn
    assert b"no mismatch" in out
    assert b"\x1b" not in out


# -- doctor --------------------------------------------------------------------------------


def test_doctor_names_what_is_there_and_what_brings_the_rest() -> None:
    done = kvmmu("doctor")
    assert done.returncode == 0, said(done)
    for word in ("kvmmu", "NumPy", "CPU", "huge pages", "torch", "CuPy", "NVRTC", "CUDA driver"):
        assert word in done.stdout
    assert "self check passed" in said(done)


def test_doctor_imports_nothing_just_to_look() -> None:
    code = (
        "import sys; from kvmmu import doctor; found = doctor.examine(); "
        "assert not {'torch', 'cupy', 'rich'} & set(sys.modules); "
        "assert all(f.found or f.note for f in found)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_verification_that_read_nothing_is_no_success() -> None:
    done = kvmmu("replay", "--sample", "--blocks", "5", "--limit", "3", "--verify", "--quiet")
    assert done.returncode == 1
    assert "nothing was verified" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["replay", "--sample", "--json", "{file}", "--html", "{file}"],
        ["soak", "shift", "--hours", "0.01", "--json", "{file}", "--html", "{link}"],
        ["advise", "--model", "qwen3-8b", "--gpu", "l40s", "--json", "{file}",
         "--write-config", "{file}"],
    ],
)  # fmt: skip
def test_two_files_that_are_one_are_refused_before_the_run(
    command: list[str], tmp_path: Path
) -> None:
    file, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(file)
    done = kvmmu(*(word.format(file=file, link=link) for word in command))
    assert done.returncode == 2
    assert "allowed: another" in done.stderr
    assert str(tmp_path) in done.stderr
    assert not done.stdout
    assert not file.exists()


def test_a_file_that_cannot_be_written_costs_neither_the_table_nor_the_others(
    tmp_path: Path,
) -> None:
    html = tmp_path / "page.html"
    asked: list[str | Path] = ["--sample", "--limit", "20", "--json", "/dev/full", "--html", html]
    done = kvmmu("replay", *asked)
    assert done.returncode == 2
    assert "--json: /dev/full cannot be written: No space left" in done.stderr
    assert "finished" in done.stdout
    assert html.stat().st_size > 100_000
