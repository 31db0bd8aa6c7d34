import contextlib
import dataclasses
import errno
import logging
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest
from support.deadlines import DEADLINE_S

from unisono.errors import CollectiveTimeoutError, PeerLostError, TransportUnavailableError, UsageError
from unisono.foundation.deadlines import Deadline
from unisono.transports.host.fd_limit import lift_limit_of_files
from unisono.transports.links import dialer as dialer_module, handshake_io, listener as listener_module
from unisono.transports.links.dialer import Dialer, DialingRank, Target, dial
from unisono.transports.links.event_loop import EventLoop
from unisono.transports.links.handshake import (
    HELLO_NBYTES,
    AcceptorHandshake,
    Admission,
    DialerHandshake,
    HandshakeError,
    Hello,
    Purpose,
)
from unisono.transports.links.handshake_io import greet
from unisono.transports.links.listener import Addresses, Listener

KEY = bytes(range(32))
JOB = b"j" * 16


class RecordingListener:
    """A listener of rank 0 of `size` ranks, and the links that it has delivered."""

    def __init__(self, key=KEY, job=JOB, size=4):
        self.delivered = queue.Queue()
        self.listener = Listener(
            key=key,
            job=job,
            epoch=0,
            rank=0,
            size=size,
            bind_address="127.0.0.1",
            host_id="host",
            use_unix=True,
            deliver=lambda *arrival: self.delivered.put(arrival),
            on_failure=self.delivered.put,
        )
        self.addresses = self.listener.addresses

    def next(self):
        return self.delivered.get(timeout=DEADLINE_S)

    def close(self):
        self.listener.close()
        while not self.delivered.empty():
            self.delivered.get()[1].close()


@pytest.fixture
def door():
    with contextlib.closing(RecordingListener()) as opened:
        yield opened


def knock(addresses, *, key=KEY, job=JOB, epoch=0, rank=1, timeout_s=DEADLINE_S, **changes):
    return dial(DialingRank(key, job, epoch, rank), target(addresses, **changes), timeout_s)


def target(addresses, *, peer=0, use_unix=False, purpose=Purpose.TCP, communicator=0, lane=0):
    return Target(peer, addresses, use_unix, purpose, communicator, lane)


def stranger(addresses, use_unix=False):
    if not use_unix:
        return socket.create_connection((addresses.tcp_host, addresses.tcp_port), DEADLINE_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(DEADLINE_S)
    sock.connect("\0" + addresses.unix)
    return sock


def assert_serves(door, rank=1):
    """Assert that a rank can still connect."""
    sock, _ = knock(door.addresses, rank=rank)
    hello, delivered = door.next()
    with sock, delivered:
        assert hello.sender == rank
        sock.sendall(b"payload")
        assert delivered.recv(7, socket.MSG_WAITALL) == b"payload"


def assert_dropped(sock):
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""


@pytest.mark.parametrize("use_unix", [False, True])
def test_listener_delivers_a_dialing_rank_with_its_hello(door, use_unix):
    sock, answer = knock(door.addresses, use_unix=use_unix, communicator=77, lane=3)
    hello, delivered = door.next()
    with sock, delivered:
        assert (hello.sender, hello.purpose, hello.communicator, hello.lane) == (1, Purpose.TCP, 77, 3)
        assert (answer.sender, answer.receiver) == (0, 1)
        for end in (sock, delivered):
            assert end.getblocking()
            assert not end.get_inheritable()
            assert end.family == (socket.AF_UNIX if use_unix else socket.AF_INET)
            if not use_unix:
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        delivered.sendall(b"after the hello")
        assert sock.recv(15, socket.MSG_WAITALL) == b"after the hello"


def test_listener_serves_many_ranks_that_dial_at_once():
    size = 100
    with contextlib.closing(RecordingListener(size=size)) as door:
        results = []
        threads = [
            threading.Thread(target=lambda r=r: results.append(knock(door.addresses, rank=r, use_unix=r % 2 == 0)))
            for r in range(1, size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        senders = set()
        for _ in range(size - 1):
            hello, sock = door.next()
            senders.add(hello.sender)
            sock.close()
        for sock, _ in results:
            sock.close()
        assert senders == set(range(1, size))


def test_listener_serves_a_rank_in_another_process(door):
    script = (
        "import sys\n"
        "from unisono.transports.links.handshake import Purpose\n"
        "from unisono.transports.links.dialer import DialingRank, Target, dial\n"
        "from unisono.transports.links.listener import Addresses\n"
        "where = Addresses(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))\n"
        "sock, hello = dial(DialingRank(bytes(range(32)), b'j' * 16, 0, 2), Target(0, where, True, Purpose.SHM), 100)\n"
        "sock.sendall(b'hello from afar')\n"
    )
    arguments = [str(value) for value in dataclasses.astuple(door.addresses)]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=DEADLINE_S)
    hello, sock = door.next()
    with sock:
        assert (hello.sender, hello.purpose) == (2, Purpose.SHM)
        assert sock.recv(15, socket.MSG_WAITALL) == b"hello from afar"


@pytest.mark.parametrize("use_unix", [False, True])
@pytest.mark.parametrize(
    "bytes_sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * 4096, id="another protocol"),
        pytest.param(b"\xff" * HELLO_NBYTES, id="garbage"),
        pytest.param(b"UNIS" + b"\0" * (HELLO_NBYTES - 4), id="the right magic alone"),
        pytest.param(Hello(JOB, 0, 1, 0, Purpose.TCP).pack() * 2, id="a hello twice"),
        pytest.param(Hello(b"x" * 16, 0, 1, 0, Purpose.TCP).pack(), id="another job"),
    ],
)
def test_listener_drops_a_stranger_that_sends_garbage(door, bytes_sent, use_unix):
    with stranger(door.addresses, use_unix) as sock:
        sock.sendall(bytes_sent)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass
    assert_serves(door)
    assert door.delivered.empty()


def test_listener_survives_a_stranger_that_sends_half_a_hello(door):
    with stranger(door.addresses) as sock:
        sock.sendall(Hello(JOB, 0, 1, 0, Purpose.TCP).pack()[:40])
    assert_serves(door)


def test_listener_drops_silent_strangers_and_serves_ranks_meanwhile(monkeypatch):
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT_S", 0.2)
    with (
        contextlib.closing(RecordingListener()) as door,
        stranger(door.addresses) as silent,
        stranger(door.addresses) as half,
    ):
        half.sendall(b"UNIS")
        assert_serves(door)
        assert_dropped(silent)
        assert_dropped(half)


def test_listener_drops_the_oldest_of_too_many_pending_connections(monkeypatch):
    monkeypatch.setattr(listener_module, "_PENDING_LIMIT", 5)
    monkeypatch.setattr(listener_module, "_PENDING_PER_RANK", 0)
    with contextlib.closing(RecordingListener()) as door, contextlib.ExitStack() as crowd:
        strangers = [crowd.enter_context(stranger(door.addresses)) for _ in range(8)]
        for early in strangers[:3]:
            assert_dropped(early)
        assert_serves(door)
        assert_dropped(strangers[3])
        strangers[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            strangers[-1].recv(1)


CROWD = """
import socket, sys
sys.stdin.readline()
held = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(int(sys.argv[3]))]
print(len(held), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def few_descriptors(free):
    """Let this process open so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with contextlib.ExitStack() as fillers:
        for _ in range(highest + 1 - len(os.listdir("/proc/self/fd"))):
            fillers.enter_context(open(os.devnull, "rb"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + free, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_strangers_leave_the_program_of_a_large_job_its_descriptors():
    with contextlib.closing(RecordingListener(size=1000)) as door, contextlib.ExitStack() as opened:
        command = [sys.executable, "-c", CROWD, door.addresses.tcp_host, str(door.addresses.tcp_port), "300"]
        crowd = opened.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        opened.enter_context(few_descriptors(200))
        crowd.stdin.write(b"\n")
        crowd.stdin.flush()
        assert crowd.stdout.readline() == b"300\n"
        for _ in range(140):
            opened.enter_context(open(os.devnull, "rb"))
        assert_serves(door)
        crowd.stdin.close()


def test_listener_of_a_large_job_admits_all_ranks_at_once():
    size = 1000
    if lift_limit_of_files(4 * size) is not None:
        pytest.skip("the limit of open files is too low")
    loop = EventLoop("dialers", lambda error: None)
    connected = queue.Queue()
    with contextlib.closing(RecordingListener(size=size)) as door:
        loop.start()
        dialers = [Dialer(loop, DialingRank(KEY, JOB, 0, rank), lambda: False) for rank in range(1, size)]
        for dialer in dialers:
            dialer.dial(target(door.addresses), connected.put, connected.put)
        senders = set()
        for _ in dialers:
            hello, sock = door.next()
            senders.add(hello.sender)
            sock.close()
            connected.get(timeout=DEADLINE_S).close()
        assert senders == set(range(1, size))
        loop.close(lambda: [dialer.close() for dialer in dialers])


def test_listener_soon_drops_a_stranger_without_a_hello(monkeypatch):
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT_S", 1e6)
    with contextlib.closing(RecordingListener()) as door, stranger(door.addresses) as silent:
        assert_dropped(silent)
        assert_serves(door)


def test_silent_strangers_do_not_drop_a_rank_that_has_sent_its_hello(monkeypatch):
    monkeypatch.setattr(listener_module, "_PENDING_LIMIT", 5)
    monkeypatch.setattr(listener_module, "_PENDING_PER_RANK", 0)
    handshake = DialerHandshake(KEY, Hello(JOB, 0, 1, 0, Purpose.TCP))
    with contextlib.closing(RecordingListener()) as door, contextlib.ExitStack() as crowd:
        rank = crowd.enter_context(stranger(door.addresses))
        rank.sendall(handshake.opening)
        proof = handshake.receive(rank.recv(HELLO_NBYTES + 32, socket.MSG_WAITALL))
        strangers = [crowd.enter_context(stranger(door.addresses)) for _ in range(8)]
        assert_dropped(strangers[0])
        rank.sendall(proof)
        assert rank.recv(1) == b"\x01"
        crowd.enter_context(door.next()[1])


def test_both_sides_refuse_a_hello_with_a_wrong_key(door):
    with pytest.raises(TransportUnavailableError, match="does not hold the key") as caught:
        knock(door.addresses, key=b"w" * 32)
    assert caught.value.peer == 0
    with stranger(door.addresses) as sock:
        sock.sendall(Hello(JOB, 0, 1, 0, Purpose.TCP).pack())
        sock.recv(HELLO_NBYTES + 32, socket.MSG_WAITALL)
        sock.sendall(os.urandom(32))
        assert_dropped(sock)
    assert_serves(door)
    assert door.delivered.empty()


def test_a_recorded_session_cannot_be_replayed(door):
    handshake = DialerHandshake(KEY, Hello(JOB, 0, 1, 0, Purpose.TCP))
    with stranger(door.addresses) as sock:
        sock.sendall(handshake.opening)
        proof = handshake.receive(sock.recv(HELLO_NBYTES + 32, socket.MSG_WAITALL))
        sock.sendall(proof)
        assert sock.recv(1) == b"\x01"
    door.next()[1].close()
    with stranger(door.addresses) as sock:
        sock.sendall(handshake.opening)
        sock.recv(HELLO_NBYTES + 32, socket.MSG_WAITALL)
        sock.sendall(proof)
        assert_dropped(sock)
    assert_serves(door)
    assert door.delivered.empty()


def test_listener_refuses_a_rank_of_another_job(door):
    with contextlib.closing(RecordingListener(key=b"o" * 32, job=b"o" * 16)) as other:
        with pytest.raises(PeerLostError, match="closed the connection"):
            knock(other.addresses)
        assert other.delivered.empty()
        assert_serves(door)


def test_error_of_a_rank_of_another_epoch_names_both_epochs(door):
    with pytest.raises(TransportUnavailableError, match="epoch 0, expected was 7"):
        knock(door.addresses, epoch=7)


def test_listener_refuses_unix_peers_of_another_user_before_their_hello(door, monkeypatch, caplog):
    become_another_user = "os.setuid(65534)" if os.geteuid() == 0 else ""
    monkeypatch.setattr(handshake_io.os, "geteuid", lambda: 4711)
    script = (
        f"import os, socket; {become_another_user}\n"
        f"sock = socket.socket(socket.AF_UNIX); sock.settimeout({DEADLINE_S})\n"
        f"sock.connect('\\0{door.addresses.unix}'); assert sock.recv(1) == b''\n"
    )
    with caplog.at_level(logging.DEBUG, logger="unisono"):
        subprocess.run([sys.executable, "-c", script], check=True, timeout=DEADLINE_S)
    assert "another user" in caplog.text


def test_listener_survives_an_error_in_deliver(caplog):
    arrivals = queue.Queue()

    def deliver(hello, sock):
        if hello.sender == 1:
            raise RuntimeError("no room")
        arrivals.put(sock)

    common = {"key": KEY, "job": JOB, "epoch": 0, "rank": 0, "size": 4, "host_id": "host", "use_unix": True}
    listener = Listener(**common, bind_address="127.0.0.1", deliver=deliver, on_failure=arrivals.put)
    with contextlib.closing(listener), caplog.at_level(logging.ERROR, logger="unisono"):
        first, _ = knock(listener.addresses, rank=1)
        with first:
            assert_dropped(first)
        second, _ = knock(listener.addresses, rank=2)
        second.close()
        arrivals.get(timeout=DEADLINE_S).close()
    assert "no room" in caplog.text


def test_listener_with_a_failed_loop_reports_it_and_refuses_ranks(door, monkeypatch, caplog):
    def fail(timeout):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(door.listener.loop._selector, "select", fail)
    door.listener.loop.submit(lambda: None)
    assert "Cannot allocate memory" in str(door.next())
    for use_unix in (False, True):
        with pytest.raises(PeerLostError, match="is gone"):
            knock(door.addresses, use_unix=use_unix)
    assert "unisono-listener-0: its event loop failed" in caplog.text


def test_listener_reports_garbage_in_the_debug_log_only(door, caplog):
    with caplog.at_level(logging.DEBUG, logger="unisono"):
        with stranger(door.addresses) as sock:
            sock.sendall(b"x" * HELLO_NBYTES)
            assert_dropped(sock)
        assert_serves(door)
    assert "sent no HELLO of Unisono" in caplog.text
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


@pytest.mark.parametrize("use_unix", [False, True])
def test_dialing_a_closed_listener_raises_peer_lost_error(use_unix):
    door = RecordingListener()
    door.close()
    with pytest.raises(PeerLostError, match=r"rank 0 at .* is gone") as caught:
        knock(door.addresses, use_unix=use_unix)
    assert (caught.value.rank, caught.value.peer) == (1, 0)


def test_dialing_a_rank_that_does_not_answer_times_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = Addresses("host", "", "127.0.0.1", silent.getsockname()[1], os.getpid())
        with pytest.raises(CollectiveTimeoutError, match=r"did not answer within 0\.1 s"):
            knock(where, timeout_s=0.1)


class SlowAcceptor:
    """A rank 0 that listens and makes each step of a handshake when the test wants it, as if it waited for a core."""

    def __init__(self):
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.addresses = Addresses("host", "", "127.0.0.1", self.listening.getsockname()[1], os.getpid())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listening.close()

    def answer(self):
        """Answer the HELLO of the next connection. Return the connection, and the reply to the proof, unsent."""
        self.listening.settimeout(DEADLINE_S)
        sock, _ = self.listening.accept()
        handshake = AcceptorHandshake(KEY, Admission(JOB, 0, 0, frozenset({1}), frozenset({Purpose.TCP})))
        sock.sendall(handshake.receive(sock.recv(handshake.needed, socket.MSG_WAITALL)))
        return sock, handshake.receive(sock.recv(handshake.needed, socket.MSG_WAITALL))

    def assert_nobody_dials(self):
        self.listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            self.listening.accept()


def test_dialer_keeps_a_connection_that_the_peer_may_have_admitted(monkeypatch):
    """The peer would take the end of that connection for the end of the rank."""
    monkeypatch.setattr(dialer_module, "_PATIENCE_S", (1e6, 1e6))
    loop, connected, fired = EventLoop("dialer", lambda error: None), queue.Queue(), threading.Event()
    dialer = Dialer(loop, DialingRank(KEY, JOB, 0, 1), lambda: False)
    with SlowAcceptor() as acceptor:
        loop.start()
        dialer.dial(target(acceptor.addresses), connected.put, connected.put)
        sock, ready = acceptor.answer()
        ((_, _, expire),) = dialer._connections.values()
        loop.submit(expire)
        loop.submit(fired.set)
        assert fired.wait(DEADLINE_S)
        acceptor.assert_nobody_dials()
        with sock:
            sock.sendall(ready)
            connected.get(timeout=DEADLINE_S).close()
        loop.close(dialer.close)


def test_limit_of_the_answer_does_not_limit_the_rest_of_the_handshake():
    answer_s = 0.3

    def admit_late():
        while True:
            with contextlib.suppress(HandshakeError, ConnectionError):  # the dialer gave up before the answer
                sock, ready = acceptor.answer()
                break
        time.sleep(3 * answer_s)
        with sock:
            sock.sendall(ready)
            sock.recv(1)

    with SlowAcceptor() as acceptor:
        admitting = threading.Thread(target=admit_late)
        admitting.start()
        sock = None
        while sock is None:
            with contextlib.suppress(CollectiveTimeoutError):
                sock, _ = dial(DialingRank(KEY, JOB, 0, 1), target(acceptor.addresses), DEADLINE_S, answer_s=answer_s)
            assert sock or admitting.is_alive()
        sock.close()
        admitting.join()


@pytest.mark.parametrize("use_unix", [False, True])
def test_only_ranks_of_other_hosts_have_a_time_for_the_handshake(monkeypatch, use_unix):
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(handshake_io, "HELLO_TIMEOUT_S", 0.05)
    with contextlib.closing(RecordingListener()) as door, stranger(door.addresses, use_unix) as silent:
        with stranger(door.addresses) as other:
            assert_dropped(other)
        assert_serves(door)
        if use_unix:
            silent.setblocking(False)
            with pytest.raises(BlockingIOError):
                silent.recv(1)
        else:
            assert_dropped(silent)


def test_dialer_waits_while_the_unix_backlog_is_full():
    name = f"unisono-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as crowded, contextlib.ExitStack() as waiting:
        crowded.bind("\0" + name)
        crowded.listen(0)
        where = Addresses("host", name, "127.0.0.1", 1, os.getpid())
        waiting.enter_context(stranger(where, use_unix=True))
        with pytest.raises(CollectiveTimeoutError):
            knock(where, use_unix=True, timeout_s=0.1)


def test_listener_close_ends_its_thread_and_can_be_called_twice():
    before = threading.active_count()
    door = RecordingListener()
    with stranger(door.addresses) as pending:
        door.close()
        door.close()
        assert_dropped(pending)
    assert threading.active_count() == before


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "203.0.113.7", "no.such.host.invalid"])
def test_listener_refuses_an_address_that_ranks_cannot_dial(address):
    with pytest.raises(UsageError, match="UNISONO_BIND_ADDRESS"):
        Listener(
            key=KEY,
            job=JOB,
            epoch=0,
            rank=0,
            size=2,
            bind_address=address,
            host_id="",
            use_unix=True,
            deliver=lambda *_: None,
            on_failure=lambda _: None,
        )


def test_greet_gives_up_at_its_deadline():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        greet(ours, DialerHandshake(KEY, Hello(JOB, 0, 1, 0, Purpose.TCP)), Deadline(0.05))
