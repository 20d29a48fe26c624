"""Trace files: good ones are read whole, bad ones are refused by file, line and field."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvmmu.replay import sample
from kvmmu.replay.traces import MAX_LINE_BYTES, TraceError, read

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def record(**changes: Any) -> str:
    """A good Mooncake line, with changes; a value of ... drops the field."""
    fields: dict[str, Any] = {
        "timestamp": 27,
        "input_length": 1200,
        "output_length": 5,
        "hash_ids": [0, 1, 2],
    }
    fields.update(changes)
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def write(tmp_path: Path, *lines: str, name: str = "trace") -> Path:
    file = tmp_path / name
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def refused(file: Path, **options: Any) -> TraceError:
    with pytest.raises(TraceError) as caught:
        read(file, **options)
    assert str(file) in str(caught.value)
    assert caught.value.file == str(file)
    return caught.value


# -- good files ----------------------------------------------------------------------------


def test_a_mooncake_file_is_read_field_by_field(tmp_path: Path) -> None:
    trace = read(write(tmp_path, record(), "", record(timestamp=3000, hash_ids=[0, 1, 7])))
    assert (trace.kind, len(trace)) == ("mooncake", 2)
    assert trace.arrival_s.tolist() == [0.0, 2.973]
    assert trace.prompt_tokens.tolist() == [1200, 1200]
    assert trace.output_tokens.tolist() == [5, 5]
    assert trace.ids_of(0).tolist() == [0, 1, 2]
    assert trace.ids_of(1).tolist() == [0, 1, 7]


def test_an_azure_file_is_read_with_its_columns_in_any_order(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "Model,GeneratedTokens,ContextTokens,TIMESTAMP",
        "a,44,374,2023-11-16 18:15:46.6805900",
        '"b, c",109,396,2023-11-16 18:15:50.9951690\r',
    )
    trace = read(file)
    assert (trace.kind, len(trace)) == ("azure", 2)
    assert trace.arrival_s == pytest.approx([0, 4.314579], abs=1e-5)
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]
    assert len(trace.ids_of(0)) == 0


@pytest.mark.parametrize("lines", [[record()], [HEADER, "2023-11-16 18:15:46,3,4"]])
def test_content_and_not_the_name_tells_the_format_and_the_packing(
    tmp_path: Path, lines: list[str]
) -> None:
    plain = write(tmp_path, *lines, name="wrong.gz")
    packed = tmp_path / "wrong.txt"
    packed.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert read(plain).prompt_tokens.tolist() == read(packed).prompt_tokens.tolist()


def test_a_byte_order_mark_and_windows_line_ends_are_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b"\xef\xbb\xbf" + HEADER.encode() + b"\r\n2023-11-16 18:15:46,3,4\r\n\r\n")
    assert read(file).prompt_tokens.tolist() == [3]


def test_requests_out_of_order_are_sorted_stably_and_counted(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        record(timestamp=5000, output_length=1),
        record(timestamp=1000, output_length=2, hash_ids=[0, 8, 9]),
        record(timestamp=5000, output_length=3),
    )
    trace = read(file)
    assert trace.output_tokens.tolist() == [2, 1, 3]
    assert trace.arrival_s.tolist() == [0, 4, 4]
    assert trace.ids_of(0).tolist() == [0, 8, 9]
    assert trace.out_of_order == 1


def test_limit_stops_reading_before_a_later_fault(tmp_path: Path) -> None:
    assert len(read(write(tmp_path, record(), record(), "broken"), limit=2)) == 2


def test_a_whole_number_written_as_a_float_is_a_whole_number(tmp_path: Path) -> None:
    assert read(write(tmp_path, record(input_length=1200.0))).prompt_tokens.tolist() == [1200]


# -- bad fields ----------------------------------------------------------------------------

NUMBERS = ("timestamp", "input_length", "output_length")


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize(
    "value",
    [-1, 0.5, float("nan"), float("inf"), 10**18, 1e300, "7", None, True, [1], {}],
    ids=str,
)
def test_a_bad_number_names_its_field_and_what_is_allowed(
    tmp_path: Path, field: str, value: object
) -> None:
    error = refused(write(tmp_path, record(), record(**{field: value})))
    assert (error.line, error.field) == (2, field)
    assert "allowed" in str(error)
    assert field in str(error)


def test_a_number_of_thousands_of_digits_is_refused_in_a_short_sentence(tmp_path: Path) -> None:
    line = record().replace("1200", "9" * 4000)
    error = refused(write(tmp_path, line))
    assert error.line == 1
    assert len(error.problem) < 200
    error = refused(write(tmp_path, record().replace("1200", "9" * 50_000)))
    assert error.line == 1


def test_a_prompt_of_nothing_is_refused(tmp_path: Path) -> None:
    assert refused(write(tmp_path, record(input_length=0, hash_ids=[]))).field == "input_length"


@pytest.mark.parametrize("field", [*NUMBERS, "hash_ids"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    error = refused(write(tmp_path, record(**{field: ...})))
    assert (error.line, error.field, error.problem) == (1, field, "missing")


@pytest.mark.parametrize(
    "ids",
    [[], [0, 1], [0, 1, 2, 3], [0, 1, -2], [0, 1, 2.5], [0, 1, True], [0, 1, "2"], [0, 1, 2**63]],
    ids=str,
)
def test_hash_ids_that_do_not_fit_are_refused(tmp_path: Path, ids: object) -> None:
    error = refused(write(tmp_path, record(hash_ids=ids)))
    assert (error.line, error.field) == (1, "hash_ids")


@pytest.mark.parametrize("ids", [None, 7, "0", {}], ids=str)
def test_hash_ids_that_are_no_list_are_refused(tmp_path: Path, ids: object) -> None:
    assert refused(write(tmp_path, record(hash_ids=ids))).field == "hash_ids"


# -- bad lines -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [record()[:40], "{", record() + "}", "[1, 2]", "7", "{" * 100_000, "{'timestamp': 1}"],
    ids=["cut", "brace", "two", "list", "number", "nested", "quotes"],
)
def test_a_line_that_is_no_json_object_is_refused(tmp_path: Path, line: str) -> None:
    error = refused(write(tmp_path, record(), line))
    assert (error.line, error.field) == (2, "whole line")


def test_a_line_of_10_mb_is_refused_without_being_read_whole(tmp_path: Path) -> None:
    long = record(padding="x" * 10_000_000)
    error = refused(write(tmp_path, record(), long, record()))
    assert (error.line, error.field) == (2, "whole line")
    assert f"{MAX_LINE_BYTES:,} bytes" in error.problem
    trace = read(write(tmp_path, record(), long, record()), skip_bad_lines=True)
    assert (len(trace), trace.skipped_lines) == (2, 1)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(record().encode() + b"\n\xff\xfe\x00\x01\n")
    error = refused(file)
    assert (error.line, error.field) == (2, "whole line")


def test_a_file_of_another_kind_is_refused_at_its_first_line(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "once upon a time"))
    assert (error.line, error.field) == (1, "whole line")
    assert "Mooncake" in error.problem
    assert "Azure" in error.problem


@pytest.mark.parametrize("column", HEADER.split(","))
def test_a_csv_without_a_column_names_it_even_when_bad_lines_are_skipped(
    tmp_path: Path, column: str
) -> None:
    header = ",".join(name for name in HEADER.split(",") if name != column)
    file = write(tmp_path, header, "1,2")
    for skip in (False, True):
        error = refused(file, skip_bad_lines=skip)
        assert (error.line, error.field) == (1, column)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("2023-11-16 18:15:46,374", "GeneratedTokens"),
        ("2023-11-16 18:15:46", "ContextTokens"),
        ("2023-11-16 18:15:46,374,44,9", "whole line"),
        ("yesterday,374,44", "TIMESTAMP"),
        ("nan,374,44", "TIMESTAMP"),
        (",374,44", "TIMESTAMP"),
        ("2023-13-16 18:15:46,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:46,-1,44", "ContextTokens"),
        ("2023-11-16 18:15:46,0,44", "ContextTokens"),
        ("2023-11-16 18:15:46,3.5,44", "ContextTokens"),
        ("2023-11-16 18:15:46,NaN,44", "ContextTokens"),
        ("2023-11-16 18:15:46,,44", "ContextTokens"),
        ("2023-11-16 18:15:46,374,-4", "GeneratedTokens"),
        ("2023-11-16 18:15:46,374,1e3", "GeneratedTokens"),
        ("2023-11-16 18:15:46,374,999999999999", "GeneratedTokens"),
        ("2023-11-16 18:15:46,374," + "9" * 5000, "GeneratedTokens"),
        ("2023-11-16 18:15:46,374,\u0664", "GeneratedTokens"),
        ('2023-11-16 18:15:46,374,"44', "whole line"),
    ],
)
def test_a_bad_csv_line_names_its_column(tmp_path: Path, line: str, field: str) -> None:
    error = refused(write(tmp_path, HEADER, "2023-11-16 18:15:40,1,1", line))
    assert (error.line, error.field) == (3, field)
    assert len(str(error)) < 400


def test_skipped_lines_are_counted_and_the_others_kept(tmp_path: Path) -> None:
    file = write(tmp_path, "junk", record(), record()[:30], record(timestamp=-1), record())
    trace = read(file, skip_bad_lines=True)
    assert (len(trace), trace.skipped_lines) == (2, 3)
    file = write(tmp_path, HEADER, "2023-11-16 18:15:46,374,44", "x,1,1", "2023-11-16 18:15:46,3")
    trace = read(file, skip_bad_lines=True)
    assert (len(trace), trace.skipped_lines) == (1, 2)


def test_a_file_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "junk", "junk"), skip_bad_lines=True)
    assert error.field == "whole file"
    assert "2 lines are bad" in error.problem


# -- bad files -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n\n", HEADER], ids=["empty", "blank", "header"])
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    assert refused(write(tmp_path, text)).field == "whole file"


def test_an_empty_gzip_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(gzip.compress(b""))
    assert "empty" in refused(file).problem


def test_a_directory_a_missing_and_an_unreadable_file_are_refused(tmp_path: Path) -> None:
    assert "directory" in refused(tmp_path).problem
    assert "cannot be read" in refused(tmp_path / "missing").problem
    # Reading it from the start is an I/O error for everybody, root included.
    assert "cannot be read" in refused(Path("/proc/self/mem")).problem
    if os.geteuid() != 0:
        file = write(tmp_path, record())
        file.chmod(0)
        assert "cannot be read" in refused(file).problem


@pytest.mark.parametrize("skip", [False, True])
def test_a_gzip_file_that_was_cut_is_refused_wherever_the_cut_is(
    tmp_path: Path, skip: bool
) -> None:
    random = np.random.default_rng(0)
    lines = [record(timestamp=int(random.integers(10**6))) for _ in range(200)]
    whole = gzip.compress("\n".join(lines).encode())
    file = tmp_path / "trace.jsonl.gz"
    for cut in (3, 12, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        file.write_bytes(whole[:cut])
        error = refused(file, skip_bad_lines=skip)
        assert error.field == "whole file"
        assert "gzip" in error.problem
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    file.write_bytes(damaged)
    assert "gzip" in refused(file).problem or error.line is not None


def test_an_error_crosses_a_process_border_with_its_parts(tmp_path: Path) -> None:
    error = refused(write(tmp_path, record(timestamp=-1)))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.line, again.field) == (1, "timestamp")


# -- samples -------------------------------------------------------------------------------


def test_a_seed_makes_the_same_sample_again_and_another_one_does_not() -> None:
    for make in (sample.small, sample.article):
        one, again, other = make(5), make(5), make(6)
        assert one.prompt_tokens.tolist() == again.prompt_tokens.tolist()
        assert one.hash_ids.tolist() == again.hash_ids.tolist()
        assert one.prompt_tokens.tolist() != other.prompt_tokens.tolist()


def test_the_small_sample_is_a_trace_that_could_be_read(tmp_path: Path) -> None:
    made = sample.small(1)
    lines = [
        json.dumps(
            {
                "timestamp": round(float(made.arrival_s[i]) * 1000),
                "input_length": int(made.prompt_tokens[i]),
                "output_length": int(made.output_tokens[i]),
                "hash_ids": made.ids_of(i).tolist(),
            }
        )
        for i in range(len(made))
    ]
    trace = read(write(tmp_path, *lines))
    assert trace.hash_ids.tolist() == made.hash_ids.tolist()
    starts = [tuple(trace.ids_of(i)[:2].tolist()) for i in range(len(trace))]
    assert len(set(starts)) < len(starts) / 2, "chats share their beginnings"


def test_the_article_sample_has_the_mix_that_it_claims() -> None:
    trace = sample.article(0, rate=5.63, minutes=60)
    count = len(trace)
    assert count == pytest.approx(5.63 * 3600, rel=0.03)
    longest = trace.prompt_tokens.max()
    assert longest == 128 * 1024
    over_16k = trace.prompt_tokens > 16 * 1024
    assert over_16k.mean() == pytest.approx(0.30, abs=0.02)  # almost every long one is
    over_100k = trace.prompt_tokens > 100 * 1024
    assert over_100k.sum() / (0.30 * count) == pytest.approx(0.13, abs=0.02)
    assert trace.output_tokens.max() == 10_000
    short = trace.output_tokens[~over_16k]
    assert short.mean() == pytest.approx(300, rel=0.1)


def test_the_published_traces_are_read_whole(traces: Path) -> None:
    mooncake = read(traces / "mooncake_conversation.jsonl")
    assert len(mooncake) == 12_031
    assert int(mooncake.prompt_tokens.sum()) == 144_793_823
    assert mooncake.out_of_order == 0
    azure = read(traces / "azure_conv_2023.csv")
    assert len(azure) == 19_366
