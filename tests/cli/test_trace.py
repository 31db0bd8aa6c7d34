"""Traces: the calls of real ranks in the format that Perfetto reads, alone and merged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import unisono
from support.hosts import needs_namespaces
from support.ranks import Job, Prefixed

import unisono as un
from unisono.bench.namespaces import SUBNET, inside, network
from unisono.postmortem.loading import load
from unisono.postmortem.timeline import timeline
from unisono.transports.recorder import traces
from unisono.transports.recorder.clocks import facts_of
from unisono.transports.recorder.memory import RecordedCall, Snapshot

X = np.ones(8, np.float32)


def call_all(world: un.Communicator) -> None:
    pair = world.subgroup([0, 1]) if world.rank < 2 else None
    world.barrier()
    works = [world.allreduce(X.copy(), wait=False) for _ in range(3)]
    if pair is not None:
        pair.sendrecv(X, 1 - pair.rank, X.copy(), 1 - pair.rank)
    un.wait_all(works)


def calls_of(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank and "args" in event]


def overlaps(events: list[dict[str, Any]]) -> bool:
    """Return whether two calls on one track overlap."""
    ends: dict[tuple[int, int], float] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        track = event["pid"], event["tid"]
        if event["ts"] < ends.get(track, 0.0) - 0.01:
            return True
        ends[track] = event["ts"] + event["dur"]
    return False


def test_ranks_write_traces_when_they_leave_and_merge_joins_them(tmp_path: Path) -> None:
    un.launch(call_all, 3, options=un.Options(trace=str(tmp_path / "traces")))
    assert len(list((tmp_path / "traces").iterdir())) == 3
    merged = unisono("trace", "merge", "traces", folder=tmp_path)
    assert (merged.returncode, merged.stderr) == (0, "")
    trace = json.loads((tmp_path / "traces" / "trace.json").read_text())
    events = trace["traceEvents"]
    assert trace["otherData"]["ranks"] == [0, 1, 2]
    for rank in range(3):
        names = [event["name"] for event in calls_of(events, rank)]
        assert names.count("allreduce(float32[8], op=sum)") == 3
        assert names.count("barrier()") == 1
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0}
    assert {"collectives of all ranks", "messages of ranks 0, 1"} <= tracks
    assert not overlaps([event for rank in range(3) for event in calls_of(events, rank)])
    assert all(event["dur"] >= 0 and event["ts"] > 1e15 for event in events if event["ph"] == "X")


def reduce_by_ring(world: un.Communicator) -> None:
    for _ in range(2):
        world.allreduce(np.ones(300_000, np.float32), algorithm="ring")


def test_traces_have_the_groups_of_plans_on_request(tmp_path: Path) -> None:
    options = un.Options(trace=str(tmp_path), trace_groups=True, segment_nbytes=256 << 10)
    un.launch(reduce_by_ring, 3, options=options)
    for path in tmp_path.iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        calls = [event for event in events if event.get("cat") == "collective" and "args" in event]
        groups = [event for event in events if event.get("cat") == "group"]
        for begun in calls[:2]:
            own = [event for event in groups if event["args"]["sequence"] == begun["args"]["sequence"]]
            segments = {event["args"]["segment"] for event in own}
            assert len(segments) > 1
            # a ring of three ranks has two steps of a reduce-scatter and two of an allgather
            assert {len([event for event in own if event["args"]["segment"] == segment]) for segment in segments} == {4}
            assert all(begun["ts"] - 1 <= event["ts"] <= event["ts"] + event["dur"] for event in own)
            assert max(event["ts"] + event["dur"] for event in own) <= begun["ts"] + begun["dur"] + 1
        assert not overlaps(groups)


def call(number: int, called_ns: int, ended_ns: int) -> RecordedCall:
    return RecordedCall(
        number, 0, number, False, 1, "barrier()", {}, 8, called_ns, called_ns + 5, called_ns + 7, ended_ns, "", None,
        None, "done",
    )  # fmt: skip


def test_overlapping_calls_get_tracks_of_their_own_and_show_their_parts(tmp_path: Path) -> None:
    calls = (call(0, 1000, 9000), call(1, 2000, 3000), call(2, 4000, 5000), call(3, 10000, 11000))
    path = traces.write(Snapshot(0, 1, 5, {"host": "a"}, {}, (), 10, calls), tmp_path / "deep" / "t.json")
    trace = json.loads(path.read_text())
    assert [event["tid"] for event in calls_of(trace["traceEvents"], 0)] == [1, 2, 2, 1]
    parts = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X" and "args" not in event]
    assert parts == ["queued", "before the first message"] * 4
    assert trace["otherData"]["calls_lost"] == 6


# --- clocks -----------------------------------------------------------------------------------------------------------

AHEAD_S = 5000


def call_together(world: un.Communicator, say: Callable[[str], None], folder: str) -> None:
    world.barrier()
    world.trace(f"{folder}/{world.rank}.trace.json")
    world.dump(folder)
    world.barrier()
    say("done")


@needs_namespaces
def test_ranks_on_hosts_with_other_clocks_are_aligned(tmp_path: Path) -> None:
    with network(2) as hosts:
        prefixes = [inside(hosts[0]), [*inside(hosts[1]), *f"unshare -T --fork --monotonic {AHEAD_S}".split()]]
        options = {"bind_address": SUBNET}
        with Job(call_together, Prefixed(prefixes), tmp_path, str(tmp_path), **options) as job:
            assert job.hear_all() == ["done"] * 2
    merged = unisono("trace", "merge", ".", folder=tmp_path)
    assert "the clocks of the hosts are aligned to" in merged.stdout
    trace = json.loads((tmp_path / "trace.json").read_text())
    offset_ns, uncertainty_ns = trace["otherData"]["clocks"]["1"].values()
    assert abs(offset_ns + AHEAD_S * 10**9) < uncertainty_ns
    bars = [calls_of(trace["traceEvents"], rank)[0] for rank in range(2)]
    assert max(bar["ts"] for bar in bars) < min(bar["ts"] + bar["dur"] for bar in bars) + uncertainty_ns / 1e3
    first, second = timeline(load([tmp_path]))[:2]
    assert max(first.begin_s, second.begin_s) < min(first.end_s, second.end_s) + uncertainty_ns / 1e9


def test_merging_puts_times_on_the_clock_of_rank_0_where_offsets_are_known(tmp_path: Path) -> None:
    for rank, measured in ((0, (0, 0)), (1, (-7_000_000, 20_000)), (2, None)):
        about = {"job": "aa" * 16, "epoch": 0, **facts_of(measured)}
        snapshot = Snapshot(rank, 3, 5, about, {}, (), 1, (call(0, 8_000_000 if rank == 1 else 1_000_000, 9_000_000),))
        traces.write(snapshot, tmp_path / traces.file_name("aaaaaaaa-0", rank, 3))
    merged = unisono("trace", "merge", str(tmp_path), folder=tmp_path)
    assert "rank 2 could not compare clocks with rank 0" in merged.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    first, second, _ = (calls_of(events, rank)[0]["ts"] for rank in range(3))
    assert abs(first - second) < 1


def test_the_program_can_ask_for_a_trace(tmp_path: Path) -> None:
    with un.init(un.Options()) as world:
        world.barrier()
        path = world.trace(tmp_path / "mine.json")
    assert [event["name"] for event in calls_of(json.loads(path.read_text())["traceEvents"], 0)] == ["barrier()"]
    assert os.listdir(tmp_path) == ["mine.json"]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "set UNISONO_TRACE"),
        ({"a.trace.json": "{"}, "no trace of Unisono, or only a part of one"),
        ({"a.trace.json": '{"traceEvents": []}'}, "no trace of Unisono"),
    ],
)
def test_what_is_no_trace_is_refused(files: dict[str, str], says: str, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    for name, text in files.items():
        (tmp_path / "traces" / name).write_text(text)
    refused = unisono("trace", "merge", "traces", folder=tmp_path)
    assert refused.returncode == 2
    assert says in refused.stderr


def test_several_jobs_are_named_and_one_is_picked(tmp_path: Path) -> None:
    for job in ("aa", "bb"):
        snapshot = Snapshot(0, 1, 5, {"job": job * 16, "epoch": 0}, {}, (), 1, (call(0, 1, 2),))
        traces.write(snapshot, tmp_path / traces.file_name(f"{job * 4}-0", 0, 1))
    assert "aaaaaaaa-0, bbbbbbbb-0" in unisono("trace", "merge", str(tmp_path), folder=tmp_path).stderr
    assert unisono("trace", "merge", str(tmp_path), "--job", "bb", folder=tmp_path).returncode == 0
