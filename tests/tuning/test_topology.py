from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.deadlines import DEADLINE_S

from unisono.errors import UsageError
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.machine.parameters import Link
from unisono.tuning.machine.topology import NO_RESOURCE, Level, Topology
from unisono.tuning.machine.topology_files import Description, described, load, to_json

LINK = Link("wire", 1e-6, 0, 1e-9)
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "topologies").glob("*.toml"))
bounded = settings(max_examples=60, deadline=None, derandomize=True)


def path(topology: Topology, source: int, target: int) -> tuple[int, float, list[str]]:
    """Return the level, the extra latency and the resources of one message."""
    result = topology.paths(np.array([source]), np.array([target]))
    names = [topology.name_of(int(resource)) for resource in result.resources[0] if resource != NO_RESOURCE]
    return int(result.level[0]), float(result.extra_s[0]), names


# Paths, computed by hand.


def test_tree_path_goes_up_only_to_the_common_switch() -> None:
    tree = Topology(16, [Level("host", LINK, 2), Level("rack", LINK, 4), Level("spine", LINK, 2)])
    assert path(tree, 0, 1) == (0, 0.0, ["out of rank 0", "into rank 1"])
    assert path(tree, 3, 6) == (1, 0.0, ["out of rank 3", "into rank 6", "out of host 1", "into host 3"])
    assert path(tree, 3, 8)[0] == 2
    assert path(tree, 3, 8)[2][2:] == ["out of host 1", "into host 4", "out of rack 0", "into rack 1"]


def test_a_dragonfly_has_a_channel_for_each_pair_of_routers_and_of_groups() -> None:
    ways = [Level("router", LINK, 2), Level("group", LINK, 3, "all_to_all"), Level("system", LINK, 4, "all_to_all")]
    dragonfly = Topology(24, ways)
    assert path(dragonfly, 0, 1)[2] == ["out of rank 0", "into rank 1"]
    assert path(dragonfly, 0, 5) == (1, 0.0, ["out of rank 0", "into rank 5", "group channel 2"])
    assert path(dragonfly, 6, 23) == (2, 0.0, ["out of rank 6", "into rank 23", "system channel 7"])
    assert path(dragonfly, 23, 6)[2][2] == "system channel 13"


def test_torus_path_takes_the_shorter_way_in_each_dimension() -> None:
    torus = Topology(12, [Level("torus", LINK, 12, "torus", (4, 3), hop_s=1e-7)])
    assert path(torus, 0, 1) == (0, 0.0, ["out of rank 0", "into rank 1", "torus link 0"])
    assert path(torus, 0, 3)[2][2:] == ["torus link 1"]  # backwards around the edge
    _, extra_s, names = path(torus, 0, 2 + 4)
    assert extra_s == pytest.approx(2e-7)
    assert names[2:] == ["torus link 0", "torus link 4", "torus link 10"]


@bounded
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), inner=st.integers(1, 3), ends=st.data())
def test_torus_path_is_as_long_as_the_distance(shape: list[int], inner: int, ends: st.DataObject) -> None:
    size = inner * int(np.prod(shape))
    torus = Topology(size, [Level("host", LINK, inner), Level("torus", LINK, size // inner, "torus", tuple(shape))])
    source, target = (ends.draw(st.integers(0, size - 1)) for _ in range(2))
    here, there = (np.unravel_index(place // inner, shape[::-1]) for place in (source, target))
    distance = sum(min(abs(a - b), length - abs(a - b)) for a, b, length in zip(here, there, shape[::-1], strict=True))
    links = [name for name in path(torus, source, target)[2] if name.startswith("torus link")]
    assert len(links) == len(set(links)) == distance


def test_all_to_all_uses_every_torus_link_equally() -> None:
    torus = Topology(9, [Level("torus", LINK, 9, "torus", (3, 3))])
    pairs = np.array([(a, b) for a, b in product(range(9), range(9)) if a != b])
    used = Counter(torus.paths(pairs[:, 0], pairs[:, 1]).resources.ravel().tolist())
    del used[NO_RESOURCE]
    assert {used[resource] for resource in used if torus.name_of(resource).startswith("torus")} == {3}


@bounded
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5), order=st.randoms())
def test_hosts_with_any_ranks_make_two_levels(lengths: list[int], order: Any) -> None:
    ranks = list(range(sum(lengths)))
    order.shuffle(ranks)
    hosts = tuple(tuple(ranks.pop() for _ in range(length)) for length in lengths)
    topology = Topology.of_hosts(hosts, LINK, LINK)
    of_rank = {rank: host for host, results in enumerate(hosts) for rank in results}
    for source, target in product(of_rank, of_rank):
        assert path(topology, source, target)[0] == (of_rank[source] != of_rank[target])
    assert sorted(map(sorted, topology.hosts())) == sorted(map(sorted, hosts))


def test_slow_parts_have_less_capacity() -> None:
    levels = [Level("host", LINK, 2), Level("network", LINK._replace(pairs=4.0), 3, slow=((1, 0.25),))]
    topology = Topology(6, levels)
    result = {topology.name_of(resource): topology.capacities[resource] for resource in range(len(topology.capacities))}
    assert (result["out of host 0"], result["out of host 1"], result["into host 1"]) == (4.0, 1.0, 1.0)


def test_topology_refuses_more_ranks_than_it_has_places_for() -> None:
    with pytest.raises(UsageError, match="has 6 ranks, not 7"):
        Topology(7, [Level("host", LINK, 2), Level("network", LINK, 3)])
    assert Topology(7, [Level("host", LINK, 2), Level("network", LINK)]).size == 7


# Files.


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_topology_examples_survive_json(example: Path, tmp_path: Path) -> None:
    result = load(example)
    assert result.over(64).size == 64
    again = tmp_path / "machine.json"
    again.write_text(json.dumps(to_json(result)))
    assert load(again) == result


def levels(**changes: Any) -> dict[str, Any]:
    level = {"name": "host", "size": 2, "latency_s": 1e-6, "overhead_s": 0, "per_byte_s": 1e-9, **changes}
    outer = {"name": "network", "latency_s": 1e-6, "overhead_s": 0, "per_byte_s": 1e-9}
    return {"levels": [{name: value for name, value in level.items() if value is not None}, outer]}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (7, "expected fields by name, not 7"),
        ({}, "levels: expected at least one"),
        ({"levels": []}, "levels: expected at least one"),
        ({"levels": [3]}, r"levels\[0\]: expected fields by name, not 3"),
        ({**levels(), "link": 1}, "no field 'link': there are name, levels"),
        (levels(size=None), r"levels\[0\]\.size: expected how many parts the level joins, not 0"),
        (levels(size=-1), r"levels\[0\]\.size: expected how many parts"),
        (levels(size="2"), r"levels\[0\]\.size: expected how many parts .* not '2'"),
        (levels(latency=1), r"levels\[0\] has no field 'latency': it has .*join.*latency_s"),
        (levels(latency_s=None), r"levels\[0\]\.latency_s is missing"),
        (levels(per_byte_s="fast"), r"levels\[0\]\.per_byte_s: expected a number"),
        (levels(join="bus"), r"levels\[0\]\.join: expected one of switch, all_to_all, torus, not 'bus'"),
        (levels(join="torus"), r"levels\[0\]\.shape: a torus needs a shape"),
        (levels(shape=[2, 2], size=5), r"levels\[0\]\.size: the shape \[2, 2\] has 4 parts, not 5"),
        (levels(shape=[0]), r"levels\[0\]\.shape: expected whole numbers"),
        (levels(hop_s="far"), r"levels\[0\]\.hop_s: expected seconds"),
        (levels(hop_s=10**400), r"levels\[0\]\.hop_s: expected seconds"),
        (levels(slow=[[0, 2]]), r"levels\[0\]\.slow: expected \[\[part, factor\], …\], with 0 < factor ≤ 1"),
        (levels(slow=3), r"levels\[0\]\.slow: expected"),
        (levels(name="network"), "two of them have the same name"),
        ({**levels(), "reduce": [[1]]}, "reduce: expected"),
    ],
)
def test_invalid_topology_is_refused_with_the_field(document: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem):
        described(document)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=rf"the topology .*bad\.json: .*{problem}"):
        load(file)


@pytest.mark.parametrize("fields", [{"shape": [2**40, 2**40]}, {"shape": [2**21, 2]}])
def test_torus_of_more_connections_than_fit_in_memory_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"level 'host' has \d+ connections, and a topology may have 8388608 a level"):
        described(levels(size=None, **fields)).over(4)


def test_all_to_all_has_connections_only_for_parts_with_ranks() -> None:
    topology = described(levels(size=2**70, join="all_to_all")).over(4)
    assert path(topology, 0, 3)[2][2:] == ["host channel 3"]


def test_unreadable_topology_file_error_says_where(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml cannot be read: No such file"):
        load(tmp_path / "nowhere.toml")
    (tmp_path / "bad.json").write_text('{"levels": [\n}')
    with pytest.raises(UsageError, match="line 2 column 1"):
        load(tmp_path / "bad.json")
    if sys.version_info >= (3, 11):
        (tmp_path / "bad.toml").write_text('name = "x"\nlevels = [\n  what')
        with pytest.raises(UsageError, match="line 3"):
            load(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"bad\.toml"):
        load(tmp_path / "bad.toml")


def test_equal_descriptions_have_equal_fingerprints() -> None:
    one = to_json(Description("a", (Level("host", LINK, 2),)))
    assert fingerprint(one) == fingerprint(json.loads(json.dumps(one)))
    assert fingerprint(one) != fingerprint({**one, "name": "b"})
    with pytest.raises(UsageError, match="must consist of JSON values"):
        fingerprint({"a": float("nan")})


# The command.


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "unisono", "simulate", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_simulate_command_shows_times_bytes_and_the_bottleneck(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(levels()))
    done = command("allreduce", "ring", "hierarchical", "-n", "8", "--size", "1M", "--topology", str(file), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {simulation["algorithm"] for simulation in document["simulations"]} == {"ring", "hierarchical"}
    assert all(simulation["seconds"] >= document["least_s"] for simulation in document["simulations"])
    ring = next(simulation for simulation in document["simulations"] if simulation["algorithm"] == "ring")
    per_pair = 14 * (1 << 20) / 8
    assert [level["nbytes"] for level in ring["levels"]] == [pytest.approx(4 * per_pair), pytest.approx(4 * per_pair)]
    table = command("allreduce", "all", "-n", "6", "--link", "tcp")
    assert table.returncode == 0
    assert "no algorithm takes less than" in table.stdout
    assert "busiest" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("allreduce", "rign"), "did you mean 'ring'"),
        (("alreduce", "ring"), "did you mean 'allreduce'"),
        (("allreduce", "ring", "--size", "much"), "'much' is not a positive number of bytes"),
        (("allreduce", "ring", "--topology", "nowhere.toml"), "nowhere.toml cannot be read: No such file"),
        (("allreduce", "ring", "--topology", "x.toml", "--link", "shm"), "use either --topology or --link"),
        (("allreduce", "ring", "-n", "4", "--root", "4"), "root"),
        (("allgather", "recursive_doubling", "-n", "6"), "cannot run on 6 ranks"),
        (("allreduce", "ring", "--param", "radix=2"), "no parameter 'radix'"),
    ],
)
def test_simulate_command_reports_errors_in_one_line(arguments: tuple[str, ...], problem: str) -> None:
    done = command(*arguments)
    assert done.returncode != 0
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
