"""Everything that a machine with a GPU can show, in one call and without a network: ``make gpu``, or this file by path.

It needs Python with cuda-bindings, NVRTC, numpy, ml_dtypes, click, rich, cloudpickle and pytest, and to build the
native core scikit-build-core, nanobind, cmake and a compiler; torch, CuPy and MPI take part where they are there. It
builds in a scratch environment that sees what is installed where it runs, and then runs stages (`gpu_stages/`), each in
processes of its own that its deadline ends: what hangs or crashes costs no more than its own stage. Results are written
after each of them; in the end there are tables, and whether the targets are met.
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
DYING_S = 5.0  # is waited for what was killed; the driver can keep it for longer
REPORT_S = 30.0
BUILD_S = 200.0  # without it, nothing is measured
SAID_LINES = 15  # of a stage's own words are kept
PACKAGE = "unisono.bench.gpu_stages"


class Stage(NamedTuple):
    """A part of the whole: a module of `gpu_stages`, with at most `budget_s` seconds.

    `small` are its arguments where only that everything runs is to be seen.
    """

    name: str
    budget_s: float
    module: str
    arguments: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


_SMALL_KERNELS = ("--sizes", "4K,100", "--dtypes", "float32", "--sources", "2,3", "--flush", "4096")
_SMALL_THREADS = ("--sizes", "1K,4K", "--calls", "3")
_SMALL_PROCESSES = ("--libraries", "unisono", "--sizes", "1K", "--seconds", "0.01", "--deadline", "70")
# By the number of ranks, how long they may take, and beside what ours are: each library takes seconds to start.
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
    """How a process has ended: its exit code, or None if the deadline ended it; and what it wrote."""

    code: int | None
    seconds: float
    output: str
    errors: str


def run_until(command: Sequence[str | Path], limit_s: float, environ: dict[str, str]) -> Ended:
    """Run `command` for at most `limit_s` seconds; nothing that it has started lives when this returns."""
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
    """Kill all that was not there `before`, and wait until it has ended, but not for ever."""
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
    """Return what this process has started, and those in their turn, whatever group they are in."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _adopt_orphans() -> None:
    """Let what a process leaves behind become a child of this one, which kills it."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


class Run:
    """One run: its document, which is written after each stage, and the time that is left."""

    def __init__(self, out: Path, budget_s: float) -> None:
        self._out = out
        self._deadline = time.monotonic() + budget_s
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.document: dict[str, Any] = {"format": FORMAT, "started": started, "stages": [], "records": []}

    def stage(self, name: str, budget_s: float, command: Sequence[str | Path], environ: dict[str, str]) -> bool:
        """Run a stage, and keep what it tells; return whether it has ended well."""
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
    """Return the records among the lines; the last may be half a line."""
    found = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "kind" in record:
                found.append(record)
    return found


def environment(folder: Path) -> Path:
    """Make an environment in `folder` that sees what is installed here; return its Python.

    Not by ``--system-site-packages``: that of an environment shows what its base has, and not the environment's own.
    The libraries of CUDA that are installed as packages are looked for below `site.PREFIXES`.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    seen = [each for each in (*site.getsitepackages(), site.getusersitepackages()) if Path(each).is_dir()]
    does = [f"site.PREFIXES += {site.PREFIXES!r}", *(f"site.addsitedir({each!r})" for each in seen)]
    Path(packages, "seen.pth").write_text("".join(f"import site; {each}\n" for each in does))
    return python


def build_command(python: Path, folder: Path) -> list[str | Path]:
    """Return the command that builds this tree and makes it known to `python`, without a network."""
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", f"-Cbuild-dir={folder / 'build'}")
    return [python, "-m", "pip", "install", *options, "--editable", ROOT]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; the exit code is 1 if one of them did not end well, or a target is missed."""
    asked = _parsed(arguments)
    out: Path = asked.out or RESULTS / f"gpu-{datetime.date.today().isoformat()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    chosen = [stage for stage in STAGES if not asked.only or stage.name in asked.only.split(",")]
    run = Run(out, asked.budget)
    with tempfile.TemporaryDirectory(prefix="unisono-gpu-") as scratch:
        python, folder = asked.python, Path(scratch)
        # No setting of the user's takes part, and kernels are compiled anew.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("UNISONO_", "PYTHON"))}
        environ = {**kept, "XDG_CACHE_HOME": scratch, "PYTHONUNBUFFERED": "1"}
        well = True
        if python is None:
            python = environment(folder / "environment")
            well = run.stage("build", BUILD_S, build_command(python, folder), environ)
        # What the machine is, is told in any case; it is asked by this tree as it stands.
        for stage in chosen if well else [stage for stage in chosen if stage.module == "machine"]:
            options = stage.small if asked.small else stage.arguments
            well &= run.stage(
                stage.name, stage.budget_s, [python, "-m", f"{PACKAGE}.{stage.module}", *options], environ
            )
        shown = subprocess.run(
            [python, "-m", f"{PACKAGE}.report", out], cwd=ROOT, env=environ, timeout=REPORT_S, check=False
        )
    return 0 if well and shown.returncode == 0 else 1


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where to write the results (default: bench/results/gpu-DATE.json)")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all stages together")
    parser.add_argument("--only", default="", help=f"stages, with commas between: {', '.join(s.name for s in STAGES)}")
    parser.add_argument("--python", help="a Python that has this tree installed; nothing is built then")
    parser.add_argument("--small", action="store_true", help="sizes that show whether everything runs, and no speed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Where it is ignored, failed stages would count as successful.
    _adopt_orphans()
    sys.exit(main())
