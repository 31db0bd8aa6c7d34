"""Run tests with other versions of torch: ``torch_environment.py 2.9.1 2.14.1 [-- ARGUMENTS OF PYTEST]``.

Without arguments of pytest, all tests of torch run.

Each version has an environment of its own, ``.torch/VERSION``. It sees the packages of the current environment: the
editable Unisono with its compiled core, and the tools of the tests. Only torch is installed, and nothing is compiled.

The wheels of torch for Linux need about 3 GB of CUDA libraries, which nothing calls on a CPU. So the environment gets
doubles of them: libraries with the same names and symbols, whose functions return 1. Only the CUDA runtime is the real
one, because torch asks it for devices.

A version that pip cannot install is skipped, and the last lines say so. The exit code is 1 if tests failed. Needs gcc,
readelf and nm.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tested_versions import test_versions

from unisono.bench.peers import make_environment

ROOT = Path(".torch")
TESTS = ("-k", "torch", "tests/frameworks")
# The package with the CUDA runtime, by the name of the library.
RUNTIMES = {"libcudart.so.12": "nvidia-cuda-runtime-cu12", "libcudart.so.13": "nvidia-cuda-runtime"}
# Libraries that the system has.
SYSTEM = re.compile(r"(ld-linux|libc|libdl|libgcc_s|libm|libpthread|librt|libstdc\+\+|libutil)[-.]")
# The prefixes of symbols that the missing libraries define. C++ symbols are those of cuDNN's frontend.
CUDA_SYMBOL = re.compile(r"(cu[A-Z]|cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nccl|nv)", re.IGNORECASE)


def install(version: str) -> str:
    """Create the environment of a version of torch, if it does not exist yet. Return the path of its Python.

    Raises:
        UsageError: pip cannot install this version here.
    """
    folder = ROOT / version
    make_environment(folder, ("--no-deps", f"torch=={version}"), sees=sysconfig.get_path("purelib"))
    python = str(folder.absolute() / "bin" / "python")
    libraries = next(folder.glob("lib/python*/site-packages/torch/lib"))
    missing = missing_libraries(libraries)
    for name in RUNTIMES.keys() & missing.keys():
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", RUNTIMES[name])
        del missing[name]
    if missing:
        make_doubles(libraries, missing.keys(), symbols_of({path for users in missing.values() for path in users}))
    return python


def missing_libraries(libraries: Path) -> dict[str, list[Path]]:
    """Return, by its name, each library that torch needs and nothing here provides, with the libraries that need it."""
    present = {path.name for folder in (libraries, libraries.parents[1] / "nvidia") for path in folder.rglob("*.so*")}
    missing = defaultdict(list)
    for library in sorted(libraries.glob("*.so*")):
        for name in re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-dW", str(library))):
            if name not in present and not SYSTEM.match(name):
                missing[name].append(library)
    return missing


def symbols_of(libraries: Iterable[Path]) -> dict[str, set[str]]:
    """Return, by their version, the symbols of CUDA libraries that `libraries` use. A symbol may have no version."""
    symbols = defaultdict(set)
    for library in libraries:
        for line in run("nm", "-D", "--undefined-only", str(library)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if CUDA_SYMBOL.match(name) and not name.startswith("cuda"):  # those are the CUDA runtime's
                symbols[version.strip("@")].add(name)
    return symbols


def make_doubles(folder: Path, names: Iterable[str], symbols: dict[str, set[str]]) -> None:
    """Compile a library of each name into `folder`. Each one has all symbols, each a function that returns 1."""
    functions = "".join(f"int {name}() {{ return 1; }}\n" for name in sorted(set().union(*symbols.values())))
    versions = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
        for version, names in symbols.items()
        if version
    )
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "doubles.c"), Path(scratch, "versions.map")
        source.write_text(functions)
        script.write_text(versions)
        options = [f"-Wl,--version-script={script}"] if versions else []
        for name in sorted(names):
            soname = f"-Wl,-soname,{name}"
            run("gcc", "-shared", "-fPIC", "-w", "-o", str(folder / name), str(source), soname, *options)


def run(*command: str) -> str:
    """Return the standard output of a command that must succeed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Test the versions that are arguments, one after the other."""
    test_versions("torch", install, TESTS)


if __name__ == "__main__":
    main()
