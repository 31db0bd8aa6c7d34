"""``unisono verify``: it shows proofs in a table, and the fault of a wrong plan in a picture, with exit code 1."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.algorithms.builders.arguments import needs_even
from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.plan import Group, Plan
from unisono.cli.main import main

RIGHT = """
from dataclasses import replace
import unisono as un
from unisono.algorithms.catalogue.registry import find

@un.algorithm("allreduce", "mine", sizes=range(2, 5), cost=find("allreduce", "ring").cost)
def mine(size, rank, root=0):
    return replace(find("allreduce", "ring").build(size, rank, root), algorithm="mine")

if __name__ == "__main__":
    raise SystemExit("it was run as a program")
"""


DIRECT = find("allreduce", "direct")


def forgetful(size: int, rank: int, root: int = 0) -> Plan:
    """The direct allreduce, in which rank 1 of five or more omits the contribution of the last rank."""
    plan = DIRECT.build(size, rank, root)
    if size < 5 or rank != 1:
        return plan
    exchange, finish = plan.groups(0)
    short = replace(finish.steps[0], sources=finish.steps[0].sources[:-1])
    return replace(plan, lanes=((exchange, Group((short,))),))


@pytest.fixture(autouse=True)
def _path_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def a_few(monkeypatch: pytest.MonkeyPatch) -> dict[str, Algorithm]:
    """Register only two algorithms of allreduce."""
    few = {name: ALGORITHMS["allreduce"][name] for name in ("ring", "direct")}
    for collective in ALGORITHMS:
        monkeypatch.setitem(ALGORITHMS, collective, few if collective == "allreduce" else {})
    return few


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["verify", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_verify_proves_the_algorithms_that_a_file_registers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    status, shown, errors = verify(capsys, str(file), "--max-size", "4")
    assert (status, errors) == (0, "")
    row = next(line for line in shown.splitlines() if "mine" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:-1] == ["allreduce mine", "2-4", "24", "6", "1.5·n", "0.75·n", "none", "same", "proved"]
    assert "ring" not in shown


def test_verified_file_may_import_modules_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "beside_mine.py").write_text(RIGHT)
    file = tmp_path / "imports.py"
    file.write_text("import beside_mine")
    assert verify(capsys, str(file), "--max-size", "3")[0] == 0


def test_verify_all_proves_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = verify(capsys, "--all", "--max-size", "3", "--json")
    document = json.loads(shown)
    names = [(collective, name) for collective, by_name in ALGORITHMS.items() for name in by_name]
    assert status == 0
    assert [(row["collective"], row["algorithm"]) for row in document] == names
    assert all(row["error"] is None for row in document)
    ring = next(row for row in document if row["algorithm"] == "ring")
    assert [report["size"] for report in ring["reports"]] == [1, 2, 3]
    facts = {"size": 2, "messages": 4, "rounds": 2, "sent": 1.0, "reduced": 0.5, "scratch_blocks": 0, "scratch_live": 0}
    assert ring["reports"][1] == {**facts, "same_bits": True}
    direct = next(row for row in document if (row["collective"], row["algorithm"]) == ("allreduce", "direct"))
    assert [(report["scratch_live"], report["scratch_blocks"]) for report in direct["reports"]] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_verify_draws_what_a_wrong_algorithm_lacks_and_proves_the_others(
    capsys: pytest.CaptureFixture[str], a_few: dict[str, Algorithm], form: list[str]
) -> None:
    a_few["direct"] = replace(a_few["direct"], build=forgetful)
    status, shown, errors = verify(capsys, "--all", "--max-size", "6", *form)
    assert status == 1
    assert errors.splitlines() == [
        "unisono: allreduce direct on 5 ranks: rank 1, lane 0, group 1, step 0: "
        "block 0 of OUTPUT lacks the contribution of rank 4",
        "  contributions to block 0 of OUTPUT, by rank",
        "    rank 0  +++++",
        "    rank 1  ++++?",
        *(f"    rank {rank}  +++++" for rank in (2, 3, 4)),
    ]
    if form:
        ring, direct = json.loads(shown)
        assert (ring["error"], len(ring["reports"])) == (None, 6)
        assert (direct["error"] in errors, len(direct["reports"])) == (True, 4)
    else:
        assert [word for line in shown.splitlines() for word in ("proved", "wrong") if word in line] == [
            "proved",
            "wrong",
        ]


def test_verify_shows_an_empty_row_for_algorithm_without_sizes(
    capsys: pytest.CaptureFixture[str], a_few: dict[str, Algorithm]
) -> None:
    a_few["ring"] = replace(a_few["ring"], supports=lambda size: "never")
    status, shown, _ = verify(capsys, "--all", "--max-size", "2")
    assert status == 0
    assert "none" in shown


def test_verify_counts_sizes_that_form_no_range(
    capsys: pytest.CaptureFixture[str], a_few: dict[str, Algorithm]
) -> None:
    a_few["ring"] = replace(a_few["ring"], supports=needs_even)
    _, shown, _ = verify(capsys, "--all", "--max-size", "20")
    assert "10 up to 20" in shown
    assert "1-20" in shown


def test_verify_says_what_is_wrong_with_the_builder_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(RIGHT.replace("size, rank, root)", "size, 0, root)"))
    status, shown, errors = verify(capsys, str(file))
    assert (status, shown) == (1, "")
    assert errors.startswith(
        "unisono: allreduce mine on 2 ranks: rank 1: (collective, algorithm, size, root, rank) is "
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "verify needs either FILE or --all: pass one of them"),
        (["--all", __file__], "verify needs either FILE or --all: pass one of them"),
        (["missing.py"], "Invalid value for '[FILE]': File 'missing.py' does not exist."),
        (["--all", "--max-size", "0"], "Invalid value for '--max-size': 0 is not in the range x>=1."),
    ],
)
def test_verify_refuses_bad_arguments_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert verify(capsys, *arguments) == (2, "", f"unisono: {message}\n")


def test_verify_refuses_a_file_that_registers_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "nothing.py"
    file.write_text("")
    assert verify(capsys, str(file)) == (
        2,
        "",
        f"unisono: '{file}' registers no algorithm: put @un.algorithm(collective, name) above a builder\n",
    )
