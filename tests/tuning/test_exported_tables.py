"""Decision tables in the formats of other libraries: readers of those formats choose as the table does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from unisono.cli.main import main, unisono
from unisono.tuning.decide.table import Decision, Range, Table, dumped, to_json
from unisono.tuning.exports import mpich, nccl, openmpi, ucc
from unisono.tuning.exports.counterparts import Library, rules_of
from unisono.tuning.measure.measurement_log import Context

# The algorithm that a library chooses for a collective there, ranks and bytes of the vector; "" for its own choice.
Choice = Callable[[str, int, int], str]

RANGES: dict[tuple[str, int], list[tuple[int, str]]] = {
    ("allreduce", 2): [(0, "direct"), (1024, "recursive_doubling"), (65536, "rabenseifner")],
    ("allreduce", 4): [(0, "recursive_doubling"), (8192, "swing"), (65536, "ring")],
    ("allreduce", 8): [(0, "recursive_multiplying"), (4096, "ring(segment_nbytes=65536)"), (1 << 20, "ring")],
    ("broadcast", 4): [(0, "binomial"), (4096, "chain(segment_nbytes=32768)"), (1 << 20, "scatter_ring")],
    ("reduce", 4): [(0, "knomial(radix=3)"), (4096, "rabenseifner")],
    ("allgather", 4): [(0, "bruck"), (10000, "ring")],
    ("alltoall", 4): [(0, "bruck"), (4096, "direct"), (1 << 16, "pairwise")],
    ("reduce_scatter", 4): [(0, "recursive_halving"), (1 << 16, "ring")],
    ("barrier", 4): [(0, "dissemination")],
}


def table(memory: str = "host", link: str = "shm") -> Table:
    decisions = {}
    for (collective, ranks), firsts in RANGES.items():
        ends = [*(first for first, _ in firsts[1:]), None]
        ranges = tuple(Range(first, end, variant) for (first, variant), end in zip(firsts, ends, strict=True))
        decisions[Context("m", collective, link, "plain", ranks, ranks, memory)] = Decision(ranges, (), {})
    return Table(decisions)


def read_nccl(text: str) -> Choice:
    rows = [line.split(",") for line in text.splitlines() if not line.startswith("#")]

    def choice(collective: str, ranks: int, nbytes: int) -> str:
        for name, low, high, algorithm, protocol, channels, nodes, size in rows:
            assert (protocol, channels, nodes) == ("ll", "-1", "1")
            if name == collective and int(low) <= nbytes <= int(high) and int(size) == ranks:
                return algorithm
        return ""

    return choice


def read_openmpi(text: str) -> Choice:
    numbers = iter([int(word) for line in text.splitlines() for word in line.split("#")[0].split()])
    sections: dict[int, list[tuple[int, list[tuple[int, int, int]]]]] = {}
    for _ in range(next(numbers)):
        collective = next(numbers)
        sections[collective] = []
        for _ in range(next(numbers)):
            ranks, count = next(numbers), next(numbers)
            rules = []
            for _ in range(count):
                first, algorithm, fan_out, segment = (next(numbers) for _ in range(4))
                assert fan_out == 0
                rules.append((first, algorithm, segment))
            assert all(one < other for (one, *_), (other, *_) in pairwise(rules))
            sections[collective].append((ranks, rules))
    assert next(numbers, None) is None

    def choice(collective: str, ranks: int, nbytes: int) -> str:
        fitting = [rules for size, rules in sections.get(openmpi.IDS[collective], []) if size <= ranks]
        rules = [rule for rule in fitting[-1] if rule[0] <= nbytes] if fitting else []
        return str(rules[-1][1]) if rules and rules[-1][1] else ""

    return choice


def read_ucc(text: str) -> Choice:
    tokens = [token.split(":") for token in text.strip().split("#")]

    def choice(collective: str, ranks: int, nbytes: int) -> str:
        for name, sizes, team, score, algorithm in tokens:
            low, high = (float(each) for each in sizes.split("-"))
            few, many = (int(each) for each in team.strip("[]").split("-"))
            assert score == "inf"
            if name == collective and low <= nbytes < high and few <= ranks <= many:
                return algorithm.removeprefix("@")
        return ""

    return choice


OWN = {"algorithm=MPIR_own": {}}
BASE = {f"collective={name}": {"comm_type=intra": OWN, "comm_type=inter": OWN} for name in ("bcast", "scan")} | {
    f"collective={name}": OWN
    for name in ("allreduce", "reduce", "allgather", "alltoall", "reduce_scatter", "reduce_scatter_block", "barrier")
}
_YES = ("comm_type=intra", "is_commutative=yes", "is_op_built_in=yes", "count=any", "is_sendbuf_inplace=no")
_NO = ("comm_type=inter", "is_commutative=no", "is_op_built_in=no", "count<pow2", "is_sendbuf_inplace=yes")


def read_mpich(text: str) -> Choice:
    tree = json.loads(text)

    def choice(collective: str, ranks: int, nbytes: int) -> str:
        sizes = {"comm_size": ranks, "total_msg_size": nbytes, "avg_msg_size": nbytes}
        if collective == "alltoall":
            sizes["avg_msg_size"] = nbytes // ranks

        def holds(key: str) -> bool:
            if key in _YES or key.endswith("=any"):
                return True
            name, _, limit = key.partition("<=")
            return key not in _NO and sizes[name] <= int(limit)

        node: Any = tree[f"collective={collective}"]
        while not (leaf := next(iter(node))).startswith("algorithm="):
            node = next(below for key, below in node.items() if holds(key))
        return "" if node == OWN else leaf.removeprefix("algorithm=MPIR_")

    return choice


FORMATS: dict[str, tuple[Library, Sequence[str], Callable[[str], Choice]]] = {
    "nccl": (nccl.LIBRARY, ("--protocol", "ll"), read_nccl),
    "openmpi": (openmpi.LIBRARY, (), read_openmpi),
    "ucc": (ucc.LIBRARY, (), read_ucc),
    "mpich": (mpich.LIBRARY, ("--base", "base.json"), read_mpich),
}


def exported(form: str, folder: Path, *options: str) -> tuple[str, str]:
    """Return the output of the command for the table, and its messages."""
    (folder / "base.json").write_text(json.dumps(BASE))
    (folder / "table.json").write_text(dumped(to_json(table(FORMATS[form][0].memory))))
    given = [str(folder / option) if option.endswith(".json") else option for option in (*FORMATS[form][1], *options)]
    result = CliRunner().invoke(unisono, ["export", str(folder / "table.json"), "--to", form, *given])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.parametrize("form", FORMATS)
def test_other_library_chooses_as_the_table_does(form: str, tmp_path: Path) -> None:
    library, _, read = FORMATS[form]
    text, messages = exported(form, tmp_path)
    choice = read(text)
    edges = sorted({first for firsts in RANGES.values() for first, _ in firsts})
    for (collective, ranks), firsts in RANGES.items():
        named = 0
        for there in library.collectives.get(collective, ()):
            for nbytes in sorted({max(0, edge + more) for edge in (*edges, 1 << 30) for more in (-4 * ranks, 0, 4)}):
                variant = [variant for first, variant in firsts if first <= nbytes][-1]
                name, _, params = variant.partition("(")
                expected = library.algorithms[there].get(name, "")
                if params and ("segment" not in params or (there, expected) not in library.segmented):
                    expected = ""
                assert choice(there, ranks, nbytes) == expected, (collective, ranks, nbytes)
                named += bool(expected)
        for first, variant in firsts:
            line = f"{collective} among {ranks} ranks from {first} B: {variant} is left out"
            has_counterpart = any(
                variant.partition("(")[0] in library.algorithms[there]
                for there in library.collectives.get(collective, ())
            )
            assert (line in messages) or has_counterpart
        assert choice("allreduce", 3, 4096) == choice("allreduce", 16, 4096) == ""
        assert named or "left out" in messages


def test_table_of_two_links_needs_one(tmp_path: Path) -> None:
    both = Table({**table().decisions, **table(link="tcp").decisions})
    path = tmp_path / "table.json"
    path.write_text(dumped(to_json(both)))
    result = CliRunner().invoke(unisono, ["export", str(path), "--to", "openmpi"])
    assert "link shm and tcp" in str(result.exception)
    result = CliRunner().invoke(unisono, ["export", str(path), "--to", "openmpi", "--link", "tcp"])
    assert result.exit_code == 0


def test_commands_on_files_keep_algorithms_that_this_process_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = Context("m", "allreduce", "shm", "plain", 4, 4, "host")
    ranges = (Range(0, 4096, "imported_mine"), Range(4096, None, "ring"))
    times = {"imported_mine": (1e-6, 9e-6), "ring": (2e-6, 8e-6)}
    path, both = tmp_path / "table.json", tmp_path / "both.json"
    path.write_text(dumped(to_json(Table({context: Decision(ranges, (8, 4096), times)}))))
    assert main(["export", str(path), "--to", "openmpi"]) == 0
    out, err = capsys.readouterr()
    assert "from 0 B: imported_mine is left out, because Open MPI has no such algorithm" in err
    assert ("4096 4 0 0\n" in out, "ignored" in err) == (True, False)
    assert main(["tune", "merge", str(path), "--out", str(both)]) == 0
    assert main(["tune", "diff", str(path), str(both)]) == 1  # the boundary is interpolated
    assert main(["tune", "show", str(both)]) == 0
    assert "imported_mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["TABLE", "--to", "mpich"], "needs --base"),
        (["TABLE", "--to", "mpich", "--base", "TABLE"], "no selection tree"),
        (["TABLE", "--to", "nccl"], "arrays in device memory"),
        (["allreduce", "ring", "--to", "ucc"], "needs a decision table"),
        (["TABLE"], "needs a collective and an algorithm"),
        (["allreduce", "ring", "--to", "chakra"], "--out"),
    ],
)
def test_bad_exports_say_why(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    path.write_text(dumped(to_json(table())))
    assert main(["export", *(str(path) if each == "TABLE" else each for each in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_segments_of_trees_go_to_openmpi() -> None:
    rules, _ = rules_of(table(), openmpi.LIBRARY)
    assert "4096 3 0 32768\n" in openmpi.written(rules)
