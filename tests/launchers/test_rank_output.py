from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from unisono.foundation.processes import LOST
from unisono.launchers import output
from unisono.launchers.output import Lines, MergedOutput
from unisono.launchers.process import Exit
from unisono.launchers.root_cause import LastError, last_error, root_cause

CHAINED = b"""Traceback (most recent call last):
  File "program.py", line 4, in <module>
    raise KeyError("first")
KeyError: 'first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "program.py", line 6, in <module>
    raise ValueError("of two\\nlines")
ValueError: of two
lines
Exception ignored in: <function f at 0x7f>
"""
SYNTAX = b"""  File "program.py", line 1
    never def this
    ^^^^^^^^^
SyntaxError: invalid syntax
"""
GROUP = b"""  + Exception Group Traceback (most recent call last):
  |   File "program.py", line 1, in <module>
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: one
"""
PEER_LOST = LastError("unisono.errors.PeerLostError", "rank 1 has died")
OWN = LastError("ValueError", "bad")
OF_TORCH = b"""[rank0]: Traceback (most recent call last):
[rank0]:   File "program.py", line 2, in <module>
[rank0]:     dist.all_reduce(x)
[rank0]: unisono.errors.PeerLostError: rank 1 has left: ValueError: bad

[rank0]: The above exception was the direct cause of the following exception:

[rank0]: Traceback (most recent call last):
[rank0]:   File "program.py", line 4, in called
[rank0]: torch.distributed.DistBackendError: unisono: Connection closed by peer: PeerLostError: rank 1 has left
"""
BY_UNISONO = LastError(
    "torch.distributed.DistBackendError", "unisono: Connection closed by peer: PeerLostError: rank 1"
)
BY_GLOO = LastError(
    "RuntimeError", "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:11139. This"
)


class Written:
    def __init__(self, *, hold: bool, keep_going: bool = False) -> None:
        self.lines: list[tuple[int, str, bytes]] = []
        self.output = MergedOutput(lambda *line: self.lines.append(line), hold=hold, keep_going=keep_going)


@given(st.lists(st.text("ab\n").map(str.encode)))
def test_lines_do_not_depend_on_how_the_stream_is_cut(pieces: list[bytes]) -> None:
    lines = Lines()
    result = [line for piece in pieces if piece for line in lines.feed(piece)] + lines.feed(b"")
    whole = b"".join(pieces)
    assert result == (whole + b"\n" * (not whole.endswith(b"\n") and bool(whole))).splitlines(keepends=True)


def test_progress_bars_come_line_by_line() -> None:
    lines = Lines()
    assert lines.feed(b"\r 10%\r 20%") == [b" 10%\r"]
    assert lines.feed(b"\r100%\n") == [b" 20%\r", b"100%\n"]


def test_windows_line_end_is_one_end_even_if_it_is_cut() -> None:
    lines = Lines()
    assert lines.feed(b"one\r") == []
    assert lines.feed(b"\ntwo\r\n") == [b"one\r\n", b"two\r\n"]


def test_line_without_end_is_written_once_it_is_too_long() -> None:
    lines = Lines()
    assert sum(len(line) for line in lines.feed(b"x" * (output.LONGEST_LINE_NBYTES + 1))) > output.LONGEST_LINE_NBYTES


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (CHAINED, "ValueError", "of two"),
        (SYNTAX, "SyntaxError", "invalid syntax"),
        (GROUP, "ExceptionGroup", "two"),
        (OF_TORCH, "torch.distributed.DistBackendError", "unisono: Connection closed by peer: PeerLostError"),
    ],
)
def test_the_last_error_is_that_of_the_last_traceback(text: bytes, kind: str, message: str) -> None:
    result = last_error(text.splitlines(keepends=True))
    assert result is not None
    assert result.kind == kind
    assert result.message.startswith(message)


def test_error_without_message_is_shown_as_its_type() -> None:
    assert str(last_error([b"Traceback (most recent call last):\n", b"KeyboardInterrupt\n"])) == "KeyboardInterrupt"
    assert str(PEER_LOST) == "PeerLostError: rank 1 has died"


def test_text_without_traceback_has_no_last_error() -> None:
    assert last_error([]) is None
    assert last_error([b"  File: none\n"]) is None


@pytest.mark.parametrize(
    ("exits", "errors", "cause"),
    [
        ([Exit(0, 0), Exit(1, 0)], {}, None),
        ([Exit(0, 1), Exit(1, 1)], {0: PEER_LOST, 1: OWN}, 1),
        ([Exit(2, 1), Exit(0, 1), Exit(1, 1)], {0: OWN, 1: OWN, 2: PEER_LOST}, 0),
        ([Exit(0, 1), Exit(1, -9)], {0: PEER_LOST}, 1),
        ([Exit(0, -15, stopped=True), Exit(1, 1)], {1: OWN}, 1),
        ([Exit(0, -15, stopped=True), Exit(1, 1)], {1: PEER_LOST}, 1),
        ([Exit(0, 1), Exit(1, 1)], {0: PEER_LOST, 1: PEER_LOST}, 0),
        ([Exit(0, -15, stopped=True)], {}, 0),
        ([Exit(0, 1), Exit(1, 3)], {0: PEER_LOST}, 1),
        ([Exit(0, 1), Exit(1, 1)], {0: BY_UNISONO, 1: OWN}, 1),
        ([Exit(0, 1), Exit(1, 1)], {0: BY_GLOO, 1: OWN}, 1),
    ],
)
def test_root_cause_is_first_rank_whose_failure_is_no_consequence(
    exits: list[Exit], errors: dict[int, LastError], cause: int | None
) -> None:
    result = root_cause(exits, errors)
    assert (result.rank if result else None) == cause


def test_exit_status_follows_shell_conventions() -> None:
    assert [Exit(0, code).status for code in (0, 3, -9, LOST)] == [0, 3, 137, 1]
    assert [str(Exit(0, code)) for code in (3, -9, -40, LOST)] == [
        "exited with code 3",
        "was killed by SIGKILL",
        "was killed by signal 40",
        "ended, and its exit code is lost (the program has waited for all of its children)",
    ]


@pytest.mark.parametrize("traceback", [CHAINED, OF_TORCH])
def test_a_traceback_is_held_back_until_the_end(traceback: bytes) -> None:
    written = Written(hold=True)
    written.output.output(0, "stderr", b"before\n" + traceback)
    written.output.output(1, "stdout", b"Traceback (most recent call last):\n")
    assert written.lines == [(0, "stderr", b"before\n"), (1, "stdout", b"Traceback (most recent call last):\n")]
    assert written.output.finish() == {0: traceback.splitlines(keepends=True)}


def test_traceback_is_written_and_returned_when_nothing_is_held_back() -> None:
    written = Written(hold=False)
    written.output.output(0, "stderr", SYNTAX)
    assert b"".join(line for _, _, line in written.lines) == SYNTAX
    assert written.output.finish() == {0: SYNTAX.splitlines(keepends=True)}


@pytest.mark.parametrize(
    ("ranks", "held"), [([], False), ([Exit(1, 0)], False), ([Exit(0, 1)], True), ([Exit(1, 1)], True)]
)
def test_held_traceback_is_written_when_no_rank_fails_within_the_hold_time(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Exit], held: bool
) -> None:
    monkeypatch.setattr(output, "HOLD_S", -1.0)
    written = Written(hold=True)
    written.output.output(0, "stderr", SYNTAX)
    for rank in ranks:
        written.output.ended(rank)
    written.output.tick()
    assert bool(written.output.finish()) is held
    assert (b"".join(line for _, _, line in written.lines) == SYNTAX) is not held


def test_traceback_of_a_rank_that_runs_on_after_a_loss_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "HOLD_S", -1.0)
    written = Written(hold=False, keep_going=True)
    for rank in (0, 1):
        written.output.output(rank, "stderr", SYNTAX)
    written.output.ended(Exit(1, 1))
    written.output.tick()
    assert written.output.finish() == {1: SYNTAX.splitlines(keepends=True)}
