"""Tests calls of a swarm, whose members enter, leave, die, stop and differ, as real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.authority import Authority
from support.swarms import SwarmProcesses

import unisono as un
from unisono.collectives.bootstrap.environment import job_of_key
from unisono.swarm import meeting_place
from unisono.swarm.links import Caller
from unisono.swarm.views import Member, new_id
from unisono.transports.tcp.tls import TlsPolicy

CALLS = """
with un.Swarm(places, min_size=3, **settings) as swarm:
    me = int(name)
    x = np.full(5, float(me))
    assert swarm.allreduce(x).tolist() == [1.0] * 5 and x.tolist() == [me] * 5
    assert sorted(member.name for member in swarm.last_call.contributors) == ["0", "1", "2"]
    assert swarm.last_call.number == swarm.next_call - 1
    assert swarm.allreduce(x, "sum", out=x) is x and x.tolist() == [3.0] * 5
    both = swarm.allreduce({"b": [np.full(2, me)], "a": np.array(me, np.float32)}, "max")
    assert both["a"] == 2.0 and both["b"][0].tolist() == [2, 2]
    root = next(member for member in swarm.members if member.name == "1")
    assert swarm.broadcast(np.array([me]), root).tolist() == [1]
    order = [int(member.name) for member in swarm.members]
    assert swarm.allgather(np.array([me])).tolist() == order
    assert swarm.rank == order.index(me) and swarm.size == 3
    swarm.barrier()
    try:
        swarm.allreduce([])
        raise AssertionError
    except un.UsageError:
        pass
    swarm.barrier()
"""


def test_members_make_each_kind_of_call(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in "012":
            swarm.start(name, CALLS)
        for name in "012":
            swarm.output(name)


def test_members_with_certificates_meet_and_call(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    with SwarmProcesses(tmp_path) as swarm:
        for name in "012":
            swarm.start(name, CALLS, authority.variables(name))
        for name in "012":
            swarm.output(name)


STRANGER = """
try:
    un.Swarm(places, min_size=2, **{**settings, "rendezvous_timeout_s": 8.0})
    print("entered")
except un.UnisonoError as error:
    print(type(error).__name__, error)
"""


def test_a_process_with_a_certificate_of_another_authority_cannot_enter(tmp_path: Path) -> None:
    own, other = Authority(tmp_path / "own"), Authority(tmp_path / "other")
    with SwarmProcesses(tmp_path) as swarm:
        swarm.start("own", STRANGER, own.variables("own"))
        swarm.start("other", STRANGER, other.variables("other"))
        outputs = [swarm.output(name) for name in ("own", "other")]
    assert all("RendezvousError" in output for output in outputs), outputs


SUMS = """
one = {name: 10 ** index for index, name in enumerate("ABCDE")}
with un.Swarm(places, **settings) as swarm:
    mark(f"{name} entered")
    sizes = []
    while not has_mark(folder, f"{name} leaves"):
        total = int(swarm.allreduce(np.array([one[name]]), "sum")[0])
        names = [member.name for member in swarm.last_call.contributors]
        assert total == sum(one[member] for member in names), (total, names)
        mark(f"{name} with {''.join(sorted(names))}")
        time.sleep(0.002)
"""


def test_members_enter_die_and_leave_while_the_others_go_on_without_code_for_it(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path, places=2) as swarm:
        for name in "ABCD":
            swarm.start(name, SUMS)
        swarm.await_marks(*(f"{name} with ABCD" for name in "ABCD"))
        swarm.processes["A"].send_signal(signal.SIGKILL)
        swarm.await_marks(*(f"{name} with BCD" for name in "BCD"))
        # The meeting place moves to its other address, and the members find it there.
        swarm.move_place()
        swarm.start("E", SUMS)
        swarm.await_marks(*(f"{name} with BCDE" for name in "BCDE"))
        swarm.mark("B leaves")
        swarm.output("B")
        swarm.await_marks(*(f"{name} with CDE" for name in "CDE"))
        swarm.processes["C"].send_signal(signal.SIGSTOP)
        swarm.await_marks(*(f"{name} with DE" for name in "DE"))
        swarm.processes["C"].send_signal(signal.SIGCONT)
        assert "LeftBehindError" in swarm.output("C", 1)
        # Of two members, both are a majority.
        swarm.processes["E"].send_signal(signal.SIGKILL)
        assert "QuorumLostError: 1 of 2 members answer" in swarm.output("D", 1)


# "B" is killed at revision 3. "A" enters again, and waits for "C", which brings an older state.
AGAIN = """
w, revision = np.zeros(2), {"A": 0, "B": 0, "C": 1}[name]
with un.Swarm(places, min_size=2, **{**settings, "rendezvous_timeout_s": 4.0 if name == "A" else 60.0}) as swarm:
    while revision < 6:
        try:
            revision = swarm.state({"w": w}, revision).revision
            w += swarm.allreduce(np.ones(2))
        except un.QuorumLostError:
            pass  # `state` enters again
        except un.RendezvousError as error:
            print(error)
            mark("A waits")
        else:
            revision += 1
        if name == "B" and revision == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        swarm.enter()
    except un.UsageError as error:
        print(error)
    print("end", revision, w.tolist())
"""


def test_a_member_that_has_lost_the_quorum_enters_again_and_keeps_the_newest_state(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        swarm.start("A", AGAIN)
        swarm.start("B", AGAIN)
        swarm.await_marks("A waits")
        swarm.start("C", AGAIN)
        outputs = {name: swarm.output(name) for name in "AC"}
    assert "it has waited for 4 s" in outputs["A"]  # the first time, it waits in vain
    for output in outputs.values():
        assert "this process is a member already" in output
        assert "end 6 [6.0, 6.0]" in output, outputs


# "B" is stopped, so it answers nothing, and its host keeps its connections open.
STOPPED = """
with un.Swarm(places, **{**settings, "heartbeat_timeout_s": 2.0, "quorum_timeout_s": 1.0, "timeout_s": 600.0}) as swarm:
    while not (has_mark(folder, "A has both again") and has_mark(folder, "B has both again")):
        has_stopped = has_mark(folder, "A has lost the quorum")
        try:
            total = int(swarm.allreduce(np.ones(1), "sum")[0])
        except un.QuorumLostError as error:
            print(error)
            mark("A has lost the quorum")
        except un.LeftBehindError:
            swarm.enter()
        else:
            assert total == len(swarm.last_call.contributors)
            if total == 2:
                mark(f"{name} has both again" if has_stopped else f"{name} has both")
"""


def test_a_call_ends_when_a_member_is_stopped_and_too_few_are_left_until_it_goes_on(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in "AB":
            swarm.start(name, STOPPED)
        swarm.await_marks("A has both", "B has both")
        swarm.processes["B"].send_signal(signal.SIGSTOP)
        swarm.await_marks("A has lost the quorum")
        swarm.processes["B"].send_signal(signal.SIGCONT)
        assert "1 of 2 members answer, and 2 are needed to go on: B did not answer for 2 s" in swarm.output("A")
        swarm.output("B")


# "C" dies after the first phase of a call. "A" has the result of that call and "B" has lost it. So "B" must get the sum
# of all three members from "A".
SUM_OF_ONE = """
from unisono.swarm import attempts
from unisono.collectives.communicator import Communicator
swarm = un.Swarm(places, min_size=3 if name == "C" else 2, **settings)
while swarm.size < 3:
    time.sleep(0.01)
swarm.barrier()
real_allreduce, second = Communicator.allreduce, attempts.second_phase
def lose(*_):
    await_mark("A has it")
    os.kill(os.getpid(), signal.SIGKILL)
def once(self, *args, **options):
    result = real_allreduce(self, *args, **options)
    Communicator.allreduce = real_allreduce
    await_mark("A has it")
    raise un.PeerLostError("a planted loss")
if name == "A":
    attempts.second_phase = lambda *args: (mark("A has it"), second(*args))[1]
elif name == "B":
    Communicator.allreduce = once
else:
    attempts.second_phase = lose
number = swarm.next_call
x = np.array([{"A": 1, "B": 10, "C": 100}[name]])
assert swarm.allreduce([x], "sum")[0].tolist() == [111] and x[0] < 100
assert len(swarm.last_call.contributors) == 3 and swarm.last_call.number == number
attempts.second_phase = second
assert swarm.allreduce(x, "sum").tolist() == [11]
assert len(swarm.last_call.contributors) == 2 and swarm.last_call.number == number + 1
swarm.close()
"""
# "B" refuses one request of the kind `refused` after the loss of "C". Of "A" and "B", only the first member of the view
# proposes views.
REFUSAL = """
from unisono.swarm import proposer
from unisono.swarm.answers import Answers
proposer._MEETING_S = 600.0
settings.update(timeout_s=600.0, rendezvous_timeout_s=600.0)
answer, refusals = Answers.answer, []
def refuse_once(self, request):
    if name == "B" and request["do"] == refused and has_mark(folder, "A has it") and not refusals:
        refusals.append(request)
        mark("B refuses")
        raise ValueError("a planted refusal")
    return answer(self, request)
Answers.answer = refuse_once
step = proposer.Proposer._step
def step_of_first(self):
    members = () if self._state.view is None else self._state.view.members
    if name == next((member.name for member in members if member.name != "C"), name):
        step(self)
proposer.Proposer._step = step_of_first
"""


def test_the_members_that_stay_get_the_sum_that_one_of_them_has_from_it(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in "ABC":
            swarm.start(name, SUM_OF_ONE)
        swarm.output("A")
        swarm.output("B")
        swarm.output("C", -signal.SIGKILL)


@pytest.mark.parametrize("refused", ["meet", "adopt"])
def test_members_wait_for_no_step_of_a_change_that_one_refuses(tmp_path: Path, refused: str) -> None:
    """If A waited for B in the refused step, it would wait longer than this test may take."""
    with SwarmProcesses(tmp_path) as swarm:
        for name in "ABC":
            swarm.start(name, f"refused = {refused!r}{REFUSAL}{SUM_OF_ONE}")
        swarm.output("A")
        swarm.output("B")
        swarm.output("C", -signal.SIGKILL)


def test_a_member_that_differs_ends_and_the_others_go_on(tmp_path: Path) -> None:
    other = """
    swarm = un.Swarm(places, **settings)
    mark("entered")
    try:
        swarm.allreduce(np.zeros(7), "sum")
    except un.MismatchError as error:
        print("mismatch", error)
    """
    slow = """
    swarm = un.Swarm(places, **settings)
    mark("slow entered")
    await_mark("A with AB again")
    try:
        swarm.allreduce(np.array([1]), "sum")
    except un.LeftBehindError as error:
        print("left", error)
    """
    expelled = """
    swarm = un.Swarm(places, **settings)
    try:
        while True:
            swarm.allreduce(np.array([1]), "sum")
    except un.LeftBehindError as error:
        print("left", error)
    try:
        swarm.enter()
    except un.RendezvousError as error:
        print("barred:", error)
    """
    with SwarmProcesses(tmp_path) as swarm:
        members = SUMS.replace("**settings", "patience_s=6.0, **{**settings, 'warn_after_s': 3.0}").replace(
            "one = {", "one = {'odd': 0, 'slow': 1, 'expelled': 1, **{"
        )
        members = members.replace('enumerate("ABCDE")}', 'enumerate("ABCDE")}}')
        members = members.replace(
            "        time.sleep(0.002)",
            """        time.sleep(0.002)
        if has_mark(folder, "slow entered") and "slow" not in [member.name for member in swarm.members]:
            mark(f"{name} with AB again")
        if name == "A" and "expelled" in names and "expelled" in [member.name for member in swarm.members]:
            swarm.expel([member.name for member in swarm.members].index("expelled"))
""",
        )
        for name in "AB":
            swarm.start(name, members)
        swarm.await_marks("A with AB", "B with AB")
        swarm.start("odd", other)
        assert "mismatch" in swarm.output("odd")
        (tmp_path / "mark A with AB").unlink()
        swarm.await_marks("A with AB")
        swarm.start("slow", slow)
        assert "left" in swarm.output("slow")
        swarm.start("expelled", expelled)
        assert "barred: the members have expelled this process" in swarm.output("expelled")
        (tmp_path / "mark A with AB").unlink()
        swarm.await_marks("A with AB")
        for name in "AB":
            swarm.mark(f"{name} leaves")
        outputs = [swarm.output(name) for name in "AB"]
        assert any("member slow has not begun call" in output for output in outputs)


# Members that call with arrays of other lengths. One of them ends, and does so in the way that a mark names.
DIFFERING = """
with un.Swarm(places, **settings) as swarm:
    while swarm.size < 2:
        time.sleep(0.01)
    mark(f"{name} entered")
    await_mark("A entered", "B entered")
    try:
        for count in range(3):
            swarm.allreduce(np.zeros(1 + (name == "B")))
        print("went on", len(swarm.last_call.contributors))
        mark("went on")
    except un.MismatchError as error:
        print("differs")
        if has_mark(folder, "stays"):
            await_mark("went on")
"""


@pytest.mark.parametrize("how", ["stays", "leaves"])
def test_of_two_members_that_differ_one_goes_on_when_the_other_one_has_its_error(tmp_path: Path, how: str) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        swarm.mark(how)
        for name in "AB":
            swarm.start(name, DIFFERING)
        outputs = sorted(swarm.printed(name).strip() for name in "AB")
    assert outputs == ["differs", "went on 1"]


# "B" passes a dict that has the key ODD instead of OTHER, in the same form and of the same length.
KEYS = """
with un.Swarm(places, min_size=2, **settings) as swarm:
    x = {COMMON: np.ones(2), (OTHER if name != "B" else ODD): np.ones(2)}
    while swarm.size < 3:
        time.sleep(0.01)
    try:
        for _ in range(3):
            total = swarm.allreduce(x, "sum")
        assert sorted(total) == [OTHER, COMMON] and total[OTHER].tolist() == [2.0, 2.0]
        print("went on", len(swarm.last_call.contributors))
    except un.MismatchError as error:
        print(error.message)
"""


@pytest.mark.parametrize(("common", "other", "odd"), [("'w'", "'b'", "'c'"), ("9", "1", "2")])
def test_arrays_of_different_keys_are_never_combined(tmp_path: Path, common: str, other: str, odd: str) -> None:
    program = KEYS.replace("COMMON", common).replace("OTHER", other).replace("ODD", odd)
    with SwarmProcesses(tmp_path) as swarm:
        for name in "ABC":
            swarm.start(name, program)
        outputs = {name: swarm.printed(name).strip() for name in "ABC"}
    assert outputs["A"] == outputs["C"] == "went on 2"
    assert "passes arrays of other keys than the others" in outputs["B"]
    assert f"x[{odd}], x[{common}]" in outputs["B"]


WRONG_OP = """
with un.Swarm(places, min_size=3, **settings) as swarm:
    if name == "B":
        try:
            swarm.allreduce({"v": np.ones(2)}, "mean")
        except un.UsageError:
            print("refused")
    print(swarm.allreduce({"w": np.ones(2)}, "sum")["w"].tolist())
    swarm.barrier()
"""


def test_a_wrong_op_for_a_dict_sends_nothing_to_the_others(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in "ABC":
            swarm.start(name, WRONG_OP)
        outputs = [swarm.printed(name).split("\n", 1) for name in "ABC"]
    assert outputs == [["[3.0, 3.0]", ""], ["refused", "[3.0, 3.0]\n"], ["[3.0, 3.0]", ""]]


READ_ONLY = np.broadcast_to(np.zeros(1), 2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda swarm: swarm.allreduce(np.ones(2), out=np.zeros(3)), r"out is float64\[3\], and x float64\[2\]"),
        (lambda swarm: swarm.allreduce(np.ones(2), out=np.zeros(2, int)), r"out is int64\[2\], and x float64"),
        (lambda swarm: swarm.allreduce(np.ones(2), out=READ_ONLY), "out is read-only"),
        (lambda swarm: swarm.allreduce([np.ones(2)], out=[]), "there is no array"),
        (lambda swarm: swarm.allreduce([np.ones(2)], out=[np.ones(2)] * 2), "out has 2 arrays, and the result 1"),
        (
            lambda swarm: swarm.allreduce({1: np.ones(2)}, out={2: np.ones(2)}),
            r"out must have the form of x: it has out\[2\] in the place of out\[1\]",
        ),
        (lambda swarm: swarm.allreduce({"w": 1.5}), r"x\['w'\] must be an array, not float"),
        (lambda swarm: swarm.allgather(np.float64(1)), "x must be an array, not numpy.float64"),
        (lambda swarm: swarm.state({"w": np.ones(2)}, 1, check_every=1.5), "check_every must be a number of calls"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_call(call: Callable[[un.Swarm], object], text: str) -> None:
    key = os.urandom(32)
    with un.MeetingPlace("tcp://127.0.0.1:0", key) as place, un.Swarm(place.url, key=key) as swarm:
        with pytest.raises(un.UsageError, match=text):
            call(swarm)
        assert swarm.next_call == 1
        assert swarm.allreduce(np.ones(2), "sum").tolist() == [1.0, 1.0]


# "A" and "B" go on whatever the others bring. "slow" computes ten times as long as they do.
GOING_ON = """
w, step, names = np.zeros(3), 0, set()
with un.Swarm(places, min_size=2, patience_s=2.0, **{**settings, "warn_after_s": 30.0}) as swarm:
    is_over = False
    while not is_over:
        step = swarm.state({"w": w}, step).revision
        total = swarm.allreduce(np.array([1.0, has_mark(folder, "end")]), "sum")
        is_over = total[1] > 0
        step += 1
        names |= {member.name for member in swarm.last_call.contributors}
        mark(f"{name} with {len(swarm.last_call.contributors)}")
        time.sleep(0.1)
    print(sorted(names))
"""
BAD = {
    "shape": """
with un.Swarm(places, **settings) as swarm:
    try:
        swarm.state({"w": np.zeros(4)}, 0)
    except un.MismatchError as error:
        print(error)
    try:
        swarm.barrier()
    except un.LeftBehindError as error:
        print(error)
""",
    "release": """
from unisono.swarm import meeting_place
meeting_place.release = lambda: "Unisono 0.0.1"
try:
    un.Swarm(places, **{**settings, "rendezvous_timeout_s": 1000.0})
except un.RendezvousError as error:
    print(error)
""",
    "clock": """
real = time.time
time.time = lambda: real() + 400 * 86400
with un.Swarm(places, **settings) as swarm:
    w = np.zeros(3)
    step = swarm.state({"w": w}, 0).revision
    print("total", swarm.allreduce(np.zeros(2), "sum")[0], step > 0)
""",
    "disk": """
with un.Swarm(places, **settings) as swarm:
    swarm.state({"w": np.zeros(3)}, 0)
    with open("/dev/full", "w") as file:
        file.write("a checkpoint")
""",
    "slow": """
with un.Swarm(places, **settings) as swarm:
    w = np.zeros(3)
    try:
        for count in range(1000):
            step = swarm.state({"w": w}, 0).revision
            time.sleep(1.0 if count < 14 else 15.0)
            swarm.allreduce(np.zeros(2), "sum")
    except un.LeftBehindError as error:
        print("left", error)
""",
}


def test_members_go_on_when_a_process_of_another_model_release_clock_disk_or_speed_enters(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in "AB":
            swarm.start(name, GOING_ON)
        swarm.await_marks("A with 2", "B with 2")
        for name, program in BAD.items():
            swarm.start(name, program)
            output = swarm.output(name, int(name == "disk"))
            text = {
                "shape": "state['w'] is float64[4] on this member, and float64[3] on the others",
                "release": "refuses this process: this process runs Unisono 0.0.1, and the meeting place",
                "clock": "total 2.0 True",
                "disk": "OSError: [Errno 28]",
                "slow": "left the other members have gone on without this one",
            }[name]
            assert text in output, output
            (tmp_path / "mark A with 2").unlink()
            swarm.await_marks("A with 2")
        swarm.mark("end")
        outputs = [swarm.output(name) for name in "AB"]
    assert any("member slow takes " in output for output in outputs), outputs
    assert any("member slow has not begun call" in output for output in outputs), outputs


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"places": []}, un.UsageError, "needs the address of a meeting place"),
        ({"places": None}, un.UsageError, "None cannot be used: it must have the form tcp://HOST:PORT"),
        ({"places": "nowhere"}, un.UsageError, "must have the form tcp://HOST:PORT"),
        ({"places": "http://127.0.0.1:29400"}, un.UsageError, "must have the form tcp://HOST:PORT"),
        ({"places": "tcp://127.0.0.1"}, un.UsageError, "must name a host and a port"),
        ({"key": b"short"}, un.UsageError, "key must be 32 bytes"),
        ({"name": ""}, un.UsageError, "name must be a printable text"),
        ({"min_size": 0}, un.UsageError, "min_size must be a positive number"),
        ({"patience_s": -1}, un.UsageError, "patience_s must be a positive number"),
        ({"quorum_timeout_s": 0}, un.UsageError, "quorum_timeout_s must be a positive number"),
        ({"key": bytes(32), "rendezvous_timeout_s": 10.0}, un.RendezvousError, "does not answer as one of this job"),
        ({"places": "tcp://127.0.0.1:9"}, un.RendezvousError, "serve a meeting place there by"),
        ({}, un.RendezvousError, "at tcp:.* is no member, and too few processes wait to found a swarm: 1; .* for 3 s"),
    ],
)
def test_a_process_that_cannot_enter_gets_an_error_that_says_why(
    tmp_path: Path, arguments: dict[str, object], error: type[un.UnisonoError], text: str
) -> None:
    key = os.urandom(32)
    with un.MeetingPlace("tcp://127.0.0.1:0", key) as place:
        usual = {"places": place.url, "key": key, "min_size": 2, "heartbeat_timeout_s": 0.5}
        with pytest.raises(error, match=text):
            un.Swarm(**{**usual, "rendezvous_timeout_s": 3.0, **arguments})  # type: ignore[arg-type]


def test_a_wrong_call_is_refused_before_anything_is_sent() -> None:
    key = os.urandom(32)
    x = np.ones(2)
    with un.MeetingPlace("tcp://127.0.0.1:0", key) as place, un.Swarm(place.url, key=key) as swarm:
        for call, text in (
            (lambda: swarm.broadcast(x, 0), "root must be a member, such as swarm.members.0."),  # type: ignore[arg-type]
            (lambda: swarm.allreduce(2.0), "x must be an array, not float"),
            (lambda: swarm.state({"x": x}, 1, check_every=-1), "check_every must be a number of calls, or 0"),
        ):
            with pytest.raises(un.UsageError, match=text):
                call()  # type: ignore[no-untyped-call]
        assert swarm.last_call is None


def test_a_swarm_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_KEY_FILE", raising=False)
    with pytest.raises(un.UsageError, match="needs the key of its job"):
        un.Swarm("tcp://127.0.0.1:1")


def test_a_meeting_place_lets_no_new_process_begin_before_one_that_has_lost_the_quorum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_place, "_GRACE", 0.0)
    key = os.urandom(32)
    new, lost, other = (Member(new_id(), name, "127.0.0.1", 9) for name in ("new", "lost", "other"))
    with un.MeetingPlace("tcp://127.0.0.1:0", key) as place:
        caller = Caller(key, job_of_key(key), TlsPolicy())
        places = meeting_place.Places([place.url], caller, serves=False, key=key)
        news = [places.register(*each) for each in ((lost, 0, 60.0, 3), (new, 0, 60.0, 1), (other, 0, 60.0, 1))]
        news += [places.register(*each) for each in ((new, 0, 60.0, 1), (lost, 0, 60.0, 3))]
        caller.close()
    assert [each.found_with for each in news] == [0, 0, 3, 0, 0]  # "other" begins with the state of all three


# "C" ends all its connections by TCP, as a network does that forgets them, while the members call.
CUT = """
from unisono.bench.programs.churn import cut_connections
with un.Swarm(places, **{**settings, "transports": "tcp", "timeout_s": 90.0}) as swarm:
    cuts = 0
    while not has_mark(folder, "end"):
        try:
            swarm.allreduce(np.zeros(4096))
        except un.LeftBehindError:
            swarm.enter()
            continue
        except un.QuorumLostError:  # the others have ended
            continue
        is_full = len(swarm.last_call.contributors) == 3
        mark(f"{name} with {len(swarm.last_call.contributors)} {cuts}")
        mark(f"{name} is whole {has_mark(folder, 'cut 5')}" if is_full else f"{name} is less")
        if name == "C" and is_full and cuts < 5:
            cuts += 1
            cut_connections()
            mark(f"cut {cuts}")
    os._exit(0)
"""


def test_members_go_on_after_all_connections_of_one_have_broken_again_and_again(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in "ABC":
            swarm.start(name, CUT)
        swarm.await_marks("cut 5", *(f"{name} is whole True" for name in "ABC"))
        swarm.mark("end")
        for name in "ABC":
            swarm.output(name)
