from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

from unisono.foundation.processes import LOST, Child, python_command


def child(code: int) -> Child:
    return Child([sys.executable, "-c", f"import sys; sys.exit({code})"])


def test_exit_code_is_lost_when_another_waiter_has_reaped_the_child() -> None:
    first, second = child(0), child(0)
    for process in (first, second):
        os.waitpid(process.pid, 0)
    assert (first.wait(), first.wait(), second.poll()) == (LOST, LOST, LOST)


def test_child_wait_times_out_and_can_be_repeated() -> None:
    with Child([sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"], stdin=subprocess.PIPE) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.communicate(b"four")
    assert (process.wait(DEADLINE_S), process.returncode) == (4, 4)


def test_python_command_imports_unisono_and_nothing_from_current_folder(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the file of the user was imported')")
    statement = "import queue, unisono; print(unisono.__file__, *sys.argv[1:])"
    command = python_command(statement, "an argument")
    text = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=DEADLINE_S)
    import unisono

    assert text == f"{unisono.__file__} an argument\n"


IGNORING = """
import os, signal, subprocess, sys, threading
import unisono as un

def fail(world):
    os._exit(5)

def launch():
    try:
        un.launch(fail, 1, timeout_s=60)
    except un.PeerLostError as error:
        print(error)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
thread = threading.Thread(target=launch)
thread.start()
thread.join()
code = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode
print(signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN, code)
"""


def test_launch_learns_exit_codes_when_program_ignores_sigchld() -> None:
    text = subprocess.check_output([sys.executable, "-c", IGNORING], text=True, timeout=DEADLINE_S)
    assert text == "rank 0 exited with code 5\nTrue 0\n"
