"""The table of names that rank 0 keeps for `unisono.compat.horovod`, without ranks."""

from __future__ import annotations

import pytest

from unisono.compat.horovod.coordinator import Coordinator
from unisono.compat.horovod.execution import batches, rows_of
from unisono.compat.horovod.requests import Answer, ReadyCall, decode_answers, decode_requests, encode
from unisono.compat.horovod.settings import Settings, read_settings
from unisono.errors import UsageError

X = (("float32", (2, 3)),)


def allreduce(name: str, **facts: object) -> ReadyCall:
    return ReadyCall("allreduce", name, **{"arrays": X, "op": "sum", **facts})  # type: ignore[arg-type]


def names(answers: list[Answer]) -> list[str]:
    return [answer.request.name for answer in answers]


def test_a_name_is_due_when_the_last_rank_asks_for_it() -> None:
    table = Coordinator((0, 1, 2))
    assert table.add(0, [allreduce("a"), allreduce("b")], 0.0) == []
    assert table.add(1, [allreduce("b"), allreduce("a")], 0.0) == []
    assert names(table.add(2, [allreduce("b")], 0.0)) == ["b"]
    assert names(table.add(2, [allreduce("a")], 0.0)) == ["a"]
    assert not table.waits()


def test_calls_of_different_kinds_may_have_the_same_name() -> None:
    table = Coordinator((0, 1))
    table.add(0, [allreduce("a")], 0.0)
    assert table.add(1, [ReadyCall("allgather", "a", X)], 0.0) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (allreduce("a", arrays=(("float32", (3, 2)),)), "float32[3, 2]"),
        (allreduce("a", arrays=(("float64", (2, 3)),)), "float64[2, 3]"),
        (allreduce("a", op="avg"), "op avg"),
        (allreduce("a", scales=(0.5, 1.0)), "factors 0.5 and 1"),
        (allreduce("a", device="cuda"), "on cuda"),
    ],
    ids=["shape", "dtype", "op", "factor", "device"],
)
def test_requests_that_do_not_fit_together_are_an_error_that_names_both(other: ReadyCall, words: str) -> None:
    table = Coordinator((4, 7))
    table.add(0, [allreduce("a")], 0.0)
    (answer,) = table.add(1, [other], 0.0)
    assert answer.error == "NameMismatchError"
    assert answer.last == 1
    assert words in answer.message
    assert "on rank 7" in answer.message
    assert "on rank 4" in answer.message
    assert names(table.add(0, [allreduce("a")], 0.0) + table.add(1, [allreduce("a")], 0.0)) == ["a"]


def test_ranks_may_gather_different_numbers_of_rows() -> None:
    table = Coordinator((0, 1))
    table.add(1, [ReadyCall("allgather", "a", (("int64", (5, 2)),))], 0.0)
    (answer,) = table.add(0, [ReadyCall("allgather", "a", (("int64", (0, 2)),))], 0.0)
    assert not answer.error
    assert answer.rows == ((0, 5),)


def test_a_rank_that_has_joined_counts_for_allreduces_alone() -> None:
    table = Coordinator((0, 1))
    table.add(0, [allreduce("a")], 0.0)
    assert names(table.add(1, [ReadyCall("join", "")], 0.0)) == ["a", ""]
    (refused,) = table.add(0, [ReadyCall("broadcast", "b", X, root=0)], 0.0)
    assert refused.error == "NameMismatchError"
    assert "rank 1 called join()" in refused.message
    (joined,) = table.add(0, [ReadyCall("join", "")], 0.0)
    assert joined.last == 0
    assert table.add(1, [allreduce("c")], 0.0) == []


def test_a_name_that_some_ranks_do_not_use_is_an_error_after_the_time_limit() -> None:
    table = Coordinator((0, 1, 2))
    table.add(1, [allreduce("a")], 10.0)
    assert table.slow(14.0, 5.0) == []
    (text,) = table.slow(15.0, 5.0)
    assert "not by ranks 0, 2" in text
    assert table.slow(16.0, 5.0) == []
    assert table.stalled(39.0, 30.0) == []
    (answer,) = table.stalled(40.0, 30.0)
    assert answer.error == "StalledError"
    assert "was called by rank 1 30 s ago, and not by ranks 0, 2" in answer.message
    assert not table.waits()


def test_a_request_that_crosses_the_error_about_its_name_is_dropped() -> None:
    table = Coordinator((0, 1))
    table.add(0, [allreduce("a")], 0.0)
    assert len(table.stalled(9.0, 5.0)) == 1
    assert table.add(1, [allreduce("a")], 9.0) == []  # rank 1 had not got the error when it asked
    assert not table.waits()
    table.add(0, [allreduce("a", stalls_seen=1)], 9.0)
    assert names(table.add(1, [allreduce("a", stalls_seen=1)], 9.0)) == ["a"]


def test_steps_are_passed_on_only_while_a_rank_has_joined() -> None:
    table = Coordinator((0, 1))
    step = ReadyCall("step", "optimizer", root=3)
    assert table.add(0, [step], 0.0) == []
    assert [answer.request.kind for answer in table.add(1, [ReadyCall("join", "")], 0.0)] == ["joined"]
    assert [answer.request for answer in table.add(0, [step], 0.0)] == [step]
    assert not table.waits()
    table.add(0, [ReadyCall("join", "")], 0.0)
    assert table.add(0, [step], 0.0) == []


def test_a_rank_that_leaves_ends_everything() -> None:
    table = Coordinator((0, 1))
    table.add(0, [allreduce("a")], 0.0)
    failed, last = table.add(1, [ReadyCall("leave", "")], 0.0)
    assert failed.error == "ShutDownError"
    assert "rank 1 has shut down" in failed.message
    assert last.request.kind == "leave"
    assert table.add(0, [allreduce("b")], 0.0) == []
    assert table.has_ended


def test_requests_and_answers_survive_their_way() -> None:
    asked = [allreduce("ä", scales=(0.5, 2.0)), ReadyCall("alltoall", "b", X, splits=(1, 1))]
    assert decode_requests(encode(asked)) == asked
    answers = [Answer(asked[0]), Answer(asked[1], ((1, 1), (0, 2)), 1, "StalledError", "text")]
    assert decode_answers(encode(answers)) == answers


def test_variables_of_horovod_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "7")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    assert read_settings() == Settings(warn_s=7.0, is_checked=False)
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "64MB")
    with pytest.raises(UsageError, match="HOROVOD_FUSION_THRESHOLD must be a number, not '64MB'"):
        read_settings()


def test_neighbours_of_one_op_are_fused_up_to_the_threshold() -> None:
    answers = [Answer(allreduce(name)) for name in "abc"]
    answers += [Answer(allreduce("d", op="max")), Answer(allreduce("e", op="max"), error="StalledError")]
    assert [names(list(batch)) for batch in batches(answers, 48)] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_the_first_ranks_get_the_rows_that_are_left_over() -> None:
    assert rows_of(7, 3) == [3, 2, 2]
    assert rows_of(1, 3) == [1, 0, 0]
