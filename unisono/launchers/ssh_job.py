"""A job whose ranks run on several hosts, which the launcher reaches by ssh.

Theory of operation
-------------------
The launcher starts ``ssh HOST python …`` for each host. The process at the other end is an *agent*
(`unisono.launchers.ssh_agent`); no daemon is needed. The agent runs the ranks of its host as a `LocalJob`, with the
same rules as on one machine. The messages between launcher and agent (`unisono.launchers.ssh_protocol`) go through the
standard streams of ssh.

1. Each agent says hello, with the address at which ssh has reached its host. Ranks of other hosts use this address. So
   ranks must reach each other, but nobody must reach the launcher.
2. The first agent gets its work, and serves the store of the job. The others get their work with the URL of that store.
   The key of the job travels inside ssh.
3. Agents send the output of the ranks and report their ends. If a rank fails, the launcher asks the other agents to end
   their ranks, as on one machine.
4. Each agent says that it is done. A connection that ends earlier is a loss of all ranks of that host.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from unisono import __version__
from unisono.errors import UsageError
from unisono.foundation.forks import closed_in_child
from unisono.foundation.processes import python_command
from unisono.foundation.records import record
from unisono.launchers.job import AFTER_FAILURE, READ_NBYTES, TICK_S, Observer, OnLoss
from unisono.launchers.process import LOST_HOST, Exit, JobPart, signal_name
from unisono.launchers.ssh_protocol import TO_LAUNCHER, MessageCutter, ProtocolError, encoded
from unisono.options import LAUNCHER_VARIABLES, PREFIX, Options, variable

# Without a terminal, ssh cannot ask for a password. A host that does not answer for so long is an error.
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10", "-T")
# The exit code of ssh for its own errors. Other codes are of the command on the host.
_OF_SSH = 255
_LONGEST_S = 1e9
_END_S = 5.0
_HOST = re.compile(r"(?P<name>\[[^\]]+\]|[^:,]+)(:(?P<count>[0-9]{1,6}))?")


@record
class Host:
    """A host and the number of its ranks; `name` is what ssh takes, such as ``node1`` or ``user@node1``."""

    name: str
    count: int


def hosts_in(text: str) -> list[Host]:
    """Return the hosts in a text such as ``node1:2,node2:2``. A host without a number has one rank.

    Raises:
        UsageError: the text is malformed, or names a host twice.

    >>> hosts_in("a:2,me@b,[fd00::7]:4")
    [Host(name='a', count=2), Host(name='me@b', count=1), Host(name='fd00::7', count=4)]
    """
    hosts = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        count = int(match["count"] or 1) if match else 0
        if match is None or count == 0 or match["name"].startswith("-"):
            raise UsageError(f"--hosts {text!r} cannot be used: write hosts and their numbers of ranks, as in a:2,b:2")
        hosts.append(Host(match["name"].strip("[]"), count))
    names = [host.name for host in hosts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--hosts names {twice!r} twice: write it once, with the number of all its ranks")
    return hosts


class SshJob:
    """The ranks of one job on several hosts. It runs once, and has the methods and attributes of `LocalJob`."""

    def __init__(
        self,
        hosts: Sequence[Host],
        argv: Sequence[str],
        observer: Observer,
        *,
        bind: str | None = None,
        environ: Mapping[str, str],
        passed: Mapping[str, str],
        on_loss: OnLoss | None = None,
        ssh: Sequence[str] = ("ssh",),
    ) -> None:
        """Prepare a job. `run` starts it.

        Args:
            hosts: the hosts in the order of their ranks.
            argv: the command of each rank.
            observer: receives the output of the ranks and how they ended.
            bind: as for `LocalJob`, on each host.
            environ: the environment of the launcher. The ranks get its ``UNISONO_*`` settings.
            passed: further variables that the ranks get.
            on_loss: as for `LocalJob`; no rank is started anew.
            ssh: the command of ssh with its options.

        Raises:
            UsageError: the current folder has been removed.
        """
        self.late: list[int] = []
        self.alone: list[int] = []
        self.whereabouts: list[str] = []
        self._argv = list(argv)
        self._folder = _current_folder()
        self._observer = observer
        self._bind = bind
        self._environ = {**_settings(environ), **passed}
        self._statistics = environ.get(variable("stats"))
        self._on_loss = on_loss
        self._ssh = ssh
        size = sum(host.count for host in hosts)
        firsts = [sum(host.count for host in hosts[:number]) for number in range(len(hosts))]
        self._agents = [
            _Agent(number, host.name, JobPart(first, host.count, size))
            for number, (host, first) in enumerate(zip(hosts, firsts, strict=True))
        ]
        self._requests: deque[Callable[[], None]] = deque()
        self._selector = closed_in_child(selectors.DefaultSelector())
        self._exits: list[Exit] = []
        self._tell: Callable[[str], None] = lambda line: None
        self._job, self._key = os.urandom(16).hex(), os.urandom(32).hex()
        self._timeout_s: float | None = None
        self._kill_at = math.inf
        self._began = 0.0
        self._is_interrupted = False
        self._answer_s = Options.from_environment(environ).rendezvous_timeout_s

    def run(self, timeout_s: float | None = None) -> list[Exit]:
        """Start the ranks, wait for them, and return how they ended, in the order of their ends.

        Args:
            timeout_s: seconds after which the ranks are stopped; None means never.

        Raises:
            UsageError: a host cannot be reached or cannot start its ranks, or does not reach the others.
        """
        self._timeout_s, self._began = timeout_s, time.monotonic()
        try:
            for agent in self._agents:
                self._connect(agent)
            while any(agent.is_connected for agent in self._agents):
                self._step()
        finally:
            self._clean_up()
        self._require_no_error()
        return self._exits

    def attend(self) -> bool:
        """Handle the requests of other threads; see `LocalJob.attend`."""
        while self._requests:
            self._requests.popleft()()
        self._give_up_silent_hosts()
        is_late = time.monotonic() >= self._kill_at
        for agent in [agent for agent in self._agents if agent.is_connected] if is_late else ():
            agent.kill(signal.SIGKILL)
            self._lose(agent)
        return not is_late

    def _give_up_silent_hosts(self) -> None:
        """End the job if hosts have not said hello in time."""
        limit_s = min(self._answer_s, _LONGEST_S if self._timeout_s is None else self._timeout_s)
        silent = [agent for agent in self._agents if agent.is_connected and not agent.has_said_hello]
        if silent and time.monotonic() - self._began > limit_s and not any(agent.error for agent in silent):
            for agent in silent:
                agent.fail(f"it has not answered within {limit_s:g} s")
                agent.kill()
            self._end_all()
            self._kill_at = min(self._kill_at, time.monotonic() + 1.0)

    def forward(self, number: int) -> None:
        """Request that a signal that ends processes is sent to all ranks, followed by the usual escalation."""
        self._requests.append(lambda: self._end("forward", number))

    def pass_on(self, number: int) -> None:
        """Request that a signal is sent to the ranks that have a handler for it."""
        self._requests.append(lambda: self._send_all("pass_on", number))

    def report(self, tell: Callable[[str], None]) -> None:
        """Request that `tell` is called with sentences that say what each rank does, host by host."""
        self._tell = tell
        self._requests.append(lambda: self._send_all("report"))

    def kill(self) -> None:
        """Request that all ranks are killed at once."""
        self._requests.append(lambda: self._end("kill"))

    def _end(self, name: str, value: Any = None) -> None:
        """Ask all agents to end their ranks; end ssh if that takes too long."""
        self._is_interrupted = True
        self._send_all(name, value)
        last = AFTER_FAILURE[-1][0] if name == "forward" else 0.0
        self._kill_at = min(self._kill_at, time.monotonic() + last + _END_S)

    def _connect(self, agent: _Agent) -> None:
        command = python_command("from unisono.launchers.ssh_agent import main; main()")
        agent.process = subprocess.Popen(
            [*self._ssh, *SSH_OPTIONS, "--", agent.host, shlex.join(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not end ssh before the ranks
            bufsize=0,
        )
        assert agent.process.stdin is not None
        os.set_blocking(agent.process.stdin.fileno(), False)
        output, errors = agent.streams()
        self._selector.register(output, selectors.EVENT_READ, (self._read, agent))
        self._selector.register(errors, selectors.EVENT_READ, (self._read_error, agent))

    def _step(self) -> None:
        for selected, _ in self._selector.select(TICK_S):
            act, agent = selected.data
            act(agent, os.read(selected.fd, READ_NBYTES))
        self.attend()
        for agent in self._agents:
            agent.flush()
        self._observer.tick()

    def _read(self, agent: _Agent, data: bytes) -> None:
        try:
            for name, value in () if agent.is_done else agent.messages.feed(data):
                getattr(self, f"_on_{name}")(agent, value)
                if agent.is_done:  # what follows is text that shells of some users write at the end
                    break
        except ProtocolError as error:
            agent.fail(str(error))
            data = b""
        if not data:
            self._lose(agent)

    def _read_error(self, agent: _Agent, data: bytes) -> None:
        agent.errors += data
        if not data:
            self._selector.unregister(agent.streams()[1])

    def _lose(self, agent: _Agent) -> None:
        """Note that the connection to an agent has ended, and how its ranks ended if it did not say that itself."""
        self._selector.unregister(agent.streams()[0])
        agent.is_connected = False
        if not agent.is_done and not agent.error and not agent.is_dismissed:
            reason = _reason(agent)
            if agent.has_started:
                self.whereabouts.append(f"the connection to host {agent.host!r} was lost: {reason}")
            else:
                agent.fail(reason)
                self._end_all()
        for rank in sorted(agent.living):
            self._end_rank(agent, Exit(rank, LOST_HOST, host=agent.host))

    def _on_hello(self, agent: _Agent, hello: Mapping[str, str]) -> None:
        if hello["version"] != __version__:
            agent.fail(f"Unisono {hello['version']} is installed there, and {__version__} here")
            self._end_all()
            return
        agent.has_said_hello = True
        if any(each.error for each in self._agents):
            agent.dismiss()
        elif all(each.has_said_hello for each in self._agents):
            self._start(self._agents[0], "")

    def _on_store(self, agent: _Agent, url: str) -> None:
        if agent.number == 0:
            for other in self._agents[1:]:
                self._start(other, url)

    def _on_output(self, agent: _Agent, output: Mapping[str, Any]) -> None:
        if output["rank"] in agent.share.ranks and output["stream"] in ("stdout", "stderr"):
            self._observer.output(output["rank"], output["stream"], output["text"].encode("latin-1", "replace"))

    def _on_ended(self, agent: _Agent, facts: Mapping[str, Any]) -> None:
        if facts["rank"] in agent.living:
            exit_ = Exit(facts["rank"], facts["code"], stopped=facts["stopped"], pid=facts["pid"], host=agent.host)
            self._end_rank(agent, exit_)

    def _on_report(self, agent: _Agent, line: str) -> None:
        self._tell(f"{agent.host}: {line}")

    def _on_statistics(self, agent: _Agent, file: Mapping[str, Any]) -> None:
        if self._statistics and file["rank"] in agent.share.ranks:
            Path(self._statistics, f"rank-{file['rank']}.jsonl").write_text(file["text"], encoding="utf-8")

    def _on_error(self, agent: _Agent, text: str) -> None:
        agent.fail(text)
        agent.living.clear()
        agent.dismiss()
        self._end_all()

    def _on_done(self, agent: _Agent, done: Mapping[str, Any]) -> None:
        agent.is_done = True
        self.late = sorted({*self.late, *done["late"]})
        self.whereabouts += [f"{agent.host}: {line}" for line in done["whereabouts"]]
        agent.dismiss()

    def _start(self, agent: _Agent, store: str) -> None:
        agent.has_started = True
        agent.living = set(agent.share.ranks)
        task = {
            "argv": self._argv,
            "folder": self._folder,
            "environ": self._environ,
            "first": agent.share.first,
            "count": agent.share.count,
            "size": agent.share.size,
            "node": agent.number,
            "nodes": len(self._agents),
            "store": store,
            "job": self._job,
            "key": self._key,
            "bind": self._bind,
            "keep_going": self._on_loss is not None,
            "timeout_s": self._remaining_s(),
        }
        agent.send("start", task)

    def _remaining_s(self) -> float | None:
        """Return the rest of the time limit; None if there is none."""
        if self._timeout_s is None or self._timeout_s > _LONGEST_S:
            return None
        return max(0.0, self._timeout_s - (time.monotonic() - self._began))

    def _end_rank(self, agent: _Agent, ended: Exit) -> None:
        agent.living.discard(ended.rank)
        self._exits.append(ended)
        self._observer.ended(ended)
        if not ended.code:
            return
        if self._on_loss is None:
            self._send_all("end_after_failure")
        elif not ended.stopped:
            self._on_loss(ended, sum(len(each.living) for each in self._agents), False)

    def _end_all(self) -> None:
        """End all agents, because the job cannot run. Agents that have not said hello yet may still say why."""
        self._kill_at = min(self._kill_at, time.monotonic() + self._answer_s)
        for agent in self._agents:
            if agent.has_started:
                agent.is_dismissed = True
                agent.living.clear()
                agent.send("kill")
            elif agent.has_said_hello:
                agent.dismiss()

    def _send_all(self, name: str, value: Any = None) -> None:
        for agent in self._agents:
            if agent.has_started and not agent.is_done:
                agent.send(name, value)
            elif name in ("forward", "kill"):
                agent.kill()

    def _require_no_error(self) -> None:
        """Raise an error if a host could not start its ranks, unless the user has ended the job before."""
        culprits = [agent for agent in self._agents if agent.error]
        if culprits and not self._is_interrupted:
            raise UsageError("; ".join(f"host {agent.host!r} cannot be used: {agent.error}" for agent in culprits))

    def _clean_up(self) -> None:
        for agent in self._agents:
            agent.close()
        self._selector.close()


class _Agent:
    """A host, as the launcher sees it.

    Attributes:
        number, host, share: the number and the name of the host, and its ranks.
        process: the process of ssh; None before it has been started.
        messages: the messages from the agent.
        errors: what ssh and the agent have written to standard error.
        error: why the host cannot be used; empty as long as it can.
        living: the ranks that run.
    """

    def __init__(self, number: int, host: str, share: JobPart) -> None:
        self.number, self.host, self.share = number, host, share
        self.process: subprocess.Popen[bytes] | None = None
        self.messages = MessageCutter(TO_LAUNCHER)
        self.errors = b""
        self.error = ""
        self.living: set[int] = set()
        self.is_connected = True
        self.has_said_hello = self.has_started = self.is_done = self.is_dismissed = False
        self._unsent = b""

    def streams(self) -> tuple[IO[bytes], IO[bytes]]:
        """Return standard output and standard error of ssh, which has been started."""
        assert self.process is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return self.process.stdout, self.process.stderr

    def exit_code(self) -> int | None:
        """Wait for the end of ssh and return its exit code; None if it does not end."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_END_S)
        return None

    def unread_errors(self) -> bytes:
        """Return the text that is in the pipe of ssh's standard error now."""
        errors = self.streams()[1]
        os.set_blocking(errors.fileno(), False)
        return errors.read() or b""

    def send(self, name: str, value: Any = None) -> None:
        """Send a message, as soon as ssh takes it."""
        self._unsent += encoded(name, value)
        self.flush()

    def flush(self) -> None:
        """Send as many of the waiting bytes as ssh takes now."""
        assert self.process is not None
        assert self.process.stdin is not None
        if self._unsent and not self.process.stdin.closed:
            try:
                self._unsent = self._unsent[self.process.stdin.write(self._unsent) or 0 :]
            except OSError:  # ssh has ended; the end of its output says so, too
                self._unsent = b""

    def fail(self, error: str) -> None:
        """Note the first reason why the host cannot be used."""
        self.error = self.error or error

    def dismiss(self) -> None:
        """Tell the agent to end, because its ranks have ended."""
        self.is_dismissed = True
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to ssh, whose end is the end of the agent and its ranks."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End ssh if it still runs, and close its streams."""
        if self.process is None:
            return
        self.dismiss()
        if self.exit_code() is None:
            self.process.kill()
            self.process.wait()
        for stream in self.streams():
            stream.close()


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder has been removed: change to the folder of the program") from None


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of Unisono in an environment, without those of a launcher."""
    of_outer_job = {PREFIX + name for name in LAUNCHER_VARIABLES}
    return {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in of_outer_job}


def _reason(agent: _Agent) -> str:
    """Return why the connection to an agent has ended, from the last line of ssh, of the shell or of Python there."""
    code = agent.exit_code() or 0
    written = agent.messages.prologue + b"\n" + agent.errors + agent.unread_errors()
    lines = [line.strip() for line in written.decode(errors="replace").split("\n") if line.strip()]
    how = f"ssh was killed by {signal_name(-code)}" if code < 0 else f"ssh ended with code {code}"
    reason = lines[-1] if lines else how
    if agent.has_said_hello or code in (_OF_SSH, 0) or code < 0:
        return reason
    return f"{reason}: all hosts need the program and the Python environment under the same paths"
