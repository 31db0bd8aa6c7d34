"""Tests of swarms whose members cannot all dial each other. The hosts are network namespaces.

A member *at home* listens at an address of its own host. The others have no route to it, or packets to it are lost. So
it dials, and nobody can dial it.
"""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from support.hosts import needs_namespaces
from support.swarms import SwarmProcesses

from unisono.bench.namespaces import address, home, inside, move_home, network, plug
from unisono.swarm.links import Caller
from unisono.swarm.routes import Routes
from unisono.swarm.views import Member
from unisono.transports.tcp.tls import TlsPolicy

PROGRAM = """
from support.deadlines import eventually
settings["heartbeat_timeout_s"] = 3.0
one = {name: 10 ** index for index, name in enumerate("ABCD")}

def sockets():
    names = []
    for each in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{each}"))
        except FileNotFoundError:
            pass
    return [name for name in names if name.startswith("socket")]

with un.Swarm(places, serve=name in "AB", quorum_timeout_s=2.0, **settings) as swarm:
    while not has_mark(folder, "end"):
        try:
            total = int(swarm.allreduce(np.full(1 << 16, one[name]), "sum")[-1])
        except un.QuorumLostError:
            continue
        except un.LeftBehindError:
            mark(f"{name} was left behind")
            swarm.enter()
            continue
        names = sorted(member.name for member in swarm.last_call.contributors)
        assert total == sum(one[each] for each in names)
        for way in swarm.ways:
            mark(f"{name} to {way.member} {way.kind}{f' by {way.relay}' if way.relay else ''}")
        when = next((f" {word}" for word in ("killed", "mended", "cut") if has_mark(folder, word)), "")
        mark(f"{name} with {''.join(names)}{when}")
        time.sleep(0.01)
assert eventually(lambda: not sockets()), sockets()
"""


@needs_namespaces
def test_members_at_home_dial_or_are_relayed_and_another_relay_takes_over_from_one_that_is_lost(tmp_path: Path) -> None:
    places = f"tcp://{address(0)}:29400,tcp://{address(1)}:29400"
    with network(4) as hosts, SwarmProcesses(tmp_path, places) as swarm:
        move_home(hosts, 2, is_silent=True)
        move_home(hosts, 3, is_silent=False)
        for host, name in enumerate("ABCD"):
            bound = home(host) if name in "CD" else address(host)
            swarm.start(name, PROGRAM, {"UNISONO_BIND_ADDRESS": bound}, inside(hosts[host]))
        swarm.await_marks(*(f"{name} with ABCD" for name in "ABCD"))
        swarm.await_marks("A to C called back", "C to A direct", "B to D called back", "D to B direct")
        first = next(name for name in "AB" if (tmp_path / f"mark C to D relayed by {name}").exists())
        second = "AB".replace(first, "")
        rest = f"{second}CD"
        plug(hosts, "AB".index(first), "down")
        swarm.mark("cut")
        swarm.await_marks(f"D to C relayed by {second}", *(f"{name} with {rest} cut" for name in rest))
        plug(hosts, "AB".index(first), "up")
        swarm.mark("mended")
        swarm.await_marks(f"{first} was left behind", *(f"{name} with ABCD mended" for name in "ABCD"))
        swarm.processes[second].kill()
        swarm.output(second, -signal.SIGKILL)
        swarm.mark("killed")
        swarm.await_marks(f"D to C relayed by {first}", *(f"{name} with {first}CD killed" for name in f"{first}CD"))
        swarm.mark("end")
        for name in f"{first}CD":
            swarm.output(name)


def test_the_error_names_both_members_between_which_there_is_no_way() -> None:
    caller = Caller(bytes(32), bytes(16), TlsPolicy())
    routes = Routes(Member("a", "Anna", "127.0.0.1", 1), bytes(32), bytes(16), caller, heartbeat_s=0.5)
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,  # as a router that drops packets
            pytest.raises(OSError, match=r"Anna and Bert cannot dial each other.*no member relays.*start a member on"),
        ):
            routes.connect(Member("b", "Bert", *silent.getsockname()), 1, timeout_s=2.0)
    finally:
        routes.close()
        caller.close()
