"""The parsers of what other processes have written, each with valid seeds and the errors by which it may refuse.

A parser that raises another error, such as KeyError, struct.error or RecursionError, has a fault, and so has one that
hangs or takes memory without bound: `bounds.py` limits both. `fuzz_parsers.py` drives them by atheris, and
`test_parsers.py` by Hypothesis.

No parser reads the attributes of calls in JAX programs: XLA decodes them for the native handler from a program that it
has compiled in this process, and its calls of MPI pass numbers. Neither comes from another process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import pickle
import socket
import struct
from base64 import b85decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from fuzz.bounds import bounded
from fuzz.edits import edited
from support import schedule_files

from unisono.algorithms.schedules import proving
from unisono.cli.output import job_statistics
from unisono.collectives.bootstrap import environment, launcher_variables, shared_settings
from unisono.errors import PlanError, RendezvousError, UnisonoError, UsageError
from unisono.foundation.deadlines import LONGEST_WAIT_S, Deadline
from unisono.foundation.json_checks import parsed_json
from unisono.launchers import pool_protocol, root_cause, ssh_protocol
from unisono.launchers.process import JobPart
from unisono.launchers.ssh_job import SshJob
from unisono.options import FIELDS, LAUNCHER_VARIABLES, Options, unknown_variables, variable
from unisono.postmortem import torch_layout
from unisono.postmortem.analysis import analyse
from unisono.postmortem.culprits import live_findings
from unisono.postmortem.loading import JobDumps
from unisono.postmortem.page import html
from unisono.swarm import links, proposer, state, stream_server, streams, views
from unisono.swarm.trees import arrays_in, described, restored
from unisono.transports.contracts.call import Argument, Signature
from unisono.transports.contracts.transport import Identity
from unisono.transports.host.host_discovery import Surroundings
from unisono.transports.links import link_messages
from unisono.transports.links.handshake import (
    TLS,
    TLS_NEEDED,
    AcceptorHandshake,
    Admission,
    DialerHandshake,
    HandshakeError,
    Hello,
    Purpose,
)
from unisono.transports.links.joiners import Invitation, JoinRequest, _parsed_answer
from unisono.transports.links.listener import Addresses
from unisono.transports.links.network_probes import Appointment, Network
from unisono.transports.links.survivors import Arrivals, Search
from unisono.transports.message import framed
from unisono.transports.message.plugin import Bootstrap
from unisono.transports.recorder import dumps, memory, traces
from unisono.transports.recorder.clocks import measured
from unisono.transports.recorder.live_ranks import LiveRank
from unisono.transports.rendezvous import roster, stores, tcp_store
from unisono.transports.rendezvous.redis_store import RedisStore
from unisono.transports.tagged.fabrics import Proposal
from unisono.transports.tcp.resumption import Resumption, Stream
from unisono.transports.tcp.tls import TlsHandshake, TlsPolicy
from unisono.tuning.decide import table
from unisono.tuning.machine import parameters, topology_files
from unisono.tuning.measure import calibration_files, measurement_log

KEY, JOB, NONCE = b"k" * 32, b"j" * 16, b"n" * 32
SIZE = 2


class Parser(NamedTuple):
    """A parser, the errors by which it refuses, and the seeds of its inputs."""

    parse: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    seeds: Sequence[Any]


class Received:
    """A socket from which some bytes can be read; then its other end is closed."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def recv(self, nbytes: int, *_: int) -> bytes:
        part, self._data = self._data[:nbytes], self._data[nbytes:]
        return part

    def sendall(self, _: bytes) -> None: ...

    def settimeout(self, _: float) -> None: ...

    def close(self) -> None: ...


# --- links ---------------------------------------------------------------------------------------------------------

HELLO = Hello(JOB, 3, 1, 0, Purpose.TCP, 7, 2, nonce=NONCE)
ADMISSION = Admission(JOB, 3, 0, frozenset({1}), frozenset({Purpose.TCP, Purpose.CONTROL}))


def accept(data: bytes) -> None:
    """Send a HELLO with a right proof, as a rank does that holds the key, and then other bytes."""
    acceptor = AcceptorHandshake(KEY, ADMISSION, NONCE)
    hello = data[:90]
    answer = acceptor.receive(hello)
    proof = hmac.digest(KEY, b"dialer" + hello + answer[:90], "sha256")
    acceptor.receive(data[90:122] or proof)
    assert not acceptor.done or acceptor.agreed.sender == 1


def dial(data: bytes) -> None:
    dialer = DialerHandshake(KEY, HELLO)
    answer = data[:90]
    dialer.receive(answer + hmac.digest(KEY, b"acceptor" + dialer.opening + answer, "sha256"))
    dialer.receive(data[90:91])
    assert dialer.agreed.sender == 0


def propose(data: bytes) -> None:
    sock, received = Received(data), bytearray()
    while Proposal.received(cast(Any, sock), received) is None:
        pass


SEARCH = Search(1, 5, (0, 1, 2), 0, Arrivals(), lambda *_: cast(Any, None), lambda: "")


def follow(data: bytes) -> None:
    """Read the verdict of the leader of the survivors."""
    search = Search(1, 5, (0, 1, 2), 0, Arrivals(), lambda *_: cast(Any, Received(_prefixed(data))), lambda: "")
    verdict = search._follow(0, _NEVER)
    assert verdict is None or 1 in verdict.members


INVITATION = {"rank": 1, "size": 2, "epoch": 1, "meeting": 0, "store": "tcp://h:9"}
REQUEST = {"release": "1", "host": "h", "port": 9, "node": "n", "pid": 7}


def invite(data: bytes) -> None:
    invitation = Invitation.of(link_messages.receive(cast(Any, Received(_prefixed(data))), _NEVER))
    assert 0 < invitation.rank < invitation.size


def read_request(data: bytes) -> None:
    assert JoinRequest.parse(data).port > 0
    _parsed_answer(data)


def lead(data: bytes) -> None:
    """Read the greeting of a follower."""
    epochs: dict[int, int] = {}
    SEARCH._add_followers({2: cast(Any, Received(_prefixed(data)))}, epochs)
    SEARCH.close()


class _Loop:
    """An event loop that calls the reader of a socket until it no longer watches the socket."""

    def __init__(self) -> None:
        self.readers: dict[socket.socket, Callable[[], None]] = {}

    def watch(self, sock: socket.socket, on_readable: Callable[[], None]) -> None:
        self.readers[sock] = on_readable

    def unwatch(self, sock: socket.socket) -> None:
        del self.readers[sock]

    def run(self) -> None:
        while self.readers:
            next(iter(self.readers.values()))()


class _Streams:
    def retire_stream(self, lane: int, _peer: int, _stream: int, resumptions: int) -> tuple[int, int] | None:
        assert lane < 1 << 32
        return (resumptions, 99) if resumptions % 2 else None

    def resume_stream(self, *fields: Any) -> bool:
        *_, resumptions, received = fields
        assert 0 <= resumptions < 1 << 32
        assert 0 <= received < 1 << 64
        return bool(received % 2)


_RESUMED = struct.Struct("!BI")  # the role of this rank, and the lane of the HELLO


def resume(data: bytes) -> None:
    """Read the state of a stream, or the request to dial it, from a rank whose HELLO names any lane."""
    role, lane = _RESUMED.unpack(data[: _RESUMED.size].ljust(_RESUMED.size, b"\0"))
    near, far = socket.socketpair()
    with far:
        far.sendall(data[_RESUMED.size :])
        far.shutdown(socket.SHUT_WR)
        loop, dialled = _Loop(), [near]

        def connect(_target: object, on_connected: Callable[[Any], None], _on_error: object, **_: Any) -> None:
            if dialled:
                on_connected(dialled.pop())

        streams = lambda communicator: _Streams() if communicator != 8 else None  # noqa: E731
        resumption = Resumption(
            2, cast(Any, loop), cast(Any, _Dialer(connect)), lambda *_: cast(Any, None), streams, lambda _: None
        )
        if role == 0:
            resumption.begin(_STREAM, 1)
        else:
            purpose = Purpose.TCP_REDIAL if role == 1 else Purpose.TCP_RESUME
            sock = dialled.pop()
            resumption.admit(dataclasses.replace(HELLO, purpose=purpose, communicator=role, lane=lane), sock)
        loop.run()
        assert near.fileno() == -1


class _Dialer(NamedTuple):
    dial: Callable[..., None]


_STREAM = Stream(7, 0, 1, 0)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection by TCP, which do not block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for sock in (near, far):
        sock.setblocking(False)
    return near, far


_TLS = TlsPolicy.offering()


def hand_over(data: bytes) -> None:
    """Read a HELLO that agrees on TLS and its proof, as an acceptor, and then bytes by TLS."""
    near, far = _pair()
    with near, far:
        acceptor = AcceptorHandshake(KEY, dataclasses.replace(ADMISSION, features=TLS | TLS_NEEDED), NONCE)
        hello = data[:90]
        answer = acceptor.receive(hello)
        proof = hmac.digest(KEY, b"dialer" + hello + answer[:90], "sha256")
        far.sendall(proof + data[90:])
        acceptor.receive(near.recv(acceptor.needed))
        if acceptor.done and acceptor.uses_tls:
            assert not TlsHandshake(_TLS, near, acceptor.secret, is_client=False).advance()


def begin_tls(data: bytes) -> None:
    """Read bytes of TLS, as a dialer."""
    near, far = _pair()
    with near, far:
        handshake = TlsHandshake(_TLS, near, NONCE, is_client=True)
        far.sendall(data)
        assert not handshake.advance()


# Both were sent by OpenSSL 3 under a pre-shared key. The end that reads them refuses the second, which is of another
# connection.
CLIENT_HELLO = b85decode(
    b"76SnR5CH%I3<Coj*w|dmzE8#WXeMjDM@!fHAs{6X=B$nkt)GAff&0=Ro#<f9js;EewcYyZHe??D53k2Oh~g06#udx8W$eYL00t8Q69WMM0RRBK01E&F0"
    b"{{U6015yW02BZn02crr02u%n0RRC30RjO70R#Xe0000M0000N0000D03HAw1Oo*F1_KBO2nYxX2nq-b2m}ZP2nGZJ1px*D04o3k0s{m9EdT-m0RS@qCI"
    b"BP=9RMKm80Q7htB*nOa#WK$wzjZ8gycfo&5c?jzt>V7!(40tDF8A64FCsqZfSFGZf^hp0000XAWa1oU8?sRfPEtbpqwoJzh8|GKB}J&8ISHu&8Ma23j"
)
TLS_HELLO = dataclasses.replace(HELLO, features=TLS | TLS_NEEDED).pack()
SERVER_HELLO = b85decode(
    b"76StSfC2yjd;<ej2ZCF3903*dQfx^2NXMT!M;w|!t{7wJK96?YvyYA-o#<f9js;EewcYyZHe??D53k2Oh~g06#udx8W$eY"
    b"L69E7KGyp3A0s{m9GXNw29RMI-QFDJxYqvfJB|jsK@xIziTGmZEg-*m7A*R<w4Aln!DF6Zh02BiQ0099P0|NjTi++g<BiE"
    b"jU!B@0^7w$;Ln6m;ANJt(R0|Njxj>7|&+<PKs4B;j9Wiz$sUnvEU-w!eov#e-}KDJTi1DP^LtBtmL>3ELDwQO|2<8m=-J^"
)


def _prefixed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


class _Never:
    def remaining_s(self) -> float:
        return 1.0

    def has_passed(self) -> bool:
        return False


_NEVER = cast(Any, _Never())

# --- the rendezvous ------------------------------------------------------------------------------------------------


def serve(data: bytes) -> None:
    received = bytearray()
    for byte in data:
        received.append(byte)
        if tcp_store._request_in(received) is not None:
            received.clear()
    tcp_store._request_in(bytearray(data))


def ask(data: bytes) -> None:
    tcp_store._request(cast(Any, Received(data)), tcp_store._Verb.GET, b"key", b"", 0)


_ADDRESSES = Addresses("ab", "unisono-1", "127.0.0.1", 5000, 9)
_MEMBERS = [roster.RosterMember(rank, _ADDRESSES, "3", Surroundings("m", "h", 1, 2, 3), rank) for rank in range(SIZE)]
MEMBERS = [dataclasses.asdict(member) for member in _MEMBERS]
SETTINGS = shared_settings.collect(Options(), 1)
LINK = {"name": "shm", "latency_s": 1e-6, "overhead_s": 1e-7, "per_byte_s": 1e-10, "step": [[1, 1e-6], [9, 2e-6]]}
CURVE = [[1, 1e-6], [1000, 1e-5]]
ROUNDS = {
    **{"ranks": 2, "ranks_per_host": 2, "call_s": 1e-6, "rooted_call_s": 1e-6},
    **dict.fromkeys(("step", "whole", "further", "reduce", "reduce_apart"), CURVE),
    "calls": {"allreduce": {"ring": CURVE}},
}
CALIBRATION = {
    **{"format": parameters.FORMAT, "links": {"shm": LINK}, "reduce": {"float32": CURVE}, "copy": CURVE},
    "rounds": {"shm": [ROUNDS]},
}


def meet(data: bytes) -> None:
    agreed = roster.roster_of(roster._decode(data), SIZE)
    assert [member.rank for member in agreed.members] == list(range(SIZE))
    shared_settings.apply(agreed.settings)


def collect_entries(data: bytes) -> None:
    record = roster.roster_record(roster._texts(data), SETTINGS)
    roster.roster_of(roster._decode(roster._encode(record)), SIZE)


ENTRIES = [roster.entry_of(member, SIZE).decode() for member in _MEMBERS]


class _Redis(RedisStore):
    """A client of a Redis server in which other programs have set the value of each key."""

    def __init__(self, value: bytes) -> None:
        self._shown, self._lifetime_s, self._own, self._errors, self._prefix = "redis://h", 60, set(), (OSError,), b""
        self._client = _RedisServer(value)


class _RedisServer(NamedTuple):
    value: bytes

    def get(self, _: bytes) -> bytes:
        return self.value

    def set(self, *_: Any, **__: Any) -> bool:
        return True


def read_store(data: bytes) -> None:
    """Ask everything that ranks ask of a store while they meet."""
    questions: Sequence[Callable[[stores.Store], object]] = (
        *(lambda store, rank=rank: roster.join(store, rank, 4, _MEMBERS[1], 1, settings={}) for rank in range(4)),  # type: ignore[misc]
        lambda store: environment.agree_on_key(store, 1, 1),
        roster.failure,
    )
    for question in questions:
        with contextlib.suppress(RendezvousError):
            question(_Redis(data))


# --- launchers and pools -------------------------------------------------------------------------------------------

FROM_LAUNCHER = [
    {
        "start": {
            **{"argv": ["a"], "folder": "/", "environ": {"A": "1"}, "first": 0, "count": 1, "size": 2, "node": 0},
            **{"nodes": 2, "store": "", "job": "00", "key": "00", "bind": None, "keep_going": False, "timeout_s": None},
        }
    },
    {"forward": 15},
    {"kill": None},
]
FROM_AGENT = [
    {"hello": {"version": "1", "address": "127.0.0.1"}},
    {"output": {"rank": 0, "stream": "stdout", "text": "a"}},
    {"ended": {"rank": 0, "code": 0, "stopped": False, "pid": 7}},
    {"done": {"late": [1], "whereabouts": ["h"]}},
]


def obey(data: bytes) -> None:
    """Read a message of the launcher, as its agent."""
    ssh_protocol.decoded(data, ssh_protocol.TO_AGENT)


def hear(data: bytes) -> None:
    """Read messages of an agent in pieces, and take them as the launcher does."""
    messages = ssh_protocol.MessageCutter(ssh_protocol.TO_LAUNCHER)
    pieces = [b"motd\n", ssh_protocol.BEGINNING[:5], ssh_protocol.BEGINNING[5:] + data[:7], data[7:], b"\n"]
    job = cast(Any, object.__new__(SshJob))
    job._observer, job._end_rank = _Observer(), lambda _, exit_: int(exit_.rank)
    for piece in pieces:
        for name, value in messages.feed(piece):
            if name in ("output", "ended"):
                getattr(job, f"_on_{name}")(_AGENT, value)
    assert messages.prologue == pieces[0]


class _Observer:
    def output(self, _rank: int, _stream: str, data: bytes) -> None:
        assert isinstance(data, bytes)


class _Agent(NamedTuple):
    share: Any
    living: Sequence[int]
    host: str


_AGENT = _Agent(JobPart(0, 2, 2), range(2), "h")


def collect_message(data: bytes) -> None:
    """Collect the bytes of a message of a pool. They are not unpickled, because parent and child trust each other."""
    inbox, sock = pool_protocol.Inbox(), cast(Any, Received(data))
    while not inbox.complete and inbox.read(sock):
        pass
    assert len(inbox._data) <= len(data)


VARIABLES = (
    *map(variable, (*FIELDS, *LAUNCHER_VARIABLES)),
    *environment._TORCHRUN,
    *launcher_variables.STEP_VARIABLES,
    *(
        name
        for names in (launcher_variables.OPEN_MPI, launcher_variables.PALS, launcher_variables.HYDRA)
        for name in names[1:]
    ),
)
_OF_UNISONO = {"UNISONO_RANK": "0", "UNISONO_SIZE": "2", "UNISONO_STORE": "tcp://h:9", "UNISONO_JOB": "ab" * 16}
_OF_SRUN = {
    **{"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    **{"SLURM_STEP_NODELIST": "node01", "SLURM_RESTART_COUNT": "1"},
}
ENVIRONMENTS = [
    {**_OF_UNISONO, **{variable(name): str(getattr(Options(), name)) for name in FIELDS}},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "9", "TORCHELASTIC_RUN_ID": "a"},
    _OF_SRUN,
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "UNISONO_STORE": "file:///a"},
]


def read_environment(data: bytes) -> None:
    """Read the variables of a launcher and the settings. A refusal names a variable."""
    try:
        texts = json.loads(data, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return
    environ = dict(_variables(texts)) if isinstance(texts, dict) else {}
    for read in (environment.detect, environment.waiting_place, Options.from_environment):
        try:
            facts = read(environ)
            assert not isinstance(facts, environment.Launch) or facts.rank < facts.size < 1 << 31
        except UsageError as error:
            if not any(name in error.message for name in VARIABLES):
                raise AssertionError("a refusal names no variable") from error
    environment.is_restarted(environ)
    environment.launchers(environ)
    list(unknown_variables(environ))


def _variables(texts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the texts that an environment can hold, which has no zeros. No descriptor of this process is read."""
    for name, value in texts.items():
        if isinstance(value, str) and name != "UNISONO_KEY_FD":
            yield (
                name.encode(errors="replace").decode(),
                os.fsdecode(value.encode(errors="surrogatepass")).replace("\0", ""),
            )


# --- frames of transports of packages ------------------------------------------------------------------------------

SIGNATURE = Signature(
    "allreduce", "float32", (8,), "C", "sum", None, "ring", 1, others=(Argument("int8", (2,), "C", None),)
)
IDENTITY = Identity(0, 4, 0, 0)
FRAMES = [
    framed._framed(framed._MESSAGE, 0, IDENTITY, framed._encoded(SIGNATURE)) + bytes(8),
    framed._framed(framed._FAILED, 0, framed._NO_IDENTITY, b'["PeerLostError", "rank 2 died", 2]'),
    framed._framed(framed._LEFT, 0, framed._NO_IDENTITY, b""),
]


class _Links:
    name = "fuzzed"

    def __init__(self, frames: Sequence[bytes]) -> None:
        self._frames = [(1, memoryview(frame)) for frame in frames]

    def send(self, _peer: int, _parts: object) -> Any:
        return self

    def done(self) -> bool:
        return True

    def receive(self) -> list[tuple[int, memoryview]]:
        frames, self._frames = self._frames, []
        return frames

    def ended(self, _peer: int) -> bool:
        return False

    def close(self) -> None: ...


def take_frames(data: bytes) -> None:
    bootstrap = Bootstrap(0, SIZE, (0, 1), lambda mine: [mine, mine], 0.0)
    transport = framed.FramedTransport(cast(Any, _Links([data])), bootstrap)
    receive = transport.post_recv(1, IDENTITY, SIGNATURE, [memoryview(bytearray(8))])
    receive.done()
    transport.progress()


def take_signature(data: bytes) -> None:
    frame = framed._framed(framed._MESSAGE, 0, IDENTITY, data)
    take_frames(frame + bytes(8))


# --- swarms and the measured network -------------------------------------------------------------------------------

MEMBER = {"id": "0123456789abcdef", "name": "h:1", "host": "10.0.0.1", "port": 9, "certificate": "ab" * 32}
BALLOT = {"number": 1, "proposer": MEMBER["id"]}
VIEW = {
    "id": "v",
    "number": 2,
    "base": "u",
    "next_call": 3,
    "members": [MEMBER, {**MEMBER, "id": "1" * 16}],
    "barred": {"names": ["h:2"], "certificates": ["cd" * 32]},
}
PROMISE = {"is_given": True, "has_result": 2, "highest": BALLOT, "accepted": {"ballot": BALLOT, "view": VIEW}}
MANIFEST = state.Manifest(3, described({"w": np.zeros(3), "n": 1})[0], 24, ("00",))._asdict()
NETWORK = {"round_trip_s": [[0.0, 0.1], [0.1, 0.0]], "per_byte_s": [[0.0, 1e-9], [1e-9, 0.0]]}
APPOINTMENT = {"turn_s": 0.1, "limit_s": 5.0}


def read_network(data: bytes) -> None:
    network = Network.of(parsed_json(data))
    hosts = len(network.round_trip_s)
    assert all(len(row) == hosts for matrix in network for row in matrix)


def read_appointment(data: bytes) -> None:
    terms = Appointment.of(parsed_json(data))
    assert all(0 < value < LONGEST_WAIT_S for value in terms)


def read_view(data: bytes) -> None:
    view = views.view_of(parsed_json(data))
    assert views.view_of(views.view_fields(view)) == view


def read_promise(data: bytes) -> None:
    proposer._promise_of(parsed_json(data))


def read_manifest(data: bytes) -> None:
    """Read a manifest, and write a small state of which it is, as a newcomer does."""
    manifest = state.Manifest.parse(data)
    assert manifest.digest
    if manifest.nbytes < 1 << 20:
        arrays = [np.zeros(shape, dtype) for dtype, shape in arrays_in(manifest.description)]
        restored({"w": np.ones(3), "n": 2}, manifest.description, arrays)


def take_stream(data: bytes) -> None:
    """Read the first message of a stream."""

    def onward(*_: object) -> socket.socket:
        raise OSError("there is no way")

    stream_server.StreamServer("me", onward, 1.0).serve(cast(Any, Received(data)), may_park=False)


def take_request(data: bytes) -> None:
    """Read a request of a swarm, and the bytes behind it."""
    links._received(cast(Any, Received(data)), Deadline(LONGEST_WAIT_S))


# --- files ---------------------------------------------------------------------------------------------------------

CONTEXT = measurement_log.Context("m", "allreduce", "shm", "plain", 2, 2)
MEASUREMENT = {
    **{"v": 1, **CONTEXT._asdict(), "variant": "ring", "nbytes": 8, "median_s": 1e-5, "low_s": 1e-5, "high_s": 2e-5},
    **{"p10_s": 1e-5, "p90_s": 2e-5, "rounds": 3, "job": "", "placement": "", "library": "", "date": "", "load": 0.5},
}
TABLE = table.to_json(
    table.Table(
        {
            CONTEXT: table.Decision(
                (table.Range(0, 8, "doubling"), table.Range(8, None, "ring")),
                (1, 1000),
                {"ring": (1e-6, 1e-5), "doubling": (1e-6, None)},
            )
        }
    ),
    machines={"m": {"load": [0.5, 1]}},
)
TOPOLOGY = {
    "name": "a torus of hosts",
    "levels": [
        {**LINK, "name": "host", "size": 4, "slow": [[1, 0.5]]},
        {**LINK, "name": "network", "shape": [2, 2], "hop_s": 1e-7, "pairs": 2},
    ],
    "reduce": CURVE,
}
CLUSTER = {
    "levels": [
        {**LINK, "name": "host", "size": 8},
        {**LINK, "name": "leaf", "size": 32, "nics": 4, "rails": True},
        {**LINK, "name": "spine", "taper": 2},
    ]
}
TOPOLOGY_TOML = (
    b'name = "a"\n[[levels]]\nname = "host"\nsize = 4\nlatency_s = 4e-7\noverhead_s = 1e-7\nper_byte_s = 1e-10'
)


CLUSTER_TOML = (
    TOPOLOGY_TOML + b'\n[[levels]]\nname = "leaf"\nsize = 32\nnics = 4\nrails = true\nlatency_s = 1e-6\noverhead_s = 0'
    b'\nper_byte_s = 8e-11\n[[levels]]\nname = "spine"\ntaper = 2\nlatency_s = 1e-6\noverhead_s = 0\nper_byte_s = 8e-11'
)


def read_table(data: bytes) -> None:
    read = table.from_text(data.decode(errors="replace"), "table.json")
    for nbytes in (0, 8, 1 << 20):
        read.read(CONTEXT, nbytes)
        read.read(CONTEXT._replace(ranks=3), nbytes)
    table.from_text(table.dumped(table.to_json(read)), "table.json")


def read_measurement(data: bytes) -> None:
    measurement = measurement_log.read_line(data.decode(errors="replace"))
    table.compiled([measurement])


def read_calibration(data: bytes) -> None:
    calibration = calibration_files.parsed(data.decode(errors="replace"), "m", "m.json")
    parameters.from_json(parameters.to_json(calibration.parameters))
    str([str(origin) for origin in calibration.origins.values()])


def read_topology(data: bytes) -> None:
    description = topology_files.described(topology_files.parsed(data.decode(errors="replace"), is_json=True))
    description.over(4)
    if topology_files.described(topology_files.to_json(description)) != description:
        raise AssertionError("a description differs after it has been written and read")


def read_topology_toml(data: bytes) -> None:
    topology_files.described(topology_files.parsed(data.decode(errors="replace"), is_json=False)).over(4)


CALL = memory.RecordedCall(
    *(3, 0, 3, False, 77, "allreduce(float32[8], op=sum)", {"collective": "allreduce", "elements": [8, 8]}, 32),
    *(10, 11, 12, 0, "train.py:12", None, 1, "running"),
)
MESSAGE = dataclasses.replace(CALL, number=4, is_message=True, peer=1, state="done", ended_ns=20, facts={})
SNAPSHOT = memory.Snapshot(
    *(0, SIZE, 99, {"job": JOB.hex(), "epoch": 0, "host": "h", "clock_offset_ns": 0, "clock_uncertainty_ns": 0}),
    *({5: (0, 1)}, (memory.ChannelTraffic(0, 1, "tcp", 1, 2, 3, 4, 5),), 5, (CALL, MESSAGE)),
)
ERROR = {"type": "PeerLostError", "text": "rank 1 died", "peer": 1, "sequence": 3}
DUMP = dumps._encoded(dumps.Dump(SNAPSHOT, "error", 30, 1.5, ERROR, {"MainThread": ["train.py:12 in step"]}))
QUIET_DUMP = {**DUMP, "error": None, "rank": 1}
TRACE = {
    "traceEvents": list(traces._events(SNAPSHOT, 1000)),
    "otherData": {"format": traces.FORMAT, **traces._facts(SNAPSHOT, 1000)},
}
STATISTICS = {"calls": 3, "seconds": 0.5, "peers": [[1, 10, 20, 0.25]]}


def read_dump(data: bytes) -> None:
    first = dumps.parsed(data.decode(errors="replace"), "dump.json")
    second = dumps.parsed(json.dumps(QUIET_DUMP), "other.json")
    by_rank = {dump.snapshot.rank: dump for dump in (second, first)}
    size = max(dump.snapshot.size for dump in by_rank.values())
    report = analyse(JobDumps(first.snapshot.job, min(size, 64), by_rank, ()))
    html(report).encode()
    json.dumps(report.to_json())


def write_torch_layout(data: bytes) -> None:
    """Write dumps, which may be hostile, in the layout of torch."""
    with contextlib.suppress(ValueError):
        first = dumps.parsed(data.decode(errors="replace"), "dump.json")
        job = JobDumps(first.snapshot.job, min(first.snapshot.size, 64), {first.snapshot.rank: first}, ())
        content = None
        try:
            content = pickle.dumps(torch_layout._content(job, first.snapshot.rank, first))
        except ValueError as error:
            raise AssertionError("a dump that was accepted cannot be written") from error
        assert content


def read_trace(data: bytes) -> None:
    trace = traces.parsed(data.decode(errors="replace"))
    events = traces.merged([trace, TRACE])
    json.dumps(events)
    measured(trace["otherData"])
    memory.job_name(trace["otherData"])


def read_statistics(data: bytes) -> None:
    statistics = job_statistics.parsed(data.decode(errors="replace"))
    job_statistics.summary({0: statistics, 1: statistics})
    job_statistics.straggler({0: statistics, 1: None})


def read_recorder(data: bytes) -> None:
    snapshot = memory.parse(data, 64)
    rank = LiveRank(9, snapshot, 1 << 60, False)
    live_findings([rank])
    list(traces._events(snapshot, 0))


def _recorder_memory() -> bytes:
    """Return the memory of a flight recorder with one call, one communicator and one channel."""
    about, texts = (
        b'{"job": "ab", "epoch": 0, "host": "h"}',
        b'\0allreduce(int8[8])\n{"collective": "allreduce"}\0t.py\0',
    )
    header = memory._HEADER.size
    at_communicators = header + len(about)
    at_traffic = at_communicators + memory._COMMUNICATOR.size
    at_records = at_traffic + memory._TRAFFIC.size
    at_texts = at_records + memory._RECORD.size
    areas = (header, len(about), at_communicators, 1, at_traffic, 1, at_records, memory._RECORD.size, 1, at_texts)
    return b"".join(
        [
            memory._HEADER.pack(memory.MAGIC, memory.VERSION, 9, 0, SIZE, *areas, len(texts), 1, 1, len(texts)),
            about,
            memory._COMMUNICATOR.pack(5, b"ranks 0-1"),
            memory._TRAFFIC.pack(1, 1, b"tcp", 1, 2, 3, 4, 5),
            memory._RECORD.pack(1, 0, 0, 7, 8, 1, 2, 3, 0, 1, 0, 12, 0, -1, 1, 1),
            texts,
        ]
    )


# --- objects and errors of ranks -----------------------------------------------------------------------------------


def last_error(data: bytes) -> None:
    root_cause.last_error(data.split(b"\n"))


TRACEBACK = (
    b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nunisono.errors.PeerLostError: rank 1 died\n'
)

# Each parser has a letter, so that inputs in `corpus/` stay valid when others are added.
# --- schedules -----------------------------------------------------------------------------------------------------


def prove_schedule(data: bytes) -> None:
    proving.proved(proving.schedule_of(data))


PARSERS: dict[str, Parser] = {
    "a": Parser(accept, (HandshakeError,), [HELLO.pack()]),
    "d": Parser(dial, (HandshakeError,), [dataclasses.replace(HELLO, sender=0, receiver=1).pack() + b"\1"]),
    "p": Parser(propose, (OSError,), [Proposal(b"address", 5).pack(), Proposal(b"", 0, "no UCX here").pack()]),
    "f": Parser(
        follow, (RendezvousError,), [{"members": [1, 2], "epoch": 1, "store": "tcp://127.0.0.1:9"}, {"error": "x"}]
    ),
    "I": Parser(invite, (ValueError,), [INVITATION]),
    "j": Parser(read_request, (ValueError, RendezvousError), [REQUEST]),
    "l": Parser(lead, (), [{"epoch": 1}]),
    "s": Parser(
        serve,
        (tcp_store._ProtocolError,),
        [tcp_store._REQUEST.pack(1, 3, 5, 0) + b"keyvalue", tcp_store._REQUEST.pack(2, 3, 0, 9) + b"key"],
    ),
    "q": Parser(ask, (OSError,), [tcp_store._REPLY.pack(0, 5) + b"value", tcp_store._REPLY.pack(3, 4) + b"gone"]),
    "m": Parser(
        meet,
        (RendezvousError, UsageError),
        [
            {"members": MEMBERS, "settings": SETTINGS},
            {"error": "rank 1 gave up"},
            {"members": MEMBERS, "settings": {**SETTINGS, "machine": "m", "parameters": json.dumps(CALIBRATION)}},
            {"members": MEMBERS, "settings": {**SETTINGS, "machine": "m", "table": json.dumps(TABLE)}},
        ],
    ),
    "e": Parser(collect_entries, (RendezvousError,), [ENTRIES, [ENTRIES[0], '{"error":"no"}']]),
    "g": Parser(take_frames, (UnisonoError,), FRAMES),
    "i": Parser(take_signature, (UnisonoError,), [json.loads(framed._encoded(SIGNATURE))]),
    "t": Parser(read_table, (UsageError,), [TABLE]),
    "n": Parser(read_measurement, (ValueError,), [MEASUREMENT]),
    "c": Parser(
        read_calibration, (ValueError,), [{**CALIBRATION, "about": {"machine": {"cpu": "x"}, "links": {"shm": {}}}}]
    ),
    "o": Parser(read_topology, (UsageError, ValueError), [TOPOLOGY, CLUSTER]),
    "T": Parser(read_topology_toml, (UsageError, ValueError), [TOPOLOGY_TOML, CLUSTER_TOML]),
    "D": Parser(read_dump, (ValueError,), [DUMP, QUIET_DUMP]),
    "r": Parser(read_trace, (ValueError,), [TRACE]),
    "S": Parser(read_statistics, (ValueError,), [STATISTICS]),
    "R": Parser(read_recorder, (ValueError,), [_recorder_memory()]),
    "x": Parser(last_error, (), [TRACEBACK]),
    "u": Parser(
        resume,
        (),
        [
            _RESUMED.pack(0, 0) + struct.pack("!IQ", 1, 9),
            _RESUMED.pack(1, 0) + struct.pack("!I", 1),
            _RESUMED.pack(2, 0xFFFF) + struct.pack("!IQ", 1, 9),
            _RESUMED.pack(8, 0xFFFF) + struct.pack("!IQ", 1, 9),
        ],
    ),
    "z": Parser(
        hand_over,
        (HandshakeError, OSError),
        [TLS_HELLO + CLIENT_HELLO[:60], TLS_HELLO + CLIENT_HELLO],
    ),
    "Z": Parser(begin_tls, (HandshakeError, OSError), [SERVER_HELLO[:5], SERVER_HELLO]),
    "v": Parser(
        read_store, (), [{"members": MEMBERS, "settings": SETTINGS}, json.loads(ENTRIES[1]), ENTRIES, b"k" * 32]
    ),
    "h": Parser(obey, (ssh_protocol.ProtocolError,), FROM_LAUNCHER),
    "H": Parser(hear, (ssh_protocol.ProtocolError,), FROM_AGENT),
    "b": Parser(collect_message, (), [pool_protocol.encoded("a"), b"\xff" * 8 + b"a"]),
    "E": Parser(read_environment, (), ENVIRONMENTS),
    "N": Parser(read_network, (ValueError,), [NETWORK]),
    "A": Parser(read_appointment, (ValueError,), [APPOINTMENT]),
    "V": Parser(read_view, (ValueError,), [VIEW]),
    "P": Parser(read_promise, (ValueError,), [PROMISE]),
    "M": Parser(read_manifest, (ValueError, UsageError), [MANIFEST]),
    "X": Parser(
        prove_schedule, (UsageError, PlanError), [schedule_files.ring_allreduce(3), schedule_files.swap_alltoall()]
    ),
    "J": Parser(
        prove_schedule,
        (UsageError, PlanError),
        [json.loads(schedule_files.put_allreduce(2)), json.loads(schedule_files.semaphore_allreduce())],
    ),
    "k": Parser(
        take_stream,
        (),
        [
            streams._FRAMING.framed(b'{"do": "connect", "member": "me", "port": 9}'),
            streams._FRAMING.framed(b'{"do": "park", "member": "me"}'),
        ],
    ),
    "K": Parser(take_request, (ValueError, OSError), [struct.pack("!I", 13) + b'{"nbytes": 3}abc']),
    "y": Parser(write_torch_layout, (), [DUMP, QUIET_DUMP]),
}
_LETTERS = list(PARSERS)


def parser_of(data: bytes) -> Parser:
    """Return the parser that the first byte of an input chooses."""
    letter = chr(data[0])
    return PARSERS[letter if letter in PARSERS else _LETTERS[data[0] % len(_LETTERS)]]


def parse(data: bytes) -> None:
    """Give an input to its parser; raises the error of a parser that has a fault, or that exceeds its bounds."""
    if not data:
        return
    parser = parser_of(data)
    text = edited(data[1:], parser.seeds)
    with bounded(), contextlib.suppress(*parser.refusals):
        parser.parse(text)
