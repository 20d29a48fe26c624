"""Metrics of a running manager, for Prometheus.

What lives here: :class:`Collector`, which reads managers when it is scraped; :class:`Watched`, what
an engine tells beside that; :func:`serve`; where the alert rules are. What never lives here:
figures of a replay (see :mod:`kvmmu.replay`), and anything that the manager does for a metric's
sake: it counts anyway, and is looked at.

    collector = kvmmu.metrics.Collector()          # registers itself
    engine = collector.add(cache, "decode")        # an MMU or a KVCache, any number
    engine.preempted()                             # what only the engine knows
    engine.waited("shape", 0.35)

Needs ``kvmmu[metrics]`` (prometheus-client); without it the import raises ``MissingExtra``. All
metrics, their labels and what they cost are in docs/metrics.md.

Any thread may scrape and any thread may tell. With several processes (``PROMETHEUS_MULTIPROC_DIR``)
prometheus-client reads files that its own counters leave, and calls no collector: serve the process
that has the manager on a port of its own.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .errors import InvalidConfig, KVCacheError, MissingExtra

try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeHistogramMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector as _PrometheusCollector
except ImportError as error:  # pragma: no cover - tested in an environment without it
    raise MissingExtra(
        "kvmmu.metrics needs prometheus-client: pip install 'kvmmu[metrics]'"
    ) from error

from ._core import MMU

if TYPE_CHECKING:
    from ._core import Measure
    from .cache import KVCache

__all__ = ["CAUSES", "Collector", "CollectorRegistry", "Server", "Watched", "alert_rules", "serve"]

CAUSES = ("memory", "shape", "tables", "batch", "prefill", "other")
"""Why a request waits: too few blocks (``OutOfBlocks``), enough in the wrong shape
(``Fragmented``), page-table nodes or sequence slots (``OutOfTables``), no row of the batch, prompts
of others that are to be computed first, anything else."""

WAIT_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Seconds. Timeouts of serving stacks are at 30 or 60."""

WINDOW = 512
"""Blocks of an aligned group that one huge page can map."""

_COUNTERS = {
    "opened": ("sequences_opened", "Sequences opened."),
    "closed": ("sequences_closed", "Sequences closed."),
    "forked": ("sequences_forked", "Sequences forked off."),
    "appended_tokens": ("appended_tokens", "Tokens appended after open."),
    "prefix_queried_blocks": ("prefix_queried_blocks", "Full prompt blocks looked up."),
    "prefix_hit_blocks": ("prefix_hit_blocks", "Of those, found cached."),
    "published_blocks": ("published_blocks", "Blocks entered into the prefix index."),
    "evicted_blocks": ("evicted_blocks", "Cached blocks dropped for others."),
    "copied_on_write": ("copied_on_write_blocks", "Blocks copied because they were shared."),
    "claimed_blocks": ("claimed_blocks", "Blocks claimed."),
    "freed_blocks": ("freed_blocks", "Blocks emptied or fenced after their last reference."),
    "promotions": ("promotions", "Larger pages made of smaller ones."),
    "splits": ("splits", "Pages cut into smaller ones."),
    "huge_missed": ("huge_pages_missed", "Regions of 512 blocks that got no huge page."),
    "holds_made": ("holds_made", "Holds made."),
    "holds_broken": ("holds_broken", "Holds given up because others needed the blocks."),
    "deduplicated": ("deduplicated_blocks", "Blocks given back because an equal one was known."),
    "given_back": ("given_back_blocks", "Blocks that went offline."),
    "taken_back": ("taken_back_blocks", "Blocks that came back."),
    "plans_begun": ("compaction_passes", "Plans of moves begun."),
    "plans_stopped_early": (
        "compaction_passes_stopped_early",
        "Of those, plans whose limit stopped them before their goal.",
    ),
    "moves_begun": ("moves_begun", "Moves of blocks begun."),
}
"""Counter of ``MMU.stats()`` to (name without ``kvmmu_`` and ``_total``, what it counts)."""

_OUTCOMES = {
    "committed": "moves_committed",
    "dropped": "moves_dropped",
    "aborted": "moves_aborted",
}
_STATES = ("empty", "destined", "in_use", "cached", "fenced", "offline")


def alert_rules() -> Path:
    """The file of alert rules that comes with kvmmu, for ``rule_files`` of Prometheus."""
    return Path(__file__).parent / "alerts.yml"


class Watched:
    """A manager whose metrics are collected, and what its engine tells about it."""

    def __init__(
        self,
        name: str,
        mmu: MMU,
        cache: KVCache | None,
        block_bytes: int | None,
        sharing_expected: bool,
        measure_every_s: float,
    ) -> None:
        self.name = name
        self.mmu = mmu
        self.sharing_expected = sharing_expected
        self.block_bytes = block_bytes
        self._cache = cache
        self._measure_every_s = measure_every_s
        self._measured: tuple[float, Measure, dict[str, int] | None] | None = None
        self._measuring = threading.Lock()
        self._telling = threading.Lock()
        self._preemptions = 0
        self._swapped = 0
        self._waits = {cause: [0] * (len(WAIT_BOUNDS) + 1) for cause in CAUSES}
        self._waited_s = dict.fromkeys(CAUSES, 0.0)

    def preempted(self, requests: int = 1) -> None:
        """So many running requests were thrown out, to be computed again."""
        self._check("requests", requests)
        with self._telling:
            self._preemptions += requests

    def swapped(self, blocks: int) -> None:
        """The engine has copied so many blocks out to other memory, or back in."""
        self._check("blocks", blocks)
        with self._telling:
            self._swapped += blocks

    def waited(self, cause: str, seconds: float) -> None:
        """A request had to wait before it was admitted.

        Args:
            cause: one of :data:`CAUSES`.
            seconds: how long, 0 or more.

        Raises:
            InvalidConfig: another cause, or no such time.
        """
        if cause not in self._waits:
            raise InvalidConfig(f"cause = {cause!r}: allowed is one of {CAUSES}")
        if isinstance(seconds, bool) or not (
            isinstance(seconds, (int, float)) and 0 <= seconds < math.inf
        ):
            raise InvalidConfig(f"seconds = {seconds!r}: allowed is a number from 0")
        with self._telling:
            self._waits[cause][bisect_left(WAIT_BOUNDS, seconds)] += 1
            self._waited_s[cause] += seconds

    @staticmethod
    def _check(name: str, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidConfig(f"{name} = {value!r}: allowed is a whole number from 0")

    # -- when scraped ------------------------------------------------------------------------

    def _measure(self) -> tuple[float, Measure, dict[str, int] | None]:
        """When it was measured, and what was found: not more often than it was said, whoever asks,
        for the manager stands still meanwhile."""
        with self._measuring:
            now = monotonic()
            if self._measured is None or now - self._measured[0] >= self._measure_every_s:
                guarantee = self.mmu.guarantee() if self.mmu.keeps_guarantee else None
                self._measured = now, self.mmu.measure(), guarantee
            return self._measured

    def _read(self, to: _Families) -> None:
        """Adds its samples. What raises has added nothing."""
        mmu, name = self.mmu, self.name
        states, stats = mmu.states(), mmu.stats()
        steps, leases = mmu.steps_in_flight(), mmu.num_leases()
        measured_at, measure, guarantee = self._measure()
        times = mmu.operation_times()
        given_back = None if self._cache is None else self._cache.bytes_given_back
        with self._telling:
            waits = {cause: list(counts) for cause, counts in self._waits.items()}
            waited_s = dict(self._waited_s)
            preemptions, swapped = self._preemptions, self._swapped

        to.gauge("pool_blocks", mmu.num_blocks, name)
        to.gauge("block_tokens", mmu.block_size, name)
        for state in _STATES:
            to.gauge("blocks", states[state], name, state)
        to.gauge("available_blocks", states["available"], name)
        to.gauge("held_blocks", states["held"], name)
        to.gauge("steps_in_flight", steps, name)
        to.gauge("leases", leases, name)
        to.gauge("sharing_expected", int(self.sharing_expected), name)

        for over, ratio in (
            ("empty", measure.ratio_empty),
            ("available", measure.ratio_available),
        ):
            to.gauge("fragmentation_ratio", ratio, name, over)
            to.gauge("fragmentation_index", 1 - ratio, name, over)
        possible = measure.available // WINDOW
        to.gauge("free_windows", measure.free_windows, name)
        to.gauge("free_windows_possible", possible, name)
        if possible:
            to.gauge("free_windows_ratio", measure.free_windows / possible, name)
        to.runs(measure, mmu.num_blocks, name)
        to.gauge("sequences", measure.sequences, name)
        to.gauge("sequence_runs", measure.runs, name)
        to.gauge("unused_slots", measure.unused_slots, name)
        to.gauge("regions", measure.regions, name)
        to.gauge("table_nodes", measure.table_nodes, name)
        for order in mmu.page_orders:
            to.gauge("pages", measure.pages.get(order, 0), name, str(order))
        to.gauge("measure_age_seconds", monotonic() - measured_at, name)
        if guarantee is not None:
            to.gauge("guarantee_debt_moves", guarantee["owed"], name)
            to.gauge("guarantee_windows_held", guarantee["windows"], name)
            to.gauge("guarantee_windows_allowed", guarantee["allowed"], name)
            to.gauge("guarantee_windows_immovable", guarantee["immovable"], name)

        for counter, (metric, _) in _COUNTERS.items():
            to.counter(metric, stats[counter], name)
        for outcome, counter in _OUTCOMES.items():
            to.counter("moves", stats[counter], name, outcome)
        if self.block_bytes is not None:
            to.gauge("block_bytes", self.block_bytes, name)
            to.counter("moved_bytes", stats["moves_committed"] * self.block_bytes, name)
        if given_back is not None:
            to.gauge("given_back_bytes", given_back, name)

        to.counter("preemptions", preemptions, name)
        to.counter("swapped_blocks", swapped, name)
        for cause, counts in waits.items():
            to.histogram("wait_seconds", WAIT_BOUNDS, counts, waited_s[cause], name, cause)
        bounds = mmu.operation_time_bounds()
        for operation, (counts, seconds) in times.items():
            to.histogram("operation_seconds", bounds, counts, seconds, name, operation)


class _Families:
    """The metrics of one scrape, each once, with the samples of all managers."""

    def __init__(self) -> None:
        self._all: dict[str, Any] = {}
        gauge, counter = self._gauge, self._counter
        gauge("up", "Whether the manager answers: 0 after an internal error, in a forked child.")
        gauge("pool_blocks", "Usable blocks of the pool.")
        gauge("block_tokens", "Tokens a block.")
        gauge("blocks", "Blocks by state; the states add up to kvmmu_pool_blocks.", "state")
        gauge("available_blocks", "Blocks that are empty or can be evicted.")
        gauge("held_blocks", "Of the empty ones, those kept behind sequences to grow into.")
        gauge("steps_in_flight", "Steps begun and not ended.")
        gauge("leases", "Transfers that hold blocks.")
        gauge("sharing_expected", "1 where prompts are expected to share prefixes, as was said.")
        gauge("fragmentation_ratio", "1 - largest run / free blocks; 0 when none is free.", "over")
        gauge("fragmentation_index", "largest run / free blocks; 1 when none is free.", "over")
        gauge("free_windows", "Aligned groups of 512 blocks that are available as a whole.")
        gauge("free_windows_possible", "Groups that the available blocks could make.")
        gauge("free_windows_ratio", "Free windows of the possible; missing when none is possible.")
        self._all["free_run_blocks"] = GaugeHistogramMetricFamily(
            "kvmmu_free_run_blocks",
            "Lengths of the runs of consecutive available blocks.",
            labels=["cache"],
        )
        gauge("sequences", "Open sequences that have blocks.")
        gauge("sequence_runs", "Runs of consecutive blocks of all of them, added up.")
        gauge("unused_slots", "Places in last blocks that no token takes.")
        gauge("regions", "Complete regions of 512 blocks of sequences: possible huge pages.")
        gauge("table_nodes", "Page-table nodes of 4 KiB in use.")
        gauge("pages", "Pages that sequences map, of 2^order blocks each.", "order")
        gauge("measure_age_seconds", "Age of the figures of fragmentation, sequences and pages.")
        gauge("guarantee_debt_moves", "Moves owed to the guarantee.")
        gauge("guarantee_windows_held", "Windows that hold a live block.")
        gauge("guarantee_windows_allowed", "Windows that the guarantee allows.")
        gauge("guarantee_windows_immovable", "Windows above that which nothing may move out of.")
        for metric, text in _COUNTERS.values():
            counter(metric, text)
        counter("moves", "Moves by what became of them.", "outcome")
        gauge("block_bytes", "Bytes of a block, over all layers.")
        counter("moved_bytes", "Bytes of the moves that came into effect.")
        gauge("given_back_bytes", "Bytes of memory that are with the system now.")
        counter("preemptions", "Running requests thrown out, as the engine tells.")
        counter("swapped_blocks", "Blocks copied out or back in, as the engine tells.")
        self._all["wait_seconds"] = HistogramMetricFamily(
            "kvmmu_wait_seconds",
            "How long requests waited to be admitted, as the engine tells.",
            labels=["cache", "cause"],
        )
        self._all["operation_seconds"] = HistogramMetricFamily(
            "kvmmu_operation_seconds",
            "Time inside calls of the manager, of about one call in 64 (or as was said).",
            labels=["cache", "operation"],
        )

    def _gauge(self, name: str, text: str, *labels: str) -> None:
        self._all[name] = GaugeMetricFamily(f"kvmmu_{name}", text, labels=["cache", *labels])

    def _counter(self, name: str, text: str, *labels: str) -> None:
        self._all[name] = CounterMetricFamily(f"kvmmu_{name}", text, labels=["cache", *labels])

    def gauge(self, name: str, value: float, *labels: str) -> None:
        self._all[name].add_metric(labels, value)

    counter = gauge

    def histogram(
        self,
        name: str,
        bounds: Iterable[float],
        counts: list[int],
        total: float,
        *labels: str,
    ) -> None:
        """``counts`` has one more than ``bounds``: what is above them all."""
        buckets, so_far = [], 0
        for bound, count in zip([*bounds, math.inf], counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == math.inf else repr(bound), so_far))
        self._all[name].add_metric(labels, buckets, total)

    def runs(self, measure: Measure, num_blocks: int, name: str) -> None:
        buckets, so_far = [], 0
        counts = measure.run_histogram.tolist()
        for k in range(num_blocks.bit_length()):
            so_far += counts[k]
            buckets.append((str(float(2 ** (k + 1) - 1)), so_far))
        buckets.append(("+Inf", so_far))
        self._all["free_run_blocks"].add_metric([name], buckets, measure.available)

    def filled(self) -> Iterator[Metric]:
        return (family for family in self._all.values() if family.samples)

    def all(self) -> Iterator[Metric]:
        return iter(self._all.values())


class Collector(_PrometheusCollector):
    """Collects the metrics of managers when it is scraped.

    Args:
        registry: where it registers itself; None: nowhere.
    """

    def __init__(self, registry: CollectorRegistry | None = REGISTRY) -> None:
        self._watched: dict[str, Watched] = {}
        self._changing = threading.Lock()
        if registry is not None:
            registry.register(self)

    def add(
        self,
        cache: MMU | KVCache,
        name: str = "kv",
        *,
        block_bytes: int | None = None,
        sharing_expected: bool = False,
        time_every: int = 64,
        measure_every_s: float = 1.0,
    ) -> Watched:
        """Watches a manager, which is kept alive until :meth:`remove`.

        Args:
            cache: an MMU, or a KVCache (which brings the bytes of its blocks).
            name: value of the label ``cache``.
            block_bytes: bytes of a block over all layers; without it ``kvmmu_moved_bytes_total``
                is missing.
            sharing_expected: prompts are expected to share prefixes: the alert on a low hit rate
                looks only where this is said.
            time_every: of the calls of each operation about one in so many is timed; 0: none.
            measure_every_s: figures for which the manager has to stand still are not read more
                often than this, however often it is scraped.

        Raises:
            InvalidConfig: an argument, or a name that is taken.
        """
        mmu: Any = getattr(cache, "mmu", cache)
        if not callable(getattr(mmu, "measure", None)):
            raise InvalidConfig(f"cache = {cache!r}: allowed is an MMU or a KVCache")
        # What prometheus-client cannot write would hide all other managers from whoever scrapes.
        if not _is_text(name):
            raise InvalidConfig(f"name = {name!r}: allowed is a text that is not empty")
        if not isinstance(sharing_expected, bool):
            raise InvalidConfig(f"sharing_expected = {sharing_expected!r}: allowed is a bool")
        if not (
            isinstance(measure_every_s, (int, float))
            and not isinstance(measure_every_s, bool)
            and 0 <= measure_every_s < math.inf
        ):
            raise InvalidConfig(f"measure_every_s = {measure_every_s!r}: allowed is 0 or more")
        whole: Any = None if mmu is cache else cache
        if block_bytes is None:
            block_bytes = None if whole is None else whole.storage.block_bytes
        elif isinstance(block_bytes, bool) or not isinstance(block_bytes, int) or block_bytes < 1:
            raise InvalidConfig(f"block_bytes = {block_bytes!r}: allowed is a whole number from 1")
        with self._changing:
            if name in self._watched:
                raise InvalidConfig(
                    f"name = {name!r}: allowed is one that is not taken: {[*self._watched]}"
                )
            mmu.time_operations(time_every)
            watched = Watched(name, mmu, whole, block_bytes, sharing_expected, measure_every_s)
            self._watched = {**self._watched, name: watched}
        return watched

    def remove(self, name: str) -> None:
        """Watches a manager no longer. Its calls are no longer timed.

        Raises:
            InvalidConfig: there is none of this name.
        """
        with self._changing:
            if name not in self._watched:
                raise InvalidConfig(f"name = {name!r}: allowed is one of {[*self._watched]}")
            gone = self._watched[name]
            self._watched = {key: w for key, w in self._watched.items() if key != name}
        gone.mmu.time_operations(0)

    def collect(self) -> Iterator[Metric]:
        """The metrics of now, for a registry."""
        families = _Families()
        for name, watched in self._watched.items():
            try:
                watched._read(families)
            except KVCacheError:  # one that is out of order does not hide the others
                families.gauge("up", 0, name)
            else:
                families.gauge("up", 1, name)
        return families.filled()

    def describe(self) -> Iterator[Metric]:
        """All metrics there may be, without samples, for a registry."""
        return _Families().all()


class Server:
    """Serves metrics until it is closed. A context manager.

    Attributes:
        url: where they are.
    """

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        host, port = server.server_address[:2]
        self.port: int = port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def close(self) -> None:
        """Ends it, and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _is_text(value: object) -> bool:
    """Whether it is text with something in it, and can be written as UTF-8."""
    return (
        isinstance(value, str)
        and bool(value)
        and not any("\ud800" <= character <= "\udfff" for character in value)
    )


def serve(port: int, registry: CollectorRegistry, *, address: str = "127.0.0.1") -> Server:
    """Serves a registry over HTTP, in a thread of its own.

    Args:
        port: 1 to 65535; 0: one that is free.
        address: which of the machine's addresses; all: ``"0.0.0.0"``. There is no access control.

    Raises:
        InvalidConfig: the port is taken, not allowed, or no port.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise InvalidConfig(f"port = {port!r}: allowed is 0 (any that is free) to 65535")
    try:
        return Server(*start_http_server(port, address, registry))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidConfig(f"port = {port}: cannot be served on {address!r}: {reason}") from None
