"""What users download: the wheel and the sdist, their contents and how they behave installed.

Nothing here uses the network: builds run with cargo offline, from what the build of the
installed package left behind.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "kvmmu"
EXTRAS = {
    "cli", "config", "html", "metrics", "testing", "torch", "cuda12", "cuda13", "test", "dev",
    "example", "nixl",
}  # fmt: skip
CRATES = {"kvmmu", "kvmmu-copy", "kvmmu-python", "kvmmu-record"}
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()


def run(
    *command: str | Path, cwd: Path = ROOT, target: Path = TARGET
) -> subprocess.CompletedProcess[str]:
    """Runs a command that builds something; its output is the failure's message."""
    environment = os.environ | {
        # Found by name: python3, and ziglang through it.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "CARGO_NET_OFFLINE": "true",
        "CARGO_TARGET_DIR": str(target),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def maturin(*arguments: str | Path, cwd: Path = ROOT) -> None:
    run(sys.executable, "-m", "maturin", *arguments, cwd=cwd)


def only_file(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def expected_wheel_names() -> set[str]:
    version = importlib.metadata.version("kvmmu")
    modules = {
        f"kvmmu/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".pyi", ".html", ".css", ".js", ".yaml", ".yml")
        or path.name == "py.typed"
    }
    info = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    return (
        modules | {"kvmmu/_core.abi3.so"} | {f"kvmmu-{version}.dist-info/{name}" for name in info}
    )


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    maturin("build", "--release", "--out", out)
    return only_file(out, "*.whl")


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    maturin("sdist", "--out", out)
    return only_file(out, "*.tar.gz")


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="session")
def base_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has kvmmu's wheel and NumPy, and nothing else."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    numpy = importlib.metadata.distribution("numpy")
    for name in {Path(str(file)).parts[0] for file in numpy.files or ()} - {".."}:
        (packages / name).symlink_to(Path(str(numpy.locate_file(name))))
    return python


def test_one_abi3_wheel_serves_every_python_from_3_11_and_stays_below_5_mb(wheel: Path) -> None:
    assert re.fullmatch(r"kvmmu-[0-9.]+-cp311-abi3-\w+\.whl", wheel.name)
    assert wheel.stat().st_size < 5e6


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel_names(wheel) == expected_wheel_names()
    assert {"kvmmu/py.typed", "kvmmu/_core.pyi", "kvmmu/__init__.py"} <= wheel_names(wheel)


def test_the_base_package_requires_numpy_only(metadata: Message) -> None:
    required = metadata.get_all("Requires-Dist") or []
    base = [line for line in required if "extra ==" not in line]
    assert [re.split(r"[^\w-]", line, maxsplit=1)[0] for line in base] == ["numpy"]


def test_the_metadata_names_licence_python_and_extras(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra") or ()) == EXTRAS


def test_the_sdist_holds_what_a_wheel_is_built_from_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {"/".join(Path(name).parts[1:]) for name in archive.getnames()}
    needed = {"Cargo.toml", "Cargo.lock", "LICENSE", "README.md", "pyproject.toml"}
    needed |= {f"rust/{crate}/Cargo.toml" for crate in CRATES}
    for folder, pattern in (("rust", "src/**/*.rs"), ("python", "*.py*"), ("kernels", "*")):
        needed |= {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob(pattern)
            if path.suffix not in (".pyc", ".so") and path.is_file()
        }
    assert needed <= names, sorted(needed - names)
    others = ("PKG-INFO", "python/kvmmu/py.typed", "rust/*/*.rs", "rust/*/README.md")
    unknown = [n for n in names - needed if not any(fnmatch(n, other) for other in others)]
    assert not unknown, unknown


@pytest.mark.slow
def test_the_sdist_alone_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-index", "--no-deps")
    # A target folder of its own: cargo takes what it finds in ours for a build of these sources.
    run(*pip, "--wheel-dir", tmp_path, sdist, cwd=tmp_path, target=tmp_path / "target")
    built = only_file(tmp_path, "*.whl")
    # maturin audits the platform when it is called itself, not when pip calls it.
    assert built.name.rsplit("-", 1)[0] == wheel.name.rsplit("-", 1)[0]
    assert wheel_names(built) == wheel_names(wheel)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed (kvmmu[dev])"
)
def test_the_documented_command_builds_a_manylinux2014_wheel(tmp_path: Path) -> None:
    documented = (ROOT / "docs" / "development.md").read_text()
    command = "maturin build --release --compatibility manylinux2014 --zig"
    assert command in documented
    maturin(*command.split()[1:], "--out", tmp_path)
    built = only_file(tmp_path, "*.whl")
    assert "manylinux2014" in built.name
    assert built.stat().st_size < 5e6
    assert wheel_names(built) == expected_wheel_names()


def test_with_numpy_alone_kvmmu_imports_and_works(base_python: Path) -> None:
    code = (
        "import numpy as np, kvmmu;"
        "mmu = kvmmu.MMU(8);"
        "s = mmu.open(np.arange(20, dtype=np.int32));"
        "assert len(mmu.block_table(s)) == 2; mmu.close(s); mmu.validate()"
    )
    command = (str(base_python), "-W", "error", "-c", code)
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_with_numpy_alone_the_command_names_the_extra_that_it_lacks(base_python: Path) -> None:
    command = (str(base_python.with_name("kvmmu")), "replay", "--sample")
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "kvmmu[cli]" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
