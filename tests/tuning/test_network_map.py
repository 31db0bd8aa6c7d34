"""The map of a far network: the streams, link and choices that follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.tuning.decide.choice import NO_STATE, Question, explain
from unisono.tuning.machine.network_map import NetworkMap

LINK = "tcp/network"


def network(hosts: int, delay_s: float, mbit_s: float) -> NetworkMap:
    def matrix(value: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(value * (i != j) for j in range(hosts)) for i in range(hosts))

    return NetworkMap(matrix(delay_s), matrix(8 / (1e6 * mbit_s)))


@pytest.mark.parametrize(
    ("delay_s", "mbit_s", "streams"),
    [(0.05, 200, 4), (0.02, 20, 1), (0.002, 200, 1), (0.05, 1000, 16), (0.1, 10_000, 16), (0.025, 400, 4)],
)
def test_streams_follow_from_round_trip_times_rate(delay_s: float, mbit_s: float, streams: int) -> None:
    assert network(2, delay_s, mbit_s).streams() == streams


def test_link_has_the_slowest_way_and_segments_beyond_the_bytes_under_way() -> None:
    delays = ((0.0, 0.05, 0.01), (0.05, 0.0, 0.02), (0.01, 0.02, 0.0))
    rates = ((0.0, 4e-8, 4e-8), (8e-8, 0.0, 4e-8), (4e-8, 4e-8, 0.0))
    link = NetworkMap(delays, rates).link(LINK)
    assert (link.latency_s, link.per_byte_s) == (0.05, 8e-8)
    assert link.segment_nbytes >= 2 * 0.1 / 4e-8


# For each size, the algorithms that suit far hosts. A short vector needs few delays. A long one must not
# arrive at a host from several hosts at once.
SUITED = {8: {"direct"}, 64 << 20: {"ring", "multi_lane_ring"}}


@pytest.mark.parametrize("hosts", [3, 4, 8])
@pytest.mark.parametrize("nbytes", SUITED)
def test_far_hosts_take_few_rounds_for_short_vectors_and_a_ring_for_long_ones(hosts: int, nbytes: int) -> None:
    question = Question("allreduce", nbytes, hosts, "tcp", hosts=tuple((rank,) for rank in range(hosts)))
    far = explain(question, NO_STATE.over(network(hosts, 0.05, 200), LINK)).choice.algorithm
    assert far in SUITED[nbytes]


def test_map_is_the_same_after_its_file(tmp_path: Path) -> None:
    of_hosts = network(3, 0.05, 200)
    of_hosts.write(tmp_path / "map.json")
    assert NetworkMap.read(tmp_path / "map.json") == of_hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2, "delay_s": [[0, 1], [1, 0]], "per_byte_s": [[0, 1], [1, 0]]}',
        '{"format": 1, "delay_s": [[0, 1], [1, 0]], "per_byte_s": [[0, 1]]}',
        '{"format": 1, "delay_s": [[0, 1], [1, 0]], "per_byte_s": [[0, -1], [1, 0]]}',
        '{"format": 1, "delay_s": [[0]], "per_byte_s": [[0]]}',
        '{"format": 1, "delay_s": [[0, "a"], [1, 0]], "per_byte_s": [[0, 1], [1, 0]]}',
        '{"format": 1, "delay_s": [[0, 1e999], [1, 0]], "per_byte_s": [[0, 1], [1, 0]]}',
    ],
)
def test_file_without_a_map_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(UsageError, match=r"the map .* (cannot be read|must have format 1)"):
        NetworkMap.read(tmp_path / "map.json")
