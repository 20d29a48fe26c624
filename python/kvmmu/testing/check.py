"""The two ways in: :func:`check_allocator` for pytest, :func:`fuzz` for as long as you like.

What lives here: how many examples, from which seed, and what becomes of the fault that they find.
What never lives here: rules and checks (see :mod:`.machine`, :mod:`.trial` and :mod:`.model`),
and printing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from ..errors import InvalidConfig
from .faults import AllocatorFault
from .machine import AllocatorMachine  # first: it says which extra is missing
from .subject import Refuses, name_of
from .trial import Trial

# isort: split
import hypothesis
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

__all__ = ["Report", "check_allocator", "find_factory", "fuzz"]

BATCH = 100
"""Examples of one seed in :func:`fuzz`."""


@dataclass(frozen=True, slots=True)
class Report:
    """What :func:`fuzz` did.

    Attributes:
        examples: sequences of calls that ran; with a fault, the last one is the first that had it.
        calls: lines in all of them.
        seconds: wall-clock time.
        seed: what to give to see the same again.
        fault: the fault, as a rule with the shortest sequence found for it; None without one.
    """

    examples: int
    calls: int
    seconds: float
    seed: int
    fault: AllocatorFault | None


def check_allocator(
    factory: Callable[[], Any],
    *,
    max_examples: int = 200,
    seed: int | None = None,
    steps: int = 40,
    refuses: Refuses | None = None,
    shrink: bool = True,
) -> None:
    """Makes random calls on new allocators and compares each with a model.

    Args:
        factory: takes nothing, returns a new allocator: see
            :class:`~kvmmu.testing.protocol.Allocator`. 4 to 16 blocks find most faults.
        max_examples: sequences of calls, each on an allocator of its own.
        seed: of the calls; None draws one.
        steps: calls a sequence.
        refuses: exception types that say "not enough blocks"; None takes the allocator's own
            ``refuses``, by default MemoryError (of which ``kvmmu.OutOfBlocks`` is one).
        shrink: look for the shortest sequence, which takes seconds, or show the first one found.

    Raises:
        AllocatorFault: the class names the kind, the message ends in the shortest sequence found,
            as Python to copy. It is an AssertionError.
        InvalidConfig: an argument is not allowed, or the factory makes no allocator.
    """
    seed = _seed(seed)
    fault = _Batch(factory, refuses, max_examples, steps, seed, shrink=shrink).run()
    if fault is not None:
        fault.add_note(f"found with seed={seed}")
        raise fault from fault.__cause__


def fuzz(
    factory: Callable[[], Any],
    *,
    seconds: float | None = None,
    max_examples: int | None = None,
    seed: int | None = None,
    steps: int = 40,
    refuses: Refuses | None = None,
    shrink: bool = True,
    watch: Callable[[int, bool], None] = lambda examples, failed: None,
) -> Report:
    """Runs examples until the time is up, so many have run, or a fault is found.

    Batch after batch of 100 examples, each from the seed and its number: the same seed runs the
    same examples in the same order, with the same code and version of Hypothesis.

    Args:
        factory, seed, steps, refuses, shrink: as for :func:`check_allocator`.
        seconds: after this no further batch begins; None: no limit.
        max_examples: the same in examples, rounded up to whole batches; None: no limit.
        watch: called after each example with how many ran, and whether a fault has been found
            and is being shortened, which may take minutes.

    Raises:
        InvalidConfig: neither limit is given, an argument is not allowed, or the factory makes no
            allocator.
        whatever ``watch`` raises, which ends the run.
    """
    if seconds is None and max_examples is None:
        raise InvalidConfig("fuzz: no limit given; give seconds, max_examples or both")
    seed, started, done, calls, number = _seed(seed), monotonic(), 0, 0, 0
    fault = None
    while fault is None:
        before = done

        def count(examples: int, failed: bool, before: int = before) -> None:
            watch(before + examples, failed)

        batch = _Batch(factory, refuses, BATCH, steps, seed * 2**32 + number, count, shrink=shrink)
        fault = batch.run()
        done, calls, number = done + batch.examples, calls + batch.calls, number + 1
        if seconds is not None and monotonic() - started >= seconds:
            break
        if max_examples is not None and number * BATCH >= max_examples:
            break
    return Report(done, calls, monotonic() - started, seed, fault)


def find_factory(target: str) -> Callable[[], Any]:
    """What ``package.module:factory`` names. The current folder can be imported from.

    Raises:
        InvalidConfig: the target is not of this form, the module cannot be imported, it has no such
            name, or what has that name cannot be called.
    """
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise InvalidConfig(f"TARGET: {target!r} given, allowed: package.module:factory")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module_name)
    except Exception as error:  # whatever its code raises
        raise InvalidConfig(
            f"TARGET: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise InvalidConfig(f"TARGET: {module_name} has no {path}")
        found = getattr(found, name)
    if not callable(found):
        raise InvalidConfig(f"TARGET: {target} is a {type(found).__name__}, which cannot be called")
    factory: Callable[[], Any] = found
    return factory


def _seed(seed: int | None) -> int:
    if seed is None:
        return random.SystemRandom().randrange(10**6)
    if seed < 0:
        raise InvalidConfig(f"seed: {seed} given, allowed: 0 or more")
    return seed


class _Batch:
    """One run of Hypothesis."""

    def __init__(
        self,
        factory: Callable[[], Any],
        refuses: Refuses | None,
        max_examples: int,
        steps: int,
        seed: int,
        watch: Callable[[int, bool], None] = lambda examples, failed: None,
        *,
        shrink: bool = True,
    ) -> None:
        for name, value in (("max_examples", max_examples), ("steps", steps)):
            if value < 1:
                raise InvalidConfig(f"{name}: {value} given, allowed: 1 or more")
        # What is no allocator is told before Hypothesis wraps it.
        one, other = (Trial(factory, refuses).allocator for _ in range(2))
        if one is other:
            raise InvalidConfig(
                f"{name_of(factory)} made the same {type(one).__name__} twice; each example needs "
                "a new one"
            )
        self.factory, self.refuses = factory, refuses
        self.seed, self.watch = seed, watch
        self.settings = hypothesis.settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            database=None,  # the seed decides, and nothing else
            deadline=None,
            phases=[hypothesis.Phase.generate] + [hypothesis.Phase.shrink] * shrink,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )
        self.examples = self.calls = 0
        self.fault: AllocatorFault | None = None
        """The last one that was raised."""
        self.refused: InvalidConfig | None = None
        """What the factory made was no allocator, later on."""

    def run(self) -> AllocatorFault | None:
        """The fault found, with the shortest sequence; None without one."""

        def machine() -> AllocatorMachine:
            try:
                return _Counted(self)
            except InvalidConfig as error:
                self.refused = error
                raise

        try:
            run_state_machine_as_test(
                hypothesis.seed(self.seed)(machine),  # type: ignore[arg-type]
                settings=self.settings,
            )
        except AllocatorFault as fault:
            fault.__notes__ = []  # Hypothesis's own words for the same sequence
            return fault.with_traceback(None)
        except Flaky as flaky:
            if self.fault is None:
                raise self.refused or flaky from None
            self.fault.add_note("not on every run: the allocator does not always do the same")
            return self.fault.with_traceback(None)
        return None


class _Counted(AllocatorMachine):
    """A machine that tells its batch how far it is."""

    def __init__(self, batch: _Batch) -> None:
        self.batch = batch
        super().__init__(batch.factory, batch.refuses)

    def teardown(self) -> None:
        batch, trial = self.batch, self.trial
        try:
            super().teardown()
        finally:
            if batch.fault is None:  # afterwards the same fault is only being shortened
                batch.examples += 1
                batch.calls += len(trial.script.lines)
            batch.fault = trial.fault or batch.fault
        batch.watch(batch.examples, batch.fault is not None)
