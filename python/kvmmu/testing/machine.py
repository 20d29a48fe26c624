"""The driver that asks Hypothesis: a state machine, and the search with it.

What lives here: the rules as a Hypothesis machine, and batches of its examples. What never lives
here: the rules themselves (see :mod:`.rules`), and what a call should do (:mod:`.trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import InvalidConfig, MissingExtra

try:
    import hypothesis
    from hypothesis import strategies as st
    from hypothesis.errors import Flaky
    from hypothesis.stateful import (
        RuleBasedStateMachine,
        initialize,
        precondition,
        rule,
        run_state_machine_as_test,
    )
except ImportError as error:
    raise MissingExtra(
        "this needs hypothesis: pip install 'kvmmu[testing]'", extra="testing"
    ) from error

from .faults import AllocatorFault
from .rules import RULES, Rule
from .search import NOT_ALWAYS, Search
from .subject import Refuses
from .trial import Trial

__all__ = ["AllocatorMachine", "HypothesisSearch"]

BATCH = 100
"""Examples of one seed."""


class AllocatorMachine(RuleBasedStateMachine):
    """Random calls on an allocator; the rules of the methods that it lacks are never run."""

    def __init__(self, factory: Callable[[], Any], refuses: Refuses | None = None) -> None:
        super().__init__()
        self.trial = Trial(factory, refuses)

    @initialize()
    def begin(self) -> None:
        """Looks at the new allocator."""
        self.trial.begin()

    def teardown(self) -> None:
        """Gives everything back and takes stock, unless a fault has been found."""
        if self.trial.fault is None:
            self.trial.finish()

    @rule()
    def be_idle(self) -> None:
        """Nothing: the simplest step, so that Hypothesis shrinks a step that is not needed to no
        line. It takes rules without arguments for the simplest, in the order of their names."""


def _strategy(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    if isinstance(values, range):
        return st.integers(values[0], values[-1])
    return st.sampled_from(values)


def _step(one: Rule) -> Any:
    def step(self: AllocatorMachine, **arguments: Any) -> None:
        one.call(self.trial, **arguments)

    step.__name__ = step.__qualname__ = one.name
    step.__doc__ = one.call.__doc__
    strategies: dict[str, Any] = {n: _strategy(values) for n, values in one.arguments.items()}
    makes_sense = precondition(lambda self: bool(one.fits(self.trial) and one.when(self.trial)))
    entered: Callable[[Any], Any] = rule(**strategies)
    return makes_sense(entered(step))


for _rule in RULES:
    setattr(AllocatorMachine, _rule.name, _step(_rule))


class HypothesisSearch(Search):
    """Batch after batch, each of a seed of its own: what Hypothesis makes of a seed depends on its
    version. Most of the time of an example is its own."""

    def run(self) -> AllocatorFault | None:
        number = 0
        while True:
            most = BATCH if self.max_examples is None else self.max_examples - self.examples
            batch = _Batch(self, self.seed * 2**32 + number, min(BATCH, most))
            fault = batch.run()
            number += 1
            if fault is not None or self._enough():
                return fault


class _Batch:
    """One run of Hypothesis."""

    def __init__(self, search: HypothesisSearch, seed: int, max_examples: int) -> None:
        self.search, self.seed = search, seed
        self.settings = hypothesis.settings(
            max_examples=max_examples,
            stateful_step_count=search.steps,
            database=None,  # the seed decides, and nothing else
            deadline=None,
            phases=[hypothesis.Phase.generate] + [hypothesis.Phase.shrink] * search.shrink,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )
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
            self.fault.add_note(NOT_ALWAYS)
            return self.fault.with_traceback(None)
        return None


class _Counted(AllocatorMachine):
    """A machine that tells its search how far it is."""

    def __init__(self, batch: _Batch) -> None:
        self.batch = batch
        super().__init__(batch.search.factory, batch.search.refuses)

    def teardown(self) -> None:
        batch, search, trial = self.batch, self.batch.search, self.trial
        try:
            super().teardown()
        finally:
            if batch.fault is None:  # afterwards the same fault is only being shortened
                search.examples += 1
                search.calls += len(trial.script.lines)
            batch.fault = trial.fault or batch.fault
        search.watch(search.examples, batch.fault is not None)
