"""The comparison of decision tables with MPI's algorithms: by hand on few numbers, and the start of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from unisono.algorithms.catalogue.vendors import MPI_NATIVE
from unisono.bench.peers import COMPLETE, mpi_ranks
from unisono.bench.studies import mixture
from unisono.bench.studies.judgement import SizeTimes
from unisono.bench.studies.mixture import COMPARISONS, ratio
from unisono.errors import UsageError

TIMES_S = {"ring": 2.0, "chain": 3.0, MPI_NATIVE: 4.0, "binomial": 1.0}


def ratios(both: str, own: str) -> dict[str, float]:
    choices = {"both": both, "own": own, "mpi": MPI_NATIVE}
    point = SizeTimes("shm", "broadcast", 8, {name: [seconds] * 4 for name, seconds in TIMES_S.items()}, choices, {})
    return {comparison.name: ratio(point, comparison) for comparison in COMPARISONS}


def test_mixture_compares_a_table_with_each_library_and_the_best_of_all() -> None:
    assert ratios(both="chain", own="ring") == pytest.approx(
        {
            "table of both ÷ the better of the two": 1.5,
            "table of both ÷ Unisono alone": 1.5,
            "table of both ÷ MPI alone": 0.75,
            "table of both ÷ the best of all": 3.0,
            "Unisono alone ÷ the best of all": 2.0,
            "MPI alone ÷ the best of all": 4.0,
        }
    )


def test_mixture_comparison_counts_mpi_as_the_better_library() -> None:
    slower = TIMES_S | {MPI_NATIVE: 1.5}
    choices = {"both": "ring", "own": "ring", "mpi": MPI_NATIVE}
    point = SizeTimes("shm", "broadcast", 8, {name: [seconds] * 4 for name, seconds in slower.items()}, choices, {})
    assert ratio(point, COMPARISONS[0]) == pytest.approx(2.0 / 1.5)


def test_mpi_ranks_use_mpiexec_and_python_of_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"unisono\.bench\.peers mpi"):
        mpi_ranks("mpich", 2, ["-V"])
    programs = tmp_path / ".mpi" / "mpich" / "bin"
    programs.mkdir(parents=True)
    (programs.parent / COMPLETE).touch()
    command, _ = mpi_ranks("mpich", 2, ["-V"])
    assert command[0] == str(programs / "mpiexec")
    assert command[-4:] == ["-n", "2", str(programs / "python"), "-V"]
    with pytest.raises(UsageError, match="there is no MPI library 'lam': there are openmpi, mpich"):
        mpi_ranks("lam", 2, [])


def test_mixture_command_passes_its_options_to_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[mixture.StudySettings] = []

    def study(place: mixture.MpiPlace, settings: mixture.StudySettings, folder: Path) -> list[SizeTimes]:
        asked.append(settings)
        choices = {"both": "ring", "own": "ring", "mpi": MPI_NATIVE}
        return [SizeTimes(place.transport, "broadcast", 8, {name: [s] * 4 for name, s in TIMES_S.items()}, choices, {})]

    monkeypatch.setattr(mixture, "study", study)
    monkeypatch.setattr(mixture, "RESULTS", tmp_path / "mixture.jsonl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = [
        "-n",
        "3",
        "--libraries",
        "mpich",
        "--transports",
        "shm,mpi",
        "--collectives",
        "broadcast",
        "--sizes",
        "8",
    ]
    result = CliRunner().invoke(mixture.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert [(question.ranks, question.collectives, question.sizes, question.placement) for question in asked] == [
        (3, ("broadcast",), (8,), "any")
    ] * 2
    assert len((tmp_path / "mixture.jsonl").read_text().splitlines()) == 2
