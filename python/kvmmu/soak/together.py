"""Several runs at once, each in a process of its own.

What lives here: :func:`soak`, the processes, what they tell of their progress, Ctrl-C. What never
lives here: a run itself (see :mod:`.run`), and drawing of bars.

A run needs one core and its own memory, so there are as many processes as cores, or fewer. They are
spawned, not forked: the core refuses to be used in a forked child.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from typing import TYPE_CHECKING, Any

from ..errors import InternalError
from ..pictures import History
from ..replay.metrics import Totals
from .run import soak_one
from .task import Task

if TYPE_CHECKING:
    from ..metrics import Collector

__all__ = ["Soaked", "alone", "soak"]

POLL_S = 0.2
STOPPED_S = 36.0
"""Simulated time of a run that was stopped before it began: its figures are of nothing."""


@dataclass(frozen=True, slots=True)
class Soaked:
    """What a run comes to.

    Attributes:
        figures: see :mod:`.figures`.
        history: of the memory, for pictures, where the task asked for it.
    """

    figures: dict[str, Any]
    history: History | None = None


_told: SynchronizedArray[float]
_stopping: Synchronized[int]


def soak(
    tasks: Sequence[Task],
    *,
    processes: int | None = None,
    watch: Callable[[Sequence[float]], bool] = lambda simulated_s: False,
) -> list[Soaked]:
    """Runs all tasks.

    Args:
        processes: at most so many at once; None: one a core.
        watch: told several times a second how far each is, in simulated seconds; returns True to
            stop them all after their present steps.

    Returns:
        what became of each task, in their order.

    Raises:
        whatever a run raises; the others are stopped.
        InternalError: a process died (killed for memory, most likely).
    """
    cores = len(os.sched_getaffinity(0))
    processes = max(1, min(processes or cores, len(tasks)))
    context = multiprocessing.get_context("spawn")
    told = context.Array("d", len(tasks))
    stopping = context.Value("i", 0)
    results: dict[int, Soaked] = {}
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin, initargs=(told, stopping)
    ) as pool:
        with _ctrl_c_later():
            numbers: dict[Future[Soaked], int] = {
                pool.submit(_one, number, task): number for number, task in enumerate(tasks)
            }
        waiting = set(numbers)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    results[numbers[future]] = future.result()
                if watch(told[:]):
                    stopping.value = 1
        except BrokenProcessPool:
            raise InternalError(
                f"one of {processes} processes died, perhaps for want of memory; "
                "--processes 1 needs less"
            ) from None
        except BaseException:
            stopping.value = 1
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[number] for number in range(len(tasks))]


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Holds Ctrl-C back. Processes that are started meanwhile never get one: they inherit that, and
    a new one imports for seconds before it could see to it itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(told: SynchronizedArray[float], stopping: Synchronized[int]) -> None:
    """In a new process. Ctrl-C is the parent's business, and it ends with the parent."""
    global _told, _stopping
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _told, _stopping = told, stopping


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _one(number: int, task: Task) -> Soaked:
    def watch(simulated_s: float) -> bool:
        _told[number] = simulated_s
        return bool(_stopping.value)

    asked_s = task.simulated_s
    if _stopping.value:  # before it began: drawing the requests of hours would take its time
        task = replace(task, hours=min(asked_s, STOPPED_S) / 3600)
    soaked = alone(task, watch)
    _told[number] = asked_s
    return soaked


def alone(
    task: Task,
    watch: Callable[[float], bool] = lambda simulated_s: False,
    collector: Collector | None = None,
) -> Soaked:
    """One run, in this process. ``collector``: of metrics, told of it while it runs."""
    history = History(every_steps=1) if task.history else None

    def look(simulated_s: float, totals: Totals) -> bool:
        return watch(simulated_s)

    return Soaked(soak_one(task, look, history, collector), history)
