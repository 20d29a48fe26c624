"""Trace files: reads them, or says exactly what is wrong with them.

What lives here: :class:`Trace` (requests as columns), :class:`TraceError` (file, line, field,
problem) and :func:`read`, which tells a Mooncake JSONL from an Azure CSV, plain or gzip, by the
content and never by the name. What never lives here: tokens, a clock, and any guess: a value
that is missing, negative, fractional, not finite or out of range is refused with its name.

Requests that are not in the order of their timestamps are sorted, stably (requests of the same
instant keep the order of the file), and :attr:`Trace.out_of_order` says how many had to be.

Formats:

- Mooncake (FAST'25): one JSON object a line, ``timestamp`` (ms), ``input_length``,
  ``output_length`` (tokens), ``hash_ids`` (one id for each 512 tokens of the prompt, equal
  prefixes have equal ids; the last one stands for a partial block when the length is no
  multiple of 512).
- Azure LLM inference (Splitwise, ISCA'24): CSV with the columns ``TIMESTAMP`` (ISO date and time),
  ``ContextTokens``, ``GeneratedTokens``; others are ignored. Its prompts share nothing.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_LINE_BYTES", "MAX_TOKENS", "TRACE_BLOCK", "Trace", "TraceError", "read"]

TRACE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""
MAX_LINE_BYTES = 1 << 20
"""Longest line accepted. A prompt of 4 M tokens needs about 80 KiB."""
MAX_TOKENS = 1 << 24
"""Longest prompt, and most generated tokens, that a line may ask for."""
MAX_MILLISECONDS = 1 << 53
MAX_HASH_ID = (1 << 63) - 1

WHOLE_LINE = "whole line"
WHOLE_FILE = "whole file"
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A trace that cannot be read.

    Attributes:
        file: path as given.
        line: line number from 1, or None when no single line is at fault.
        field: the field or column at fault, ``"whole line"`` or ``"whole file"``.
        problem: what was found and what is allowed.
    """

    def __init__(self, file: str, line: int | None, field: str, problem: str) -> None:
        super().__init__(file, line, field, problem)
        self.file = file
        self.line = line
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{where}, {self.field}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, as columns.

    Attributes:
        name: what to call it in a report.
        kind: ``"mooncake"``, ``"azure"`` or ``"sample"``.
        arrival_s: float64 [n], seconds, not falling; only differences matter.
        prompt_tokens: int64 [n], each >= 1.
        output_tokens: int64 [n], each >= 0.
        hash_ids: uint64 [k], the ids of all requests behind each other; empty when the trace has
            none (every token is then unique to its request).
        hash_starts: int64 [n + 1], where the ids of request i begin.
        skipped_lines: bad lines left out (``--skip-bad-lines``).
        out_of_order: requests that arrived before the one in the line above.
        parents: int64 [n] or None: the request (an earlier one) that each continues, or -1. A
            continuation's prompt begins with all tokens of its parent, prompt and output, and its
            ``arrival_s`` is the pause after its parent's end. Only traces that are made have it.
    """

    name: str
    kind: str
    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    hash_ids: npt.NDArray[np.uint64]
    hash_starts: npt.NDArray[np.int64]
    skipped_lines: int = 0
    out_of_order: int = 0
    parents: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    def ids_of(self, request: int) -> npt.NDArray[np.uint64]:
        """uint64 [ceil(prompt / 512)], or empty."""
        return self.hash_ids[self.hash_starts[request] : self.hash_starts[request + 1]]

    def positions(self, request: int) -> int:
        """Positions that a request has written when it ends: the last token that it generates is
        never computed on."""
        return int(self.prompt_tokens[request]) + max(int(self.output_tokens[request]) - 1, 0)

    def head(self, count: int) -> Trace:
        """The first ``count`` requests."""
        if count >= len(self):
            return self
        return Trace(
            name=self.name,
            kind=self.kind,
            arrival_s=self.arrival_s[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            hash_ids=self.hash_ids[: self.hash_starts[count]],
            hash_starts=self.hash_starts[: count + 1],
            skipped_lines=self.skipped_lines,
            out_of_order=self.out_of_order,
        )


def read(
    path: str | os.PathLike[str], *, limit: int | None = None, skip_bad_lines: bool = False
) -> Trace:
    """Reads a trace file.

    Args:
        path: the file; gzip is recognised by its first two bytes.
        limit: stop after so many good requests.
        skip_bad_lines: leave bad lines out and count them. What is wrong with the whole file (not
            readable, cut-off gzip, empty, no known format) is an error all the same.

    Raises:
        TraceError: the first thing that is wrong.
    """
    file = os.fspath(path)
    lines = _Lines(file)
    if Path(file).is_dir():
        raise TraceError(file, None, WHOLE_FILE, "is a directory, not a trace file")
    try:
        with open(file, "rb") as raw:
            if raw.peek(2)[:2] != b"\x1f\x8b":
                return _read(lines, raw, limit, skip_bad_lines)
            with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
                return _read(lines, unpacked, limit, skip_bad_lines)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            file, lines.number + 1, WHOLE_FILE, f"the gzip data is cut off or damaged ({error})"
        ) from None
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise TraceError(file, None, WHOLE_FILE, f"cannot be read: {reason}") from None


class _Stream(Protocol):
    """A plain or a gzip file."""

    def readline(self, size: int, /) -> bytes: ...


class _Lines:
    """The lines of a file, with their numbers; never holds more than one, nor a long one."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.number = 0

    def walk(self, stream: _Stream, bad: Callable[[TraceError], None]) -> Iterator[str]:
        """Lines that are not blank. ``bad`` is told of one that is no text or too long."""
        while line := stream.readline(MAX_LINE_BYTES + 1):
            self.number += 1
            if len(line) > MAX_LINE_BYTES:
                bad(self.error(WHOLE_LINE, f"longer than {MAX_LINE_BYTES:,} bytes"))
                while line and not line.endswith(b"\n"):
                    line = stream.readline(MAX_LINE_BYTES)
                continue
            try:
                text = line.decode("utf-8-sig" if self.number == 1 else "utf-8")
            except UnicodeDecodeError:
                bad(self.error(WHOLE_LINE, "not UTF-8 text"))
                continue
            text = text.strip()
            if text:
                yield text

    def error(self, field: str, problem: str) -> TraceError:
        return TraceError(self.file, self.number, field, problem)


@dataclass(slots=True)
class _Columns:
    """Grows by a request a line, then becomes a Trace."""

    kind: str
    seconds: list[float] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    def finish(self, name: str, skipped: int) -> Trace:
        seconds = np.array(self.seconds, dtype=np.float64)
        order = np.argsort(seconds, kind="stable")
        out_of_order = int(np.count_nonzero(np.diff(seconds) < 0))
        ids = [self.ids[i] for i in order.tolist()] if self.ids else []
        starts = np.zeros(len(seconds) + 1, dtype=np.int64)
        if ids:
            np.cumsum([len(row) for row in ids], out=starts[1:])
        flat = np.fromiter(
            (value for row in ids for value in row), dtype=np.uint64, count=int(starts[-1])
        )
        return Trace(
            name=name,
            kind=self.kind,
            arrival_s=seconds[order] - seconds.min(),
            prompt_tokens=np.array(self.prompts, dtype=np.int64)[order],
            output_tokens=np.array(self.outputs, dtype=np.int64)[order],
            hash_ids=flat,
            hash_starts=starts,
            skipped_lines=skipped,
            out_of_order=out_of_order,
        )


def _read(lines: _Lines, stream: _Stream, limit: int | None, skip: bool) -> Trace:
    skipped = 0

    def bad(error: TraceError) -> None:
        nonlocal skipped
        if not skip:
            raise error
        skipped += 1

    columns: _Columns | None = None
    parse: Callable[[str], None] | None = None
    for text in lines.walk(stream, bad):
        try:
            if parse is None or columns is None:
                if text.startswith("{"):
                    columns = _Columns("mooncake")
                    parse = _mooncake(lines, columns)
                else:
                    columns = _Columns("azure")
                    parse = _azure(lines, columns, text)
                    continue
            parse(text)
        except TraceError as error:
            if parse is None and error.field != WHOLE_LINE:
                raise  # a header that lacks a column spoils every line
            bad(error)
            continue
        if limit is not None and len(columns.seconds) >= limit:
            break
    if columns is None or not columns.seconds:
        why = "no requests in it"
        if skipped:
            why = f"no requests left: all of its {skipped} lines are bad"
        elif lines.number == 0:
            why = "the file is empty"
        raise TraceError(lines.file, None, WHOLE_FILE, why)
    return columns.finish(Path(lines.file).name, skipped)


# -- Mooncake ------------------------------------------------------------------------------


def _mooncake(lines: _Lines, columns: _Columns) -> Callable[[str], None]:
    def parse(text: str) -> None:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise lines.error(WHOLE_LINE, f"not JSON, or cut off ({what})") from None
        if not isinstance(record, dict):
            raise lines.error(WHOLE_LINE, f"a JSON object was expected, not {_show(record)}")
        milliseconds = _whole(lines, record, "timestamp", 0, MAX_MILLISECONDS)
        prompt = _whole(lines, record, "input_length", 1, MAX_TOKENS)
        output = _whole(lines, record, "output_length", 0, MAX_TOKENS)
        ids = _hash_ids(lines, record, prompt)
        columns.seconds.append(milliseconds / 1000)
        columns.prompts.append(prompt)
        columns.outputs.append(output)
        columns.ids.append(ids)

    return parse


def _whole(lines: _Lines, record: dict[str, Any], name: str, low: int, high: int) -> int:
    if name not in record:
        raise lines.error(name, "missing")
    value = record[name]
    allowed = f"allowed: a whole number from {low:,} to {high:,}"
    if isinstance(value, float) and value.is_integer() and abs(value) <= high:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise lines.error(name, f"{_show(value)} given, {allowed}")
    return value


def _hash_ids(lines: _Lines, record: dict[str, Any], prompt: int) -> list[int]:
    name = "hash_ids"
    if name not in record:
        raise lines.error(name, "missing")
    ids = record[name]
    if not isinstance(ids, list):
        raise lines.error(name, f"{_show(ids)} given, a list of whole numbers was expected")
    expected = -(-prompt // TRACE_BLOCK)
    if len(ids) != expected:
        raise lines.error(
            name,
            f"{len(ids)} ids do not fit input_length {prompt}: "
            f"{expected} expected, one for each {TRACE_BLOCK} tokens",
        )
    for value in ids:
        # type(), not isinstance(): True is an int.
        if type(value) is not int or not 0 <= value <= MAX_HASH_ID:
            raise lines.error(
                name, f"{_show(value)} in it, allowed: whole numbers from 0 to 2^63 - 1"
            )
    return ids


# -- Azure ---------------------------------------------------------------------------------


def _azure(lines: _Lines, columns: _Columns, header: str) -> Callable[[str], None]:
    names = [name.strip() for name in _cells(lines, header)]
    missing = [name for name in AZURE_COLUMNS if name not in names]
    if len(missing) == len(AZURE_COLUMNS):
        raise lines.error(
            WHOLE_LINE,
            "neither a Mooncake JSON object nor the header of an Azure CSV "
            f"({', '.join(AZURE_COLUMNS)})",
        )
    if missing:
        raise lines.error(missing[0], "the CSV has no such column")
    when, prompt, output = (names.index(name) for name in AZURE_COLUMNS)

    def parse(text: str) -> None:
        cells = _cells(lines, text)
        if len(cells) != len(names):
            lost = names[len(cells)] if len(cells) < len(names) else WHOLE_LINE
            raise lines.error(lost, f"{len(cells)} cells in the line, {len(names)} in the header")
        seconds = _seconds(lines, cells[when])
        tokens = _count(lines, "ContextTokens", cells[prompt], 1)
        generated = _count(lines, "GeneratedTokens", cells[output], 0)
        columns.seconds.append(seconds)
        columns.prompts.append(tokens)
        columns.outputs.append(generated)

    return parse


def _cells(lines: _Lines, text: str) -> list[str]:
    try:
        return next(csv.reader(io.StringIO(text), strict=True))
    except (csv.Error, StopIteration) as error:
        raise lines.error(WHOLE_LINE, f"not CSV ({error})") from None


def _seconds(lines: _Lines, cell: str) -> float:
    """ISO date and time; digits behind the microsecond are dropped, no zone means UTC."""
    try:
        moment = datetime.fromisoformat(cell.strip())
    except ValueError:
        raise lines.error(
            "TIMESTAMP", f"{_show(cell)} is no date and time (2023-11-16 18:15:46.680590)"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _count(lines: _Lines, name: str, cell: str, low: int) -> int:
    digits = cell.strip()
    if (
        not (digits.isascii() and digits.isdigit())
        or len(digits) > 20
        or not low <= int(digits) <= MAX_TOKENS
    ):
        raise lines.error(
            name, f"{_show(cell)} given, allowed: a whole number from {low:,} to {MAX_TOKENS:,}"
        )
    return int(digits)


def _show(value: object) -> str:
    """A value in a message: never long, whatever stood in the file."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of about {value.bit_length() * 3 // 10} digits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
