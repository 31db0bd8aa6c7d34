"""The distributions, built and installed for real."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

import unisono
from unisono.transports.cuda.kernels.catalogue import KERNELS, SHARED_HEADERS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("algorithms", "bench", "collectives", "frameworks", "transports", "tuning")
NATIVE_SOURCES = (".cpp", ".h", "CMakeLists.txt")
USE = "import unisono as un; from unisono.transports import _core; un.init; un.launch; print(_core.__file__)"


def run(*command: str | Path, cwd: Path, timeout_s: float = 300.0) -> str:
    """Run the command without the settings of this environment; return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert process.returncode == 0, f"{command} ended with {process.returncode}\n{process.stdout}\n{process.stderr}"
    return process.stdout


@pytest.mark.packaging
@pytest.mark.timeout(900)
def test_sdist_and_wheel_install_and_import_in_a_fresh_environment(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    # The sdist, and the wheel built from the sdist. The tests are about their files, so the native core is compiled
    # quickly.
    quick = ("-Ccmake.build-type=RelWithDebInfo", "-Ccmake.define.CMAKE_UNITY_BUILD=ON")
    quick += ("-Ccmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1",)
    run(sys.executable, "-m", "build", *quick, "--outdir", dist, ROOT, cwd=tmp_path, timeout_s=600)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    check_sdist(sdist)
    check_wheel(wheel)

    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=True)
    run(fresh / "bin/pip", "install", "--quiet", wheel, cwd=tmp_path)
    for cwd in (tmp_path, Path("/")):
        native = Path(run(fresh / "bin/python", "-c", USE, cwd=cwd).strip())
        assert native.is_relative_to(fresh)
    assert run(fresh / "bin/unisono", "--version", cwd=tmp_path).startswith("unisono ")
    check_import_from_the_source_folder(fresh / "bin/python")


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2]: archive.getmember(name) for name in archive.getnames()}
    for folder in FOLDERS:
        assert members[f"unisono/{folder}/__init__.py"].isfile()
    for name in (
        "LICENSE",
        "README.md",
        "CMakeLists.txt",
        "transports/native/bindings/binding.cpp",
        "tests/conftest.py",
    ):
        assert members[name].isfile()
    assert not [name for name in members if name.startswith((".venv", ".peers", "build/", ".ci"))]


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "unisono/py.typed" in names
    for folder in FOLDERS:
        assert f"unisono/{folder}/__init__.py" in names
    assert [name for name in names if name.startswith("unisono/transports/_core.") and name.endswith(".so")]
    for_gpus = {
        f"unisono/transports/cuda/kernels/{path.relative_to(KERNELS)}"
        for path in [*KERNELS.glob("*.cuh"), *(KERNELS / "standard").iterdir()]
    }
    for_gpus |= {f"unisono/transports/native/core/kernels/{name}" for name in SHARED_HEADERS}
    assert for_gpus <= set(names)
    assert not [name for name in set(names) - for_gpus if name.endswith(NATIVE_SOURCES)]
    assert not [name for name in names if name.startswith(("unisono/bench/studies/", "unisono/bench/results/"))]
    assert {name.partition("/")[0] for name in names if not name.startswith("unisono-")} == {"unisono"}


def check_import_from_the_source_folder(python: Path) -> None:
    """Start Python in the repository with a regular install: it imports the source folder, and its error has advice."""
    for code in ("import unisono; unisono.init()", "from unisono.transports import _core"):
        process = subprocess.run(
            [python, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert process.returncode == 1
        assert f"ImportError: Unisono was imported from its source folder {ROOT}" in process.stderr
        assert "pip install --editable" in process.stderr


def test_version_is_the_same_wherever_it_is_written() -> None:
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    recipe = re.search(r'version: "(.*)"', (ROOT / "scripts/conda/recipe.yaml").read_text())
    assert citation
    assert recipe
    assert importlib.metadata.version("unisono") == unisono.__version__ == citation[1] == recipe[1]


def test_the_native_core_is_imported_from_anywhere(tmp_path: Path) -> None:
    code = "from unisono.transports import _core; print(_core.__name__)"
    for cwd in (ROOT, tmp_path, Path("/")):
        assert run(sys.executable, "-c", code, cwd=cwd, timeout_s=60).strip() == "unisono.transports._core"


def in_the_source_folder(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in the source folder, from which it imports Unisono without the native core.

    -S disables the import hook of the editable install, which would find the core.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.mark.parametrize(
    "code",
    [
        "from unisono.transports import _core",
        "import unisono as un; un.init()",
        "import unisono as un; un.empty(3)",
        "import unisono as un; un.launch(print, 2)",
    ],
)
def test_source_folder_without_native_core_says_what_to_do(code: str, tmp_path: Path) -> None:
    process = in_the_source_folder("-c", code, folder=tmp_path)
    assert process.returncode == 1
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: Unisono was imported from its source folder {ROOT}")
    assert f"pip install --editable {ROOT}" in last
    assert "During handling" not in process.stderr
    assert "<frozen importlib" not in process.stderr


@pytest.mark.parametrize("arguments", ["run -n 2 program.py", "tune", "bench allreduce"])
def test_command_without_native_core_ends_with_one_line_of_advice(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("pass")
    process = in_the_source_folder("-m", "unisono", *arguments.split(), folder=tmp_path)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith(f"unisono: Unisono was imported from its source folder {ROOT}")
    assert len(process.stderr.splitlines()) == 1


def test_unknown_name_of_transports_is_an_attribute_error() -> None:
    import unisono.transports

    with pytest.raises(AttributeError, match="has no attribute 'carrier_pigeon'"):
        _ = unisono.transports.carrier_pigeon


def preflight(python: str, compiler: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts/preflight.sh", python, compiler]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_preflight_check_is_silent_when_nothing_is_missing() -> None:
    process = preflight(sys.executable, os.environ.get("CXX", "c++"))
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_preflight_check_lists_missing_tools_and_how_to_get_them(tmp_path: Path) -> None:
    old_python = tmp_path / "python"
    # a Python older than 3.10 ends with 1 when it is asked for its version
    old_python.write_text("#!/bin/sh\nexit 1\n")
    old_python.chmod(0o755)
    process = preflight(str(old_python), "no-such-compiler")
    assert process.returncode == 1
    assert "missing: Python 3.10 or newer" in process.stderr
    assert "missing: a C++20 compiler as 'no-such-compiler'" in process.stderr
    for advice in ("apt install g++", "dnf install gcc-c++", "conda install -c conda-forge cxx-compiler"):
        assert advice in process.stderr


@pytest.mark.parametrize(
    ("compiler", "problem"), [("no-such-compiler", "none was"), ("old-compiler", "compiles no")], ids=["none", "old"]
)
def test_pip_without_cxx20_compiler_says_how_to_get_one(compiler: str, problem: str, tmp_path: Path) -> None:
    pytest.importorskip("cmake")
    old = tmp_path / "old-compiler"
    old.write_text('#!/bin/sh\ncase "$*" in *-std=c++20*) exit 1;; esac\nexec c++ "$@"\n')
    old.chmod(0o755)
    programs = Path(sys.executable).parent
    configure = [programs / "cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", "-DUNISONO_MODULE=OFF"]
    environment = {**os.environ, "CXX": str(old) if compiler == old.name else compiler}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"  # the folder that has ninja
    process = subprocess.run(
        configure, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert process.returncode == 1
    assert "Unisono needs a C++20 compiler (g++ 11, clang++ 14 or newer)" in process.stderr
    assert problem in process.stderr
    for advice in ("apt install g++", "dnf install gcc-c++", "conda install -c conda-forge cxx-compiler"):
        assert advice in process.stderr
