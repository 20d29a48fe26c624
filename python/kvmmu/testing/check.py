"""The two ways in: :func:`check_allocator` for pytest, :func:`fuzz` for as long as you like.

What lives here: how many examples, from which seed, by which driver. What never lives here: rules,
drivers and checks (see :mod:`.rules`, :mod:`.search`, :mod:`.machine`, :mod:`.trial` and
:mod:`.model`), and printing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from ..errors import InvalidConfig
from .faults import AllocatorFault
from .machine import HypothesisSearch
from .search import RandomSearch, Search
from .subject import Refuses

__all__ = ["Driver", "Report", "check_allocator", "find_factory", "fuzz"]

Driver = Literal["random", "hypothesis"]
"""Who draws the calls: :class:`~.search.RandomSearch` or :class:`~.machine.HypothesisSearch`."""

DRIVERS: dict[str, type[Search]] = {"random": RandomSearch, "hypothesis": HypothesisSearch}


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
    max_examples: int = 1000,
    seed: int | None = None,
    steps: int = 40,
    refuses: Refuses | None = None,
    shrink: bool = True,
    driver: Driver = "random",
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
        shrink: look for the shortest sequence, or show the first one found.
        driver: "random" draws the calls from the seed; "hypothesis" asks Hypothesis for them, which
            is far slower and varies what it has tried. The calls are the same.

    Raises:
        AllocatorFault: the class names the kind, the message ends in the shortest sequence found,
            as Python to copy. It is an AssertionError.
        InvalidConfig: an argument is not allowed, or the factory makes no allocator.
    """
    report = fuzz(
        factory,
        max_examples=max_examples,
        seed=seed,
        steps=steps,
        refuses=refuses,
        shrink=shrink,
        driver=driver,
    )
    if report.fault is not None:
        report.fault.add_note(f"found with seed={report.seed}")
        raise report.fault from report.fault.__cause__


def fuzz(
    factory: Callable[[], Any],
    *,
    seconds: float | None = None,
    max_examples: int | None = None,
    seed: int | None = None,
    steps: int = 40,
    refuses: Refuses | None = None,
    shrink: bool = True,
    driver: Driver = "random",
    watch: Callable[[int, bool], None] = lambda examples, failed: None,
) -> Report:
    """Runs examples until the time is up, so many have run, or a fault is found; at least one.

    The same seed runs the same examples in the same order, with the same code (and, where it is
    asked for them, the same version of Hypothesis).

    Args:
        factory, seed, steps, refuses, shrink, driver: as for :func:`check_allocator`.
        seconds: after this no further example begins (with Hypothesis no further batch of 100);
            None: no limit.
        max_examples: the same in examples; None: no limit.
        watch: called after each example with how many ran, and whether a fault has been found
            and is being shortened, which may take minutes.

    Raises:
        InvalidConfig: neither limit is given, an argument is not allowed, or the factory makes no
            allocator.
        whatever ``watch`` raises, which ends the run.
    """
    if seconds is None and max_examples is None:
        raise InvalidConfig("fuzz: no limit given; give seconds, max_examples or both")
    for name, value in (("max_examples", max_examples), ("steps", steps)):
        if value is not None and value < 1:
            raise InvalidConfig(f"{name}: {value} given, allowed: 1 or more")
    if driver not in DRIVERS:
        raise InvalidConfig(f"driver: {driver!r} given, allowed: {', '.join(DRIVERS)}")
    seed, started = _seed(seed), monotonic()
    search = DRIVERS[driver](factory, refuses, steps, seed, max_examples, seconds, shrink, watch)
    fault = search.run()
    return Report(search.examples, search.calls, monotonic() - started, seed, fault)


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
