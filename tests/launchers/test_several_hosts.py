"""`unisono run` on several hosts: with ssh from one place, and with a launcher on each machine.

The hosts are network namespaces with a real sshd in each.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S, eventually
from support.hosts import needs_namespaces
from support.ports import free_port

import unisono as un
from unisono.bench.namespaces import address, inside, network
from unisono.launchers.job_store import LauncherNode, NodeStore
from unisono.launchers.process import JobPart
from unisono.launchers.ssh_protocol import BEGINNING, TO_LAUNCHER, MessageCutter, ProtocolError, encoded
from unisono.transports.rendezvous.stores import PrefixStore

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_sshd = pytest.mark.skipif(SSHD is None or shutil.which("ssh-keygen") is None, reason="needs OpenSSH's server")
RUN = (sys.executable, "-m", "unisono", "run")
SUM = """
import os
import numpy as np, unisono as un
with un.init() as world:
    total = world.allreduce(np.full(2, world.rank + 1))
    print(world.rank, world.hosts, *total, os.environ["UNISONO_LOCAL_RANK"], os.environ["MASTER_ADDR"])
"""


class Ssh:
    """Hosts of a network that ssh reaches as ``host0``, ``host1`` and so on, and the command of ssh for them."""

    def __init__(self, namespaces: Sequence[str], folder: Path) -> None:
        self.namespaces = namespaces
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        server = folder / "sshd_config"
        server.write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
            "PidFile none\nPrintMotd no\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd needs this folder for processes without privileges
        assert SSHD is not None
        self._servers = [
            subprocess.Popen([*inside(name), SSHD, "-D", "-f", server, "-E", folder / "sshd_log"])
            for name in namespaces
        ]
        client = folder / "ssh_config"
        client.write_text(
            "".join(f"Host host{number}\n  HostName {address(number)}\n" for number in range(len(namespaces)))
            + f"Host *\n  IdentityFile {folder}/user_key\n  StrictHostKeyChecking no\n  LogLevel ERROR\n"
            "  UserKnownHostsFile /dev/null\n"
        )
        self.command = f"ssh -F {client}"
        for number in range(len(namespaces)):
            login = [*self.here(), *self.command.split(), f"host{number}", "true"]
            assert eventually(
                lambda login=login: subprocess.run(login, capture_output=True, check=False).returncode == 0
            )

    def here(self) -> list[str]:
        """Return the words to put before a command so that it runs on the first host, where the launcher is."""
        return inside(self.namespaces[0])

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start `unisono run` on the first host."""
        words = [*self.here(), *RUN, "--ssh", self.command, *map(str, arguments)]
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, *arguments: str | Path) -> tuple[int, list[str], str]:
        """Run `unisono run` on the first host; return its exit code, its sorted lines, and its errors."""
        with self.start(*arguments) as launcher:
            output, errors = launcher.communicate(timeout=DEADLINE_S)
        return launcher.returncode, sorted(output.splitlines()), errors

    def close(self) -> None:
        """Stop the servers."""
        for server in self._servers:
            server.terminate()
            server.wait()


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ssh]:
    with network(2) as namespaces:
        ssh = Ssh(namespaces, tmp_path_factory.mktemp("ssh"))
        try:
            yield ssh
        finally:
            ssh.close()


def processes(is_searched: Callable[[list[str]], bool]) -> list[int]:
    """Return the processes with such a command line."""
    results = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if is_searched(path.read_text().split("\0")[:-1]):
                results.append(int(path.parent.name))
        except OSError:
            continue
    return results


@needs_namespaces
@needs_sshd
def test_ranks_on_two_hosts_meet_and_report_as_on_one(ssh: Ssh, tmp_path: Path) -> None:
    program = tmp_path / "sum.py"
    program.write_text(SUM)
    code, lines, errors = ssh.run("--hosts", "host0:2,host1", "--stats", program)
    hosts = "((0, 1), (2,)) 6 6"
    places = [f"{local} {address(0)}" for local in (0, 1, 0)]
    assert (code, lines) == (0, [f"[{rank}] {rank} {hosts} {place}" for rank, place in enumerate(places)]), errors
    assert re.search(r"│ +2 │ +1 │", errors), errors  # the counters of the rank on the other host


@needs_namespaces
@needs_sshd
def test_ranks_of_hosts_get_variables_and_the_first_failure_is_the_exit_code(ssh: Ssh) -> None:
    program = "echo $A; test $UNISONO_RANK = 0 || exit 7"
    code, lines, errors = ssh.run("--hosts", "host0,host1", "--env", "A=1", "--", "sh", "-c", program)
    assert (code, lines) == (7, ["[0] 1", "[1] 1"]), errors
    assert errors == "unisono: rank 1 exited with code 7\n"


@needs_namespaces
@needs_sshd
def test_time_limit_ends_ranks_of_all_hosts(ssh: Ssh) -> None:
    code, lines, errors = ssh.run("--hosts", "host0,host1", "--timeout", "2", "--", "sleep", "600")
    assert (code, lines) == (124, [])
    assert errors == "unisono: stopped after 2 s (--timeout): ranks 0, 1 had not ended\n"


@needs_namespaces
@needs_sshd
@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ("host0,absent.invalid", "host 'absent.invalid' cannot be used: ssh: Could not resolve hostname"),
        ("host0,10.213.77.2", "host '10.213.77.2' cannot be used: "),
    ],
)
def test_host_that_cannot_be_used_is_one_error_and_no_rank_starts(ssh: Ssh, hosts: str, why: str) -> None:
    sink = ssh.command.replace("ssh -F", "ssh -p 9 -F") if "10." in hosts else ssh.command
    words = [*ssh.here(), *RUN, "--ssh", sink, "--hosts", hosts, "--", "echo", "started"]
    completed = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert why in completed.stderr


@needs_namespaces
@needs_sshd
@pytest.mark.parametrize("lost", ["launcher", "connection"])
def test_ranks_end_when_the_launcher_or_the_connection_is_lost(ssh: Ssh, lost: str) -> None:
    marker = f"60{os.getpid()}{len(lost)}"
    launcher = ssh.start("--hosts", "host0,host1", "--", "sleep", marker)

    def ranks() -> list[int]:
        return processes(lambda words: words == ["sleep", marker])

    assert eventually(lambda: len(ranks()) == 2)
    if lost == "launcher":
        os.killpg(launcher.pid, signal.SIGKILL)
    else:
        (connection,) = processes(lambda words: words[:3] == ssh.command.split() and "host1" in words)
        os.kill(connection, signal.SIGKILL)
    output, errors = launcher.communicate(timeout=DEADLINE_S)
    assert eventually(lambda: not ranks()), (output, errors)
    if lost == "connection":
        assert launcher.returncode == 255
        assert errors.startswith("unisono: the connection to host 'host1' was lost: ssh was killed by SIGKILL\n")
        assert "unisono: rank 1 was lost with host host1\n" in errors


# In place of ssh: runs the command of a host here, as the name of the host says.
FAKE_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
case $2 in
  mute*) sleep 600 ;;
  trailing*) sh -c "$3"; echo Goodbye ;;
  adjoining*) sh -c "$3" | sed -u '/"done"/s/$/\\nGoodbye/' ;;
  elsewhere*) sed -u 's#"folder": "#"folder": "/absent#' | sh -c "$3" ;;
  bare*) echo "sh: python: not found" >&2; exit 127 ;;
  *) exec sh -c "$3" ;;
esac
"""


def run_by_fake_ssh(tmp_path: Path, *arguments: str, **environ: str) -> tuple[int, list[str], str]:
    """Run `unisono run` with hosts that `FAKE_SSH` knows; return its exit code, its sorted lines, and its errors."""
    fake = tmp_path / "fake-ssh"
    fake.write_text(FAKE_SSH)
    fake.chmod(0o700)
    words = [*RUN, "--ssh", str(fake), *arguments]
    environment = {**os.environ, **environ}
    completed = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)
    return completed.returncode, sorted(completed.stdout.splitlines()), completed.stderr


@pytest.mark.parametrize(
    ("host", "arguments", "why"),
    [
        ("mute", ["--timeout", "0.5"], "it has not answered within 0.5 s"),
        ("elsewhere", [], "cannot be entered there (No such file or directory): all hosts need the program"),
        ("bare", [], "sh: python: not found: all hosts need the program and the Python environment"),
    ],
)
def test_host_that_cannot_start_its_ranks_is_the_only_one_named(
    tmp_path: Path, host: str, arguments: list[str], why: str
) -> None:
    code, lines, errors = run_by_fake_ssh(tmp_path, "--hosts", f"good,{host}", *arguments, "--", "echo", "started")
    assert (code, lines) == (2, [])
    assert errors.startswith(f"unisono: host '{host}' cannot be used: ")
    assert why in errors
    assert "good" not in errors


def test_silent_host_is_given_up_after_the_time_of_the_rendezvous(tmp_path: Path) -> None:
    limit = {"UNISONO_RENDEZVOUS_TIMEOUT_S": "0.5"}
    code, _, errors = run_by_fake_ssh(tmp_path, "--hosts", "mute", "--", "true", **limit)
    assert (code, errors) == (2, "unisono: host 'mute' cannot be used: it has not answered within 0.5 s\n")


@pytest.mark.parametrize("host", ["trailing", "adjoining"])
def test_text_of_a_shell_after_the_job_is_ignored(tmp_path: Path, host: str) -> None:
    assert run_by_fake_ssh(tmp_path, "--hosts", host, "--", "echo", "a") == (0, ["[0] a"], "")


def test_interrupt_while_hosts_are_silent_ends_the_launcher(tmp_path: Path) -> None:
    code = "import os, signal, threading; threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start(); "
    fake = tmp_path / "fake-ssh"
    fake.write_text(FAKE_SSH)
    fake.chmod(0o700)
    main = code + "import sys; from unisono.cli.entry import command; sys.exit(command())"
    words = [sys.executable, "-c", main, "run", "--ssh", str(fake), "--hosts", "good,mute", "--", "true"]
    completed = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (completed.returncode, completed.stderr) == (130, "unisono: interrupted\n")


def started_on_each(
    tmp_path: Path,
    store: str,
    counts: Sequence[int],
    namespaces: Sequence[str] = ("", ""),
    program: str = SUM,
    keys: Sequence[bytes] = (bytes(32), bytes(32)),
) -> list[tuple[int, str, str]]:
    """Run `unisono run` for each of two nodes; return exit code, output and errors of each."""
    (tmp_path / "program.py").write_text(program)

    def node(number: int) -> tuple[int, str, str]:
        key = tmp_path / f"key-{number}"
        key.touch(0o600)
        key.write_bytes(keys[number])
        words = ["-n", str(counts[number]), "--nnodes", "2", "--node-rank", str(number), "--store", store]
        prefix = inside(namespaces[number]) if namespaces[number] else []
        completed = subprocess.run(
            [*prefix, *RUN, *words, str(tmp_path / "program.py")],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, "UNISONO_KEY_FILE": str(key)},
            check=False,
        )
        return completed.returncode, completed.stdout, completed.stderr

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(node, range(2)))


@needs_namespaces
def test_launchers_on_two_machines_start_one_job(tmp_path: Path) -> None:
    with network(2) as namespaces:
        launchers = started_on_each(tmp_path, f"tcp://{address(0)}:29400", (1, 1), namespaces)
    assert launchers == [(0, f"[{rank}] {rank} ((0,), (1,)) 3 3 0 {address(0)}\n", "") for rank in range(2)]


def test_launchers_meet_in_a_shared_folder_and_leave_nothing_there(tmp_path: Path) -> None:
    launchers = started_on_each(tmp_path, f"file://{tmp_path}/store", (2, 2))
    assert [(code, errors) for code, _, errors in launchers] == [(0, "")] * 2
    assert launchers[1][1].count("((0, 1, 2, 3),) 10 10") == 2
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_launchers_that_were_started_differently_fail_on_both_machines(tmp_path: Path, scheme: str) -> None:
    store = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    for code, output, errors in started_on_each(tmp_path, store, (3, 2)):
        assert (code, output) == (2, "")
        assert errors.startswith("unisono: the launcher of node 0 was started for 6 ranks, and that of node 1 for 4")


def test_launchers_with_different_keys_say_so(tmp_path: Path) -> None:
    keys = (bytes(32), bytes([1] * 32))
    for code, output, errors in started_on_each(tmp_path, f"file://{tmp_path}/store", (1, 1), keys=keys):
        assert (code, output) == (2, "")
        assert errors.startswith("unisono: the launchers of nodes 0 and 1 have different keys")


@pytest.mark.parametrize("counts", [(1, 1), (2, 1)], ids=["right", "different"])
def test_store_stays_until_a_slow_launcher_has_read_that_it_may_start(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int]
) -> None:
    url, key, slow = f"tcp://127.0.0.1:{free_port()}", bytes(32), threading.local()
    get = PrefixStore.get

    def get_late(store: PrefixStore, key: str, timeout_s: float) -> bytes:
        if key == "ready" and hasattr(slow, "by_s"):
            time.sleep(slow.by_s)
        return get(store, key, timeout_s)

    def met(number: int) -> str:
        node = LauncherNode(number, 2, url, "127.0.0.1", bytes(16), key)
        if number:
            slow.by_s = 0.5
        try:
            NodeStore(node, JobPart(number, 1, counts[number]), DEADLINE_S).close()
        except un.UsageError as error:
            return str(error)
        return ""

    monkeypatch.setattr(PrefixStore, "get", get_late)
    with ThreadPoolExecutor(2) as threads:
        launchers = list(threads.map(met, range(2)))
    wrong = "the launcher of node 0 was started for 2 ranks, and that of node 1 for 1"
    assert [text.startswith(wrong) if counts[0] > 1 else not text for text in launchers] == [True, True], launchers


@pytest.mark.parametrize("bad", [0, 1])
def test_failure_on_one_machine_ends_the_ranks_of_the_other(tmp_path: Path, bad: int) -> None:
    program = f"import os, sys, time\nos.environ['UNISONO_RANK'] == '{bad}' and sys.exit(7)\ntime.sleep(600)\n"
    launchers = started_on_each(tmp_path, f"tcp://127.0.0.1:{free_port()}", (1, 1), program=program)
    assert launchers[bad] == (7, "", f"unisono: rank {bad} exited with code 7\n")
    code, _, errors = launchers[1 - bad]
    assert code == 143
    first = f"unisono: rank {bad} exited with code 7 on host .*"
    assert re.match(f"{first}\nunisono: rank {1 - bad} was (killed by|stopped).*SIGTERM", errors)


def test_missing_launcher_is_an_error_before_a_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(os.urandom(32))
    words = (
        "-n",
        "1",
        "--nnodes",
        "3",
        "--node-rank",
        "0",
        "--store",
        f"tcp://127.0.0.1:{free_port()}",
        "--",
        "echo",
        "started",
    )
    environ = {**os.environ, "UNISONO_KEY_FILE": str(key), "UNISONO_RENDEZVOUS_TIMEOUT_S": "0.2"}
    completed = subprocess.run(
        [*RUN, *words], capture_output=True, text=True, timeout=DEADLINE_S, env=environ, check=False
    )
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "the launchers of nodes 1, 2 did not come" in completed.stderr


def test_text_of_a_login_shell_before_the_first_message_is_kept_apart() -> None:
    messages = MessageCutter(TO_LAUNCHER)
    stream = b"Welcome\n{}\n" + BEGINNING + encoded("store", "tcp://a:1") + encoded("error", "no")
    read = [message for byte in stream for message in messages.feed(bytes([byte]))]
    assert read == [("store", "tcp://a:1"), ("error", "no")]
    assert messages.prologue == b"Welcome\n{}\n"


@pytest.mark.parametrize(
    "line", [b"{}", b"[]", b"x", b'{"hello": 3}', b'{"store": "a", "error": "b"}', b'{"run": "rm"}', b'{"ended": {}}']
)
def test_malformed_message_is_an_error(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(MessageCutter(TO_LAUNCHER).feed(BEGINNING + line + b"\n"))
