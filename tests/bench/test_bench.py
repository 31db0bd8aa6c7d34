"""The benchmarks: arithmetic, command line, and the driver with libraries that work, raise, crash or hang."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S

from unisono.bench import page
from unisono.bench.driver import BenchDriver, NoTimes, Results, Sample, Settings, steps
from unisono.bench.formats import FORMATS
from unisono.bench.peers import COMPLETE, ENVIRONMENTS, PEERS, ROOT, Library, peer, unisono_over
from unisono.bench.placement import cores_to_bind
from unisono.bench.report import append, document, rows
from unisono.bench.sizes import format_size, parse_sizes
from unisono.bench.statistics import BUS_FACTORS, bus_bandwidth, median, p90, paired_ratio, slowest
from unisono.cli.commands.bench import PROGRAMS
from unisono.cli.main import main
from unisono.errors import UsageError
from unisono.transports.host.core_distance import UNKNOWN, CorePlacement, measure

PAGE_KIB = resource.getpagesize() // 1024
STATES = ("a channel open to each", "8 messages of 8 B to each", "1 MiB to each")
REPOSITORY = Path(__file__).resolve().parents[2]
NEAR, FAR = CorePlacement("near", 50.0), CorePlacement("far", 210.0)

# Libraries of this test: real ranks under the real launcher, without communication, which a job of one rank does not
# need.
ADAPTER = """
import os, time

class Adapter:
    size = int(os.environ["UNISONO_SIZE"])
    version = "adapter of a test"

    def call(self, collective, array, out):
        if {lacks}:
            raise NotImplementedError("no such call")
        def call():
            {body}
        return call

    def barrier(self):
        pass

    def close(self):
        pass

connect = Adapter
"""


class Silence:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def step(self, doing: str) -> None:
        self.heard.append(doing)


@pytest.fixture
def library_that(tmp_path: Path) -> Any:
    def make(body: str, name: str = "library", lacks: str = "False") -> Library:
        path = tmp_path / f"{name}.py"
        path.write_text(ADAPTER.format(body=body, lacks=lacks))
        launch = "{python} -m unisono run -n {ranks} --no-label -- {worker}"
        return Library(name, str(path.with_suffix("")), launch, "UNISONO_RANK")

    return make


def small(*libraries: Library, ranks: int = 1, sizes: tuple[int, ...] = (8,), deadline_s: float = 30.0) -> Settings:
    return Settings(
        "allreduce", ranks, sizes, "float32", 4, libraries, rounds=2, seconds=0.02, bind="none", deadline_s=deadline_s
    )


def command_fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("unisono: ")
    assert written.err.count("\n") == 1
    return written.err


# --- Statistics


def test_time_of_a_call_is_that_of_its_slowest_rank() -> None:
    assert slowest([[1000, 5000], [3000, 2000]]).tolist() == [3.0, 5.0]


def test_median_is_taken_within_each_round_and_then_over_rounds() -> None:
    rounds = [np.array([1.0, 2.0, 30.0]), np.array([4.0] * 100), np.array([8.0])]
    assert median(rounds) == 4.0


def test_p90_is_taken_over_same_rounds_as_median() -> None:
    rounds = [np.arange(0.0, 101.0), np.arange(100.0, 201.0), np.arange(0.0, 101.0)]
    assert p90(rounds) == pytest.approx(90.0)
    # The one fast round has most calls, and the two other rounds are slow.
    uneven = [np.full(1000, 1.0), np.full(3, 50.0), np.full(3, 60.0)]
    assert p90(uneven) >= median(uneven) == 50.0


@pytest.mark.parametrize(
    ("collective", "ranks", "expected"),
    [("allreduce", 4, 1.5), ("allreduce", 2, 1.0), ("broadcast", 4, 1.0), ("reduce", 4, 1.0), ("alltoall", 4, 0.75)],
)
def test_bus_bandwidth_follows_nccl_tests(collective: str, ranks: int, expected: float) -> None:
    assert bus_bandwidth(collective, 1_000_000, ranks, 1000.0) == pytest.approx(expected)


def test_barrier_has_no_bus_bandwidth() -> None:
    assert bus_bandwidth("barrier", 0, 4, 1.0) is None


def test_paired_ratio_cancels_disturbances_of_a_round() -> None:
    disturbance = np.array([1.0, 7.0, 0.5, 20.0])
    assert paired_ratio(list(3.0 * disturbance), list(disturbance)) == pytest.approx((3.0, 3.0, 3.0))


def test_paired_ratio_is_a_geometric_mean_inside_its_interval() -> None:
    ratio = paired_ratio([1.0, 4.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0])
    assert ratio.value == pytest.approx(2.0)
    assert 1.0 <= ratio.low < 2.0 < ratio.high <= 4.0


# --- Sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", (8,)),
        ("8:512", (8, 32, 128, 512)),
        ("8:600", (8, 32, 128, 512, 600)),
        ("1K:4K:2", (1024, 2048, 4096)),
        ("1M,8,8", (8, 1 << 20)),
        ("8:8,64", (8, 64)),
    ],
)
def test_parse_sizes_accepts_ranges_and_lists(text: str, expected: tuple[int, ...]) -> None:
    assert parse_sizes(text) == expected


@pytest.mark.parametrize("text", ["", "x", "8:", "0", "-8", "64:8", "8:64:1", "8:64:x", "8:16:2:2", "8,,16", "1T"])
def test_parse_sizes_refuses_invalid_text(text: str) -> None:
    with pytest.raises(UsageError):
        parse_sizes(text)


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (8, "8 B"), (1536, "1536 B"), (65536, "64 KiB")])
def test_format_size_uses_the_largest_unit_that_divides_the_size(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


# --- Command line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["allreduce", "--against", "nobody"], "no peer 'nobody'"),
        (["allreduce", "--against", "gloo,gloo"], "named twice"),
        (["allreduce", "--transports", "pigeon"], "'pigeon' cannot be measured as a transport"),
        (["allreduce", "--sizes", "many"], "'many' is not a size"),
        (["allreduce", "--sizes", "6"], "no whole number of elements"),
        (["alltoall", "-n", "3", "--sizes", "16"], "for each of 3 ranks"),
        (["allreduce", "-n", "0"], "0 is not in the range"),
        (["allreduce", "--dtype", "complex64"], "complex64"),
        (["gossip"], "there is no command 'gossip'"),
        (["allreduc"], "did you mean 'allreduce'?"),
        (["compare", "absent.json", "absent.json"], "absent.json"),
    ],
)
def test_bench_refuses_bad_arguments_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert expected in command_fails(capsys, *arguments)


def test_bench_says_how_to_install_a_missing_peer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "-m unisono.bench.peers install gloo`" in command_fails(capsys, "allreduce", "--against", "gloo")


def test_every_peer_has_an_environment_an_adapter_and_a_command() -> None:
    for library in PEERS.values():
        assert library.environment in {*ENVIRONMENTS, None}
        assert (REPOSITORY / "bench" / "adapters" / f"{library.adapter}.py").is_file()
        command = library.command(3, ["python", "worker.py"])
        assert command[-2:] == ["python", "worker.py"]
        assert "3" in command
        assert not any("{" in word for word in command)


# --- Placement


def test_ranks_get_cores_of_their_own_where_there_are_enough() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert cores_to_bind(len(allowed), "auto") == allowed
    assert cores_to_bind(len(allowed) + 1, "auto") == []
    assert cores_to_bind(len(allowed) + 1, "core") == [*allowed, allowed[0]]
    assert cores_to_bind(1, "none") == []


def test_placement_is_unknown_without_two_cores() -> None:
    assert measure([]) == measure([0]) == measure([0, 0]) == UNKNOWN


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two cores")
def test_placement_is_measured_between_two_cores() -> None:
    placement = measure(cores_to_bind(2, "core"))
    assert placement.latency_ns is not None
    assert placement.latency_ns > 0
    assert placement.label in {"core", "near", "far"}


# --- The driver, with libraries of the test


def test_driver_measures_every_library_in_all_rounds_at_all_sizes(library_that: Any) -> None:
    settings = small(library_that("pass", "one"), library_that("pass", "two"), sizes=(8, 1024))
    observer = Silence()
    results = BenchDriver(settings, observer).run()
    assert results.failures == []
    measured = sorted((sample.nbytes, sample.library, sample.round) for sample in results.samples)
    assert measured == sorted(
        (nbytes, name, number) for nbytes in (8, 1024) for name in ("one", "two") for number in (0, 1)
    )
    assert all(sample.times_us.size > 0 and (sample.times_us > 0).all() for sample in results.samples)
    assert len(observer.heard) == steps(settings)


def test_driver_reports_a_wrong_result_and_does_not_time_it(library_that: Any) -> None:
    results = BenchDriver(small(library_that("array[1] += 1", "wrong"), library_that("pass", "right")), Silence()).run()
    (failure,) = results.failures
    assert (failure.library, failure.nbytes) == ("wrong", 8)
    assert "wrong result on rank 0: element 1 is 2.0 and must be 1.0" in failure.reason
    assert {sample.library for sample in results.samples} == {"right"}


def test_driver_detects_a_result_that_goes_wrong_in_a_later_call(library_that: Any) -> None:
    body = "call.calls = getattr(call, 'calls', 0) + 1; array[:] += call.calls > 1"
    results = BenchDriver(small(library_that(body)), Silence()).run()
    assert "wrong result" in results.failures[0].reason
    assert results.samples == []


def test_driver_measures_library_again_at_sizes_whose_call_it_has(library_that: Any) -> None:
    library = library_that("pass", lacks="array.size == 2")
    results = BenchDriver(small(library, sizes=(8, 1024)), Silence()).run()
    assert results.failures == [NoTimes(8, "library", "no such call")]
    assert {sample.nbytes for sample in results.samples} == {1024}


@pytest.mark.parametrize(
    ("body", "expected", "deadline_s"),
    [
        ("os.kill(os.getpid(), 9)", "a rank ended unexpectedly", 60.0),
        ("raise RuntimeError('out of luck')", "RuntimeError: out of luck", 60.0),
        ("time.sleep(1000)", "its ranks did not answer in time", 5.0),
    ],
)
def test_driver_measures_the_others_when_a_library_crashes_raises_or_hangs(
    library_that: Any, tmp_path: Path, body: str, expected: str, deadline_s: float
) -> None:
    pids = tmp_path / "pids"
    bad = library_that(f"open({str(pids)!r}, 'a').write(str(os.getpid()) + ' '); {body}", "bad")
    results = BenchDriver(
        small(bad, library_that("pass", "good"), ranks=2, sizes=(0,), deadline_s=deadline_s), Silence()
    ).run()
    (failure,) = results.failures
    assert (failure.library, expected in failure.reason) == ("bad", True), failure
    assert {sample.library for sample in results.samples} == {"good"}
    assert _all_ended(pids.read_text().split())


def test_driver_reports_a_launcher_that_ends_at_once() -> None:
    results = BenchDriver(small(Library("library", "mpi", "/bin/false", "RANK")), Silence()).run()
    assert results.failures == [NoTimes(8, "library", "its launcher ended with code 1")]


def test_driver_reports_a_launcher_that_does_not_exist() -> None:
    (failure,) = BenchDriver(small(Library("library", "mpi", "/nowhere/mpirun", "RANK")), Silence()).run().failures
    assert "its launcher cannot be started" in failure.reason


def _all_ended(pids: list[str]) -> bool:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if not any(Path("/proc", pid).exists() for pid in pids):
            return len(pids) > 0
        time.sleep(0.01)
    return False


# --- The report


def _sample(library: str, number: int, placement: CorePlacement, *times_us: float) -> Sample:
    return Sample(1024, library, number, placement, np.array(times_us))


def test_report_compares_only_rounds_of_one_placement() -> None:
    own, other = unisono_over("shm"), PEERS["gloo"]
    samples = [
        *(_sample(own.name, 0, NEAR, 1.0, 1.0), _sample(other.name, 0, NEAR, 2.0, 2.0)),
        *(_sample(own.name, 1, FAR, 10.0, 10.0), _sample(other.name, 1, FAR, 50.0, 50.0)),
    ]
    result = rows(small(own, other, ranks=2, sizes=(1024,)), Results(samples))
    by_key = {(row.placement, row.library): row for row in result}
    assert [(row.placement, row.library) for row in result] == [
        ("far", "unisono-shm"),
        ("far", "gloo"),
        ("near", "unisono-shm"),
        ("near", "gloo"),
    ]
    assert (by_key["near", "gloo"].ratios or {})["unisono-shm"].value == pytest.approx(2.0)
    assert (by_key["far", "gloo"].ratios or {})["unisono-shm"].value == pytest.approx(5.0)
    assert by_key["near", "unisono-shm"].ratios == {}
    assert by_key["far", "gloo"].latency_ns == FAR.latency_ns
    assert by_key["far", "gloo"].busbw == pytest.approx(1024 / 50.0 / 1e3)


def test_json_document_has_a_row_for_each_failure_and_no_host_name(tmp_path: Path) -> None:
    own = unisono_over("shm")
    results = Results(
        [_sample(own.name, 0, UNKNOWN, 1.0)], [NoTimes(1024, own.name, "its ranks did not answer in time")]
    )
    settings = small(own, sizes=(1024,))
    content = document(settings, results, rows(settings, results))
    append(tmp_path / "results" / "allreduce.jsonl", content)
    append(tmp_path / "results" / "allreduce.jsonl", content)
    lines = (tmp_path / "results" / "allreduce.jsonl").read_text().splitlines()
    assert len(lines) == 2
    read = json.loads(lines[0])
    assert [row["failure"] for row in read["rows"]] == [None, "its ranks did not answer in time"]
    assert read["machine"].keys() == {"cpu", "cores", "kernel", "python", "numpy", "unisono"}


def test_results_are_printed_as_other_tools_print_them() -> None:
    own = unisono_over("shm")
    results = Results([_sample(own.name, 0, NEAR, 2.0)], [NoTimes(2048, own.name, "its ranks did not answer in time")])
    settings = small(own, ranks=2, sizes=(1024, 2048))
    text = {name: write(settings, results, rows(settings, results)) for name, write in FORMATS.items()}
    assert list(csv.DictReader(io.StringIO(text["csv"]))) == [
        {
            **{"collective": "allreduce", "dtype": "float32", "ranks": "2", "nbytes": "1024", "library": own.name},
            **{"placement": "near", "median_us": "2.0", "p90_us": "2.0", "busbw": "0.512", "calls": "1"},
        }
    ]
    about = f"# allreduce float32, 2 ranks: {own.name}, placement near"
    assert text["osu"].splitlines()[0] == text["nccl-tests"].splitlines()[0] == about
    assert text["osu"].splitlines()[-1].split() == ["1024", "2.00"]
    columns = ["1024", "256", "float", "sum", "-1", "2.00", "0.51", "0.51", "0"]
    assert text["nccl-tests"].splitlines()[-1].split() == columns
    assert len(json.loads(text["json"])["rows"]) == 2


def test_bench_prints_json_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "barrier", "-n", "2", "--seconds", "0.05", "--rounds", "2", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["collective"] == "barrier"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium, which Debian has as a package")
def test_browser_shows_the_page_of_a_benchmark(tmp_path: Path) -> None:
    own, other = unisono_over("shm"), PEERS["gloo"]
    samples = [
        _sample(library.name, number, NEAR, time_us)
        for library, time_us in ((own, 2.0), (other, 8.0))
        for number in (0, 1)
    ]
    results = Results(samples, [NoTimes(2048, other.name, "<it> did not answer")], {"unisono": "1", "gloo": "2"})
    settings = small(own, other, ranks=2, sizes=(1024, 2048))
    path = tmp_path / "page.html"
    path.write_text(page.html(document(settings, results, rows(settings, results))))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{path}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    assert "<svg" in shown
    assert "8 · 4.00 [4.00–4.00]" in shown
    assert "background: #78be78" in shown  # the strongest green, for four times as long
    assert "&lt;it&gt; did not answer" in shown
    assert "<script" not in shown
    assert not re.search("(src|href)=[^#]*http", shown)


def saved(path: Path, times: Mapping[str, tuple[float, float]], **facts: Any) -> Path:
    """Write a benchmark with the median and the 90th percentile of each library; return its path."""
    rows = [
        {"nbytes": 8, "placement": "near", "library": name, "median_us": median_us, "p90_us": p90_us}
        for name, (median_us, p90_us) in times.items()
    ]
    document = {"format": 1, "date": "2026-01-02T03:04:05", "collective": "allreduce", "dtype": "float32", "ranks": 2}
    path.write_text(json.dumps({**document, "machine": {"cpu": "EPYC"}, "rows": rows, **facts}))
    return path


def test_comparison_tells_changes_from_noise_and_from_a_slower_machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old = saved(tmp_path / "old.json", {"unisono-shm": (1.0, 1.1), "unisono-tcp": (9.0, 9.9), "gloo": (100.0, 180.0)})
    new = saved(tmp_path / "new.json", {"unisono-shm": (2.0, 2.2), "unisono-tcp": (9.5, 9.6), "gloo": (150.0, 200.0)})
    assert main(["bench", "compare", str(old), str(new), "--json"]) == 1
    result = {record["library"]: record for record in json.loads(capfd.readouterr().out)}
    assert {name: record["verdict"] for name, record in result.items()} == {
        "unisono-shm": "slower",
        "unisono-tcp": "same",
        "gloo": "same",
    }
    assert result["unisono-shm"]["ratio"] == 2.0
    assert result["unisono-shm"]["relative"] == pytest.approx(2.0 / 1.5)
    assert result["gloo"]["relative"] is None
    assert main(["bench", "compare", str(new), str(old)]) == 0
    assert "faster" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"ranks": 4}, "one has ranks 2, the other 4"),
        ({"rows": []}, "no size, placement and library in common"),
        ({"rows": 3}, "is no result of `unisono bench`"),
    ],
)
def test_benchmarks_that_differ_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], facts: dict[str, Any], why: str
) -> None:
    old = saved(tmp_path / "old.json", {"unisono-shm": (1.0, 1.1)})
    new = saved(tmp_path / "new.json", {"unisono-shm": (1.0, 1.1)}, **facts)
    assert why in command_fails(capsys, "compare", str(old), str(new))


def test_programs_of_the_bench_are_commands(capfd: pytest.CaptureFixture[str]) -> None:
    for package, names in PROGRAMS.items():
        assert [name for name in names if find_spec(f"{package}.{name}") is None] == []
    assert main(["bench", "bootstrap", "--ranks", "2", "--repeats", "1", "--json"]) == 0
    assert [row["ranks"] for row in json.loads(capfd.readouterr().out)] == [2]


# --- The real libraries


def measured_by_the_command(path: Path, *arguments: str) -> dict[str, Any]:
    status = main(["bench", *arguments, "--seconds", "0.05", "--rounds", "2", "--out", str(path)])
    assert status == 0
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.parametrize(
    "collective",
    [name if name in ("allreduce", "barrier") else pytest.param(name, marks=pytest.mark.night) for name in BUS_FACTORS],
)
def test_bench_measures_unisono_over_shm_and_tcp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], collective: str
) -> None:
    arguments = (collective, "-n", "2", "--sizes", "8,64K", "--transports", "shm,tcp")
    content = measured_by_the_command(tmp_path / "results.json", *arguments)
    sizes = {0} if collective == "barrier" else {8, 65536}
    assert {(row["nbytes"], row["library"]) for row in content["rows"]} == {
        (size, name) for size in sizes for name in ("unisono-shm", "unisono-tcp")
    }
    assert all(row["median_us"] > 0 for row in content["rows"])
    output = capsys.readouterr().out
    assert "÷ unisono-shm" in output
    assert re.search(rf"{content['date'][:4]}-.* cores, load \d+\.\d before, Linux ", output.replace("\n", " "))


def test_bench_measures_mapped_arrays_and_bare_copies_beside_ordinary_ones(tmp_path: Path) -> None:
    peers = "unisono-empty", "bare-copy"
    content = measured_by_the_command(
        tmp_path / "results.json", "allreduce", "--sizes", "256K", "--against", ",".join(peers)
    )
    ratios = {row["library"]: row["ratios"] for row in content["rows"]}
    assert all(ratios[name]["unisono-shm"]["value"] > 0 for name in peers)
    assert [row["failure"] for row in content["rows"]] == [None] * len(content["rows"])


@pytest.mark.skipif(not (REPOSITORY / ROOT / "gloo" / COMPLETE).exists(), reason="make peers installs Gloo")
def test_bench_measures_gloo_beside_unisono(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert peer("gloo").environment == "gloo"
    content = measured_by_the_command(tmp_path / "results.json", "allreduce", "--sizes", "1K", "--against", "gloo")
    assert content["versions"]["gloo"].startswith("Gloo of torch 2.13.0")
    gloo = [row for row in content["rows"] if row["library"] == "gloo"]
    assert all(row["ratios"]["unisono-shm"]["value"] > 0 for row in gloo)
    assert gloo


def test_small_messages_cost_at_most_two_pages_for_each_peer() -> None:
    peers = 200
    output = subprocess.check_output(
        [sys.executable, "-m", "unisono.bench.programs.memory", "--peers", str(peers), "--json"]
    )
    linked, small, large = (
        {row["state"]: row["resident_kib"] for row in json.loads(output)}[state] for state in STATES
    )
    assert (small - linked) / peers <= 2 * PAGE_KIB + 9  # the memory for messages is a few KiB more
    assert (large - small) / peers > 1000


def test_overlap_benchmark_measures_calls_beside_computing() -> None:
    asked = ["--sizes", "4K,1M", "--rounds", "3", "--json"]
    rows = json.loads(
        subprocess.check_output([sys.executable, "-m", "unisono.bench.programs.overlap", *asked], timeout=DEADLINE_S)
    )
    assert [(row["ranks"], row["nbytes"]) for row in rows] == [(2, 4096), (2, 1 << 20)]
    for row in rows:
        assert all(row[name] > 0 for name in ("compute_ms", "allreduce_ms", "overlapped_ms", "ratio", "start_us"))


def test_overlap_benchmark_prints_a_table() -> None:
    asked = ["--sizes", "4K", "--rounds", "2", "-n", "1"]
    output = subprocess.check_output(
        [sys.executable, "-m", "unisono.bench.programs.overlap", *asked], timeout=DEADLINE_S, text=True
    )
    header, row = output.splitlines()
    assert header.split()[0] == "nbytes"
    assert row.split()[:2] == ["4", "KiB"]
