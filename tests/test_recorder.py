"""The flight recorder: what is in the file, that it plays again, and what a damaged one is told."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from kvmmu import MMU, InternalError, InvalidConfig, InvalidRecording, KVCacheError, recorder
from kvmmu.cli import main

BLOCK = 4


def ints(values: Any) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def longs(values: Any) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


class Engine:
    """Makes calls at random, good and bad ones, from a seed."""

    def __init__(self, seed: int, mmu: MMU) -> None:
        self.draw = random.Random(seed)
        self.mmu = mmu
        self.open: list[int] = []
        self.steps: list[int] = []
        self.moves: list[Any] = []
        self.leases: list[int] = []
        self.pinned: list[npt.NDArray[np.int64]] = []
        self.calls = 1
        self.tables = mmu.register_tables(
            np.empty((6, 32), np.int32),
            np.empty(6, np.int32),
            np.empty(300, np.int64),
            np.empty(7, np.int32),
        )

    def run(self, calls: int) -> None:
        names = [name for name in dir(self) if name.startswith("do_")]
        while self.calls < calls:
            with suppress(KVCacheError):
                getattr(self, self.draw.choice(names))()

    def one(self) -> int:
        return self.draw.choice(self.open) if self.open and self.draw.random() < 0.95 else 999

    def do_open(self) -> None:
        self.calls += 1
        draw = self.draw
        start = draw.choice([0, 0, 50, 100_000])
        sequence = self.mmu.open(
            ints(range(start, start + draw.randrange(40))),
            salt=draw.choice([None, b"tenant"]),
            extra_keys=draw.choice([{}, {1: b"image", 0: b""}]),
            anchor=draw.random() < 0.2,
            page_orders=draw.choice([None, (0,), (0, 2)]),
            contiguous=draw.choice([0, 0, 8]),
        )
        self.open.append(sequence)

    def do_step(self) -> None:
        mmu = self.mmu
        self.calls += 2
        step = mmu.begin_step()
        some = self.draw.sample(self.open, min(len(self.open), self.draw.randrange(6)))
        lens = [mmu.info(s).num_tokens - mmu.info(s).num_scheduled + 1 for s in some]
        values = ints([self.draw.randrange(-5, 100) for _ in some])
        try:
            mmu.prepare(step, longs(some), self.tables, query_lens=ints(lens), new_tokens=values)
        except KVCacheError:
            self.calls += 1
            mmu.end_step(step)
            return
        self.calls += 1
        if self.draw.random() < 0.8:
            mmu.written(step)
        else:
            mmu.cancel(step)
        self.steps.append(step)

    def do_end_step(self) -> None:
        if self.steps:
            self.calls += 1
            self.mmu.end_step(self.steps.pop(self.draw.randrange(len(self.steps))))

    def do_append(self) -> None:
        self.calls += 1
        self.mmu.append(self.one(), ints([1, 2, 3]))

    def do_fork(self) -> None:
        self.calls += 1
        self.open.append(self.mmu.fork(self.one()))

    def do_truncate(self) -> None:
        self.calls += 1
        self.mmu.truncate(self.one(), self.draw.randrange(20))

    def do_release_before(self) -> None:
        self.calls += 1
        self.mmu.release_before(self.one(), self.draw.randrange(12))

    def do_close(self) -> None:
        self.calls += 1
        sequence = self.one()
        self.mmu.close(sequence)
        self.open.remove(sequence)

    def do_export(self) -> None:
        self.calls += 1
        self.mmu.export(longs(self.open[:5]), self.tables)

    def do_evict(self) -> None:
        self.calls += 1
        self.mmu.evict(self.draw.randrange(4))

    def do_plan(self) -> None:
        self.calls += 1
        mmu, n = self.mmu, self.draw.randrange(2, 20)
        plans: list[Callable[[], Any]] = [
            lambda: mmu.plan_free_run(n, max_blocks=self.draw.choice([None, 4])),
            lambda: mmu.plan_below(n / 20),
            lambda: mmu.plan_groups(4, n // 4 + 1, max_blocks=3),
            lambda: mmu.plan_gather(self.one()),
            lambda: mmu.plan_compaction(),
            lambda: mmu.plan_shrink(n, granule=2),
            lambda: mmu.plan_huge_pages(1),
        ]
        plan = self.draw.choice(plans)()
        if plan is not None:
            self.calls += 1
            self.moves.append(mmu.begin(plan))

    def do_finish(self) -> None:
        if self.moves:
            self.calls += 1
            moves = self.moves.pop()
            self.draw.choice([self.mmu.commit, self.mmu.commit, self.mmu.abort])(moves)

    def do_lease(self) -> None:
        self.calls += 1
        self.leases.append(self.mmu.lease(self.one(), 0, 4)[0])

    def do_end_lease(self) -> None:
        if self.leases:
            self.calls += 1
            self.mmu.end_lease(self.leases.pop())

    def do_pin(self) -> None:
        sequence = self.one()
        blocks = self.mmu.block_table(sequence)[:2].astype(np.int64)
        self.calls += 1
        self.mmu.pin(blocks)
        self.pinned.append(blocks)

    def do_unpin(self) -> None:
        if self.pinned:
            self.calls += 1
            self.mmu.unpin(self.pinned.pop())

    def do_ready(self) -> None:
        self.calls += 1
        self.mmu.ready(self.draw.randrange(1, 40))

    def do_shrink(self) -> None:
        self.calls += 1
        self.mmu.shrink(self.draw.randrange(3), granule=self.draw.choice([1, 2]))

    def do_grow(self) -> None:
        blocks = self.mmu.offline_blocks()
        self.calls += 1
        self.mmu.grow(blocks)


def recorded(
    folder: Path, number: int = 0, calls: int = 400, **options: Any
) -> tuple[Path, Engine]:
    """An engine that has run, and the file of it."""
    file = folder / f"flight{number}"
    mmu = MMU(48, BLOCK, record=str(file), **options)
    engine = Engine(number, mmu)
    engine.run(calls)
    mmu.flush_recording()
    return file, engine


OPTIONS: list[dict[str, Any]] = [
    {},
    {"placement": "scatter", "seed": -3, "page_orders": (0, 1, 2)},
    {"dedup": True, "eviction": "lfu", "hold_blocks": 0},
    {"guarantee": 1, "null_block": "first"},
    {"prefix_caching": False, "placement": "fifo", "compaction_start": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_recording_plays_again_call_for_call(tmp_path: Path, options: dict[str, Any]) -> None:
    for seed in range(4):
        file, engine = recorded(tmp_path, seed, **options)
        recording = recorder.read(file)
        assert recording.truncated is None
        assert len(recording.calls) == engine.calls
        made: list[MMU] = []

        def make(settings: Mapping[str, Any], made: list[MMU] = made) -> MMU:
            made.append(recorder.make_mmu(settings))
            return made[-1]

        result = recorder.replay(recording, make=make)
        assert result.failure is None
        assert result.differs == []
        assert result.calls == engine.calls
        (again,) = made
        assert again.stats() == engine.mmu.stats()
        assert again.states() == engine.mmu.states()
        assert again.sequences().tolist() == engine.mmu.sequences().tolist()
        for sequence in again.sequences().tolist():
            there, here = engine.mmu.block_table(sequence), again.block_table(sequence)
            assert there.tolist() == here.tolist()
        assert again.recording is None
    errors = {call.error for call in recording.calls} - {None}
    assert errors, "a recording in which nothing was refused shows too little"


def test_every_verb_that_changes_something_is_recorded(tmp_path: Path) -> None:
    seen = set()
    for seed in range(12):
        file, _ = recorded(tmp_path, seed, 600)
        seen |= {call.name for call in recorder.read(file).calls}
    known = {name for name, _ in recorder._ARGUMENTS.values()}
    assert seen == known - {"_panic_for_test"}


def test_the_same_calls_written_as_a_test_leave_the_same_state(tmp_path: Path) -> None:
    file, engine = recorded(tmp_path, 5, 200)
    recording = recorder.read(file)
    player = recorder.Player(recorder.make_mmu(recording.settings))
    for call in recording.calls:
        assert player.makes_sense(call) or call.error is not None
        assert player.play(call) is None
    source = recorder.as_test(recording.settings, [*player.lines, "globals()['found'] = mmu"])
    scope: dict[str, Any] = {}
    exec(compile(source, "<test>", "exec"), scope)
    scope["test_recorded"]()
    assert scope["found"].stats() == engine.mmu.stats()
    assert scope["found"].states() == engine.mmu.states()


# -- files ---------------------------------------------------------------------------------------


def several_frames(folder: Path) -> Path:
    file = folder / "frames"
    mmu = MMU(16, BLOCK, record=str(file))
    for i in range(3):
        mmu.close(mmu.open(ints(range(i, i + 9)), salt=b"x"))
        mmu.flush_recording()
    return file


def test_a_file_that_ends_anywhere_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    file = several_frames(tmp_path)
    data = file.read_bytes()
    whole = recorder.read(file)
    ends = [at for at in range(len(data)) if data[at : at + 4] == b"KFRM"] + [len(data)]
    assert len(ends) == 4
    cut = tmp_path / "cut"
    for length in range(len(data) + 1):
        cut.write_bytes(data[:length])
        if length < ends[0]:
            with pytest.raises(InvalidRecording) as error:
                recorder.read(cut)
            assert error.value.offset == length
            continue
        found = recorder.read(cut)
        frames = sum(end <= length for end in ends) - 1
        assert len(found.calls) == 2 * frames
        assert [call.name for call in found.calls] == ["open", "close"] * frames
        assert [call.returned for call in found.calls] == [
            call.returned for call in whole.calls[: 2 * frames]
        ]
        assert found.truncated == (None if length in ends else ends[frames])


def test_a_flipped_byte_is_an_error_that_says_where(tmp_path: Path) -> None:
    file = several_frames(tmp_path)
    data = file.read_bytes()
    ends = [at for at in range(len(data)) if data[at : at + 4] == b"KFRM"]
    damaged = tmp_path / "damaged"
    for at in range(len(data)):
        for bit in (0x01, 0x80):
            wrong = bytearray(data)
            wrong[at] ^= bit
            damaged.write_bytes(wrong)
            with pytest.raises(InvalidRecording) as error:
                recorder.read(damaged)
            if at >= ends[0]:  # the frame that it lies in
                assert error.value.offset == max(end for end in ends if end <= at)
            else:
                assert error.value.offset <= len(data)


def framed(*records: bytes, raw: int | None = None, stored: bytes | None = None) -> bytes:
    """A frame whose checksums are right, whatever is in it; the records as literals of LZ4."""
    body = b"".join(records)
    if stored is None:
        length = len(body)
        token = bytes([min(length, 15) << 4])
        rest = length - 15
        more = b"" if rest < 0 else b"\xff" * (rest // 255) + bytes([rest % 255])
        stored = token + more + body
    size = len(body) if raw is None else raw
    head = struct.pack("<4sIIQI", b"KFRM", size, len(stored), 0, zlib.crc32(stored))
    return head + struct.pack("<I", zlib.crc32(head)) + stored


def headed(text: bytes | None = None, version: int = 1) -> bytes:
    if text is None:
        text = json.dumps({"kvmmu": "0.1.0", "mmu": {"num_blocks": 8, "block_size": 4}}).encode()
    return struct.pack("<8sIII", b"KVMMUREC", version, len(text), zlib.crc32(text)) + text


HEAD = headed()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes"),
        (b"x" * 100, "no recording"),
        (headed(version=2), "format 2"),
        (headed(b"{"), "cannot be read"),
        (headed(b"[]"), "cannot be read"),
        (headed(b"[" * 100_000), "cannot be read"),
        (headed(b'{"kvmmu": 1, "mmu": 3}'), "cannot be read"),
        (HEAD + b"nonsense", "no frame"),
        (HEAD + framed(raw=2**32 - 1, stored=b"\0"), "at most"),
        (HEAD + framed(raw=2**28, stored=b"\0"), "not 268435456"),
        (HEAD + framed(raw=4, stored=b"\xff\xff\xff"), "frame at"),
        (HEAD + framed(b"\x03\x01\x05", raw=2), "frame at"),
        (HEAD + framed(b"\x4d\x00"), "operation 77 is unknown"),
        (HEAD + framed(b"\x03\x00"), "too early"),
        (HEAD + framed(b"\x03"), "too early"),
        (HEAD + framed(b"\x03\x05\x01"), "too early"),
        (HEAD + framed(b"\x03\x02\x01\x01"), "longer"),
        (HEAD + framed(b"\x03\x0b" + b"\xff" * 10 + b"\x01"), "too large"),
        (HEAD + framed(b"\x02\x06\x01\xff\xff\xff\xff\x07"), "too early"),
        (HEAD + framed(b"\x00\x03\x00\x00\x05"), "an outcome of call 0, of 0"),
    ],
)
def test_a_hostile_file_is_an_error_and_nothing_else(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    file = tmp_path / "hostile"
    file.write_bytes(data)
    with pytest.raises(InvalidRecording, match=reason) as error:
        recorder.read(file)
    assert 0 <= error.value.offset <= len(data)


def test_settings_that_this_version_does_not_know_are_an_error(tmp_path: Path) -> None:
    for settings in ({"num_blocks": 0, "block_size": 4}, {"num_blocks": 8, "colour": 1}):
        file = tmp_path / "settings"
        file.write_bytes(headed(json.dumps({"kvmmu": "9", "mmu": settings}).encode()))
        with pytest.raises(InvalidRecording, match="settings"):
            recorder.replay(recorder.read(file))


def test_calls_are_in_the_file_soon_although_nobody_flushes(tmp_path: Path) -> None:
    file = tmp_path / "soon"
    mmu = MMU(8, BLOCK, record=str(file))
    mmu.evict(1)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not recorder.read(file).calls:
        time.sleep(0.05)
    assert [call.name for call in recorder.read(file).calls] == ["evict"]
    status = mmu.recording
    assert status is not None
    assert (status["file"], status["bytes"]) == (file, file.stat().st_size)
    assert status["failure"] is None


def child(code: str, file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import os, signal\nimport numpy as np\nimport kvmmu\n" + code],
        env={**os.environ, "KVMMU_RECORD": str(file)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_variable_alone_records_an_engine_that_ends_or_dies(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    done = child("mmu = kvmmu.MMU(8, 4); mmu.evict(1)\nkept = [mmu]; kept.append(kept)", ended)
    assert done.returncode == 0, done.stderr
    assert [call.name for call in recorder.read(ended).calls] == ["evict"]
    killed = tmp_path / "killed"
    code = "mmu = kvmmu.MMU(8, 4); mmu.evict(1); mmu.flush_recording(); mmu.evict(2)\n"
    done = child(code + "os.kill(os.getpid(), signal.SIGKILL)", killed)
    assert done.returncode == -signal.SIGKILL
    calls = recorder.read(killed).calls
    assert [call.arguments["num_blocks"] for call in calls] in ([1], [1, 2])
    panicked = tmp_path / "panicked"
    code = """
mmu = kvmmu.MMU(8, 4)
try:
    mmu._panic_for_test()
except kvmmu.InternalError:
    os._exit(3)
"""
    assert child(code, panicked).returncode == 3
    (last,) = recorder.read(panicked).calls
    assert (last.name, last.error) == ("_panic_for_test", "InternalError")


def test_a_forked_child_leaves_the_recording_alone(tmp_path: Path) -> None:
    file = tmp_path / "forked"
    code = """
import sys, warnings
warnings.simplefilter("ignore")
mmu = kvmmu.MMU(8, 4)
mmu.evict(1)
child = os.fork()
if not child:
    try:
        mmu.evict(2)
    except kvmmu.UsedAfterFork:
        del mmu
        sys.exit(0)
    sys.exit(1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
mmu.evict(3)
sys.exit(status)
"""
    done = child(code, file)
    assert done.returncode == 0, done.stderr
    calls = recorder.read(file).calls
    assert [call.arguments["num_blocks"] for call in calls] == [1, 3]


def test_an_earlier_recording_is_kept_and_false_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "flight"
    monkeypatch.setenv("KVMMU_RECORD", str(file))
    names = []
    for _ in range(3):
        status = MMU(8, 4).recording
        assert status is not None
        names.append(status["file"].name)
    assert names == ["flight", "flight.1", "flight.2"]
    assert MMU(8, 4, record=False).recording is None
    monkeypatch.setenv("KVMMU_RECORD", "")
    assert MMU(8, 4).recording is None
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("record", ["", True, 3, "/no/such/folder/file"])
def test_what_cannot_be_recorded_to_is_said_when_the_manager_is_made(record: Any) -> None:
    with pytest.raises(InvalidConfig, match="record"):
        MMU(8, 4, record=record)


def test_calls_of_threads_are_all_there(tmp_path: Path) -> None:
    file = tmp_path / "threads"
    mmu = MMU(4096, BLOCK, record=str(file))

    def work(number: int) -> None:
        for i in range(200):
            mmu.close(mmu.open(ints(range(1000 * number + i, 1000 * number + i + 9))))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mmu.flush_recording()
    calls = recorder.read(file).calls
    names = [call.name for call in calls]
    assert names.count("open") == names.count("close") == 800
    opened = {call.returned for call in calls if call.name == "open"}
    assert opened == {call.arguments["sequence"] for call in calls if call.name == "close"}
    assert recorder.replay(recorder.read(file), every=50).failure is None


# -- failures ------------------------------------------------------------------------------------


class Broken:
    """A manager that is wrong from when a sequence that was forked off is truncated."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.mmu = recorder.make_mmu(settings)
        self.forks: set[int] = set()
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mmu, name)

    def fork(self, sequence: int) -> int:
        child = self.mmu.fork(sequence)
        self.forks.add(child)
        return child

    def truncate(self, sequence: int, num_tokens: int) -> None:
        self.mmu.truncate(sequence, num_tokens)
        self.broken |= sequence in self.forks

    def validate(self, tables: Any = None) -> None:
        self.mmu.validate(tables)
        if self.broken:
            raise InternalError("a fork was truncated")


def broken(settings: Mapping[str, Any]) -> MMU:
    return cast(MMU, Broken(settings))


@pytest.mark.parametrize("every", [1, 7, 10**6])
def test_a_failure_is_found_where_it_begins_and_shortened_to_what_it_needs(
    tmp_path: Path, every: int
) -> None:
    file, _ = recorded(tmp_path, 3, 800)
    recording = recorder.read(file)
    result = recorder.replay(recording, make=broken, every=every)
    failure = result.failure
    assert failure is not None
    assert (failure.call.name, failure.crashed) == ("truncate", False)
    first = recorder.replay(recording, make=broken).failure
    assert first is not None
    assert failure.call.number == first.call.number
    fault = recorder.shortest(recording, failure, make=broken)
    lines = [line.strip() for line in fault.sequence.splitlines()]
    body = lines[lines.index("def test_recorded() -> None:") + 2 :]
    assert [line.split("mmu.")[1].split("(")[0] for line in body if line] == [
        "open",
        "fork",
        "truncate",
        "validate",
    ]
    assert body[0] == "s0 = mmu.open(np.array([50], np.int32))"  # of the simplest kind
    compile(fault.sequence, "<test>", "exec")


def test_shortening_stops_when_it_is_told(tmp_path: Path) -> None:
    file, _ = recorded(tmp_path, 3, 800)
    recording = recorder.read(file)
    failure = recorder.replay(recording, make=broken).failure
    assert failure is not None
    runs = iter(range(10**6))
    fault = recorder.shortest(recording, failure, make=broken, watch=lambda: next(runs) > 3)
    assert "mmu.validate()" in fault.sequence


def test_a_failure_that_does_not_show_again_is_told_as_that(tmp_path: Path) -> None:
    file, _ = recorded(tmp_path, 3, 800)
    recording = recorder.read(file)
    failure = recorder.replay(recording, make=broken).failure
    assert failure is not None
    fault = recorder.shortest(recording, failure)
    assert any("does not show again" in note for note in fault.__notes__)


def test_calls_that_end_otherwise_than_they_did_are_told(tmp_path: Path) -> None:
    file, _ = recorded(tmp_path, 1)
    recording = recorder.read(file)

    def larger(settings: Mapping[str, Any]) -> MMU:
        return recorder.make_mmu({**settings, "num_blocks": 4096, "null_block": 4096})

    result = recorder.replay(recording, make=larger)
    assert result.failure is None
    assert result.num_differs > 0
    assert "raised nothing, it was OutOfBlocks" in {what for _, what in result.differs} or any(
        "raised" in what for _, what in result.differs
    )


# -- the command ---------------------------------------------------------------------------------


def test_kvmmu_fuzz_makes_the_calls_of_a_recording_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, engine = recorded(tmp_path)
    assert main(["fuzz", "--from", str(file)]) == 0
    assert capsys.readouterr().out == f"no invariant broken in {engine.calls:,} calls\n"


def test_kvmmu_fuzz_prints_a_test_that_fails_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, engine = recorded(tmp_path)
    with pytest.raises(InternalError):
        engine.mmu._panic_for_test()
    figures = tmp_path / "figures.json"
    assert main(["fuzz", "--from", str(file), "--json", str(figures)]) == 1
    out = capsys.readouterr().out
    assert f"in call {engine.calls} (_panic_for_test): the core panicked: on purpose" in out
    source = out[out.index("import kvmmu") :]
    scope: dict[str, Any] = {}
    exec(compile(source, "<test>", "exec"), scope)
    with pytest.raises(InternalError, match="on purpose"):
        scope["test_recorded"]()
    assert source.count("mmu.") == 2  # MMU(...) and the call
    found = json.loads(figures.read_text())
    assert found["fault"]["call"] == engine.calls
    assert found["fault"]["sequence"] in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "none given"),
        (["kvmmu.testing.adapters:FreeList", "--from", "x"], "both given"),
        (["--from", "/no/such/file"], "cannot be read"),
        (["--from", "/no/such/file", "--every", "0"], "--every"),
        (["--from", __file__], "no recording"),
        (["a:b", "--every", "3"], "--every: 3 given without --from, allowed: with it"),
        (["--from", "x", "--examples", "3"], "--examples: 3 given with --from, allowed: without"),
        (["--from", "x", "--steps", "3"], "--steps: 3 given with --from"),
        (["--from", "x", "--seed", "3"], "--seed: 3 given with --from"),
        (["--from", "x", "--driver", "random"], "--driver: random given with --from"),
    ],
)
def test_bad_input_is_said_in_a_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_truncated_recording_is_played_and_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = several_frames(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["fuzz", "--from", str(file)]) == 0
    printed = capsys.readouterr()
    assert "what was there is lost" in printed.err
    assert "in 4 calls" in printed.out


def test_a_recording_of_which_nothing_is_left_cannot_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = several_frames(tmp_path)
    whole = file.read_bytes()
    for kept in range(len(whole) - 1, 0, -1):  # the first frame is cut when no call is left
        file.write_bytes(whole[:kept])
        code = main(["fuzz", "--from", str(file)])
        printed = capsys.readouterr()
        if code:
            said = f"--from: {file}: nothing was checked, for the recording has no whole frame"
            assert (code, printed.out, printed.err) == (2, "", f"kvmmu: {said}\n")
            return
        assert code == 0
    raise AssertionError("some call was always left")


def test_a_replay_is_recorded_and_plays_again(tmp_path: Path) -> None:
    file = tmp_path / "replay"
    command = [sys.executable, "-m", "kvmmu.cli", "replay", "--sample", "--limit", "60", "--quiet"]
    environment = {**os.environ, "KVMMU_RECORD": str(file)}
    subprocess.run(command, env=environment, check=True, timeout=300)
    recording = recorder.read(file)
    assert {"open", "prepare", "begin", "commit", "close"} <= {c.name for c in recording.calls}
    result = recorder.replay(recording, every=100)
    assert result.failure is None
    assert result.num_differs == 0
