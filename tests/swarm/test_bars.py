"""Members that were expelled stay out: by their names, and by the public keys of their certificates."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from support.authority import Authority
from support.deadlines import DEADLINE_S
from support.swarms import SwarmProcesses

import unisono as un
from unisono.swarm.links import NOTHING, BarredError, Caller, RefusedError, Service
from unisono.swarm.views import MOST_BARRED, Bars, Member, View, new_id, view_fields, view_of
from unisono.transports.links.listener import listen_tcp
from unisono.transports.tcp.tls import TlsPolicy

# A member that expels the member that a mark names, and leaves marks about the others.
MEMBER = """
with un.Swarm(places, min_size=1, **settings) as swarm:
    while not has_mark(folder, f"{name} leaves"):
        swarm.allreduce(np.zeros(1))
        names = [member.name for member in swarm.last_call.contributors]
        mark(f"{name} with {','.join(sorted(names))}")
        if "E" in names and has_mark(folder, f"{name} expels E") and not has_mark(folder, "E is expelled"):
            mark("E is expelled")
            swarm.expel([member.name for member in swarm.members].index("E"))
        time.sleep(0.002)
"""
# A process that is expelled, and tries to enter again; or one that must not enter at all.
EXPELLED = """
try:
    swarm = un.Swarm(places, **settings)
except un.RendezvousError as error:
    print("refused:", error)
    sys.exit()
mark(f"{name} entered")
try:
    while True:
        swarm.allreduce(np.zeros(1))
except un.LeftBehindError as error:
    print("left:", error)
try:
    swarm.enter()
except un.RendezvousError as error:
    print("refused:", error)
"""
IS_REFUSED = "refused: the members have expelled this process"


def test_the_certificate_of_an_expelled_member_stays_barred_in_later_members_and_at_another_place(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "authority")
    with SwarmProcesses(tmp_path, places=2) as swarm:
        for name in "AB":
            swarm.start(name, MEMBER, authority.variables(name))
        swarm.start("E", EXPELLED, own := authority.variables("E"))
        swarm.await_marks(*(f"{name} with A,B,E" for name in "AB"))
        swarm.mark("A expels E")
        output = swarm.printed("E")
        assert "left: the members have expelled this process" in output
        assert IS_REFUSED in output
        swarm.start("another name", EXPELLED, own)
        assert swarm.printed("another name").strip() == IS_REFUSED
        # A member that enters later, after the meeting place has moved, knows the bar from the view.
        swarm.move_place()
        swarm.start("C", MEMBER, authority.variables("C"))
        swarm.await_marks(*(f"{name} with A,B,C" for name in "ABC"))
        for name in "AB":
            swarm.mark(f"{name} leaves")
            swarm.output(name)
        swarm.await_marks("C with C")
        swarm.start("renewed", EXPELLED, authority.renewed("E"))
        assert swarm.printed("renewed").strip() == IS_REFUSED
        swarm.start("E", EXPELLED, authority.variables("other"))
        assert swarm.printed("E").strip() == IS_REFUSED  # by its name
        swarm.mark("C leaves")
        swarm.output("C")


def test_without_certificates_the_name_alone_is_barred(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        swarm.start("A", MEMBER)
        swarm.start("E", EXPELLED)
        swarm.await_marks("A with A,E")
        swarm.mark("A expels E")
        assert IS_REFUSED in swarm.printed("E")
        swarm.start("another name", MEMBER)
        swarm.await_marks("A with A,another name")
        for name in ("A", "another name"):
            swarm.mark(f"{name} leaves")
            swarm.output(name)


def test_a_certificate_that_other_members_have_too_is_not_barred(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    shared = authority.variables("all")
    with SwarmProcesses(tmp_path) as swarm:
        swarm.start("A", MEMBER, shared)
        swarm.start("E", EXPELLED, shared)
        swarm.await_marks("A with A,E")
        swarm.mark("A expels E")
        assert IS_REFUSED in swarm.printed("E")
        swarm.start("B", MEMBER, shared)
        swarm.await_marks("A with A,B")
        for name in "AB":
            swarm.mark(f"{name} leaves")
        assert "the certificate of E too, so only its name is barred" in swarm.output("A")
        swarm.output("B")


ALONE = """
with un.Swarm(places, **{**settings, "rendezvous_timeout_s": 4.0}) as swarm:
    try:
        while True:
            swarm.allreduce(np.zeros(1))
    except un.LeftBehindError as error:
        print("left:", error)
    mark("E was left")
    await_mark("A has ended")
    try:
        swarm.enter()
    except un.RendezvousError as error:
        print(error)
"""


def test_a_member_that_was_left_behind_founds_no_swarm_without_a_quorum(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        swarm.start("A", MEMBER)
        swarm.start("E", ALONE)
        swarm.await_marks("A with A,E")
        swarm.mark("A expels E")
        swarm.await_marks("A with A", "E was left")
        swarm.mark("A leaves")
        swarm.output("A")
        swarm.mark("A has ended")
        assert "it has waited for 4 s" in swarm.printed("E")


# A member that expels "E" while both call, and proposes no view without it.
EXPELLER = """
from unisono.swarm import membership, proposer
with un.Swarm(places, min_size=1, **settings) as swarm:
    ENDS = {"is killed": lambda: os._exit(0), "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP)}
    names = lambda: [member.name for member in swarm.members]
    while not has_mark(folder, "all call") or "E" not in names():
        swarm.barrier()
    proposer.Proposer._step = lambda self: None
    tell = membership.Membership.tell
    if how == "leaves":
        membership.Membership.tell = lambda self, to, news: news["do"] == "expel" or tell(self, to, news)
    else:
        membership.in_background = lambda task: task()
    swarm.expel(names().index("E"))
    ENDS.get(how, list)()
"""
CALLER = """
with un.Swarm(places, min_size=1, **settings) as swarm:
    try:
        while not has_mark(folder, "end"):
            swarm.barrier()
            mark(f"{name} with {','.join(sorted(member.name for member in swarm.last_call.contributors))}")
        print("went on")
    except un.LeftBehindError as error:
        print("left:", error)
"""


@pytest.mark.parametrize("how", ["is killed", "is stopped"])
def test_a_member_learns_of_its_expulsion_though_only_one_that_has_ended_knows_of_it(tmp_path: Path, how: str) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        swarm.start("A", f"how = {how!r}" + EXPELLER)
        swarm.start("E", CALLER)
        swarm.await_marks("E with A,E")
        swarm.mark("all call")
        assert "left: the members have expelled this process" in swarm.printed("E")


def test_a_member_that_leaves_passes_on_the_expulsion_of_which_nobody_else_has_heard(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        swarm.start("A", "how = 'leaves'" + EXPELLER)
        for name in "BE":
            swarm.start(name, CALLER)
        swarm.await_marks("B with A,B,E", "E with A,B,E")
        swarm.mark("all call")
        swarm.output("A")
        assert "left: the members have expelled this process" in swarm.printed("E")
        swarm.start("E", EXPELLED)
        assert IS_REFUSED in swarm.printed("E")
        swarm.await_marks("B with B")
        swarm.mark("end")
        assert "went on" in swarm.printed("B")


# --- requests --------------------------------------------------------------------------------------------------------


class Guarded:
    """Bars some certificates, and notes that it is barred itself."""

    def __init__(self, *barred: str) -> None:
        self.barred = barred
        self.is_barred = False

    def bars(self, certificate: str) -> bool:
        return certificate in self.barred

    def note_bar(self) -> None:
        self.is_barred = True


def test_requests_check_the_certificates_of_both_ends(tmp_path: Path) -> None:
    key, job = os.urandom(32), bytes(16)
    authority = Authority(tmp_path / "authority")
    policies = {name: authority.policy(name) for name in ("server", "client", "expelled")}
    certificates = {name: policy.certificate for name, policy in policies.items()}
    assert len(set(certificates.values())) == 3
    assert TlsPolicy("on").certificate == ""
    listening = listen_tcp("127.0.0.1")
    answer: Any = lambda request, _: ({"is": request["do"]}, NOTHING)  # noqa: E731
    server = Member(new_id(), "server", *listening.getsockname()[:2], certificates["server"])
    guard = Guarded(certificates["expelled"])
    with contextlib.ExitStack() as stack:
        service = Service(listening, key, job, policies["server"], answer, guard=guard)
        stack.callback(service.close)
        callers = {name: Caller(key, job, policy) for name, policy in policies.items()}
        for caller in callers.values():
            stack.callback(caller.close)
            caller.guard = Guarded()
        request = {"do": "something"}
        assert callers["client"].ask(server, request, DEADLINE_S)[0]["is"] == "something"
        with pytest.raises(BarredError, match="is barred"):
            callers["expelled"].ask(server, request, DEADLINE_S)
        assert callers["expelled"].guard.is_barred  # type: ignore[union-attr]
        for claim in (certificates["client"], ""):
            with pytest.raises(ConnectionAbortedError, match="server presents another certificate"):
                callers["client"].ask(server._replace(certificate=claim), request, DEADLINE_S)
        callers["client"].guard = Guarded(certificates["server"])
        with pytest.raises(RefusedError, match="the certificate of server is barred"):
            callers["client"].ask(server, request, DEADLINE_S)
        guard.barred = (certificates["client"],)  # of a connection that is open
        callers["client"].guard = Guarded()
        with pytest.raises(BarredError):
            callers["client"].ask(server, request, DEADLINE_S)


# --- bars as data ----------------------------------------------------------------------------------------------------

ONE, TWO = (Member(new_id(), name, "127.0.0.1", 9, digit * 64) for name, digit in (("one", "1"), ("two", "2")))


def test_a_view_bars_a_certificate_unless_another_member_has_it() -> None:
    assert View("v", 1, "", 1, (ONE, TWO)).bars_of(ONE.id) == Bars(frozenset({"one"}), frozenset({"1" * 64}))
    twin = TWO._replace(certificate=ONE.certificate)
    assert View("v", 1, "", 1, (ONE, twin)).bars_of(ONE.id) == Bars(frozenset({"one"}))
    assert View("v", 1, "", 1, (ONE._replace(certificate=""), TWO)).bars_of(ONE.id) == Bars(frozenset({"one"}))
    assert View("v", 1, "", 1, (TWO,)).bars_of(ONE.id) == Bars()


def test_a_view_from_another_process_has_bars_in_range() -> None:
    bars = Bars(frozenset(str(number) for number in range(2 * MOST_BARRED)), frozenset({"3" * 64}))
    fields = view_fields(View("v", 1, "", 1, (ONE,), bars))
    assert len(view_of(fields).barred.names) == MOST_BARRED
    for barred in (
        {"names": ["x" * 65], "certificates": []},
        {"names": [], "certificates": [""]},
        {"names": [], "certificates": ["3" * 65]},
        {"names": []},
        ["one"],
        {"names": [3], "certificates": []},
    ):
        with pytest.raises(ValueError, match=r"barred|bar is out of range|names|certificates"):
            view_of({**fields, "barred": barred})
    with pytest.raises(ValueError, match="a member is out of range"):
        view_of({**fields, "members": [{**ONE._asdict(), "certificate": "33"}]})


@pytest.mark.parametrize("rank", [-1, 1, True, 0.0])
def test_a_member_expels_no_rank_that_there_is_not(rank: Any) -> None:
    key = os.urandom(32)
    with un.MeetingPlace("tcp://127.0.0.1:0", key) as place, un.Swarm(place.url, key=key) as swarm:
        with pytest.raises(un.UsageError, match="rank must be one of the 1 members"):
            swarm.expel(rank)
        with pytest.raises(un.UsageError, match="does not expel itself"):
            swarm.expel(0)
