"""Members that have been the same ones for a while measure their network, and their calls follow the map."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from support.hosts import needs_wide_area
from support.swarms import SwarmProcesses

from unisono.bench.namespaces import SUBNET, address, inside
from unisono.bench.wide_area import AccessLine, Area, NetworkWay, WideAreaNetwork, uniform
from unisono.swarm import settling
from unisono.swarm.routes import Routes
from unisono.swarm.settling import Settling
from unisono.swarm.views import Member, View

FAR = uniform(3, AccessLine(100, 100), NetworkWay(delay_ms=30))

PROGRAM = """
from unisono.swarm import settling
from unisono.transports.links import session

settling._SETTLED_S = 2.0
measure, names = session.measure, ""

def dying(*args):
    mark(f"{name} measures")
    if names == "ABC" and name == "C" and has_mark(folder, "C dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(*args)

session.measure = dying
with un.Swarm(places, serve=name == "A", **settings) as swarm:
    while not has_mark(folder, "end"):
        total = int(swarm.allreduce(np.array([10 ** "ABC".index(name)]), "sum")[0])
        names = "".join(sorted(member.name for member in swarm.last_call.contributors))
        assert total == sum(10 ** "ABC".index(member) for member in names)
        if swarm.network is not None and len(names) == len(swarm.network.delay_s):
            (folder / f"map of {name} with {names}").write_text(repr(swarm.network))
            mark(f"{name} follows a map with {names}")
"""


class FakeRoutes:
    """Routes to members of which some are relayed."""

    def __init__(self, *relayed: str) -> None:
        self.relayed = relayed

    def is_direct(self, member: Member) -> bool:
        return member.id not in self.relayed


class FakeComm:
    """A communicator of two hosts that counts how often it measures."""

    hosts = ((0,), (1,))

    def __init__(self) -> None:
        self.times = 0

    def measure_network(self, *, timeout_s: float) -> None:
        self.times += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("unisono.swarm.settling.time.monotonic", lambda: now[0])
    return now


def settling_of(name: str, *relayed: str) -> Settling:
    return Settling(name, cast(Routes, FakeRoutes(*relayed)))


def view_of(*names: str, number: int = 1) -> View:
    return View(f"view {number}", number, "", 1, tuple(Member(name, name, "127.0.0.1", 1) for name in names))


def calls(member: Settling, view: View, comm: Any, least_age_s: float | None = None) -> float:
    """Make a call of a member in a view; return the age that it passes."""
    member.measure_if_due(view, comm, 60.0)
    age_s = member.age_s(view)
    member.note(age_s if least_age_s is None else least_age_s)
    return age_s


def test_a_member_measures_once_the_youngest_has_settled_and_again_later(clock: list[float]) -> None:
    member, view, comm = settling_of("A"), view_of("A", "B"), FakeComm()
    assert calls(member, view, comm) == 0
    clock[0] += settling._SETTLED_S
    assert calls(member, view, comm, least_age_s=settling._SETTLED_S - 1) == settling._SETTLED_S
    calls(member, view, comm)
    assert comm.times == 0
    calls(member, view, comm)
    calls(member, view, comm)
    assert comm.times == 1
    clock[0] += settling._AGAIN_S
    calls(member, view, comm)
    calls(member, view, comm)
    assert comm.times == 2


def test_a_member_does_not_measure_in_a_new_view_or_through_a_relay(clock: list[float]) -> None:
    view, comm = view_of("A", "B"), FakeComm()
    member, relayed = settling_of("A"), settling_of("A", "B")
    for each in (member, relayed):
        calls(each, view, comm)
    clock[0] += settling._SETTLED_S
    assert calls(relayed, view, comm) == 0
    calls(member, view, comm)
    assert calls(member, view_of("A", "B", number=2), comm) == 0
    assert comm.times == 0


@needs_wide_area
def test_far_members_that_have_settled_have_the_same_map(
    wide_area_of: Callable[[Area], WideAreaNetwork], tmp_path: Path
) -> None:
    hosts = wide_area_of(FAR).namespaces
    with SwarmProcesses(tmp_path, f"tcp://{address(0)}:29400") as swarm:
        for name, host in zip("ABC", hosts, strict=True):
            swarm.start(name, PROGRAM, {"UNISONO_BIND_ADDRESS": SUBNET}, inside(host))
        swarm.await_marks(*(f"{name} follows a map with ABC" for name in "ABC"))
        first, *others = [(tmp_path / f"map of {name} with ABC").read_text() for name in "ABC"]
        swarm.mark("end")
        for name in "ABC":
            swarm.processes[name].wait(100)
    assert others == [first] * 2


@pytest.mark.night
@needs_wide_area
def test_members_go_on_and_settle_anew_when_one_dies_while_they_measure(
    wide_area_of: Callable[[Area], WideAreaNetwork], tmp_path: Path
) -> None:
    hosts = wide_area_of(FAR).namespaces
    with SwarmProcesses(tmp_path, f"tcp://{address(0)}:29400") as swarm:
        swarm.mark("C dies")
        for name, host in zip("ABC", hosts, strict=True):
            swarm.start(name, PROGRAM, {"UNISONO_BIND_ADDRESS": SUBNET}, inside(host))
        swarm.await_marks("C measures", "A follows a map with AB", "B follows a map with AB")
        swarm.mark("end")
        for name in "AB":
            swarm.processes[name].wait(100)
    maps = [(tmp_path / f"map of {name} with AB").read_text() for name in "AB"]
    assert maps[0] == maps[1]
