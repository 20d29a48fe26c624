"""The fuzzing kit finds what is broken, calls it by its name, and accuses nothing that is correct.

``broken/`` has the allocators; ``test_fuzzing_blind.py`` has those of people who had not seen the
kit, ``test_fuzzing_hostile.py`` what is no allocator at all, and ``test_fuzzing_search.py`` how the
calls are drawn and a sequence becomes short. A quick or default run looks at each correct one for
some seconds; ``KVMMU_TEST_PROFILE=deep`` makes 100,000 examples of each.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvmmu import InvalidConfig, cli
from kvmmu.testing import AllocatorFault, Driver, check_allocator, faults, find_factory, fuzz
from kvmmu.testing.adapters import (
    FreeList,
    MMUSequences,
    PoolBlocks,
    vllm_block_pool,
    vllm_block_pool_sparse,
)

from .broken import patches
from .broken.correct import BlockPool, CachingPool, Sequences
from .broken.patches import BROKEN, OwnsItsMemory

ROOT = Path(__file__).resolve().parent.parent
PROFILES: dict[str, dict[Driver, int]] = {
    "quick": {"random": 100, "hypothesis": 20},
    "default": {"random": 500, "hypothesis": 60},
    "deep": {"random": 100_000, "hypothesis": 1000},
}
EXAMPLES = PROFILES[os.environ.get("KVMMU_TEST_PROFILE", "default")]
DRIVERS = list(EXAMPLES)
NAMES = [broken.__name__ for broken in BROKEN]


def no_cache() -> MMUSequences:
    """An MMU that keeps no prefixes."""
    return MMUSequences(6, prefix_caching=False, placement="address")


class RefusesToBeToldTwice(BlockPool):
    """Correct: no block may be in a list twice, not even for two of its holders."""

    def check_held(self, blocks: Sequence[int]) -> None:
        super().check_held(blocks)
        if len(set(blocks)) < len(blocks):
            raise ValueError(f"named twice: {blocks}")


CORRECT: list[Callable[[], Any]] = [
    FreeList, BlockPool, RefusesToBeToldTwice, CachingPool, Sequences, OwnsItsMemory,
    MMUSequences, no_cache, PoolBlocks,
]  # fmt: skip


def run(sequence: str) -> None:
    """Runs a sequence as somebody would who copies it."""
    exec(compile(sequence, "<copied>", "exec"), {})


# -- what is correct -------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("factory", CORRECT, ids=lambda factory: factory.__name__)
def test_no_correct_allocator_is_accused(factory: Callable[[], Any], driver: Driver) -> None:
    report = fuzz(factory, max_examples=EXAMPLES[driver], seed=11, driver=driver)
    print(report)
    assert report.fault is None
    assert report.examples >= EXAMPLES[driver]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("factory", [vllm_block_pool, vllm_block_pool_sparse])
@pytest.mark.usefixtures("vllm")
def test_vllm_is_not_accused_where_callers_are_trusted(
    factory: Callable[[], Any], driver: Driver
) -> None:
    report = fuzz(factory, max_examples=EXAMPLES[driver], seed=11, driver=driver)
    print(report)
    assert report.fault is None
    assert report.examples >= EXAMPLES[driver]


# -- what is broken --------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(("broken", "kind"), BROKEN.items(), ids=NAMES)
def test_each_broken_allocator_is_found_and_called_by_its_name(
    broken: type, kind: type[AllocatorFault], driver: Driver
) -> None:
    with pytest.raises(AllocatorFault) as raised:
        check_allocator(broken, max_examples=2000, seed=1, shrink=False, driver=driver)
    assert type(raised.value) is kind, raised.value
    # Where a call should not have raised, it is that call that ends the sequence.
    own = {faults.LostBlock: MemoryError, faults.Crashed: IndexError, faults.Invalid: RuntimeError}
    with pytest.raises(own.get(kind, AssertionError)):
        run(raised.value.sequence)


def test_every_kind_of_fault_is_shown_by_some_broken_allocator() -> None:
    kinds = {getattr(faults, name) for name in faults.__all__} - {AllocatorFault}
    assert kinds - set(BROKEN.values()) == set()
    classes = inspect.getmembers(patches, inspect.isclass)
    local = {c for _, c in classes if c.__module__ == patches.__name__}
    assert local - set(BROKEN) == {OwnsItsMemory}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("broken", "lines"),
    [
        (patches.SlipsInTheStack, 4),
        (patches.LeaksTheFirstBlocksOfAFailedClaim, 5),
        (patches.PublishesBeforeItIsWritten, 5),
        (patches.ForgetsToCopyWhatItMoves, 7),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_sequence_shown_is_short_and_fails_when_it_is_copied(
    broken: type, lines: int, driver: Driver
) -> None:
    with pytest.raises(BROKEN[broken]) as raised:
        check_allocator(broken, max_examples=500, seed=1, driver=driver)
    sequence = raised.value.sequence
    assert len(sequence.splitlines()) <= lines + 2, sequence
    assert sequence.startswith(("from tests.broken.patches import", "from contextlib import"))
    with pytest.raises(AssertionError):
        run(sequence)


def test_an_exception_of_the_allocator_is_the_cause_of_the_fault() -> None:
    with pytest.raises(faults.Crashed) as raised:
        check_allocator(patches.BreaksWhenTheListIsEmpty, max_examples=500, seed=1, shrink=False)
    assert isinstance(raised.value.__cause__, IndexError)


def test_a_fault_can_be_pickled() -> None:
    fault = faults.LostBlock("claim(1) was refused", "a.claim(1)\n")
    again = pickle.loads(pickle.dumps(fault))
    assert (type(again), str(again), again.sequence) == (type(fault), str(fault), fault.sequence)
    assert isinstance(fault, AssertionError)


# -- seeds and arguments ---------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_same_seed_runs_the_same_examples_and_finds_the_same(driver: Driver) -> None:
    first, second = (
        fuzz(patches.SaysItEvictedAll, max_examples=500, seed=5, driver=driver) for _ in range(2)
    )
    assert first.fault is not None
    assert (first.examples, first.calls) == (second.examples, second.calls)
    assert str(first.fault) == str(second.fault)
    one, same, other = (
        fuzz(FreeList, max_examples=20, seed=seed, steps=10, driver=driver).calls
        for seed in (1, 1, 2)
    )
    assert one == same != other


class Sometimes(FreeList):
    """Not the same on every run: every third one gives a block that it does not have."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Sometimes.made += 1
        self.bad = Sometimes.made % 3 == 0

    def claim(self, n: int) -> list[int]:
        return super().claim(n) if not self.bad else [99] * n


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_allocator_that_is_not_the_same_on_every_run_is_reported(driver: Driver) -> None:
    fault = fuzz(Sometimes, max_examples=300, seed=1, driver=driver).fault
    assert isinstance(fault, faults.UnknownBlock)


def test_other_exceptions_can_mean_that_a_claim_is_refused() -> None:
    class Full(FreeList):
        def claim(self, n: int) -> list[int]:
            if n > len(self.free):
                raise LookupError
            return super().claim(n)

    with pytest.raises(faults.Crashed):
        check_allocator(Full, max_examples=50, seed=1, shrink=False)
    check_allocator(Full, max_examples=20, seed=1, refuses=(LookupError,))


def test_misuse_is_left_alone_where_callers_are_trusted() -> None:
    class Trusting(patches.ClampsCounts):
        trusts_caller = True

    check_allocator(Trusting, max_examples=50, seed=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"factory": dict}, "lacks num_blocks, claim, release"),
        ({"factory": lambda: 1 / 0}, "raised ZeroDivisionError"),
        ({"factory": FreeList, "seed": -1}, "seed: -1 given"),
        ({"factory": FreeList, "max_examples": 0}, "max_examples: 0 given"),
        ({"factory": FreeList, "steps": 0}, "steps: 0 given"),
        ({"factory": FreeList, "driver": "dice"}, "driver: 'dice' given, allowed: random, hypo"),
    ],
)
def test_bad_arguments_are_told_before_anything_runs(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said.replace("(", r"\(")):
        check_allocator(**arguments)


def test_a_search_needs_a_limit() -> None:
    with pytest.raises(InvalidConfig, match="no limit"):
        fuzz(FreeList)


# -- installed or not ------------------------------------------------------------------------


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_kvmmu_alone_loads_no_kit_and_the_kit_loads_no_torch() -> None:
    done = python(
        "import sys, kvmmu; kvmmu.MMU(4); assert 'hypothesis' not in sys.modules;"
        "import kvmmu.testing.adapters; assert 'torch' not in sys.modules"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_hypothesis_the_extra_is_named() -> None:
    done = python("import sys; sys.modules['hypothesis'] = None; import kvmmu.testing")
    assert "MissingExtra: this needs hypothesis: pip install 'kvmmu[testing]'" in done.stderr
    done = python(
        "import sys; sys.modules['hypothesis'] = None; from kvmmu.cli import main;"
        "sys.exit(main(['fuzz', 'a:b']))"
    )
    assert done.returncode == 2
    assert done.stderr == "kvmmu: this needs hypothesis: pip install 'kvmmu[testing]'\n"


# -- kvmmu fuzz ------------------------------------------------------------------------------

MINE = """
class Stack:
    num_blocks = 8

    def __init__(self):
        self.free = list(range(8))

    def claim(self, n):
        if n > len(self.free):
            raise MemoryError
        return [self.free.pop() for _ in range(n)]

    def release(self, blocks):
        self.free += blocks
"""


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvmmu.cli", "fuzz", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "60", "TERM": "dumb"},
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


def test_the_command_exits_0_without_a_fault_and_says_how_far_it_looked(tmp_path: Path) -> None:
    arguments = ("kvmmu.testing.adapters:FreeList", "--examples", "100", "--seed", "3")
    done = command(*arguments, "--json", "found.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["examples"] == 100
    assert found["fault"] is None
    said = f"no fault in {found['examples']:,} examples ({found['calls']:,} calls, seed 3)"
    assert " ".join(done.stdout.split()) == said
    assert command(*arguments, "-q", cwd=tmp_path).stdout == ""


def test_the_command_exits_1_with_a_sequence_to_copy(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    done, again = (
        command("mine:Stack", "--seed", "1", "--json", "found.json", cwd=tmp_path) for _ in "12"
    )
    assert (done.returncode, done.stdout) == (1, again.stdout)
    fault = json.loads((tmp_path / "found.json").read_text())["fault"]
    assert fault["kind"] in done.stdout
    assert fault["sequence"] in done.stdout, "not wrapped at 60 columns"
    assert fault["sequence"].startswith("from mine import Stack\na = Stack()\n")
    copied = subprocess.run(
        [sys.executable, "-c", fault["sequence"]], cwd=tmp_path, capture_output=True, check=False
    )
    assert b"AssertionError" in copied.stderr


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("mine", "'mine' given, allowed: package.module:factory"),
        ("mine:", "allowed: package.module:factory"),
        ("mine:Nothing", "mine has no Nothing"),
        ("mine:Stack.num_blocks", "is a int, which cannot be called"),
        ("mine:Stack.claim", "Stack.claim() raised TypeError"),
        ("nowhere:f", "nowhere cannot be imported: ModuleNotFoundError"),
        ("bad:f", "bad cannot be imported: SyntaxError"),
        ("builtins:dict", "lacks num_blocks, claim, release"),
    ],
)
def test_a_bad_target_exits_2_and_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    said: str,
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "bad.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert cli.main(["fuzz", target]) == 2
    assert said in capsys.readouterr().err
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("option", [("--seconds", "0"), ("--seed", "-1"), ("--examples", "0")])
def test_a_bad_option_exits_2(capsys: pytest.CaptureFixture[str], option: tuple[str, str]) -> None:
    assert cli.main(["fuzz", "kvmmu.testing.adapters:FreeList", *option]) == 2
    assert f"{option[0]}: {option[1]} given, allowed" in capsys.readouterr().err


def test_a_target_is_found_by_its_name() -> None:
    assert find_factory("kvmmu.testing.adapters:FreeList") is FreeList


# -- the page --------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "fuzzing.md").read_text()


def test_the_free_list_of_the_page_is_the_one_in_the_package() -> None:
    assert inspect.getsource(FreeList) in PAGE


def test_the_stack_of_the_page_has_the_fault_that_the_page_shows(tmp_path: Path) -> None:
    stack, test, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mypool.py").write_text(stack)
    shown = re.search(r"^from contextlib.*?^assert [^\n]*", PAGE, re.DOTALL | re.MULTILINE)
    assert shown is not None
    copied, found = (
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)
        for code in (shown[0], f"{test}\ntest_stack()")
    )
    assert b"AssertionError" in copied.stderr
    assert b"kvmmu.testing.faults." in found.stderr
