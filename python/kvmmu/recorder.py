"""The flight recorder: what was asked of a manager, call by call, and the same calls again.

What lives here: reading a recording (:func:`read`), carrying it out again on a new manager
(:class:`Player`, :func:`replay`), the shortest part of it that shows a failure (:func:`shortest`)
and that part as a test (:func:`as_test`). What never lives here: writing one. The compiled core
does that, beside each call, when ``KVMMU_RECORD`` names a file or ``MMU(record=...)`` does.

The format, version 1. Fixed numbers are little-endian, *number* is LEB128::

    file    "KVMMUREC", version u32, length u32, crc32 u32, that many bytes of JSON, frame ...
    frame   "KFRM", raw bytes u32, stored bytes u32, unix time in us u64, crc32 of the stored
            bytes u32, crc32 of the 24 bytes before u32, LZ4 block
    record  operation u8, length number, body

The JSON holds ``kvmmu`` (version) and ``mmu`` (the arguments of ``MMU``). Records do not span
frames. An operation is a call with its arguments, or 0: what came of a call (its number, counted
from 0; then 0 and the number that it returned, or 1 and the class of the error). Calls that change
nothing (``match``, ``quote``, ``info``, ``measure``, ...) are not recorded, and no bytes of KV are.
Tokens are: a recording says what users have written.

With one calling thread a recording is exact. Calls of several threads stand in the order in which
they began, which need not be that in which they took effect.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ._core import MMU, _unpack_records
from .errors import InternalError, InvalidRecording, KVCacheError

if TYPE_CHECKING:
    from .testing.faults import AllocatorFault

__all__ = [
    "Call",
    "Failure",
    "Player",
    "Recording",
    "Replayed",
    "as_test",
    "read",
    "replay",
    "shortest",
]

VERSION = 1
_MAGIC, _FRAME = b"KVMMUREC", b"KFRM"
_HEAD = struct.Struct("<8sIII")
_FRAME_HEAD = struct.Struct("<4sIIQI")
_U32 = struct.Struct("<I")
MAX_FRAME = 1 << 28
"""Bytes of a frame: the largest call (a prompt of 4 M tokens has 16 MB) and room."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        number: in the recording, from 0.
        name: of the method.
        arguments: by name. Sequences, steps, tables, plans, moves and leases are the numbers that
            they had when it was recorded.
        returned: the number that later calls name, if any.
        error: class of the error that it raised.
    """

    number: int
    name: str
    arguments: Mapping[str, Any]
    returned: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """All that a file holds.

    Attributes:
        version: of kvmmu.
        settings: arguments of ``MMU``.
        calls: in order.
        truncated: offset behind the last whole frame of a file that ends within the next one, as
            after a crash; None: it is whole.
    """

    version: str
    settings: dict[str, Any]
    calls: list[Call]
    truncated: int | None


# -- reading -------------------------------------------------------------------------------------


def read(file: str | Path) -> Recording:
    """Reads a recording. One that ends within a frame is read up to the frame before.

    Raises:
        InvalidRecording: it is none, of another version, or damaged; says where.
        OSError: it cannot be read.
    """
    data = Path(file).read_bytes()
    if len(data) < _HEAD.size:
        raise InvalidRecording(
            f"{file}: {len(data)} bytes, a recording has at least {_HEAD.size}", offset=len(data)
        )
    magic, version, length, checksum = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise InvalidRecording(f"{file}: is no recording of kvmmu", offset=0)
    if version != VERSION:
        raise InvalidRecording(
            f"{file}: format {version}, this kvmmu reads {VERSION}", offset=8, version=version
        )
    text = data[_HEAD.size : _HEAD.size + length]
    if len(text) < length:
        raise InvalidRecording(f"{file}: ends within its head, at {len(data)}", offset=len(data))
    if zlib.crc32(text) != checksum:
        raise InvalidRecording(f"{file}: the head at {_HEAD.size} is damaged", offset=_HEAD.size)
    try:
        head = json.loads(text)
        kvmmu, settings = str(head["kvmmu"]), dict(head["mmu"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRecording(
            f"{file}: the head at {_HEAD.size} cannot be read: {error}", offset=_HEAD.size
        ) from None
    reader = _Reader(str(file))
    at = _HEAD.size + length
    truncated = None
    while at < len(data):
        frame = _frame(str(file), data, at)
        if frame is None:
            truncated = at
            break
        raw, end = frame
        reader.records(raw, at)
        at = end
    return Recording(kvmmu, settings, reader.calls, truncated)


def _frame(file: str, data: bytes, at: int) -> tuple[bytes, int] | None:
    """The records of the frame at an offset, and where it ends; None: the file ends within it."""
    size = _FRAME_HEAD.size + _U32.size
    head = data[at : at + size]
    if not _FRAME.startswith(head[:4]) and head[:4] != _FRAME:
        raise InvalidRecording(f"{file}: no frame at {at}", offset=at)
    if len(head) < size:
        return None
    _, raw_size, stored_size, _, checksum = _FRAME_HEAD.unpack_from(head)
    if zlib.crc32(head[: _FRAME_HEAD.size]) != _U32.unpack_from(head, _FRAME_HEAD.size)[0]:
        raise InvalidRecording(f"{file}: the head of the frame at {at} is damaged", offset=at)
    stored = data[at + size : at + size + stored_size]
    if len(stored) < stored_size:
        return None
    if zlib.crc32(stored) != checksum:
        raise InvalidRecording(f"{file}: the frame at {at} is damaged", offset=at)
    if raw_size > MAX_FRAME:
        raise InvalidRecording(
            f"{file}: the frame at {at} says {raw_size} bytes, at most {MAX_FRAME} are allowed",
            offset=at,
        )
    try:
        raw = _unpack_records(stored, raw_size)
    except ValueError as error:
        raise InvalidRecording(f"{file}: the frame at {at}: {error}", offset=at) from None
    return raw, at + size + stored_size


class _Body:
    """Takes values out of a record, in order."""

    def __init__(self, data: memoryview, refuse: Callable[[str], InvalidRecording]) -> None:
        self.data, self.at, self.refuse = data, 0, refuse

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise self.refuse("a record ends too early")
        taken = self.data[self.at : self.at + count]
        self.at += count
        return taken

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if value >= 1 << 64:
            raise self.refuse("a number is too large")
        return value

    def id(self) -> int:
        value = self.number()
        return value - (1 << 64) if value >> 63 else value

    def flag(self) -> bool:
        return bool(self.number())

    def optional(self) -> int | None:
        value = self.number()
        return value - 1 if value else None

    def bytes(self) -> bytes:
        return bytes(self.take(self.number()))

    def float(self) -> float:
        value: float = struct.unpack("<d", self.take(8))[0]
        return value

    def words(self) -> npt.NDArray[np.int32]:
        count = self.number()
        planes = np.frombuffer(self.take(4 * count), np.uint8).reshape(4, count)
        return np.ascontiguousarray(planes.T).view("<i4").reshape(count).astype(np.int32)

    def optional_words(self) -> npt.NDArray[np.int32] | None:
        return self.words() if self.number() else None

    def longs(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.take(8 * self.number()), "<i8").astype(np.int64)


def _extra_keys(body: _Body) -> dict[int, bytes]:
    return {body.number(): body.bytes() for _ in range(body.number())}


def _page_orders(body: _Body) -> tuple[int, ...] | None:
    bits = body.optional()
    return None if bits is None else tuple(k for k in range(10) if bits >> k & 1)


def _most(body: _Body) -> int | None:
    """A limit of a plan; the largest number is none."""
    value = body.number()
    return None if value == 2**32 - 1 else value


_NUMBER, _ID, _WORDS, _LONGS = _Body.number, _Body.id, _Body.words, _Body.longs
_ARGUMENTS: dict[int, tuple[str, dict[str, Callable[[_Body], Any]]]] = {
    1: (
        "open",
        {
            "tokens": _WORDS,
            "salt": _Body.bytes,
            "extra_keys": _extra_keys,
            "anchor": _Body.flag,
            "page_orders": _page_orders,
            "require": lambda body: "huge" if body.flag() else None,
            "contiguous": _NUMBER,
        },
    ),
    2: ("append", {"sequence": _ID, "tokens": _WORDS}),
    3: ("fork", {"sequence": _ID}),
    4: ("truncate", {"sequence": _ID, "num_tokens": _NUMBER}),
    5: ("release_before", {"sequence": _ID, "token": _NUMBER}),
    6: ("close", {"sequence": _ID}),
    7: ("begin_step", {}),
    8: (
        "prepare",
        {
            "step": _NUMBER,
            "tables": _NUMBER,
            "sequences": lambda body: None if not body.number() else body.longs(),
            "query_lens": _Body.optional_words,
            "new_tokens": _Body.optional_words,
        },
    ),
    9: ("written", {"step": _NUMBER}),
    10: ("cancel", {"step": _NUMBER}),
    11: ("end_step", {"step": _NUMBER}),
    12: (
        "register_tables",
        {
            "rows": _NUMBER,
            "width": _NUMBER,
            "slots": _NUMBER,
            "kernel_block_size": lambda body: body.number() or None,
            "page_order": _Body.optional,
        },
    ),
    13: (
        "export",
        {
            "tables": _NUMBER,
            "sequences": lambda body: None if not body.number() else body.longs(),
        },
    ),
    14: ("pin", {"blocks": _LONGS}),
    15: ("unpin", {"blocks": _LONGS}),
    16: ("lease", {"sequence": _ID, "start": _NUMBER, "stop": _NUMBER}),
    17: ("end_lease", {"lease": _NUMBER}),
    18: ("evict", {"num_blocks": _NUMBER}),
    19: ("plan_free_run", {"num_blocks": _NUMBER, "max_blocks": _most}),
    20: ("plan_below", {"ratio": _Body.float, "max_blocks": _most}),
    21: ("plan_huge_pages", {"num_pages": _NUMBER, "max_blocks": _most}),
    22: ("plan_groups", {"size": _NUMBER, "groups": _NUMBER, "max_blocks": _most}),
    23: ("plan_gather", {"sequence": _ID, "max_blocks": _most}),
    24: ("plan_compaction", {"max_blocks": _most}),
    25: ("plan_shrink", {"num_blocks": _NUMBER, "granule": _NUMBER, "max_blocks": _most}),
    26: ("ready", {"num_blocks": _NUMBER}),
    27: ("begin", {"plan": _NUMBER}),
    28: ("commit", {"moves": _NUMBER}),
    29: ("abort", {"moves": _NUMBER}),
    30: ("shrink", {"num_blocks": _NUMBER, "granule": _NUMBER}),
    31: ("grow", {"blocks": _LONGS}),
    32: ("_panic_for_test", {}),
}
"""Operation to the method and how its arguments are read, in their order in the record."""


class _Reader:
    """Calls and what came of them, from the records of one frame after the other."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.calls: list[Call] = []
        self._batch = np.empty(0, np.int64)

    def records(self, raw: bytes, offset: int) -> None:
        def refuse(reason: str) -> InvalidRecording:
            return InvalidRecording(f"{self.file}: the frame at {offset}: {reason}", offset=offset)

        whole = _Body(memoryview(raw), refuse)
        while whole.at < len(raw):
            operation = whole.take(1)[0]
            body = _Body(whole.take(whole.number()), refuse)
            if operation == 0:
                self._outcome(body, refuse)
            elif operation not in _ARGUMENTS:
                raise refuse(f"operation {operation} is unknown")
            else:
                name, readers = _ARGUMENTS[operation]
                arguments = {key: take(body) for key, take in readers.items()}
                if "sequences" in arguments:
                    if arguments["sequences"] is None:
                        arguments["sequences"] = self._batch
                    self._batch = arguments["sequences"]
                self.calls.append(Call(len(self.calls), name, arguments))
            if body.at != len(body.data):
                raise refuse("a record is longer than what it holds")

    def _outcome(self, body: _Body, refuse: Callable[[str], InvalidRecording]) -> None:
        number, failed = body.number(), body.number()
        if number >= len(self.calls):
            raise refuse(f"an outcome of call {number}, of {len(self.calls)}")
        if failed:
            error = body.bytes().decode("utf-8", "replace")
            self.calls[number] = replace(self.calls[number], error=error)
        else:
            self.calls[number] = replace(self.calls[number], returned=body.id())


# -- again ---------------------------------------------------------------------------------------

_NAMED = {
    "sequence": "s",
    "step": "step",
    "tables": "t",
    "plan": "plan",
    "moves": "moves",
    "lease": "lease",
}
"""Arguments that name what an earlier call returned, and what that is called in a test."""

_RETURNS = {
    "open": "sequence",
    "fork": "sequence",
    "begin_step": "step",
    "register_tables": "tables",
    "lease": "lease",
    "begin": "moves",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An invariant that does not hold, or an internal error.

    Attributes:
        call: the last that was made.
        message: what is wrong.
        crashed: the call itself ended in it; else it was found by ``validate`` after it.
    """

    call: Call
    message: str
    crashed: bool

    def __str__(self) -> str:
        where = "in" if self.crashed else "after"
        return f"{where} call {self.call.number} ({self.call.name}): {self.message}"


class Player:
    """Carries recorded calls out on another manager, and writes them down as Python.

    Args:
        mmu: the manager, new.
        block_size: its tokens a block.

    Attributes:
        lines: what was done, as source.
        differs: calls that raised something else than they did when they were recorded, or nothing.
    """

    def __init__(self, mmu: MMU) -> None:
        self._mmu = mmu
        self._things: dict[str, dict[int, tuple[str, Any]]] = {kind: {} for kind in _NAMED}
        self._count = dict.fromkeys(_NAMED, 0)
        self._used: Any = None
        self.lines: list[str] = []
        self.differs: list[tuple[Call, str]] = []

    def makes_sense(self, call: Call) -> bool:
        """Whether all that a call names is there: not if the call that made it was left out."""
        for key, given in call.arguments.items():
            if key in _NAMED and given not in self._things[key]:
                return False
            if key == "sequences":
                known = self._things["sequence"]
                if any(sequence not in known for sequence in given.tolist()):
                    return False
        return True

    def play(self, call: Call) -> Failure | None:
        """Makes a call. What it raises but an internal error is taken as it is."""
        arguments, shown = self._translate(call)
        source = f"mmu.{call.name}({', '.join(shown)})"
        try:
            returned = self._call(call.name, arguments)
        except InternalError as error:
            self.lines.append(source)
            return Failure(call, str(error), crashed=True)
        except KVCacheError as error:
            self.lines.append(f"with suppress(kvmmu.KVCacheError):  # {type(error).__name__}")
            self.lines.append(f"    {source}")
            if call.error != type(error).__name__:
                self.differs.append((call, f"raised {type(error).__name__}: {error}"))
            return None
        if call.error is not None:
            self.differs.append((call, f"raised nothing, it was {call.error}"))
        kind = "plan" if call.name.startswith("plan_") else _RETURNS.get(call.name)
        if kind is not None and returned is not None:
            name = f"{_NAMED[kind]}{self._count[kind]}"
            self._count[kind] += 1
            key = call.number if kind in ("plan", "tables") else call.returned
            if kind == "lease":
                returned, source = returned[0], f"{source}[0]"
            if key is not None:
                self._things[kind][key] = name, returned
            source = f"{name} = {source}"
        self.lines.append(source)
        return None

    def validate(self, call: Call) -> Failure | None:
        """Recounts everything, the tables too that the last call filled."""
        try:
            if call.name in ("prepare", "export") and self._used is not None:
                self._mmu.validate(self._used[1])
            else:
                self._mmu.validate()
        except InternalError as error:
            return Failure(call, str(error), crashed=False)
        return None

    def proof(self, call: Call) -> str:
        """The line that shows a failure after a call."""
        used = self._used[0] if call.name in ("prepare", "export") and self._used else ""
        return f"mmu.validate({used})"

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if name == "register_tables":
            rows, width, slots = (arguments.pop(key) for key in ("rows", "width", "slots"))
            return self._mmu.register_tables(
                np.empty((rows, width), np.int32),
                np.empty(rows, np.int32),
                np.empty(slots, np.int64),
                np.empty(rows + 1, np.int32),
                **arguments,
            )
        return getattr(self._mmu, name)(**arguments)

    def _translate(self, call: Call) -> tuple[dict[str, Any], list[str]]:
        """Arguments for this manager, and as source. What is not given is left out."""
        arguments: dict[str, Any] = {}
        shown: list[str] = []
        if call.name == "register_tables":
            rows, width, slots = (call.arguments[key] for key in ("rows", "width", "slots"))
            shown += [
                f"np.empty(({rows}, {width}), np.int32)",
                f"np.empty({rows}, np.int32)",
                f"np.empty({slots}, np.int64)",
                f"np.empty({rows + 1}, np.int32)",
            ]
        keys = list(call.arguments)
        if call.name == "prepare":
            keys = ["step", "sequences", "tables", "query_lens", "new_tokens"]
        elif call.name == "export":
            keys = ["sequences", "tables"]
        for key in keys:
            given = call.arguments[key]
            if key in _NAMED:
                name, thing = self._things[key].get(given, (repr(given), given))
                arguments[key] = thing
                shown.append(name)
                if key == "tables":
                    self._used = name, thing
            elif key == "sequences":
                known = self._things["sequence"]
                pairs = [known.get(one, (repr(one), one)) for one in given.tolist()]
                arguments[key] = np.array([thing for _, thing in pairs], np.int64)
                shown.append(f"np.array([{', '.join(name for name, _ in pairs)}], np.int64)")
            elif given is not None and given not in ((b"", {}, False) if key in _OPTIONAL else ()):
                arguments[key] = given
                if key not in ("rows", "width", "slots"):
                    text = _shown(given)
                    shown.append(text if key in _FIRST else f"{key}={text}")
        return arguments, shown


_OPTIONAL = {"salt", "extra_keys", "anchor", "contiguous"}
_FIRST = {"tokens", "num_tokens", "token", "blocks", "start", "stop", "num_blocks", "ratio"} | {
    "num_pages",
    "size",
    "groups",
}


def _shown(value: Any) -> str:
    """A value as source; arrays of consecutive numbers by their ends."""
    if not isinstance(value, np.ndarray):
        return repr(value)
    dtype = f"np.{value.dtype.name}"
    if len(value) > 3 and (np.diff(value) == 1).all():
        return f"np.arange({value[0]}, {int(value[-1]) + 1}, dtype={dtype})"
    if len(value) > 3 and (value == value[0]).all():
        return f"np.full({len(value)}, {value[0]}, {dtype})"
    return f"np.array({value.tolist()}, {dtype})"


@dataclass(slots=True)
class Replayed:
    """What came of a recording.

    Attributes:
        calls: how many were made.
        failure: the first; None: all invariants held.
        differs: calls that did not end as they did when they were recorded, the first few; how many
            there were.
    """

    calls: int = 0
    failure: Failure | None = None
    differs: list[tuple[Call, str]] = field(default_factory=list)
    num_differs: int = 0


Make = Callable[[Mapping[str, Any]], MMU]


def make_mmu(settings: Mapping[str, Any]) -> MMU:
    """A manager like the recorded one, whose calls are not recorded.

    Raises:
        InvalidRecording: a setting is unknown here, or not allowed.
    """
    try:
        return MMU(**settings, record=False)
    except (TypeError, KVCacheError) as error:
        raise InvalidRecording(f"the recorded settings: {error}", offset=_HEAD.size) from None


def replay(
    recording: Recording,
    *,
    every: int = 1,
    make: Make = make_mmu,
    watch: Callable[[int], bool] = lambda calls: False,
) -> Replayed:
    """Makes the recorded calls on a new manager and recounts everything after each.

    Args:
        every: recount after every so many calls only. When something is wrong then, the calls since
            the last recount are gone through one by one.
        make: makes the manager.
        watch: told how many calls were made; returns True to stop.
    """
    result = _replay(recording, every, 0, make, watch)
    failure = result.failure
    if failure is not None and not failure.crashed and every > 1:
        number = failure.call.number
        part = replace(recording, calls=recording.calls[: number + 1])
        nearer = _replay(part, 1, max(number - every, 0), make, watch)
        result.failure = nearer.failure or failure
    return result


def _replay(
    recording: Recording,
    every: int,
    start: int,
    make: Make,
    watch: Callable[[int], bool],
) -> Replayed:
    """Recounts from the call ``start`` on."""
    player = Player(make(recording.settings))
    result = Replayed()
    last = len(recording.calls) - 1
    for call in recording.calls:
        result.failure = player.play(call)
        result.calls += 1
        due = call.number >= start and (call.number % every == 0 or call.number == last)
        if result.failure is None and due:
            result.failure = player.validate(call)
        player.lines.clear()
        if result.failure is not None or watch(result.calls):
            break
    result.num_differs = len(player.differs)
    result.differs = player.differs[:5]
    return result


# -- the shortest part ---------------------------------------------------------------------------


def shortest(
    recording: Recording,
    failure: Failure,
    *,
    make: Make = make_mmu,
    watch: Callable[[], bool] = lambda: False,
) -> AllocatorFault:
    """The shortest part found of the calls up to a failure that shows one of the same kind, as a
    fault of the fuzzing kit whose ``sequence`` is a test to copy. Needs ``kvmmu[testing]``.

    Args:
        make: makes a manager.
        watch: returns True when it has taken long enough.
    """
    from .testing.faults import Crashed, Invalid
    from .testing.rules import Rule
    from .testing.shorten import Example, Step, shorten

    origins: dict[int, int] = {}
    for call in recording.calls:
        if call.name == "fork" and call.returned is not None:
            origins[call.returned] = call.arguments["sequence"]

    def rule(call: Call) -> Rule:
        simpler = _simpler(call, recording.settings["block_size"], origins)
        return Rule(_played, lambda trial: True, lambda trial: True, simpler)

    def run(steps: Sequence[Step]) -> Example:
        if watch():
            return Example(list(steps), [], None)
        player = Player(make(recording.settings))
        taken: list[Step] = []
        every = max(1, len(steps) // 200)
        found: Failure | None = None
        for i, (one, drawn) in enumerate(steps):
            call: Call = drawn["call"]
            call = _simplified(call, drawn)
            if not player.makes_sense(call):
                continue
            taken.append((one, drawn))
            found = player.play(call)
            if found is None and (i % every == 0 or i == len(steps) - 1):
                found = player.validate(call)
            if found is not None:
                break
        if found is None:
            return Example(taken, player.lines, None)
        kind = Crashed if found.crashed else Invalid
        proof = [] if found.crashed else [player.proof(found.call)]
        return Example(
            taken,
            player.lines,
            kind(found.message, as_test(recording.settings, [*player.lines, *proof])),
        )

    steps: list[Step] = []
    for call in recording.calls[: failure.call.number + 1]:
        one = rule(call)
        as_it_was = {name: values[-1] for name, values in one.arguments.items()}
        steps.append((one, {"call": call, **as_it_was}))
    whole = run(steps)
    if whole.fault is None:
        fault = (Crashed if failure.crashed else Invalid)(failure.message, "")
        fault.add_note("it does not show again: several threads, or chance, had a part in it")
        return fault
    best = shorten(run, whole).fault
    assert best is not None
    return best


def _played(call: Call) -> None:
    """Stands for a recorded call among the rules of the kit; :func:`shortest` plays it."""


def _simpler(call: Call, size: int, origins: Mapping[int, int]) -> dict[str, Sequence[Any]]:
    """What of a call can be made simpler: for each such thing what to try, the simplest first and
    what it was last."""
    found: dict[str, Sequence[Any]] = {}
    if call.name == "open":
        tokens = len(call.arguments["tokens"])
        candidates = {1, size + 1, 2 * size + 1, tokens // 4, tokens // 2, tokens}
        found["tokens"] = sorted(n for n in candidates if n <= tokens)
        found["plain"] = [True, False]
    if call.name == "truncate" and call.arguments["num_tokens"]:
        found["num_tokens"] = [0, call.arguments["num_tokens"]]
    sequence: int = call.arguments.get("sequence", -1)
    if sequence in origins:
        chain = [sequence]
        while chain[-1] in origins and len(chain) < 16:
            chain.append(origins[chain[-1]])
        found["sequence"] = chain[::-1]  # who it was forked off
    return found


def _simplified(call: Call, drawn: Mapping[str, Any]) -> Call:
    arguments = dict(call.arguments)
    for name in ("sequence", "num_tokens"):
        if name in drawn:
            arguments[name] = drawn[name]
    if "tokens" in drawn:
        arguments["tokens"] = arguments["tokens"][: drawn["tokens"]]
    if drawn.get("plain"):
        plain = {"salt": b"", "extra_keys": {}, "anchor": False, "page_orders": None}
        arguments |= {**plain, "require": None, "contiguous": 0}
    return replace(call, arguments=arguments)


_DEFAULTS: dict[str, Any] = {
    "max_sequences": 1024,
    "prefix_caching": True,
    "placement": "address",
    "budget_blocks": 32,
    "windows_below": 0.8,
    "guarantee": None,
    "gather_least": 0.1,
    "compaction_start": None,
    "compaction_stop": 0.3,
    "anchor": 0.15,
    "page_orders": [0, 2, 9],
    "medium_from": 512,
    "huge_from": 2048,
    "hold_blocks": 8,
    "dedup": False,
    "seed": 0,
    "eviction": "lru",
    "page_aware": True,
    "events": 0,
}


def as_test(settings: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Lines of :class:`Player` as a test, complete with imports."""
    given = {k: v for k, v in settings.items() if k not in _DEFAULTS or v != _DEFAULTS[k]}
    positional = [repr(given.pop(key)) for key in ("num_blocks", "block_size") if key in given]
    if given.get("null_block") == settings.get("num_blocks"):
        given.pop("null_block", None)
    arguments = [*positional, *(f"{key}={value!r}" for key, value in given.items())]
    head = ["from contextlib import suppress", ""] if any("suppress" in x for x in lines) else []
    body = [f"mmu = kvmmu.MMU({', '.join(arguments)})", *lines]
    return "\n".join(
        [
            *head,
            "import kvmmu",
            *(["import numpy as np"] if any("np." in line for line in lines) else []),
            "",
            "",
            "def test_recorded() -> None:",
            *(f"    {line}" for line in body),
            "",
        ]
    )


def calls_of(recording: Recording) -> Iterator[str]:
    """The calls as text, a line each, for people."""
    for call in recording.calls:
        shown = ", ".join(f"{key}={_shown(value)}" for key, value in call.arguments.items())
        came = "" if call.returned is None else f" -> {call.returned}"
        came = f" raised {call.error}" if call.error else came
        yield f"{call.number}: {call.name}({shown}){came}"
