import contextlib
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.programs import completed
from support.redis_server import redis_server

from unisono.errors import RendezvousError, UsageError
from unisono.transports.host.host_discovery import Surroundings
from unisono.transports.links.listener import Addresses
from unisono.transports.rendezvous import host_and_port, next_prefix, open_store, tcp_store, torch_store_of
from unisono.transports.rendezvous.file_store import FileStore
from unisono.transports.rendezvous.redis_store import RedisStore
from unisono.transports.rendezvous.roster import RosterMember, entry_of, join
from unisono.transports.rendezvous.stores import KEY_LIMIT_NBYTES, VALUE_LIMIT_NBYTES, PrefixStore, StoreTimeoutError
from unisono.transports.rendezvous.tcp_store import StoreServer, TcpStore
from unisono.transports.rendezvous.torch_store import TorchStore, connect

KEY = bytes(range(32))
JOB = b"j" * 16
HERE = Surroundings("machine", "node", 1, 2, 3)


@pytest.fixture(params=["tcp with a key", "tcp on loopback", "file", "torch", "redis"])
def opened(request, tmp_path):
    """Return a function that opens another client of the same store."""
    with contextlib.ExitStack() as stack:
        if request.param == "file":
            yield lambda: stack.enter_context(contextlib.closing(FileStore(str(tmp_path / "store"))))
        elif request.param == "redis":
            pytest.importorskip("redis")
            port, _ = stack.enter_context(redis_server(tmp_path))
            url = f"redis://127.0.0.1:{port}"
            yield lambda: stack.enter_context(contextlib.closing(RedisStore(url, DEADLINE_S)))
        elif request.param == "torch":
            torch = pytest.importorskip("torch.distributed")
            served = torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            yield lambda: stack.enter_context(
                contextlib.closing(TorchStore(connect("127.0.0.1", served.port, DEADLINE_S)))
            )
        else:
            key = KEY if request.param == "tcp with a key" else None
            server = stack.enter_context(contextlib.closing(StoreServer("127.0.0.1", 0, key=key, job=JOB)))
            yield lambda: stack.enter_context(contextlib.closing(client(server, key=key)))


@pytest.fixture
def server():
    with contextlib.closing(StoreServer("127.0.0.1", 0, key=KEY, job=JOB)) as running:
        yield running


def client(server, key=KEY, job=JOB, timeout_s=DEADLINE_S):
    return TcpStore(*host_and_port(server.url), key=key, job=job, timeout_s=timeout_s)


def member(rank):
    return RosterMember(rank, Addresses("host", f"name-{rank}", "127.0.0.1", 4000 + rank, 100 + rank), "3", HERE, rank)


def later(action, *arguments):
    """Call `action` a moment later, when the caller has begun to wait; return the thread."""
    thread = threading.Thread(target=lambda: (time.sleep(0.05), action(*arguments)))
    thread.start()
    return thread


def test_store_passes_values_between_clients(opened):
    writer, reader = opened(), opened()
    writer.set("a/b", b"\x00binary\xff")
    writer.set("empty", b"")
    assert reader.get("a/b", DEADLINE_S) == b"\x00binary\xff"
    assert reader.get("empty", DEADLINE_S) == b""


def test_store_get_waits_until_the_key_is_set(opened):
    writer, reader = opened(), opened()
    setting = later(writer.set, "late", b"value")
    assert reader.get("late", DEADLINE_S) == b"value"
    setting.join()


def test_get_times_out_naming_the_key_and_works_again_afterwards(opened):
    store = opened()
    with pytest.raises(StoreTimeoutError, match=r"'nothing' was not set within 0\.05 s"):
        store.get("nothing", 0.05)
    with pytest.raises(StoreTimeoutError):
        store.get("nothing", 0.0)
    store.set("nothing", b"something")
    assert store.get("nothing", 0.0) == b"something"


def test_store_key_can_be_set_only_once(opened):
    first, second = opened(), opened()
    first.set("member/0", b"one")
    with pytest.raises(RendezvousError, match="same rank"):
        second.set("member/0", b"two")
    assert second.get("member/0", DEADLINE_S) == b"one"


def test_the_largest_key_and_value_fit(opened):
    store = opened()
    value = os.urandom(VALUE_LIMIT_NBYTES)
    store.set("k" * KEY_LIMIT_NBYTES, value)
    assert store.get("k" * KEY_LIMIT_NBYTES, DEADLINE_S) == value


@pytest.mark.parametrize(("key", "nbytes"), [("", 1), ("k" * (KEY_LIMIT_NBYTES + 1), 1), ("k", VALUE_LIMIT_NBYTES + 1)])
def test_longer_keys_and_values_are_refused_before_they_are_sent(opened, key, nbytes):
    with pytest.raises(UsageError, match="bytes"):
        opened().set(key, bytes(nbytes))


def test_store_serves_many_clients_at_once(opened):
    clients = [opened() for _ in range(16)]

    def work(number):
        clients[number].set(f"key/{number}", str(number).encode())
        return [clients[number].get(f"key/{other}", DEADLINE_S) for other in range(16)]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == [[str(number).encode() for number in range(16)]] * 16


def test_store_close_can_be_called_twice(opened):
    store = opened()
    store.close()
    store.close()


def test_a_prefix_keeps_two_jobs_in_one_store_apart(opened):
    store = opened()
    one, two = PrefixStore(store, "one/"), PrefixStore(store, "two/")
    one.set("key", b"1")
    two.set("key", b"2")
    assert (one.get("key", 0.0), two.get("key", 0.0)) == (b"1", b"2")


# The server.


def test_store_server_on_a_used_port_says_who_must_change_it(server):
    with pytest.raises(RendezvousError, match="in use; start the job with a store at another port"):
        StoreServer(*host_and_port(server.url), key=KEY, job=JOB)


def test_the_port_of_a_closed_store_is_free_again(server):
    with contextlib.closing(client(server)):
        server.close()
    StoreServer(*host_and_port(server.url), key=KEY, job=JOB).close()


def test_a_store_without_a_key_serves_loopback_only():
    with pytest.raises(UsageError, match="UNISONO_KEY_FILE"):
        StoreServer("0.0.0.0", 0, key=None, job=JOB)


@pytest.mark.parametrize(("key", "job"), [(b"w" * 32, JOB), (KEY, b"o" * 16), (None, JOB)])
def test_a_client_of_another_job_is_refused(server, key, job):
    with (
        pytest.raises(RendezvousError, match="store"),
        contextlib.closing(client(server, key=key, job=job, timeout_s=2)) as store,
    ):
        store.set("key", b"planted" * 100)
    with contextlib.closing(client(server)) as store, pytest.raises(StoreTimeoutError):
        store.get("key", 0.0)


def test_a_client_waits_for_a_server_that_starts_later():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        host, port = probe.getsockname()
    started = []
    starting = later(lambda: started.append(StoreServer(host, port, key=KEY, job=JOB)))
    with contextlib.closing(TcpStore(host, port, key=KEY, job=JOB, timeout_s=DEADLINE_S)) as store:
        store.set("key", b"value")
    starting.join()
    started[0].close()


@pytest.mark.parametrize("moment", ["while it connects", "right after it has connected"])
def test_store_client_survives_that_a_server_ends(moment, monkeypatch):
    """The kernel resets a connection that a server has not accepted when it ends."""
    listening = [socket.create_server(("127.0.0.1", 0))]
    host, port = listening[0].getsockname()
    servers = []

    class Connecting(socket.socket):
        def connect(self, address):
            super().connect(address)
            if listening:
                listening.pop().close()
                servers.append(StoreServer(host, port, key=None, job=JOB))
                if moment == "while it connects":
                    code = self.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket, "socket", Connecting)
    with contextlib.closing(TcpStore(host, port, key=None, job=JOB, timeout_s=DEADLINE_S, prefix="1/")) as store:
        store.set("1/key", b"value")
        assert store.get("1/key", 0.0) == b"value"
    servers[0].close()


def test_a_client_without_a_server_gives_up_and_names_the_address():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        host, port = probe.getsockname()
    with pytest.raises(RendezvousError, match=rf"no store answers at tcp://127\.0\.0\.1:{port} within 0\.1 s"):
        TcpStore(host, port, key=KEY, job=JOB, timeout_s=0.1)


def test_unreachable_store_address_fails_at_once():
    with pytest.raises(RendezvousError, match=r"the store at tcp://.* cannot be reached: ") as caught:
        TcpStore("255.255.255.255", 1, key=KEY, job=JOB, timeout_s=DEADLINE_S)
    assert "within" not in caught.value.message


def test_store_client_without_key_refuses_a_remote_store():
    with pytest.raises(UsageError, match="would be open to anyone: give the job a key"):
        TcpStore("192.0.2.1", 1, key=None, job=JOB, timeout_s=DEADLINE_S)


def set_early(server, key):
    host, port = host_and_port(server.url)
    own = TcpStore(host, port, key=key, job=JOB, timeout_s=DEADLINE_S, prefix="1/")
    with contextlib.closing(PrefixStore(own, "1/")) as store:
        store.set("member", b"early")


@pytest.mark.parametrize("key", [KEY, None], ids=["with a key", "open"])
def test_store_client_of_the_next_rendezvous_waits_for_its_server(key):
    with contextlib.closing(StoreServer("127.0.0.1", 0, key=key, job=JOB, prefix="0/")) as first:
        host, port = host_and_port(first.url)
        with contextlib.closing(client(first, key=key)) as store, ThreadPoolExecutor(1) as pool:
            store.set("0/key", b"first")
            early = pool.submit(set_early, first, key)
            assert store.get("0/key", 0.0) == b"first"
            time.sleep(0.05)
            first.close()
            with contextlib.closing(StoreServer(host, port, key=key, job=JOB, prefix="1/")) as second:
                early.result(DEADLINE_S)
                with contextlib.closing(client(second, key=key)) as late:
                    assert late.get("1/member", DEADLINE_S) == b"early"


def test_store_client_waits_for_a_slow_server_up_to_its_timeout(server, monkeypatch):
    monkeypatch.setattr(tcp_store, "_GRACE_S", 0.05)
    with contextlib.closing(client(server)) as patient, contextlib.closing(client(server, timeout_s=0.2)) as hasty:
        server._loop.submit(lambda: time.sleep(0.6))
        patient.set("patient", b"")
        busy, through = threading.Event(), threading.Event()
        server._loop.submit(lambda: (busy.set(), through.wait(DEADLINE_S)))
        assert busy.wait(DEADLINE_S)
        with pytest.raises(RendezvousError, match="is gone: timed out"):
            hasty.set("hasty", b"")
        through.set()


def test_store_client_repeats_its_handshake_when_the_server_hangs_up():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        host, port = busy.getsockname()

        def hang_up_and_serve():
            busy.accept()[0].close()
            busy.close()
            started.append(StoreServer(host, port, key=KEY, job=JOB))

        started = []
        serving = later(hang_up_and_serve)
        with contextlib.closing(TcpStore(host, port, key=KEY, job=JOB, timeout_s=DEADLINE_S)) as store:
            store.set("key", b"value")
    serving.join()
    started[0].close()


def test_a_failed_store_ends_pending_and_later_gets_with_the_reason(server):
    with contextlib.closing(client(server)) as waiting, contextlib.closing(client(server)) as arriving:
        failing = later(server.fail, "rank 2 exited with code 0 before it called un.init()")
        with pytest.raises(RendezvousError, match="rank 2 exited with code 0"):
            waiting.get("roster", DEADLINE_S)
        with pytest.raises(RendezvousError, match="rank 2 exited with code 0"):
            arriving.get("roster", DEADLINE_S)
        failing.join()


def test_store_server_accepts_a_failure_after_close(server):
    server.close()
    server.fail("too late to matter")


def test_a_closed_server_ends_pending_gets(server):
    with contextlib.closing(client(server)) as waiting:
        closing = later(server.close)
        with pytest.raises(RendezvousError, match="is gone"):
            waiting.get("roster", DEADLINE_S)
        closing.join()


def test_store_server_with_a_failed_loop_ends_pending_gets(server, monkeypatch):
    select = server._loop._selector.select

    def fail_once_somebody_waits(timeout):
        if any(client.waiting_for for client in server._clients):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return select(0.01)

    monkeypatch.setattr(server._loop._selector, "select", fail_once_somebody_waits)
    message = r"the store at tcp://.* has ended: there is not enough memory"
    with contextlib.closing(client(server)) as waiting, pytest.raises(RendezvousError, match=message):
        waiting.get("roster", DEADLINE_S)
    with pytest.raises(RendezvousError, match="no store answers"):
        client(server, timeout_s=0.1)


@pytest.mark.parametrize("limit_s", [10_000_000.0, 1e300, float("inf")])
def test_store_accepts_timeouts_too_long_for_a_selector(server, limit_s):
    with contextlib.closing(client(server, timeout_s=limit_s)) as reader, contextlib.closing(client(server)) as writer:
        setting = later(writer.set, "late", b"value")
        assert reader.get("late", limit_s) == b"value"
        setting.join()


def test_store_limits_the_number_of_keys(server, monkeypatch):
    monkeypatch.setattr(tcp_store, "KEYS_LIMIT", 2)
    with contextlib.closing(client(server)) as store:
        store.set("one", b"")
        store.set("two", b"")
        with pytest.raises(RendezvousError, match="full"):
            store.set("three", b"")


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(struct.pack("!BHII", 1, 3, VALUE_LIMIT_NBYTES + 1, 0), id="an oversize value"),
        pytest.param(struct.pack("!BHII", 1, KEY_LIMIT_NBYTES + 1, 1, 0), id="an oversize key"),
        pytest.param(struct.pack("!BHII", 1, 0, 1, 0), id="no key"),
        pytest.param(struct.pack("!BHII", 9, 3, 1, 0), id="an unknown verb"),
        pytest.param(struct.pack("!BHII", 2, 3, 0, 60_000) + b"key" + b"more", id="two requests at once"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n" * 64, id="another protocol"),
    ],
)
def test_malformed_store_request_only_closes_the_connection(frame):
    with contextlib.closing(StoreServer("127.0.0.1", 0, key=None, job=JOB)) as server:
        with socket.create_connection(host_and_port(server.url), DEADLINE_S) as stranger:
            stranger.sendall(frame)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        with contextlib.closing(client(server, key=None)) as store:
            store.set("key", b"value")
            assert store.get("key", 0.0) == b"value"


def test_store_server_forgets_a_killed_client(server):
    host, port = host_and_port(server.url)
    script = (
        "from unisono.transports.rendezvous.tcp_store import TcpStore\n"
        f"store = TcpStore({host!r}, {port}, key=bytes(range(32)), job=b'j' * 16, timeout_s=100)\n"
        "store.set('here', b''); store.get('never', 60)\n"
    )
    with contextlib.closing(client(server)) as store, subprocess.Popen([sys.executable, "-c", script]) as process:
        store.get("here", DEADLINE_S)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        store.set("never", b"")
        assert store.get("never", DEADLINE_S) == b""


# The folder.


def test_file_store_is_private_to_its_owner(tmp_path):
    path = tmp_path / "store"
    with contextlib.closing(FileStore(str(path))) as store:
        store.set("key", b"secret")
        inside = path / "unisono.store"
        assert {path.stat().st_mode & 0o777, inside.stat().st_mode & 0o777} == {0o700}
        assert {file.stat().st_mode & 0o777 for file in inside.iterdir()} == {0o600}


def test_one_of_many_clients_sets_a_key_of_a_file_store(tmp_path):
    stores = [FileStore(str(tmp_path / "store")) for _ in range(8)]
    begin = threading.Barrier(8)

    def claims(number, key):
        begin.wait(DEADLINE_S)
        try:
            stores[number].set(key, str(number).encode())
        except RendezvousError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        for key in map(str, range(20)):
            taken = list(pool.map(claims, range(8), [key] * 8))
            assert taken.count(True) == 1
            assert stores[0].get(key, DEADLINE_S) == str(taken.index(True)).encode()
    for store in stores:
        store.close()


def test_file_store_needs_no_hard_links(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    store = FileStore(str(tmp_path / "store"))
    store.set("key", b"value")
    with pytest.raises(RendezvousError, match="in the store already"):
        store.set("key", b"another")
    assert store.get("key", DEADLINE_S) == b"value"
    store.close()
    assert not (tmp_path / "store").exists()


def test_last_rank_removes_the_folder_of_a_file_store(tmp_path):
    path = tmp_path / "store"
    first, second = FileStore(str(path)), FileStore(str(path))
    first.set("key", b"value")
    first.close()
    assert second.get("key", 0.0) == b"value"
    second.close()
    assert not path.exists()


def test_file_store_keeps_an_existing_folder_and_its_files(tmp_path):
    names = ["notes.txt", "unisono.json", "unisono.lock", "unisono.log", "unisono." + "0" * 64]
    for name in names:
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        with contextlib.closing(FileStore(str(tmp_path))) as store:
            store.set("key", b"value")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(names, "mine")


def test_file_store_keeps_foreign_files_in_its_own_folder(tmp_path):
    (tmp_path / "unisono.store").mkdir(mode=0o700)
    (tmp_path / "unisono.store" / "notes.txt").write_text("mine")
    with contextlib.closing(FileStore(str(tmp_path))) as store:
        store.set("key", b"value")
    assert [path.name for path in (tmp_path / "unisono.store").iterdir()] == ["notes.txt"]


def test_open_file_store_ignores_a_replaced_folder(tmp_path):
    path, planted = tmp_path / "store", tmp_path / "planted"
    with contextlib.closing(FileStore(str(path))) as first, contextlib.closing(FileStore(str(path))) as second:
        path.rename(tmp_path / "moved")
        with contextlib.closing(FileStore(str(planted))) as strange:
            path.symlink_to(planted)
            strange.set("key", b"planted")
            first.set("key", b"secret")
            assert second.get("key", 0.0) == b"secret"
            assert len(list((planted / "unisono.store").iterdir())) == 2


def test_file_store_refuses_a_symbolic_link(tmp_path):
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("folder")
    with pytest.raises(RendezvousError, match="is not a folder, but a symbolic link: name"):
        FileStore(str(tmp_path / "link"))
    (tmp_path / "folder" / "unisono.store").symlink_to(tmp_path)
    with pytest.raises(RendezvousError, match=r"unisono\.store is not a folder, but a symbolic"):
        FileStore(str(tmp_path / "folder"))


def test_file_store_refuses_a_value_of_another_user(tmp_path, monkeypatch):
    with contextlib.closing(FileStore(str(tmp_path / "store"))) as store:
        store.set("key", b"value")
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 4711)
            with pytest.raises(RendezvousError, match=r"a value in the store .* belongs to another user"):
                store.get("key", 0.0)


def test_store_client_can_clear_its_values(opened):
    writer, reader = opened(), opened()
    writer.set("key", b"secret")
    assert reader.get("key", DEADLINE_S) == b"secret"
    writer.clear()
    if not isinstance(writer, TcpStore):  # the server of a TCP store ends with its writer
        with pytest.raises(StoreTimeoutError):
            reader.get("key", 0.0)


def test_file_store_ignores_values_of_a_killed_job(tmp_path):
    path = tmp_path / "store"
    script = (
        "import os, signal, sys; from unisono.transports.rendezvous.file_store import FileStore\n"
        "FileStore(sys.argv[1]).set('roster', b'stale'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    assert len(list((path / "unisono.store").iterdir())) == 2
    with contextlib.closing(FileStore(str(path))) as store, pytest.raises(StoreTimeoutError):
        store.get("roster", 0.0)
    assert not path.exists()


def test_file_store_refuses_a_folder_of_another_user(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(RendezvousError, match="belongs to another user"):
        FileStore(str(tmp_path))


def test_file_store_refuses_a_folder_that_others_can_write(tmp_path):
    tmp_path.chmod(0o770)
    with pytest.raises(RendezvousError, match="chmod 700"):
        FileStore(str(tmp_path))


def test_file_store_refuses_a_path_that_is_not_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RendezvousError, match="not a folder"):
        FileStore(str(tmp_path / "file"))


def test_file_store_refuses_a_folder_without_a_parent(tmp_path):
    with pytest.raises(RendezvousError, match="No such file"):
        FileStore(str(tmp_path / "no" / "store"))


# URLs.


def test_each_opening_of_a_store_sees_only_its_own_values(tmp_path):
    url = f"file://{tmp_path}/store"

    def opening(rank):
        prefix = next_prefix(url, rank=rank, job=JOB)
        return contextlib.closing(open_store(url, prefix, key=None, job=JOB, timeout_s=1))

    with opening(0) as first:
        first.set("key", b"first")
        with opening(1) as other:
            assert other.get("key", 0.0) == b"first"
        with opening(0) as second, pytest.raises(StoreTimeoutError):
            second.get("key", 0.0)


def test_two_jobs_in_one_store_do_not_see_each_other(tmp_path):
    url = f"file://{tmp_path}/store"

    def opening(job):
        prefix = next_prefix(url, rank=0, job=job)
        return contextlib.closing(open_store(url, prefix, key=None, job=job, timeout_s=1))

    with opening(JOB) as one, opening(b"o" * 16) as two:
        one.set("key", b"one")
        with pytest.raises(StoreTimeoutError):
            two.get("key", 0.0)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "etcd://host:1", "tcp://host", "tcp://host:port", "tcp://:80", "file://relative/path"]
)
def test_open_store_refuses_invalid_urls(url):
    with pytest.raises(UsageError, match="cannot be used"):
        open_store(url, "", key=None, job=JOB, timeout_s=1)


def test_store_of_torchrun_without_torch_is_a_rendezvous_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(RendezvousError, match="needs torch"):
        torch_store_of("torch://127.0.0.1:1", 0, 2, 1)


# The roster.


def test_join_gives_all_ranks_one_roster_with_settings_of_rank_0(opened):
    size = 4
    stores = [opened() for _ in range(size)]

    def rank(number):
        return join(stores[number], number, size, member(number), DEADLINE_S, settings={"threshold": number})

    with ThreadPoolExecutor(size) as pool:
        rosters = list(pool.map(rank, range(size)))
    assert rosters == [rosters[0]] * size
    assert rosters[0].members == tuple(member(number) for number in range(size))
    assert rosters[0].settings == {"threshold": 0}


class Counting:
    """A store that counts its queries."""

    def __init__(self, store):
        self._store = store
        self.asked = 0

    def set(self, key, value):
        self.asked += 1
        self._store.set(key, value)

    def get(self, key, timeout_s):
        self.asked += 1
        return self._store.get(key, timeout_s)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33, 100])
def test_join_makes_a_logarithmic_number_of_store_requests_per_rank(server, size):
    with contextlib.ExitStack() as opened:
        stores = [Counting(opened.enter_context(contextlib.closing(client(server)))) for _ in range(size)]
        with ThreadPoolExecutor(size) as pool:
            rosters = list(
                pool.map(lambda n: join(stores[n], n, size, member(n), DEADLINE_S, settings={}), range(size))
            )
    assert rosters == [rosters[0]] * size
    assert [entry.rank for entry in rosters[0].members] == list(range(size))
    assert max(store.asked for store in stores) <= 3 + (size - 1).bit_length()
    assert sum(store.asked for store in stores) <= 4 * size


def test_join_names_a_rank_that_died_after_writing_its_own_entry(server):
    """Rank 2 should pass the entry of rank 3 on, and ends after writing its own entry."""
    with contextlib.closing(client(server)) as store:
        store.set("member/2", entry_of(member(2), 4))

    def rank(number):
        with contextlib.closing(client(server)) as store, pytest.raises(RendezvousError) as caught:
            join(store, number, 4, member(number), 0.3, settings={})
        return caught.value.message

    with ThreadPoolExecutor(3) as pool:
        assert "rank 2 of 4 did not arrive within 0.3 s" in list(pool.map(rank, (0, 1, 3)))


def test_join_works_between_processes(server):
    script = (
        "import sys; from unisono.transports.links.listener import Addresses\n"
        "from unisono.transports.host.host_discovery import Surroundings\n"
        "from unisono.transports.rendezvous import next_prefix, open_store\n"
        "from unisono.transports.rendezvous.roster import RosterMember, join\n"
        "url, rank = sys.argv[1], int(sys.argv[2])\n"
        "prefix = next_prefix(url, rank=rank, job=b'j' * 16)\n"
        "store = open_store(url, prefix, key=bytes(range(32)), job=b'j' * 16, timeout_s=100)\n"
        "me = RosterMember(rank, Addresses('host', 'name', '127.0.0.1', 1 + rank, 1), '3', Surroundings.here(), rank)\n"
        "roster = join(store, rank, 3, me, 20, settings={})\n"
        "print([member.addresses.tcp_port for member in roster.members])\n"
    )
    ranks = completed([[sys.executable, "-c", script, server.url, str(rank)] for rank in range(3)])
    assert [rank.stdout for rank in ranks] == ["[1, 2, 3]\n"] * 3, ranks


@pytest.mark.parametrize(
    ("present", "missing"),
    [([0, 1, 3], "rank 2"), ([0], "ranks 1, 2, 3"), ([1, 2, 3], "rank 0"), ([1], "ranks 0, 2, 3")],
)
def test_join_names_all_missing_ranks_on_every_waiting_rank(server, present, missing):
    def rank(number):
        with contextlib.closing(client(server)) as store, pytest.raises(RendezvousError) as caught:
            join(store, number, 4, member(number), 0.3, settings={})
        return caught.value.message

    with ThreadPoolExecutor(len(present)) as pool:
        messages = list(pool.map(rank, present))
    assert messages == [f"{missing} of 4 did not arrive within 0.3 s"] * len(present)


def test_join_refuses_two_processes_with_the_same_rank(server):
    with contextlib.closing(client(server)) as store:
        join(store, 0, 1, member(0), DEADLINE_S, settings={})
        with pytest.raises(RendezvousError, match="two processes have the same rank"):
            join(store, 0, 1, member(0), DEADLINE_S, settings={})


def entry(**changes):
    where = {"host_id": "host", "unix": "name", "tcp_host": "127.0.0.1", "tcp_port": 1, "pid": 1, **changes}
    return {"rank": 0, "addresses": where, "cores": "3", "surroundings": asdict(HERE)}


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"not json",
        b"[" * 100_000,
        b"\xff\xfe",
        b"[]",
        b"{}",
        json.dumps({"members": [], "settings": {}}).encode(),
        json.dumps({"members": [entry()], "settings": {"list": []}}).encode(),
        json.dumps({"members": [entry()], "settings": {}, "more": 1}).encode(),
        json.dumps({"members": [entry(tcp_port=0)], "settings": {}}).encode(),
        json.dumps({"members": [entry(tcp_port=65536)], "settings": {}}).encode(),
        json.dumps({"members": [entry(tcp_port=True)], "settings": {}}).encode(),
        json.dumps({"members": [entry(pid=-1)], "settings": {}}).encode(),
        json.dumps({"members": [entry(unix="x" * 257)], "settings": {}}).encode(),
        json.dumps({"members": [{**entry(), "rank": 1}], "settings": {}}).encode(),
        json.dumps({"members": [{**entry(), "cores": "all"}], "settings": {}}).encode(),
        json.dumps({"members": [{**entry(), "surroundings": {}}], "settings": {}}).encode(),
        json.dumps({"members": [{**entry(), "surroundings": {**asdict(HERE), "user": "0"}}], "settings": {}}).encode(),
        json.dumps({"members": [entry(), entry()], "settings": {}}).encode(),
        json.dumps({"members": 1, "settings": {}}).encode(),
    ],
)
def test_join_refuses_an_invalid_roster(tmp_path, blob):
    with contextlib.closing(FileStore(str(tmp_path / "store"))) as store:
        store.set("roster", blob)
        with pytest.raises(RendezvousError, match="the roster in the store cannot be used"):
            join(store, 1, 1, member(1), DEADLINE_S, settings={})


def test_join_with_a_file_store_leaves_no_files(tmp_path):
    with contextlib.closing(FileStore(str(tmp_path / "store"))) as store:
        join(store, 0, 1, member(0), DEADLINE_S, settings={})
    assert list(Path(tmp_path).iterdir()) == []
