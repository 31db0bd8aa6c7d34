"""Runs everything that needs a GPU, in one call and without a network: ``make gpu``, or this file by its path.

It needs Python with cuda-bindings, NVRTC, numpy, ml_dtypes, click, rich, cloudpickle and pytest. To build the native
core, it needs scikit-build-core, nanobind, cmake and a compiler. torch, CuPy and MPI are used if they are installed.

It builds in a scratch environment that sees the packages of the current one, and then runs stages (`gpu_stages/`). Each
stage has processes of its own and a deadline, so a hang or a crash costs only that stage. Results are written after
each stage. At the end, it prints tables, and whether the targets are met.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
FORMAT = 1
BUDGET_S = 460.0
DYING_S = 5.0  # the wait for a killed process, which the driver can keep for longer
REPORT_S = 30.0
BUILD_S = 200.0  # without the build, nothing is measured
SAID_LINES = 15  # the lines of a stage's own output that are kept
PACKAGE = "unisono.bench.gpu_stages"


class Stage(NamedTuple):
    """A part of the run: a module of `gpu_stages`, with at most `budget_s` seconds.

    With `small` as arguments, it only shows that everything runs.
    """

    name: str
    budget_s: float
    module: str
    arguments: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


_SMALL_KERNELS = ("--sizes", "4K,100", "--dtypes", "float32", "--sources", "2,3", "--flush", "4096")
_SMALL_THREADS = ("--sizes", "1K,4K", "--calls", "3")
_SMALL_PROCESSES = ("--libraries", "unisono", "--sizes", "1K", "--seconds", "0.01", "--deadline", "70")
# For each number of ranks, the time limit and the libraries. Each library takes seconds to start.
_PROCESSES = (
    (2, 80, "unisono,gloo,symm_mem two-shot,symm_mem one-shot,nccl,MPI staged"),
    (4, 60, "unisono,gloo,symm_mem two-shot"),
    (8, 50, "unisono,gloo"),
)

STAGES = (
    Stage("machine", 30, "machine"),
    Stage("tests", 80, "suite"),
    Stage("kernels", 70, "kernels", (), _SMALL_KERNELS),
    *(
        Stage(f"threads-{ranks}", 15, "threads", ("--ranks", str(ranks)), ("--ranks", str(ranks), *_SMALL_THREADS))
        for ranks in (2, 4, 8)
    ),
    *(
        Stage(
            f"processes-{ranks}",
            budget_s,
            "processes",
            ("--ranks", str(ranks), "--libraries", libraries),
            ("--ranks", str(ranks), *_SMALL_PROCESSES),
        )
        for ranks, budget_s, libraries in _PROCESSES
    ),
)


class Ended(NamedTuple):
    """The end of a process: its exit code, or None if its deadline ended it; its time and its output."""

    code: int | None
    seconds: float
    output: str
    errors: str


def run_until(command: Sequence[str | Path], limit_s: float, environ: dict[str, str]) -> Ended:
    """Run `command` for at most `limit_s` seconds; all processes that it started have ended when this returns."""
    started, before = time.monotonic(), _descendants()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environ,
            cwd=ROOT,
            start_new_session=True,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        _kill(process, before)
        texts = [_text(file) for file in (output, errors)]
    return Ended(code, time.monotonic() - started, *texts)


def _kill(process: subprocess.Popen[Any], before: set[int]) -> None:
    """Kill all processes that did not exist `before`, and wait for their end, but only for some seconds."""
    deadline = time.monotonic() + DYING_S
    while process.poll() is None or (_descendants() - before):
        for pid in _descendants() - before:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                if pid != process.pid:
                    os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _descendants() -> set[int]:
    """Return all descendants of this process, in any process group."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {os.getpid()}


def _adopt_orphans() -> None:
    """Make orphans of descendants children of this process, which kills them."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


class Run:
    """One run: its document, which is written after each stage, and its remaining time."""

    def __init__(self, out: Path, budget_s: float) -> None:
        self._out = out
        self._deadline = time.monotonic() + budget_s
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.document: dict[str, Any] = {"format": FORMAT, "started": started, "stages": [], "records": []}

    def stage(self, name: str, budget_s: float, command: Sequence[str | Path], environ: dict[str, str]) -> bool:
        """Run a stage, and keep its records; return whether it has succeeded."""
        limit_s = min(budget_s, self._deadline - time.monotonic())
        if limit_s <= 0:
            self._keep(name, 0.0, "not run: no time was left", "")
            return False
        print(f"{name} … ", end="", flush=True)  # noqa: T201
        ended = run_until(command, limit_s, environ)
        how = f"ended by its deadline of {limit_s:.0f} s" if ended.code is None else f"code {ended.code}"
        print(f"{how}, {ended.seconds:.1f} s", flush=True)  # noqa: T201
        self.document["records"] += _records(ended.output)
        self._keep(name, ended.seconds, how, ended.errors)
        return ended.code == 0

    def _keep(self, name: str, seconds: float, how: str, said: str) -> None:
        last = said.strip().splitlines()[-SAID_LINES:]
        self.document["stages"].append({"name": name, "seconds": round(seconds, 1), "ended": how, "said": last})
        scratch = self._out.with_suffix(".partial")
        scratch.write_text(json.dumps(self.document, indent=1) + "\n")
        scratch.replace(self._out)


def _records(output: str) -> list[dict[str, Any]]:
    """Return the records among the lines of an output; the last line may be incomplete."""
    records = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "kind" in record:
                records.append(record)
    return records


def environment(folder: Path) -> Path:
    """Create an environment in `folder` that sees the packages installed here; return its Python.

    ``--system-site-packages`` would show the packages of the base of an environment, not those of the environment.
    CUDA libraries that are installed as packages are looked for below `site.PREFIXES`.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    seen = [each for each in (*site.getsitepackages(), site.getusersitepackages()) if Path(each).is_dir()]
    lines = [f"site.PREFIXES += {site.PREFIXES!r}", *(f"site.addsitedir({each!r})" for each in seen)]
    Path(packages, "seen.pth").write_text("".join(f"import site; {line}\n" for line in lines))
    return python


def build_command(python: Path, folder: Path) -> list[str | Path]:
    """Return the command that builds this tree and installs it for `python`, without a network."""
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", f"-Cbuild-dir={folder / 'build'}")
    return [python, "-m", "pip", "install", *options, "--editable", ROOT]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; the exit code is 1 if one of them failed, or a target is missed."""
    options = _parsed(arguments)
    out: Path = options.out or RESULTS / f"gpu-{datetime.date.today().isoformat()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    chosen = [stage for stage in STAGES if not options.only or stage.name in options.only.split(",")]
    run = Run(out, options.budget)
    with tempfile.TemporaryDirectory(prefix="unisono-gpu-") as scratch:
        python, folder = options.python, Path(scratch)
        # The user's settings are dropped, and kernels are compiled again.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("UNISONO_", "PYTHON"))}
        environ = {**kept, "XDG_CACHE_HOME": scratch, "PYTHONUNBUFFERED": "1"}
        is_good = True
        if python is None:
            python = environment(folder / "environment")
            is_good = run.stage("build", BUILD_S, build_command(python, folder), environ)
        # The stage that describes the machine runs in any case; it needs no build.
        for stage in chosen if is_good else [stage for stage in chosen if stage.module == "machine"]:
            words = stage.small if options.small else stage.arguments
            is_good &= run.stage(
                stage.name, stage.budget_s, [python, "-m", f"{PACKAGE}.{stage.module}", *words], environ
            )
        shown = subprocess.run(
            [python, "-m", f"{PACKAGE}.report", out], cwd=ROOT, env=environ, timeout=REPORT_S, check=False
        )
    return 0 if is_good and shown.returncode == 0 else 1


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where to write the results (default: bench/results/gpu-DATE.json)")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all stages together")
    parser.add_argument("--only", default="", help=f"stages, with commas between: {', '.join(s.name for s in STAGES)}")
    parser.add_argument("--python", help="a Python that has this tree installed; nothing is built then")
    parser.add_argument("--small", action="store_true", help="sizes that show whether everything runs, and no speed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, failed stages would count as successful
    _adopt_orphans()
    sys.exit(main())
