from __future__ import annotations

import json
import os
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

from unisono.algorithms.catalogue.registry import find
from unisono.cli.main import main
from unisono.errors import UsageError
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.machine.parameters import Link
from unisono.tuning.machine.placed_topology import PlacedTopology
from unisono.tuning.machine.topology import NO_RESOURCE, Level, Topology
from unisono.tuning.machine.topology_files import Description, described, load, text_of, to_json
from unisono.tuning.simulator.simulate import simulate

NOTHING: dict[str, Any] = {}
LINK = Link("wire", 1e-6, 0, 1e-9)
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "topologies").glob("*.toml"))
LINK_FIELDS = {"name": "network", "latency_s": 1e-6, "overhead_s": 0, "per_byte_s": 1e-9}
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


def test_rank_leaves_its_host_by_its_nic_and_changes_rails_above_the_leaf_switches() -> None:
    topology = described(cluster()).over(600)  # of 3 leaf switches on each rail
    assert path(topology, 0, 7) == (0, 0.0, ["out of rank 0", "into rank 7"])
    nics = ["out of host NIC 0", "into host NIC 124"]
    assert path(topology, 1, 8 * 31) == (1, 0.0, ["out of rank 1", "into rank 248", *nics])
    rails = ["out of host NIC 0", "into host NIC 7", "out of leaf 0", "into leaf 3"]
    assert path(topology, 0, 15)[::2] == (2, ["out of rank 0", "into rank 15", *rails])
    same_rail = ["out of host NIC 3", "into host NIC 131", "out of leaf 3", "into leaf 7"]
    assert path(topology, 7, 8 * 32 + 6)[::2] == (2, ["out of rank 7", "into rank 262", *same_rail])


def test_core_above_a_spine_joins_groups_of_all_rails() -> None:
    content = cluster(spine={"size": 2})
    content["levels"].append({**content["levels"][0], "name": "core", "size": 3, "taper": 4})
    topology = described(content).over(8 * 32 * 2 * 3)
    assert path(topology, 0, 8 * 32 * 2 + 7)[2][-4:] == [
        "out of leaf 0",
        "into leaf 11",
        "out of spine 0",
        "into spine 1",
    ]
    assert topology.capacities[-1] == 2 * 4 * 16 / 4


@bounded
@given(ranks=st.integers(1, 6), nics=st.integers(1, 6), leaf=st.integers(1, 3), rails=st.booleans(), ends=st.data())
def test_nics_divide_the_ranks_of_a_host(ranks: int, nics: int, leaf: int, rails: bool, ends: st.DataObject) -> None:
    nics = min(nics, ranks)
    names = [
        Level("host", LINK, ranks),
        Level("leaf", LINK, leaf, nics=nics, rails=rails and nics > 1),
        Level("spine", LINK),
    ]
    size = 3 * leaf * ranks
    topology = Topology(size, names)
    source, target = (ends.draw(st.integers(0, size - 1)) for _ in range(2))
    nic_of = {rank: rank // ranks * nics + rank % ranks * nics // ranks for rank in (source, target)}
    is_inside = source // ranks == target // ranks
    is_leaf = source // (leaf * ranks) == target // (leaf * ranks)
    same_rail = not names[1].rails or nic_of[source] % nics == nic_of[target] % nics
    level, _, resources = path(topology, source, target)
    assert level == (0 if is_inside else 1 if is_leaf and same_rail else 2)
    kind = "host NIC" if nics > 1 else "host"
    assert resources[2:4] == ([] if is_inside else [f"out of {kind} {nic_of[source]}", f"into {kind} {nic_of[target]}"])


def test_taper_compares_bandwidths_of_the_levels() -> None:
    half_rate = described(cluster(spine={"per_byte_s": 2e-9}))
    assert half_rate.levels[2].link.pairs == 32 * 2 / 2
    without_rails = described(cluster({"rails": None}))
    assert (without_rails.levels[1].link.pairs, without_rails.levels[2].link.pairs) == (1, 4 * 32 / 2)
    ports = described(levels(size=6, ports=2)).levels[0]
    assert (
        described({"levels": [to_json(Description("", (ports,)))["levels"][0], {**LINK_FIELDS, "taper": 4}]})
        .levels[1]
        .link.pairs
        == 3
    )


def test_ring_over_one_rail_is_faster_than_over_two() -> None:
    topology = described(cluster()).over(64)
    one_rail, two_rails = (np.arange(8)[None] * 8 + offsets for offsets in (np.zeros(8, int), np.arange(8) % 2 * 7))
    steps = [(PlacedTopology(topology, places)) for places in (one_rail, two_rails)]
    near, far = (simulate(find("allreduce", "ring"), 1 << 20, placed) for placed in steps)
    assert (near.levels[1].messages, far.levels[1].messages) == (112, 0)
    assert near.levels[2].messages == 0


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


def cluster(leaf: dict[str, Any] | None = None, spine: dict[str, Any] | None = NOTHING) -> dict[str, Any]:
    """Return hosts of 8 ranks and 4 NICs on 4 rails, leaf switches of 32 hosts, and a taper of 2:1 above them."""
    link = {"latency_s": 1e-6, "overhead_s": 0, "per_byte_s": 1e-9}
    entries = [
        {**link, "name": "host", "size": 8},
        {**link, "name": "leaf", "size": 32, "nics": 4, "rails": True, **(leaf or {})},
        {**link, "name": "spine", "taper": 2, **(spine or {})},
    ][: 2 if spine is None else 3]
    return {"levels": [{name: value for name, value in entry.items() if value is not None} for entry in entries]}


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
        (levels(shape=[0]), r"levels\[0\]\.shape: expected up to 16 whole numbers"),
        (levels(shape=[True, 2]), r"levels\[0\]\.shape: expected up to 16 whole numbers"),
        (
            levels(shape=[1] * 17),
            r"levels\[0\]\.shape: expected up to 16 whole numbers.* not \[1, 1, 1, 1, 1, 1, \.{3}\]",
        ),
        (levels(size=2**63), r"levels\[0\]\.size: expected how many parts"),
        (levels(slow=[[0, 1e-9]]), r"levels\[0\]\.slow: expected"),
        (levels(name="x" * 81), r"levels\[0\]\.name: expected at most 80 characters, not 'xxxxxxxxxxxx\.{3}"),
        ({**levels(), "name": "x" * 81}, "name: expected a text of at most 80 characters"),
        ({**levels(), "name": 3}, "name: expected a text of at most 80 characters, not 3"),
        ({"levels": levels()["levels"] * 500}, "levels: expected at most 64, not 1000"),
        (levels(hop_s="far"), r"levels\[0\]\.hop_s: expected seconds"),
        (levels(hop_s=10**400), r"levels\[0\]\.hop_s: expected seconds"),
        (levels(slow=[[0, 2]]), r"levels\[0\]\.slow: expected \[\[part, factor\], …\], with 1e-06 ≤ factor ≤ 1"),
        (levels(slow=3), r"levels\[0\]\.slow: expected"),
        (levels(name="network"), "two of them have the same name"),
        (cluster({"nics": 0}), r"levels\[1\]\.nics: expected a whole number from 1 to 1024, not 0"),
        (cluster({"nics": True}), r"levels\[1\]\.nics: expected a whole number"),
        (cluster({"nics": 9}), r"levels\[1\]\.nics: each rank uses one NIC, and 9 are more than the 8 ranks of a part"),
        (cluster({"join": "all_to_all"}), r"levels\[1\]\.nics: only parts with ranks .* joined by a switch"),
        (levels(nics=2), r"levels\[0\]\.nics: only parts with ranks of their own"),
        (cluster({"rails": 1}), r"levels\[1\]\.rails: expected true or false, not 1"),
        (cluster({"nics": 1}), r"levels\[1\]\.rails: rails need nics of 2 or more"),
        (cluster(spine=None), r"levels\[1\]\.rails: .* a level above that joins their switches"),
        (cluster(spine={"join": "all_to_all", "taper": None}), r"levels\[2\]: this level joins the switches of rails"),
        (cluster(spine={"nics": 2, "taper": None}), r"levels\[2\]: this level joins the switches of rails"),
        (cluster(spine={"taper": 0.5}), r"levels\[2\]\.taper: expected a number, at least 1, not 0\.5"),
        (cluster(spine={"taper": "2:1"}), r"levels\[2\]\.taper: expected a number, at least 1, not '2:1'"),
        (cluster(spine={"taper": 64}), r"levels\[2\]\.taper: the way of a part carries 0\.5 messages"),
        (cluster(spine={"pairs": 2}), r"levels\[2\]\.taper: the bandwidth follows from pairs"),
        (cluster(spine={"per_byte_s": 0}), r"levels\[2\]\.taper: the bandwidth inside is unknown: 'leaf' needs pairs"),
        (cluster({"nics": None, "rails": None}), r"levels\[2\]\.taper: the bandwidth inside is unknown"),
        ({**levels(), "eager": 1}, "eager: expected true or false, not 1"),
        ({**levels(), "places": 1}, "places: expected numbers of hosts from 0 to 524287, not 1"),
        ({**levels(), "places": [0, 2**19]}, "places: expected numbers of hosts"),
        ({**levels(), "places": [0, True]}, "places: expected numbers of hosts"),
        ({**levels(), "places": [0, 1, 0]}, r"places: expected each host once, not \[0, 1, 0\]"),
        (
            {"levels": [levels()["levels"][0], {**LINK_FIELDS, "size": 2}], "places": [1, 2]},
            "places: the levels have 2 places, and none has the number 2",
        ),
        (levels(taper=2), r"levels\[0\]\.taper: only a switch above another switch has a taper"),
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


@pytest.mark.parametrize("fields", [{"shape": [2**30, 2**31]}, {"shape": [2**21, 2]}])
def test_torus_of_more_connections_than_fit_in_memory_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"level 'host' has \d+ connections, and a topology may have 8388608 a level"):
        described(levels(size=None, **fields)).over(4)


def test_all_to_all_has_connections_only_for_parts_with_ranks() -> None:
    topology = described(levels(size=2**62, join="all_to_all")).over(4)
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


def test_large_and_hostile_files_are_refused_soon(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    with file.open("wb") as output:
        output.truncate(100 << 20)
    with pytest.raises(UsageError, match=r"machine\.json has more than 4 MiB"):
        load(file)
    file.write_text("[" * 100_000)
    with pytest.raises(UsageError, match="nested too deeply"):
        load(file)
    toml = tmp_path / "machine.toml"
    toml.write_text("levels = " + "[" * 100_000)
    with pytest.raises(UsageError, match=r"machine\.toml: "):
        load(toml)
    toml.write_text('[[levels]]\nname = "h"\nlatency_s = 0\noverhead_s = 0\nper_byte_s = 0\nsize = 0x' + "f" * 100_000)
    with pytest.raises(
        UsageError, match=r"levels\[0\]\.size: expected how many parts .* not a number of too many digits"
    ):
        load(toml)
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(UsageError, match="is no regular file"):
        load(tmp_path / "pipe.toml")


def test_equal_descriptions_have_equal_fingerprints() -> None:
    one = to_json(Description("a", (Level("host", LINK, 2),)))
    assert fingerprint(one) == fingerprint(json.loads(json.dumps(one)))
    assert fingerprint(one) != fingerprint({**one, "name": "b"})
    with pytest.raises(UsageError, match="must consist of JSON values"):
        fingerprint({"a": float("nan")})


def test_ranks_of_a_measured_job_stand_at_its_places() -> None:
    content = {"levels": [levels()["levels"][0], {**LINK_FIELDS, "name": "group", "size": 2}, LINK_FIELDS]}
    machine = described({**content, "places": [0, 2, 1, 3], "eager": True})
    job = machine.over(8)
    assert [path(job, 0, target)[0] for target in range(1, 8)] == [0, 2, 2, 1, 1, 2, 2]
    assert job.hosts() == ((0, 1), (4, 5), (2, 3), (6, 7))
    assert job.is_eager
    assert machine.over(3).size == 3
    assert [path(machine.over(10), 0, target)[0] for target in (2, 4)] == [1, 2]  # more ranks than the job has
    assert described(to_json(machine)) == machine


@pytest.mark.parametrize("is_json", [True, False])
def test_written_description_is_read_as_it_was(is_json: bool, tmp_path: Path) -> None:
    machine = described({**cluster(), "name": 'so "called" \\ Größe 😀\x7f', "places": [3, 1], "reduce": [[8, 1e-9]]})
    file = tmp_path / ("machine.json" if is_json else "machine.toml")
    file.write_text(text_of(machine, is_json=is_json, about=["measured", "here"]), encoding="utf-8")
    assert load(file) == machine._replace(name=machine.name.replace("\x7f", "\\x7f"))
    assert file.read_text(encoding="utf-8").startswith("{" if is_json else "# measured\n# here\n\nname")


# The command.


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "unisono", "simulate", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize("line", ["simulate barrier dissemination", "explain barrier"])
def test_commands_predict_a_barrier_without_a_vector(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    times = set()
    for nbytes in ("8", "1M"):
        assert main([*line.split(), "--size", nbytes, "--json"]) == 0
        times.add(capsys.readouterr().out)
    assert len(times) == 1


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
