"""The agent of the launcher on another host: starts the ranks of that host, and reports their states.

ssh connects its standard input and standard output to the launcher. The agent ends its ranks when the input ends, which
happens if the launcher or the connection is lost. The kernel ends the ranks if the agent itself is killed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unisono import __version__
from unisono.errors import UnisonoError, UsageError
from unisono.foundation import streams
from unisono.launchers.job import LocalJob
from unisono.launchers.job_store import LauncherNode, NodeStore
from unisono.launchers.process import Command, Exit, JobPart, statistics_folder
from unisono.launchers.ssh_protocol import BEGINNING, TO_AGENT, ProtocolError, decoded, encoded
from unisono.options import Options, variable
from unisono.transports.host.bind_address import address_for

# The time to end all ranks after the launcher has been lost.
_END_S = 2.0
# The ranks of another host may start, and fail, a little before this host knows that all hosts have met.
_MEETING_S = 5.0


def main() -> None:
    """Serve the launcher at the other end of the standard streams until the ranks have ended."""
    _Agent().run()
    os._exit(0)  # without waiting for the thread that reads the standard input


class _Agent:
    """Runs the ranks of this host. It is the observer of their job."""

    def __init__(self) -> None:
        self._input = sys.stdin.buffer
        # Ranks inherit no standard output. A library that prints in this process must not break the protocol.
        self._output = os.dup(1)
        os.dup2(2, 1)
        self._keep_waiting: Callable[[], bool] = lambda: True
        self._met = threading.Event()  # all hosts have met

    def run(self) -> None:
        try:
            self._write(BEGINNING)
            self._send("hello", {"version": __version__, "address": _own_address()})
            message = self._input.readline()
            if message:
                _, task = decoded(message, {"start": TO_AGENT["start"]})
                self._start(task)
        except (UnisonoError, OSError, ProtocolError) as error:
            self._send("error", str(error))

    def output(self, rank: int, stream: str, data: bytes) -> None:
        self._send("output", {"rank": rank, "stream": stream, "text": data.decode("latin-1")})

    def ended(self, exit_: Exit) -> None:
        facts = {"rank": exit_.rank, "code": exit_.code, "stopped": exit_.stopped, "pid": exit_.pid}
        self._send("ended", facts)

    def tick(self) -> None:
        """Do nothing: the launcher looks at the time itself."""

    def _start(self, task: Mapping[str, Any]) -> None:
        _enter(task["folder"])
        environ = {**os.environ, **task["environ"]}
        environ.setdefault(variable("bind_address"), _own_address())
        options = Options.from_environment(environ)
        share = JobPart(task["first"], task["count"], task["size"])
        address = address_for(options.bind_address)
        url = task["store"] or f"tcp://{f'[{address}]' if ':' in address else address}:0"
        secrets = bytes.fromhex(task["job"]), bytes.fromhex(task["key"])
        node = LauncherNode(task["node"], task["nodes"], url, address, *secrets)

        with statistics_folder(bool(options.stats)) as folder:
            if folder:
                environ[variable("stats")] = folder
            job = LocalJob(
                [Command(tuple(task["argv"]))] * share.count,
                self,
                bind=task["bind"],
                environ=environ,
                on_loss=(lambda *_: None) if task["keep_going"] else None,
                share=share,
                store=partial(self._meet, node, share, options.rendezvous_timeout_s),
            )
            self._keep_waiting = job.attend
            threading.Thread(target=self._obey, args=(job,), daemon=True).start()
            job.run(task["timeout_s"])
            for rank in share.ranks if folder else ():
                self._send_statistics(rank, Path(folder, f"rank-{rank}.jsonl"))
        self._send("done", {"late": job.late, "whereabouts": job.whereabouts})

    def _meet(self, node: LauncherNode, share: JobPart, timeout_s: float) -> NodeStore:
        store = NodeStore(node, share, timeout_s, partial(self._send, "store"))
        self._met.set()
        return store

    def _obey(self, job: LocalJob) -> None:
        """Carry out the messages of the launcher, in a thread of its own; kill the ranks when it is gone."""
        try:
            for line in self._input:
                name, value = decoded(line, TO_AGENT)
                if name in ("forward", "kill") and not self._met.is_set():
                    break
                if name == "end_after_failure" and not self._met.wait(_MEETING_S):
                    break
                if name in ("forward", "pass_on"):
                    getattr(job, name)(value)
                elif name == "report":
                    job.report(lambda line: self._send("report", line))
                else:
                    getattr(job, name)()
        except (ProtocolError, OSError):
            pass
        if self._met.is_set():
            job.kill()
            time.sleep(_END_S)
        os._exit(1)  # the main thread still waits for another host, or for ranks that cannot be killed

    def _send_statistics(self, rank: int, file: Path) -> None:
        if file.exists():
            self._send("statistics", {"rank": rank, "text": file.read_text(encoding="utf-8")})

    def _send(self, name: str, value: Any) -> None:
        self._write(encoded(name, value))

    def _write(self, data: bytes) -> None:
        streams.write_all(self._output, data, self._keep_waiting)


def _own_address() -> str:
    """Return the address at which ssh has reached this host."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 else "127.0.0.1"


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"the folder {folder!r} cannot be entered there ({error.strerror}): all hosts need the program and the "
            "Python environment under the same paths, for example on a shared disk"
        ) from None
