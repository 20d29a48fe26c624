"""What is missing for CUDA is named, with what to install; what causes the rest comes first."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from kvmmu import CUDAUnavailable, KVCacheError, MissingExtra, cuda, doctor
from kvmmu.cuda import availability
from kvmmu.cuda.availability import Installed, problems

ROOT = Path(__file__).resolve().parent.parent
CUPY_13, CUPY_12 = ("cupy-cuda13x", "14.2.0"), ("cupy-cuda12x", "14.2.0")
NVRTC_13, NVRTC_12 = (13, "nvidia-cuda-nvrtc 13.2.86"), (12, "nvidia-cuda-nvrtc-cu12 12.9.86")
READY_13 = Installed((13, 0), 1, (CUPY_13,), (NVRTC_13,))
READY_12 = Installed((12, 4), 1, (CUPY_12,), (NVRTC_12,))


@pytest.mark.parametrize(
    "found",
    [
        READY_13,
        READY_12,
        replace(READY_12, driver=(13, 2)),  # a driver runs what was made for older ones
        replace(READY_13, driver=(14, 0)),
        replace(READY_13, nvrtc=(NVRTC_13, NVRTC_12)),
        replace(READY_13, cupy=(("cupy", "14.2.0"),)),  # built from source, for whatever is there
        replace(READY_12, cupy=(("cupy", "15.0.0a1"),)),
    ],
)
def test_what_fits_has_no_problem(found: Installed) -> None:
    assert problems(found) == []


@pytest.mark.parametrize(
    ("found", "error", "says", "numbers"),
    [
        (
            replace(READY_13, driver=None, devices=0),
            CUDAUnavailable,
            "no CUDA driver.*install the NVIDIA driver",
            {},
        ),
        (
            replace(READY_12, driver=(11, 8)),
            CUDAUnavailable,
            "supports CUDA 11.8 .*install driver 525 or newer",
            {"driver": (11, 8), "needed": 12},
        ),
        (replace(READY_13, devices=0), CUDAUnavailable, "no device.*nvidia-smi", {"devices": 0}),
        (
            replace(READY_13, cupy=()),
            MissingExtra,
            r"CuPy is not installed: pip install 'kvmmu\[cuda13\]'",
            {"extra": "cuda13"},
        ),
        (
            replace(READY_12, cupy=()),
            MissingExtra,
            r"CuPy is not installed: pip install 'kvmmu\[cuda12\]'",
            {"extra": "cuda12"},
        ),
        (
            replace(READY_13, driver=(12, 9)),
            CUDAUnavailable,
            r"cupy-cuda13x needs a driver of CUDA 13 \(580 or newer\), and this one supports CUDA "
            r"12.9: pip uninstall cupy-cuda13x, then pip install 'kvmmu\[cuda12\]'",
            {"driver": (12, 9), "needed": 13, "cupy": {"cupy-cuda13x": "14.2.0"}},
        ),
        (
            replace(READY_13, cupy=(CUPY_13, CUPY_12)),
            CUDAUnavailable,
            r"overwrite each other: pip uninstall cupy-cuda13x cupy-cuda12x, then pip install "
            r"'kvmmu\[cuda13\]'",
            {},
        ),
        (
            replace(READY_12, cupy=(("cupy-cuda12x", "13.6.0"),)),
            CUDAUnavailable,
            r"cupy-cuda12x 13.6.0 is too old, 14 or newer.*'kvmmu\[cuda12\]'",
            {"needed": 14},
        ),
        (
            replace(READY_13, cupy=(("cupy-cuda11x", "13.6.0"),)),
            CUDAUnavailable,
            r"cupy-cuda11x 13.6.0 is too old.*pip uninstall cupy-cuda11x, then pip install "
            r"'kvmmu\[cuda13\]'",
            {},
        ),
        (
            replace(READY_13, nvrtc=()),
            MissingExtra,
            r"NVRTC of CUDA 13 is not installed, and cupy-cuda13x needs it: pip install "
            r"'kvmmu\[cuda13\]'",
            {"extra": "cuda13"},
        ),
        (
            replace(READY_12, driver=(13, 0), nvrtc=(NVRTC_13,)),
            MissingExtra,
            r"NVRTC of CUDA 12 is not installed \(there is one of CUDA 13\), and cupy-cuda12x",
            {"extra": "cuda12"},
        ),
    ],
)
def test_what_does_not_fit_says_what_to_install(
    found: Installed,
    error: type[KVCacheError],
    says: str,
    numbers: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(availability, "installed", lambda: found)
    with pytest.raises(error, match=says) as caught:
        cuda.require()
    assert caught.value.numbers.items() >= numbers.items()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.numbers) == (error, caught.value.numbers)
    (row,) = [row for row in doctor.examine() if row.what == "CUDA"]
    assert str(caught.value) in row.note
    assert (row.found is None) == (found.driver is None)
    assert not row.failed  # nothing on a CPU needs it


def test_a_machine_without_anything_hears_of_the_driver_first_and_then_of_the_extra() -> None:
    first, second = problems(Installed())
    assert isinstance(first, CUDAUnavailable)
    assert isinstance(second, MissingExtra)
    assert second.extra == "cuda13"


def test_the_doctor_shows_that_all_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "installed", lambda: READY_13)
    assert cuda.require() is READY_13
    rows = {row.what: row for row in doctor.examine()}
    assert rows["CUDA"].found == "ready"
    assert rows["CUDA driver"].found == "CUDA 13.0"
    assert rows["CuPy"].found == "14.2.0"
    assert rows["NVRTC"].found == "CUDA 13"


def test_packages_are_found_by_what_is_installed() -> None:
    found = cuda.installed()
    for name, version in found.cupy:
        assert metadata.version(name) == version
    for major, place in found.nvrtc:
        assert str(major) in place
    if found.driver is None:
        assert found.devices == 0


def test_the_package_needs_neither_cupy_nor_torch_to_be_imported() -> None:
    code = (
        "import sys, kvmmu.cuda, kvmmu.kernels; kvmmu.cuda.installed(); "
        "assert not {'torch', 'cupy'} & set(sys.modules), 'imported'"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_extras_bring_what_is_required() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for major in (12, 13):
        names = [re.split(r"[<>=]", line, maxsplit=1)[0] for line in extras[f"cuda{major}"]]
        assert set(names) & set(availability._CUPY) == {f"cupy-cuda{major}x"}
        assert set(names) & set(availability._NVRTC)
        assert f"cupy-cuda{major}x>={availability._MIN_CUPY}" in extras[f"cuda{major}"][0]
