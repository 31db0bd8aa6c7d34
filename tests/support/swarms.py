"""Processes of a swarm for tests: each runs a program with the names `swarm`, `un`, `np`, `mark` and `await_mark`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from support.deadlines import DEADLINE_S, await_marks, leave_mark
from support.import_path import import_path
from support.ports import free_port

import unisono as un
from unisono.swarm import meeting_place

_PRELUDE = """
import os, signal, sys, time
import numpy as np
import unisono as un
from pathlib import Path
from support.deadlines import await_marks, has_mark, leave_mark

folder, name = Path(sys.argv[1]), sys.argv[2]
mark = lambda word: leave_mark(folder, word)
await_mark = lambda *words: await_marks(folder, *words)
places = os.environ["PLACES"].split(",")
settings = dict(name=name, heartbeat_timeout_s=6.0, timeout_s=60.0, rendezvous_timeout_s=60.0, warn_after_s=50.0)
"""


class SwarmProcesses:
    """Processes that run programs, and the meeting places that this process serves for them; a context manager.

    The places of the start wait for no members of a swarm that runs already, because there is none.

    Args:
        folder: for the key and the marks.
        places: the number of addresses of meeting places, of which this process serves the first; or one that a member
            serves.
    """

    def __init__(self, folder: Path, places: int | str = 1) -> None:
        self.folder = folder
        self._grace, meeting_place._GRACE = meeting_place._GRACE, 0.0
        self.key = os.urandom(32)
        with open(os.open(folder / "key", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(self.key)
        is_served = isinstance(places, str)
        self.urls = [places] if is_served else [f"tcp://127.0.0.1:{free_port()}" for _ in range(int(places))]
        self.places = {url: un.MeetingPlace(url, self.key) for url in self.urls[: 0 if is_served else 1]}
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(
        self, name: str, program: str, environ: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start a process that runs the prelude and `program`, by a command that begins with `prefix`."""
        variables = {
            **os.environ,
            "PLACES": ",".join(self.urls),
            "UNISONO_KEY_FILE": str(self.folder / "key"),
            "PYTHONPATH": import_path(),
            **(environ or {}),
        }
        code = _PRELUDE + textwrap.dedent(program)
        command = [*prefix, sys.executable, "-W", "error", "-c", code, str(self.folder), name]
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.processes[name] = process
        return process

    def left_behind(self, name: str, others: str) -> int:
        """Stop a member until the others have gone on without it; return how often it had entered by then.

        The programs leave the marks "NAME with MEMBERS COUNT", where COUNT is each number up to that of its entries.
        The one of `name` has written its process into the file "process of NAME".
        """
        pid = int((self.folder / f"process of {name}").read_text())
        members = ",".join(sorted(others))
        marks = [f"{other} with {members} 1" for other in others]
        os.kill(pid, signal.SIGSTOP)
        try:
            for mark in marks:
                (self.folder / f"mark {mark}").unlink(missing_ok=True)  # because this member may have entered late
            self.await_marks(*marks)
            return len(list(self.folder.glob(f"mark {name} with {','.join(sorted(others + name))} *")))
        finally:
            os.kill(pid, signal.SIGCONT)

    def move_place(self) -> None:
        """Close the meeting place, and serve one at the second address, which waits for the members to register."""
        self.places.pop(self.urls[0]).close()
        meeting_place._GRACE = self._grace
        self.places[self.urls[1]] = un.MeetingPlace(self.urls[1], self.key)

    def mark(self, word: str) -> None:
        """Leave a mark that programs await."""
        leave_mark(self.folder, word)

    def await_marks(self, *words: str) -> None:
        """Wait until programs have left these marks."""
        await_marks(self.folder, *words)

    def output(self, name: str, returncode: int = 0) -> str:
        """Return what a process has written, once it has ended with this code."""
        output, _ = self.processes[name].communicate(timeout=DEADLINE_S)
        assert self.processes[name].returncode == returncode, output
        return output

    def printed(self, name: str, returncode: int = 0) -> str:
        """Return what a program has printed, as `output`, without the log, which names members that are slow."""
        lines = self.output(name, returncode).splitlines(keepends=True)
        return "".join(line for line in lines if not re.match(r"(\[\d+\] )?unisono ", line))

    def __enter__(self) -> SwarmProcesses:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        meeting_place._GRACE = self._grace
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for place in self.places.values():
            place.close()
