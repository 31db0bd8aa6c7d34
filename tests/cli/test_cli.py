from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

from unisono.cli.main import SUBCOMMANDS, main


def unisono(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **environ},
        check=False,
    )


def test_version_option_prints_one_line() -> None:
    completed = unisono("--version")
    assert (completed.returncode, completed.stdout) == (0, "unisono 0.1.0\n")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"]])
def test_commands_without_arrays_load_neither_numpy_nor_native_core(arguments: list[str]) -> None:
    program = f"""
import sys
from unisono.cli.main import main
status = main({arguments!r})
heavy = {{"numpy", "rich", "unisono.transports._core"}} & set(sys.modules)
sys.exit(status or (f"loaded {{heavy}}" if heavy else 0))
"""
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (completed.returncode, completed.stderr) == (0, "")


def test_the_help_names_every_subcommand() -> None:
    for arguments in ([], ["--help"], ["-h"]):
        completed = unisono(*arguments)
        assert completed.returncode == 0
        assert all(f"  {name} " in completed.stdout for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_exists_and_has_help(name: str) -> None:
    completed = unisono(name, "--help")
    assert completed.returncode == 0
    assert f"unisono {name}" in completed.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["explain", "allreduce", "1M", "-n", "4"], "predicted us"),
        (["show", "allreduce", "ring", "-n", "2"], "->1 "),
    ],
)
def test_results_are_printed_in_ascii_if_stdout_allows_no_more(arguments: list[str], part: str) -> None:
    completed = unisono(*arguments, PYTHONIOENCODING="ascii", COLUMNS="200")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert part in completed.stdout


@pytest.mark.parametrize("arguments", [["run", "-n", "2", "-m", "unisono", "--version"], ["test", "--cases", "5"]])
def test_commands_run_with_warnings_as_errors(arguments: list[str]) -> None:
    completed = unisono(*arguments, PYTHONDEVMODE="1", PYTHONWARNINGS="error")
    assert (completed.returncode, completed.stderr) == (0, "")


def test_unwritable_stdout_is_reported_in_one_line() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "unisono", "--version"]
        completed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=DEADLINE_S, check=False)
    assert completed.stderr == b"unisono: the output cannot be written: No space left on device\n"
    assert completed.returncode == 1


# The statement after which a program interrupts itself: in the imports of the command, in those of a subcommand, and
# when the interpreter ends.
_INTERRUPTED_WHILE = {
    "the command is imported": "before_import('click')",
    "a subcommand is imported": "before_import('unisono.cli.commands.doctor')",
    "the interpreter ends": "import atexit; atexit.register(interrupt)",
}


@pytest.mark.parametrize("phase", _INTERRUPTED_WHILE)
def test_interrupt_shows_no_traceback_while(phase: str) -> None:
    program = f"""
import os, signal, sys
def interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("the module that was imported has replaced the error")
def before_import(module):
    class Finder:
        def find_spec(name, path, target=None):
            if name == module:
                interrupt()
    sys.meta_path.insert(0, Finder)
signal.signal(signal.SIGINT, signal.default_int_handler)
{_INTERRUPTED_WHILE[phase]}
from unisono.cli.entry import command
sys.exit(command())
"""
    completed = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--help"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (completed.returncode, completed.stderr) == (130, "unisono: interrupted\n")


def test_interrupts_stay_ignored_in_the_background_of_a_shell() -> None:
    program = """
import signal
from unisono.foundation import interrupts
signal.signal(signal.SIGINT, signal.SIG_IGN)
interrupts.end_process()
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
interrupts.raise_error()
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S, check=True)


def test_an_unknown_subcommand_is_refused_in_one_line() -> None:
    completed = unisono("frobnicate")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.startswith("unisono: there is no command 'frobnicate'; there are run, ")
    assert completed.stderr.count("\n") == 1
    assert unisono("doctr").stderr == "unisono: there is no command 'doctr'; did you mean 'doctor'?\n"


@pytest.mark.parametrize("group", ["swarm", "trace", "bench"])
def test_a_group_without_a_subcommand_shows_its_help_in_lines(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group]) == 2
    assert capsys.readouterr().err.startswith(f"Usage: unisono {group} [OPTIONS] COMMAND [ARGS]...\n\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("unisono be", "bench"),
        ("unisono show allg", "allgather"),
        ("unisono show allreduce rabens", "rabenseifner"),
        ("unisono simulate allreduce ring rec", "recursive_doubling"),
        ("unisono explain allreduce 1M --algorithm rabens", "rabenseifner"),
        ("unisono bench comp", "compare"),
    ],
)
def test_a_shell_completes_commands_collectives_and_algorithms(words: str, expected: str) -> None:
    completing = {"_UNISONO_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = Path(sys.executable).with_name("unisono")
    done = subprocess.run(
        [command], capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **completing}, check=False
    )
    assert f"plain,{expected}" in done.stdout.splitlines()


def test_an_error_has_a_traceback_only_in_the_debug_log() -> None:
    bad = {"UNISONO_TIMEOUT_S": "soon"}
    quiet, loud = (
        unisono("run", "-n", "1", "x.py", **bad),
        unisono("run", "-n", "1", "x.py", **bad, UNISONO_LOG="debug"),
    )
    assert quiet.stderr == "unisono: UNISONO_TIMEOUT_S='soon' cannot be used: it must be a positive number of seconds\n"
    assert quiet.returncode == 2
    assert "Traceback" in loud.stderr
    assert loud.returncode != 0
