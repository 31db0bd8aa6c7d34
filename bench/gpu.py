"""Runs everything that needs a GPU, in one call and without a network: ``make gpu``, or this file by its path.

It needs Python with cuda-bindings, NVRTC, numpy, ml_dtypes, click, rich, cloudpickle, pytest, pytest-timeout and
hypothesis. To build the native core, it needs scikit-build-core, nanobind, cmake and a compiler. torch, CuPy, MPI,
nccl4py and pytest-xdist are used if they are installed, also from folders in PYTHONPATH.

It builds in a scratch environment that sees the packages of the current one, and then runs stages (`gpu_stages/`), the
most important ones first. With ``--wheel`` it installs that wheel instead, and compiles nothing but kernels. Each stage
has processes of its own and a deadline, so a hang or a crash costs only that stage. Results are written after each
stage, and the records of a stage as they come. At the end, it prints tables, and whether the targets are met.

Without a GPU that works, it ends after the stage that describes the machine. The double of the driver, which the tests
use elsewhere, counts as a GPU only with ``--small``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import hashlib
import json
import math
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
FORMAT = 1
SMALL_TIMES = 5  # the multiple of its budget that a stage has with --small, on machines that do other work, too
DYING_S = 5.0  # the wait for a killed process, which the driver can keep for longer
REPORT_S = 30.0
BUILD_S = 150.0  # without the build, nothing is measured
INSTALL_S = 20.0
SAID_LINES = 15  # the lines of a stage's own output that are kept
# Exit codes: a stage failed, or the build did; no GPU works; all stages ended well, but a target is missed.
FAILED, NO_GPU, MISSED = 1, 3, 4
PACKAGE = "unisono.bench.gpu_stages"
# The environment variable that forbids the double of the driver. Runs on a real GPU set it.
REAL_GPU = "FAKE_CUDA_FORBIDDEN"
# The environment variable that names the features, flags or graphs, that devices must not use
# (`transports/cuda/driver_api/cuda_device.py`). Each check of `machine` or premise of `probes` in the table is needed
# for its feature. Without flags, events order processes.
WITHOUT = "BENCH_GPU_WITHOUT"
NEEDED = (
    ("CUDA IPC", "flags"),
    ("a wait for a flag ends when the host writes the flag", "flags"),
    ("a flag of one process releases a stream of another one", "flags"),
    ("flags are compared cyclically", "graphs"),
    ("flags in a graph wait and are written, each time the graph is launched", "graphs"),
)


class RunStage(NamedTuple):
    """A part of the run: a module of `gpu_stages`, with at most `budget_s` seconds.

    With `small` as arguments, it only shows that everything runs.
    """

    name: str
    budget_s: float
    module: str
    arguments: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


def _tests(*names: str) -> tuple[str, ...]:
    """Return arguments for tests, which are named because collecting all of the project's takes longer than a stage."""
    return tuple(str(ROOT / "tests" / name) for name in names)


_CONTRACT, _DRIVER = "collectives/test_device_contract.py", "transports/test_cuda_driver.py"
TESTS = _tests(_CONTRACT, _DRIVER, "transports/test_cuda_programs.py", "transports/test_gpu_collectives.py")
# A test that hangs costs its own time only.
_OF_TESTS = ("--timeout", "40", "--workers", "4")
_SMALL_TESTS = _tests(
    f"{_DRIVER}::test_device_knows_its_name_uuid_and_reachable_devices",
    f"{_CONTRACT}::test_memory_and_events_are_shared_by_processes[driver]",
    f"{_CONTRACT}::test_flags_order_processes_on_the_driver",
)
_ARRAYS = "collectives/test_gpu_arrays.py"
_SMALL_ARRAYS = _tests(f"{_ARRAYS}::test_plans_on_registered_arrays_are_right")
_NCCL = "transports/test_nccl.py"
_SMALL_NCCL = _tests(f"{_NCCL}::test_missing_bindings_are_named_with_what_to_install")
_CUPY = str(ROOT / "examples" / "cupy_power.py")
_SMALL_DDP = ("--width", "64", "--steps", "8", "--compiler", "aot_eager", "--timeout", "100")
_SMALL_PROBES = ("--dtype", "float32", "--copy", "64K", "--rounds", "20")
_KERNELS = ("--sizes", "256M", "--dtypes", "float32,bfloat16,float8_e4m3fn", "--sources", "2,4,8")
_SMALL_KERNELS = ("--sizes", "4K,100", "--dtypes", "float32", "--sources", "2,3", "--flush", "4096")
_SMALL_VARIANTS = ("--size", "4K", "--dtypes", "float32", "--ops", "sum", "--sources", "2", "--flush", "4096")
_SMALL_SANITIZER = ("--counts", "1,100", "--sources", "2,3")
_SMALL_THREADS = ("--sizes", "1K,4K", "--calls", "3", "--held", "4096")
_SMALL_ROUTES = ("--sizes", "1K,4K", "--rounds", "2", "--flush", "4096")
_SMALL_PROCESSES = ("--libraries", "unisono,unisono plans", "--sizes", "1K", "--seconds", "0.01", "--deadline", "70")


def _threads(ranks: int) -> RunStage:
    of_ranks = ("--ranks", str(ranks))
    return RunStage(f"threads-{ranks}", 15, "speeds.threads", of_ranks, (*of_ranks, *_SMALL_THREADS))


def _routes(ranks: int) -> RunStage:
    of_ranks = ("--ranks", str(ranks))
    return RunStage(f"routes-{ranks}", 30, "speeds.routes", of_ranks, (*of_ranks, *_SMALL_ROUTES))


def _processes(ranks: int, budget_s: float, libraries: str, name: str = "processes") -> RunStage:
    """Return a stage that measures libraries among processes. Each library takes seconds to start."""
    of_ranks = ("--ranks", str(ranks))
    arguments = (*of_ranks, "--libraries", libraries)
    return RunStage(f"{name}-{ranks}", budget_s, "speeds.processes", arguments, (*of_ranks, *_SMALL_PROCESSES))


# A first run on a GPU, in the order of what must be known before the rest means anything.
FIRST = (
    RunStage("machine", 20, "checks.machine"),
    RunStage("probes", 40, "checks.probes", (), _SMALL_PROBES),
    RunStage("tests", 80, "checks.suite", (*TESTS, *_OF_TESTS), (*_SMALL_TESTS, "--workers", "2")),
    RunStage("arrays", 80, "checks.suite", (*_tests(_ARRAYS), *_OF_TESTS), _SMALL_ARRAYS),
    RunStage("kernels", 45, "speeds.kernels", _KERNELS, _SMALL_KERNELS),
    RunStage("issue", 15, "speeds.issue", (), ("--sizes", "1K", "--calls", "3")),
    _threads(2),
    _routes(2),
    _processes(2, 70, "unisono,unisono plans,gloo,symm_mem two-shot"),
    RunStage("ddp", 45, "speeds.ddp", ("--cupy", _CUPY), ("--cupy", _CUPY, *_SMALL_DDP)),
    RunStage("sanitizer", 40, "checks.sanitizer", (), _SMALL_SANITIZER),
)
REST = (
    RunStage("kernels-more", 40, "speeds.kernels", ("--sources", "3,5,6,7"), _SMALL_KERNELS),
    RunStage("variants", 30, "speeds.variants", (), _SMALL_VARIANTS),
    _threads(4),
    _threads(8),
    _routes(4),
    RunStage("hosts-4", 30, "speeds.hosts", (), ("--sizes", "1K,4K", "--rounds", "2")),
    _processes(4, 55, "unisono,unisono plans,gloo,symm_mem two-shot"),
    _processes(8, 40, "unisono,gloo"),
    _processes(2, 45, "unisono,symm_mem one-shot,MPI staged", "rivals"),
)
# With the NCCL of the machine, or with one that is loaded before.
NCCL = (
    RunStage("nccl-1", 20, "checks.nccl_alone", (), ("--sizes", "1K")),
    RunStage("nccl-tests", 50, "checks.suite", (*_tests(_NCCL), *_OF_TESTS), _SMALL_NCCL),
    _processes(2, 60, "unisono,unisono plans,nccl,nccl.native", "nccl"),
)
STAGES = (*FIRST, *REST, *NCCL)
GROUPS = {"first": FIRST, "rest": REST, "nccl": NCCL}


def stages_of(names: str) -> list[RunStage]:
    """Return the stages that `names` lists with commas between, in their order of importance; all for "".

    Raises:
        ValueError: a name is neither that of a stage nor that of a group.
    """
    by_name = {stage.name: (stage,) for stage in STAGES} | GROUPS
    chosen = names.split(",") if names else list(GROUPS)
    unknown = [name for name in chosen if name not in by_name]
    if unknown:
        raise ValueError(f"there is no stage {', '.join(unknown)}; there are {', '.join(by_name)}")
    in_groups = {stage.name for name in chosen for stage in by_name[name]}
    return [stage for stage in STAGES if stage.name in in_groups]


class Ended(NamedTuple):
    """The end of a process: its exit code, or None if its deadline ended it; its time and its output."""

    code: int | None
    seconds: float
    output: str
    errors: str


def run_until(
    command: Sequence[str | Path],
    limit_s: float,
    environ: dict[str, str],
    folder: Path = ROOT,
    output_to: Path | None = None,
) -> Ended:
    """Run `command` for at most `limit_s` seconds; all processes that it started have ended when this returns.

    Args:
        command: the program and its arguments.
        limit_s: the time limit.
        environ: its environment.
        folder: its current folder.
        output_to: a file to which its output is appended as it comes.
    """
    started, before = time.monotonic(), _descendants()
    with (
        tempfile.TemporaryFile("w+") if output_to is None else output_to.open("a+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        output.seek(0, os.SEEK_END)
        begin = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environ,
            cwd=folder,
            start_new_session=True,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        _kill(process, before)
        texts = [_text(output, begin), _text(errors)]
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
    """Make this process the parent of orphaned descendants, so that it can kill them."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def _text(file: Any, begin: int = 0) -> str:
    file.seek(begin)
    return str(file.read())


class Run:
    """One run: its document, which is written after each stage, and its remaining time."""

    def __init__(self, out: Path, budget_s: float, folder: Path = ROOT) -> None:
        """Begin a run whose stages have `folder` as their current one. Their records also go to ``OUT.jsonl``."""
        self._out = out
        self.folder = folder
        self._lines = out.with_suffix(".jsonl")
        self._lines.write_text("")
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
        ended = run_until(command, limit_s, environ, self.folder, self._lines)
        how = f"ended by its deadline of {limit_s:.0f} s" if ended.code is None else f"code {ended.code}"
        last = ended.errors.strip().splitlines()[-1:] if ended.code else []
        print(f"{how}, {ended.seconds:.1f} s", *last, sep=": ", flush=True)  # noqa: T201
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


def environment_kept(folder: Path, installed: str) -> tuple[Path, bool]:
    """Return the Python of an environment in `folder`, and whether an earlier run has installed `installed` there."""
    python, mark = folder / "bin" / "python", folder / "installed"
    has_installed = mark.exists() and mark.read_text() == installed
    return (python if has_installed else environment(folder)), has_installed


def identity(wheel: Path | None) -> str:
    """Return the name and the digest of a wheel, or the name of this tree, which an environment sees as it changes."""
    return str(ROOT) if wheel is None else f"{wheel.name} {hashlib.sha256(wheel.read_bytes()).hexdigest()}"


def settings(environ: Mapping[str, str], scratch: str, *, allows_double: bool = False) -> dict[str, str]:
    """Return the environment of all stages: the user's settings are dropped, and kernels are compiled again.

    Tools of the build that are installed as packages, such as ninja, lie beside Python. Folders of PYTHONPATH hold
    packages that a machine without a network has been given; the tree is none, because it has no compiled core.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(("UNISONO_", "PYTHON"))}
    folders = [Path(folder).resolve() for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    path = os.pathsep.join(str(folder) for folder in folders if folder != ROOT)
    return {
        **kept,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), environ.get("PATH", os.defpath))),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))),
        "XDG_CACHE_HOME": scratch,
        "PYTHONUNBUFFERED": "1",
        **({"PYTHONPATH": path} if path else {}),
        **({} if allows_double else {REAL_GPU: "1"}),
    }


def refuted(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the variables that switch off the features that failed here, so that the stages measure the others."""
    lacking = {lack for record in records for name, lack in NEEDED if record.get("name") == name and not _works(record)}
    return {WITHOUT: ",".join(sorted(lacking))} if lacking else {}


def _works(record: Mapping[str, Any]) -> bool:
    return bool(record.get("usable", record.get("holds", True)))


def install_command(python: Path, wheel: Path) -> list[str | Path]:
    """Return the command that installs a wheel of this tree for `python`, without a network."""
    return [python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--force-reinstall", wheel.absolute()]


def build_command(python: Path, folder: Path) -> list[str | Path]:
    """Return the command that builds this tree and installs it for `python`, without a network."""
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", f"-Cbuild-dir={folder / 'build'}")
    return [python, "-m", "pip", "install", *options, "--editable", ROOT]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages. The exit code is `FAILED`, `NO_GPU` or `MISSED`; 0 if all went well."""
    options = _parsed(arguments)
    out: Path = (options.out or _default_out(os.environ)).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    chosen = stages_of(options.only)
    with tempfile.TemporaryDirectory(prefix="unisono-gpu-") as scratch:
        folder = Path(scratch)
        # The tree has no compiled core, and would hide the package of a wheel.
        run = Run(out, options.budget, folder)
        environ = settings(os.environ, scratch, allows_double=options.small)
        has_gpu = True
        python, is_good = options.python and os.path.abspath(shutil.which(options.python) or options.python), True
        if python is None:
            python, is_good = _installed(run, options, folder, environ)
        if not is_good:
            run.folder = ROOT
        # The stage that describes the machine runs in any case; it needs no build.
        for stage in chosen if is_good else [stage for stage in chosen if stage.name == "machine"]:
            environ |= refuted(run.document["records"]) if stage.name != "probes" else {}
            words = stage.small if options.small else stage.arguments
            command = [python, "-m", f"{PACKAGE}.{stage.module}", *words]
            budget_s = stage.budget_s * (SMALL_TIMES if options.small else 1)
            has_passed = run.stage(stage.name, budget_s, command, environ)
            is_good &= has_passed
            if stage.name == "machine" and not has_passed:
                has_gpu = False
                break
        shown = subprocess.run(
            [python, "-m", f"{PACKAGE}.results.report", out],
            cwd=run.folder,
            env=environ,
            timeout=REPORT_S,
            check=False,
        )
    if not has_gpu:
        return NO_GPU
    return FAILED if not is_good else MISSED if shown.returncode else 0


def _default_out(environ: Mapping[str, str]) -> Path:
    """Return the file of the results: in the folder that the variable OUT names, or else in `RESULTS`."""
    return Path(environ["OUT"], "gpu.json") if environ.get("OUT") else RESULTS / f"gpu-{datetime.date.today()}.json"


def _installed(run: Run, options: argparse.Namespace, folder: Path, environ: dict[str, str]) -> tuple[Path, bool]:
    """Install this tree, or the wheel, in an environment; return its Python, and whether that succeeded."""
    where = options.keep or folder / "environment"
    installed = identity(options.wheel)
    python, is_installed = environment_kept(where.absolute(), installed)
    if is_installed:
        return python, True
    command = install_command(python, options.wheel) if options.wheel else build_command(python, folder)
    is_good = run.stage("build", INSTALL_S if options.wheel else BUILD_S, command, environ)
    if is_good:
        (where / "installed").write_text(installed)
    return python, is_good


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        help="where to write the results (default: gpu.json in $OUT, or bench/results/gpu-DATE.json)",
    )
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all stages together")
    names = ", ".join((*GROUPS, *(stage.name for stage in STAGES)))
    parser.add_argument("--only", default="", help=f"stages or groups of stages, with commas between: {names}")
    parser.add_argument(
        "--wheel", type=Path, help="a wheel of this tree for this Python, to install instead of building"
    )
    parser.add_argument("--keep", type=Path, help="an environment to make there and keep, which later runs use again")
    parser.add_argument("--python", help="a Python that has this tree installed; nothing is built then")
    parser.add_argument("--small", action="store_true", help="sizes that show whether everything runs, and no speed")
    options = parser.parse_args(arguments)
    try:
        stages_of(options.only)
    except ValueError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, failed stages would count as successful
    _adopt_orphans()
    sys.exit(main())
