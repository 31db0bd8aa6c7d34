"""Tries a swarm under churn: ``unisono bench churn [--seconds 1800] [--seed 1] [--members 4] [--homes] [--json]``.

Three to six processes sum integers in a swarm, while a random one is killed, stopped, cut off, leaves, or enters. The
swarm begins with as many as ``--members`` says. The contribution of a process to a call follows from its number and
that of the call. So every sum shows whether it has the contributions that its contributors name. Each process writes a
line for each call that has ended. At the end, the lines of all processes are compared:

- no sum differs from that of its contributors;
- no two processes name different contributors of a call;
- no process has been without a call for longer than the bound.

With ``--homes``, each process runs on a host of its own, a network namespace. Half of the hosts are at home, so that
the others cannot dial them. Links of hosts go down for a while too. This needs root.

The cost of a loss is the time from the loss to the next call that has ended on a member.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import unisono as un
from unisono.bench import argument_types
from unisono.bench.namespaces import address, home, inside, move_home, network, plug
from unisono.foundation import streams
from unisono.foundation.processes import python_command
from unisono.foundation.program import begin

LEAST, MOST = 3, 6
HEARTBEAT_S = 2.0
BOUND_S = 60.0
_ELEMENTS = 4096
_MODULUS = 1_000_003
_LOOK_S = 0.02
_GATHER_S = 60.0
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000
# (event, how often it is drawn)
_EVENTS = {"kill": 3, "stop": 2, "cut": 2, "leave": 1, "enter": 4, "place": 1}
_EVENTS_OF_HOSTS = {**_EVENTS, "unplug": 2}
# The first hosts can be dialled by all others. So many of them always have a member, because members at home need one.
_PUBLIC, _LEAST_PUBLIC = 3, 2

# The module that started interpreters import; this one may be `__main__`.
_MODULE = "unisono.bench.programs.churn"


class ChurnTrial(NamedTuple):
    """The result of a trial.

    Attributes:
        calls: the number of different calls that have ended.
        views: the number of different lists of contributors.
        events: how often each event occurred.
        losses_s: the cost of each loss, in seconds.
        wrong_sums, disagreements, hangs: the violated promises, as sentences.
        errors: the errors of processes, with the number of times.
    """

    calls: int
    views: int
    events: dict[str, int]
    losses_s: list[float]
    wrong_sums: list[str]
    disagreements: list[str]
    hangs: list[str]
    errors: dict[str, int]

    @property
    def is_right(self) -> bool:
        """Whether there were calls, all sums were right and equal on all members, and no call hung."""
        return self.calls > 0 and not (self.wrong_sums or self.disagreements or self.hangs)


def contribution(process: int, call: int) -> int:
    """Return the first of the integers that a process contributes to a call; the others follow it."""
    return (process * 7919 + call * 104_729) % _MODULUS


def main() -> None:
    """Try a swarm as the command line asks, and print its events and results."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = range(LEAST, MOST + 1)
    parser.add_argument("--seconds", type=argument_types.duration, default=1800.0, help="the length of the trial")
    parser.add_argument("--seed", type=int, default=1, help="decides about the events")
    parser.add_argument("--members", type=int, default=LEAST + 1, choices=sizes, help="how many processes begin")
    parser.add_argument(
        "--transports", type=argument_types.transports, default="auto", help="as the option `transports`"
    )
    parser.add_argument("--homes", action="store_true", help="put half of the processes behind NAT; needs root")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    options = parser.parse_args()
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        hosts = opened.enter_context(hosts_with_homes()) if options.homes else ()
        outcome = try_swarm(folder, options.seconds, options.seed, options.transports, hosts, options.members)
        if not outcome.calls:
            streams.write(sys.stderr, f"the swarm made no call; {_last_words(folder)}\n")
    if options.json:
        sys.stdout.write(json.dumps(outcome._asdict()) + "\n")
    else:
        _show(outcome)
    sys.exit(0 if outcome.is_right else 1)


def _last_words(folder: Path) -> str:
    """Return the last line that process 0 has written, which is the error that ended it."""
    lines = (folder / "output-0.txt").read_text().split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"process 0 wrote: {last}" if last else "process 0 wrote nothing"


def _show(outcome: ChurnTrial) -> None:
    table = Table("", "")
    table.add_row("calls", f"{outcome.calls:,}")
    table.add_row("lists of contributors", str(outcome.views))
    table.add_row("events", ", ".join(f"{count} × {name}" for name, count in sorted(outcome.events.items())))
    if outcome.losses_s:
        median, worst = np.percentile(outcome.losses_s, [50, 100])
        table.add_row("cost of a loss", f"median {median:.2f} s, at most {worst:.2f} s")
    table.add_row("errors", ", ".join(f"{count} × {name}" for name, count in outcome.errors.items()) or "none")
    for name in ("wrong_sums", "disagreements", "hangs"):
        values = getattr(outcome, name)
        table.add_row(name.replace("_", " "), "\n".join(values[:5]) or "none")
    Console().print(table)


@contextlib.contextmanager
def hosts_with_homes() -> Iterator[list[str]]:
    """Create a host for each process, and yield their namespaces. The later half is at home, some of it silently."""
    with network(MOST) as hosts:
        for host in range(_PUBLIC, MOST):
            move_home(hosts, host, is_silent=host % 2 == 0)
        yield hosts


def try_swarm(
    folder: Path,
    seconds: float,
    seed: int,
    transports: str = "auto",
    hosts: Sequence[str] = (),
    members: int = LEAST + 1,
) -> ChurnTrial:
    """Run a swarm under churn for `seconds`, and return its events and results.

    Args:
        folder: for the key and the logs.
        seconds: the length of the trial.
        seed: decides about the events.
        transports: the option of all processes.
        hosts: as of `hosts_with_homes`; by default all processes run on this host.
        members: the number of processes with which the swarm begins.
    """
    with open(os.open(folder / "key", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as key:
        key.write(os.urandom(32))
    trial = _Trial(folder, random.Random(seed), transports, hosts)
    try:
        trial.run(seconds, members)
    finally:
        trial.end()
    return trial.outcome()


@contextlib.contextmanager
def _progress_bar(seconds: float) -> Iterator[Callable[[float, int, int], None]]:
    """Show a bar on a terminal; yield a function of the passed seconds and the numbers of calls and events."""
    errors, columns = Console(stderr=True), (BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=seconds)

        def show(passed_s: float, calls: int, events: int) -> None:
            bar.update(task, completed=passed_s, description=f"{calls:,} calls, {events} events")

        yield show


class _Process:
    """A process of the trial: its number, its log, and whether it must make calls now."""

    def __init__(self, number: int, process: subprocess.Popen[str], log: Path, host: int = 0) -> None:
        self.number = number
        self.host = host
        self.process = process
        self.log = log
        self.is_stopped = False
        self.progress = time.monotonic()
        self.has_entered = False
        self.call = 0  # the last one that has ended
        self.view_size = 0  # the number of its contributors
        self._read = 0

    def look(self) -> None:
        """Read the lines that the process has written since the last look."""
        text = self.log.read_bytes()[self._read :] if self.log.exists() else b""
        end = text.rfind(b"\n") + 1
        if not end:
            return
        self._read += end
        self.progress, self.has_entered = time.monotonic(), True
        line = json.loads(text[:end].splitlines()[-1])
        self.call = line.get("call", self.call)
        self.view_size = len(line.get("contributors", ()))

    def tell(self, word: str) -> None:
        """Send a command to the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()


class _Trial:
    def __init__(self, folder: Path, chance: random.Random, transports: str, hosts: Sequence[str] = ()) -> None:
        self._folder = folder
        self._chance = chance
        self._hosts = hosts
        self._events_drawn = _EVENTS_OF_HOSTS if hosts else _EVENTS
        self._places = [f"tcp://{address(k) if hosts else '127.0.0.1'}:{port}" for k, port in enumerate(_free_ports(2))]
        self._transports = transports
        self._all: list[_Process] = []
        self._place: subprocess.Popen[str] | None = None
        self._place_number = 0
        self._events: defaultdict[str, int] = defaultdict(int)
        self._losses_s: list[float] = []
        self._hangs: list[str] = []
        self._silences: list[threading.Thread] = []
        self._lost_at: float | None = None
        self._call_of_loss = 0

    def run(self, seconds: float, members: int) -> None:
        """Start some members, and kill, stop, add and remove processes of the swarm at random for `seconds`."""
        self._serve()
        for _ in range(members):
            self._start()
        self._await(lambda: all(each.has_entered for each in self._living()), _GATHER_S)
        began = time.monotonic()
        with _progress_bar(seconds) as show:
            while (passed_s := time.monotonic() - began) < seconds and not self._hangs:
                show(passed_s, max(each.call for each in self._all), sum(self._events.values()))
                self._happen()
                self._await(lambda: False, self._chance.uniform(0.2, 2.5))
                if self._lost_at is not None:
                    self._await(lambda: self._lost_at is None, BOUND_S)

    def _living(self) -> list[_Process]:
        return [each for each in self._all if each.process.poll() is None and not each.is_stopped]

    def _entered(self) -> list[_Process]:
        return [each for each in self._living() if each.has_entered]

    def _members(self) -> list[_Process]:
        """Return the processes that make calls now."""
        latest = time.monotonic() - HEARTBEAT_S
        return [each for each in self._entered() if each.progress > latest and each.view_size]

    def _await(self, condition: Any, limit_s: float) -> None:
        """Watch the processes until a condition holds, or a time has passed."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end and not condition():
            for each in self._living():
                each.look()
            now = time.monotonic()
            if self._lost_at is not None and max(each.call for each in self._living()) > self._call_of_loss + 1:
                self._losses_s.append(now - self._lost_at)
                self._lost_at = None
            for each in self._entered():
                if now - each.progress > BOUND_S:
                    self._hangs.append(f"process {each.number} has ended no call for {BOUND_S:g} s")
                    return
            time.sleep(_LOOK_S)

    def _happen(self) -> None:
        members = self._members()
        names = list(self._events_drawn)
        event = self._chance.choices(names, list(self._events_drawn.values()))[0]
        if event == "enter":
            if not self._has_room():
                return
            self._start()
        elif event == "place":
            self._serve()
        elif len(members) <= LEAST or 2 * (len(members) - 1) <= max(each.view_size for each in members):
            if self._has_room():
                self._start()
            return
        else:
            process = self._chance.choice(members)
            if self._is_needed(process, members):
                return
            getattr(self, f"_{event}")(process)
        self._events[event] += 1

    def _has_room(self) -> bool:
        return sum(each.process.poll() is None for each in self._all) < MOST

    def _is_needed(self, process: _Process, members: Sequence[_Process]) -> bool:
        """Return whether too few members could be dialled without this one."""
        public = [each for each in members if each.host < _PUBLIC]
        return bool(self._hosts) and process in public and len(public) <= _LEAST_PUBLIC

    def _kill(self, process: _Process) -> None:
        process.process.kill()
        process.process.wait()
        self._note_loss()

    def _stop(self, process: _Process) -> None:
        """Stop a process by SIGSTOP for a while."""
        process.process.send_signal(signal.SIGSTOP)
        self._silence(process, lambda: process.process.send_signal(signal.SIGCONT))

    def _unplug(self, process: _Process) -> None:
        """Set the link of a process's host down for a while."""
        plug(self._hosts, process.host, "down")
        self._silence(process, lambda: plug(self._hosts, process.host, "up"))

    def _silence(self, process: _Process, end: Callable[[], object]) -> None:
        """Expect no calls of a process for a while, which may be longer than the other members wait; then end it."""
        process.is_stopped = True
        self._note_loss()
        seconds = self._chance.uniform(0.2, 2.5) * HEARTBEAT_S

        def go_on() -> None:
            time.sleep(seconds)
            end()
            process.progress, process.is_stopped = time.monotonic(), False

        silence = threading.Thread(target=go_on, daemon=True)
        silence.start()
        self._silences.append(silence)

    def _cut(self, process: _Process) -> None:
        process.tell("cut")
        self._note_loss()

    def _leave(self, process: _Process) -> None:
        process.tell("leave")
        process.has_entered = False

    def _note_loss(self) -> None:
        for each in self._all:
            each.look()
        self._call_of_loss = max(each.call for each in self._all)
        self._lost_at = time.monotonic()

    def _start(self) -> None:
        number = len(self._all)
        log = self._folder / f"calls-{number}.jsonl"
        command = python_command(
            "from unisono.bench.programs.churn import take_part; take_part()", str(number), str(log)
        )
        environ = {
            **os.environ,
            "UNISONO_KEY_FILE": str(self._folder / "key"),
            "CHURN_PLACES": ",".join(self._places),
            "UNISONO_TRANSPORTS": self._transports,
        }
        host = self._free_host() if self._hosts else 0
        if self._hosts:
            environ["UNISONO_BIND_ADDRESS"] = address(host) if host < _PUBLIC else home(host)
            command = (*inside(self._hosts[host]), *command)
        with open(self._folder / f"output-{number}.txt", "w") as output:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stderr=output, stdout=output, text=True
            )
        self._all.append(_Process(number, process, log, host))

    def _free_host(self) -> int:
        """Return a host without a process: one that can be dialled, as long as too few of these have one."""
        taken = {each.host for each in self._all if each.process.poll() is None}
        free = [host for host in range(MOST) if host not in taken]
        public = [host for host in free if host < _PUBLIC]
        return self._chance.choice(public if _PUBLIC - len(public) < _LEAST_PUBLIC else free)

    def _serve(self) -> None:
        """End the meeting place, and start one at the other address."""
        self._end_place()
        self._place_number += 1
        number = self._place_number % len(self._places)
        command = python_command("from unisono.bench.programs.churn import serve; serve()", self._places[number])
        if self._hosts:
            command = (*inside(self._hosts[number]), *command)
        environ = {**os.environ, "UNISONO_KEY_FILE": str(self._folder / "key")}
        # Ctrl-C may end this program before it knows of the new process, which then finds no key, and says so.
        with open(self._folder / f"output-place-{self._place_number}.txt", "w") as output:
            self._place = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,  # Ctrl-C is for this program, which ends the process
            )

    def end(self) -> None:
        """End all processes."""
        for silence in self._silences:
            silence.join()
        for each in self._all:
            _end(each.process)
        self._end_place()

    def _end_place(self) -> None:
        if self._place is not None:
            _end(self._place)

    def outcome(self) -> ChurnTrial:
        """Compare the lines of all processes."""
        calls: dict[int, tuple[int, list[str]]] = {}
        wrong, disagreements, errors = [], [], defaultdict[str, int](int)
        for each in self._all:
            for line in _lines(each.log):
                if "error" in line:
                    errors[line["error"]] += 1
                    continue
                number, who = line["call"], line["contributors"]
                expected = sum(contribution(int(name.partition("/")[2]), number) for name in who)
                if line["sum"] != expected or not line["is_even"]:
                    wrong.append(f"call {number} on process {each.number}: {line['sum']} instead of {expected}")
                process, first = calls.setdefault(number, (each.number, who))
                if first != who:
                    disagreements.append(f"call {number}: {first} on process {process}, {who} on {each.number}")
        views = len({tuple(who) for _, who in calls.values()})
        return ChurnTrial(
            len(calls), views, dict(self._events), self._losses_s, wrong, disagreements, self._hangs, dict(errors)
        )


def _lines(log: Path) -> Iterator[Mapping[str, Any]]:
    """Return the complete lines of a log; a process may have been killed while it wrote the last one."""
    text = log.read_text() if log.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def _free_ports(count: int) -> list[int]:
    """Return ports on which no process listens, outside of those that the kernel assigns by itself, if there are such.

    Otherwise another program could have the second port by the time when the place moves there.
    """
    first, last = map(int, _EPHEMERAL_PORTS.read_text().split())
    ports = [port for port in range(_LOWEST_PORT, 1 << 16) if not first <= port <= last]
    ports = ports or list(range(_LOWEST_PORT, 1 << 16))
    random.SystemRandom().shuffle(ports)
    return list(islice(filter(_is_free, ports), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def serve() -> None:
    """Serve a meeting place until the end of the standard input."""
    with un.MeetingPlace(sys.argv[1]):
        sys.stdin.read()


def take_part() -> None:
    """Sum in the swarm until the command "leave", and write a line for each call."""
    number, path = int(sys.argv[1]), sys.argv[2]
    leaves = threading.Event()
    threading.Thread(target=_obey, args=(leaves,), daemon=True).start()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    swarm = un.Swarm(
        os.environ["CHURN_PLACES"].split(","),
        name=f"process/{number}",
        heartbeat_timeout_s=HEARTBEAT_S,
        rendezvous_timeout_s=BOUND_S,
        timeout_s=BOUND_S,
        warn_after_s=BOUND_S,
        quorum_timeout_s=4 * HEARTBEAT_S,
    )
    with swarm:
        while not leaves.is_set():
            try:
                line = _call(swarm, number)
            except un.LeftBehindError as error:
                _write(log, {"error": type(error).__name__, "why": str(error)})
                swarm.enter()
                continue
            except un.UnisonoError as error:
                _write(log, {"error": type(error).__name__, "why": str(error)})
                continue
            _write(log, line)
            time.sleep(0.005)


def _call(swarm: un.Swarm, number: int) -> dict[str, Any]:
    """Make a call of the swarm, and return the line about it for the log."""
    x = np.arange(_ELEMENTS, dtype=np.int64) + contribution(number, swarm.next_call)
    before, began = x.copy(), time.monotonic()
    result = swarm.allreduce(x, "sum")
    call = swarm.last_call
    assert call is not None
    size = len(call.contributors)
    is_even = bool((x == before).all() and (result - size * np.arange(_ELEMENTS) == result[0]).all())
    return {
        "call": call.number,
        "sum": int(result[0]),
        "is_even": is_even,
        "contributors": [member.name for member in call.contributors],
        "attempts": call.attempts,
        "seconds": time.monotonic() - began,
    }


def _write(log: int, line: Mapping[str, Any]) -> None:
    os.write(log, json.dumps(line).encode() + b"\n")


def _obey(leaves: threading.Event) -> None:
    for line in sys.stdin:
        if line.strip() == "cut":
            cut_connections()
        else:
            leaves.set()
    os._exit(1)  # the trial was killed


def _socket_of(descriptor: int) -> socket.socket:
    """Return a socket on a duplicate of a descriptor; raises OSError if the descriptor is not a socket."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def cut_connections() -> None:
    """Shut down all TCP connections of this process, like a network that loses its state of them."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), _socket_of(descriptor) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                sock.getpeername()
                sock.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    begin()
    main()
