"""What all tests share: how long randomised tests look, what may be skipped, where traces are.

``KVMMU_TEST_PROFILE``   quick, default or deep: cases of each Hypothesis test
``KVMMU_REQUIRE_ALL=1``  a test that would be skipped fails, unless it needs a GPU or the traces,
                         or vLLM, Chromium or Prometheus, which no package of the project brings,
                         or NIXL (kvmmu[nixl])
``KVMMU_TRACES``         folder of the published traces; tests that read them take ``traces``
``KVMMU_CHROMIUM``       Chromium or Chrome, where none is on the path
``KVMMU_VLLM``           folder of vLLM's source where only what it imports is installed;
                         tests of its BlockPool take ``vllm``
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from kvmmu import InvalidConfig
from kvmmu.testing.adapters import vllm_block_pool

ROOT = Path(__file__).resolve().parent.parent
REQUIRE_ALL = os.environ.get("KVMMU_REQUIRE_ALL", "") not in ("", "0")
MAY_BE_SKIPPED = (
    "gpu", "needs_chromium", "needs_nixl", "needs_prometheus", "needs_traces", "needs_vllm",
)  # fmt: skip

for name, examples, steps in (("quick", 20, 30), ("default", 100, 50), ("deep", 5000, 100)):
    settings.register_profile(
        name,
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,  # no test asserts a time
        print_blob=True,  # a failure prints what reproduces it
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("KVMMU_TEST_PROFILE", "default"))


def traces_folder() -> Path | None:
    """The folder that KVMMU_TRACES names, if it is there."""
    folder = os.environ.get("KVMMU_TRACES")
    return Path(folder) if folder and Path(folder).is_dir() else None


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of the published traces."""
    folder = traces_folder()
    assert folder is not None, "tests that take `traces` are skipped without them"
    return folder


@pytest.fixture(scope="session")
def vllm() -> None:
    """vLLM's BlockPool can be imported, or the test is skipped and says why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's own
            vllm_block_pool(path=os.environ.get("KVMMU_VLLM"))
    except InvalidConfig as error:
        pytest.skip(f"{error}; KVMMU_VLLM can name a folder of vLLM's source")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "vllm" in getattr(item, "fixturenames", ()):
            item.add_marker("needs_vllm")
        if "traces" in getattr(item, "fixturenames", ()):
            item.add_marker("needs_traces")
        if item.get_closest_marker("needs_traces") and traces_folder() is None:
            item.add_marker(pytest.mark.skip(reason="KVMMU_TRACES names no folder of traces"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    excused = any(item.get_closest_marker(name) for name in MAY_BE_SKIPPED)
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail") and not excused:
        report.outcome = "failed"
        report.longrepr = f"skipped although KVMMU_REQUIRE_ALL is set: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if REQUIRE_ALL and report.skipped:  # a module that skipped itself
        report.outcome = "failed"
        report.longrepr = f"skipped although KVMMU_REQUIRE_ALL is set: {report.longrepr}"
    return report
