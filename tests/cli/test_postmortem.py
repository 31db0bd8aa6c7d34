"""`unisono postmortem`: its reports about real jobs that fail or hang, and about dumps made by hand."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import unisono
from support.deadlines import DEADLINE_S

from unisono.errors import UsageError
from unisono.postmortem.analysis import Report, analyse
from unisono.postmortem.culprits import live_findings
from unisono.postmortem.loading import load
from unisono.postmortem.page import html
from unisono.transports.recorder.dumps import Dump, write
from unisono.transports.recorder.live_ranks import LiveRank
from unisono.transports.recorder.memory import ChannelTraffic, RecordedCall, Snapshot

PROGRAM = """
import os, signal, sys, time
import numpy as np, unisono as un
world = un.init()
x = np.ones(8, np.float32)
for _ in range(3):
    world.allreduce(x, out=x)
fault, rank = sys.argv[1], world.rank
if rank == 0: print("ready", flush=True)
if fault == "mismatch":
    world.barrier() if rank == 1 else world.allreduce(x)
elif fault == "message deadlock":
    world.recv(x, 1 - rank) if rank < 2 else world.barrier()
elif fault == "exception":
    if rank == 1: raise ValueError("this rank is wrong")
    world.allreduce(x)
elif fault == "killed":
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    world.allreduce(x)
elif fault == "two communicators":
    pairs = [world.dup(), world.dup()]
    for pair in pairs: pair.barrier()
    if rank < 2:
        pairs[rank].allreduce(x)
        pairs[1 - rank].allreduce(x)
    else:
        world.barrier()
elif fault == "endless loop":
    while rank == 1: pass
    world.allreduce(x)
"""


def job(fault: str, folder: Path, **environ: str) -> str:
    """Run the program with a fault; return its output."""
    (folder / "program.py").write_text(PROGRAM)
    done = unisono("run", "-n", "3", "program.py", fault, folder=folder, UNISONO_DUMP=str(folder / "dumps"), **environ)
    assert done.returncode != 0
    return done.stderr


def report_on(folder: Path) -> Report:
    return analyse(load([folder / "dumps"]))


@pytest.mark.parametrize(
    ("fault", "kind", "culprits", "says"),
    [
        ("mismatch", "mismatch", (1,), "rank 1 called barrier()"),
        ("exception", "left", (1,), "ValueError: this rank is wrong"),
        ("killed", "dead", (1,), "rank 1 died"),
    ],
)
def test_the_culprit_of_a_failure_is_named(
    fault: str, kind: str, culprits: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    job(fault, tmp_path)
    report = report_on(tmp_path)
    assert (report.findings[0].kind, report.findings[0].ranks) == (kind, culprits)
    assert says.lower() in report.summary.lower()


def test_dumps_that_cannot_be_written_are_a_warning_beside_the_error(tmp_path: Path) -> None:
    (tmp_path / "dumps").write_text("a file, where a directory should be")
    said = job("mismatch", tmp_path)
    assert said.count(f"no dump could be written to {tmp_path}/dumps: File exists") == 3
    assert "rank 1 called barrier()" in said


@pytest.mark.parametrize("fault", ["message deadlock", "two communicators"])
def test_a_cycle_of_waiting_ranks_is_named(fault: str, tmp_path: Path) -> None:
    job(fault, tmp_path, UNISONO_TIMEOUT_S="2")
    (finding, *_) = report_on(tmp_path).findings
    assert (finding.kind, finding.ranks) == ("deadlock", (0, 1))


def test_sigusr1_to_the_launcher_says_who_hangs_and_where(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    dumps = tmp_path / "dumps"
    command = [sys.executable, "-m", "unisono", "run", "-n", "3", "program.py", "endless loop"]
    environ, pipe = {**os.environ, "UNISONO_DUMP": str(dumps)}, subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, env=environ) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == b"[0] ready\n"
            said = _ask_until_all_wait(launcher)
            assert "rank 0 is in #3 allreduce(float32[8], op=sum) at program.py:30" in said.replace(f"{tmp_path}/", "")
            for earlier in dumps.glob("unisono-*.json"):  # of ranks that may not have waited yet
                earlier.unlink()
            launcher.send_signal(signal.SIGUSR1)
            deadline = time.monotonic() + DEADLINE_S
            while len(list(dumps.glob("unisono-*.json"))) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            (finding,) = report_on(tmp_path).findings
        finally:
            launcher.terminate()
            launcher.communicate(timeout=DEADLINE_S)
    assert (finding.kind, finding.ranks) == ("user code", (1,))
    assert "program.py:29 in <module>" in finding.text


def _ask_until_all_wait(launcher: subprocess.Popen[bytes]) -> str:
    """Send SIGUSR1 to the launcher until it reports that rank 2 waits for rank 1; return that report."""
    assert launcher.stderr is not None
    deadline = time.monotonic() + DEADLINE_S
    said = ""
    while time.monotonic() < deadline:
        launcher.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        said += os.read(launcher.stderr.fileno(), 1 << 16).decode()
        if all(part in said for part in ("rank 0 is in #3", "rank 2 is in #3", "rank 1 is in user code")):
            return said
    raise AssertionError(said)


UNMET = """
import os, sys, time, unisono as un
rank, fault = int(os.environ["UNISONO_RANK"]), sys.argv[1]
if rank == 1 and fault == "absent": sys.exit(0)
if rank == 1: os.environ["UNISONO_STORE"] = f"file://{os.getcwd()}/other"
def meet():
    un.init()
try:
    meet()
except un.RendezvousError:
    while len(os.listdir("dumps")) < (2 if fault == "absent" else 3): time.sleep(0.05)
    raise
"""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("absent", "rank 1 wrote no dump"),
        ("other store", "rank 1 could not meet the others: ranks 0, 2 of 3 did not arrive"),
    ],
)
def test_ranks_that_do_not_meet_write_dumps_and_the_absent_one_is_named(fault: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(UNMET)
    limits = {"UNISONO_DUMP": str(tmp_path / "dumps"), "UNISONO_RENDEZVOUS_TIMEOUT_S": "2"}
    failed = unisono("run", "-n", "3", "program.py", fault, folder=tmp_path, **limits)
    assert "RendezvousError" in failed.stderr
    report = report_on(tmp_path)
    assert [(finding.kind, finding.ranks) for finding in report.findings] == [("not met", (1,))]
    assert says in report.findings[0].text
    dump = report.dumps.by_rank[0]
    assert dump.snapshot.calls == ()
    assert dump.stack["MainThread"][-1].endswith("program.py:7 in meet")


STUCK = """
import os, signal, sys, time
import numpy as np, unisono as un
world = un.init()
world.allreduce(np.ones(8, np.float32))
if world.rank == 1:
    if "interrupted" in sys.argv:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
world.allreduce(np.ones(8, np.float32))
"""


@pytest.mark.parametrize("end", ["timeout", "interrupted"])
def test_dumps_of_a_job_that_the_launcher_ends_show_the_place_of_the_culprit(end: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STUCK)
    limit = ["--timeout", "3"] if end == "timeout" else []
    completed = unisono(
        "run", *limit, "-n", "2", "program.py", end, folder=tmp_path, UNISONO_DUMP=str(tmp_path / "dumps")
    )
    assert completed.returncode == (124 if end == "timeout" else 130)
    dumps = report_on(tmp_path).dumps.by_rank
    assert sorted(dumps) == [0, 1]
    assert dumps[1].stack["MainThread"][-1].endswith("program.py:9 in <module>")


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_tables_json_and_a_page(tmp_path: Path) -> None:
    job("mismatch", tmp_path)
    shown = unisono("postmortem", "dumps", "--html", "page.html", folder=tmp_path)
    assert shown.returncode == 0
    assert "rank 1 called barrier()" in shown.stdout
    assert "Where each rank is" in shown.stdout
    assert "barrier() failed" in shown.stdout
    values = json.loads(unisono("postmortem", "dumps", "--json", folder=tmp_path).stdout)
    assert values["findings"][0]["ranks"] == [1]
    page = (tmp_path / "page.html").read_text()
    assert "rank 1 called barrier()" in page
    assert page.count("<rect") >= 12  # four calls of three ranks
    assert "http" not in page


def test_no_dumps_and_files_that_are_no_dumps(tmp_path: Path) -> None:
    missing = unisono("postmortem", "nowhere", folder=tmp_path)
    assert (missing.returncode, missing.stderr) == (2, "unisono: there is no file or directory 'nowhere'\n")
    (tmp_path / "dumps").mkdir()
    assert "set UNISONO_DUMP to a directory" in unisono("postmortem", "dumps", folder=tmp_path).stderr
    (tmp_path / "dumps" / "broken.json").write_text('{"format": "unisono-dump", "ver')
    assert "only a part of one" in unisono("postmortem", "dumps", folder=tmp_path).stderr


# --- dumps made by hand ----------------------------------------------------------------------------------------------


def call(sequence: int, text: str = "barrier()", state: str = "done", **changes: object) -> RecordedCall:
    ended_ns = 0 if state == "running" else 2000 + sequence
    values = RecordedCall(
        sequence, 0, sequence, False, hash(text) % 2**64, text, {}, 8, 1000 + sequence, 1000 + sequence, 0, ended_ns,
        "train.py:12", None, None, state,
    )  # fmt: skip
    return replace(values, **changes)  # type: ignore[arg-type]


def dump(rank: int, calls: Sequence[RecordedCall], size: int = 2, job: str = "aa" * 16, written_s: float = 1.0) -> Dump:
    about = {"job": job, "epoch": 0, "host": "a"}
    snapshot = Snapshot(rank, size, 100 + rank, about, {}, (), len(calls), tuple(calls))
    return Dump(snapshot, "request", 9000, written_s, None, {"MainThread": ["train.py:20 in step"]})


def reported(folder: Path, *dumps: Dump, job: str = "") -> Report:
    for dump in dumps:
        write(dump, folder, f"{dump.snapshot.about['job'][:8]}-0")
    return analyse(load([folder], job))


def test_ranks_that_run_ahead_of_what_another_rank_has_kept_are_no_culprits(tmp_path: Path) -> None:
    old = dump(0, [call(number) for number in range(5)] + [call(5, state="running")])
    ahead = dump(1, [call(number) for number in range(3, 6)] + [call(6, state="running")])
    report = reported(tmp_path, old, ahead)
    assert [row.absent for row in report.rows] == [(), (), (), (), (), (), (0,)]
    assert [finding.ranks for finding in report.findings] == [(0,)]


def test_a_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    waiting = [call(0, state="running")]
    report = reported(tmp_path, dump(0, waiting, size=3), dump(2, waiting, size=3))
    assert report.dumps.missing == (1,)
    assert "rank 1 wrote no dump" in report.findings[0].text


def test_a_slow_rank_is_the_one_for_which_the_others_wait(tmp_path: Path) -> None:
    waiting = [call(0), call(1, state="running", waits_for=1)]
    slow = [call(0), call(1, state="running")]
    report = reported(tmp_path, dump(0, waiting, 3), dump(1, slow, 3), dump(2, waiting, 3))
    assert [(finding.kind, finding.ranks) for finding in report.findings] == [("slow", (1,))]


def test_a_slow_link_is_the_one_with_bytes_under_way_in_a_ring_where_all_wait(tmp_path: Path) -> None:
    def rank(own: int, sent: int, received: int) -> Dump:
        after, before = (own + 1) % 3, (own - 1) % 3
        traffic = (
            ChannelTraffic(0, after, "tcp", 9, sent, 0, 0, 0),
            ChannelTraffic(1, before, "tcp", 0, 0, 9, received, 0),
        )
        whole = dump(own, [call(0, state="running", waits_for=before)], 3)
        return replace(whole, snapshot=replace(whole.snapshot, traffic=traffic))

    report = reported(
        tmp_path, rank(0, 4_000_000, 4_000_000), rank(1, 5_000_000, 4_000_000), rank(2, 4_000_000, 3_500_000)
    )
    assert [(finding.kind, finding.ranks) for finding in report.findings] == [("slow link", (1, 2))]
    assert "rank 1 to rank 2 is slow: 1.5 MB" in report.summary


def test_the_rank_that_uses_communicators_in_another_order_is_the_culprit(tmp_path: Path) -> None:
    def rank(own: int, communicator: int) -> Dump:
        whole = dump(own, [call(0), call(0, "allreduce(x)", "running", communicator=communicator)], 3)
        return replace(whole, snapshot=replace(whole.snapshot, communicators={7: (0, 1, 2), 8: (0, 1, 2)}))

    report = reported(tmp_path, rank(0, 7), rank(1, 8), rank(2, 7))
    assert [(finding.kind, finding.ranks) for finding in report.findings] == [("deadlock", (1,))]
    assert "of communicator 2 of ranks 0, 1 and 2, where ranks 0 and 2 wait in" in report.summary


def test_the_culprit_of_a_running_job_is_named_once_others_have_waited() -> None:
    def rank(own: int, calls: Sequence[RecordedCall], waited_s: float, *, is_stopped: bool = False) -> LiveRank:
        return LiveRank(100 + own, dump(own, calls, 3).snapshot, 1001 + int(waited_s * 1e9), is_stopped)

    def culprits(waited_s: float, middle: LiveRank | None) -> list[tuple[str, tuple[int, ...]]]:
        waiting = [call(0), call(1, state="running", waits_for=1)]
        ranks = [rank(0, waiting, waited_s), *([] if middle is None else [middle]), rank(2, waiting, waited_s)]
        return [(finding.kind, finding.ranks) for finding in live_findings(ranks)]

    assert culprits(0.5, rank(1, [call(0)], 0.5)) == []
    assert culprits(1.5, rank(1, [call(0)], 1.5)) == [("user code", (1,))]
    assert culprits(1.5, rank(1, [call(0)], 1.5, is_stopped=True)) == [("stopped", (1,))]
    assert culprits(1.5, None) == [("elsewhere", (1,))]
    assert live_findings([]) == []


def test_of_several_jobs_the_newest_is_shown_unless_one_is_picked(tmp_path: Path) -> None:
    older, newer = dump(0, [call(0)], 1, "bb" * 16, 1.0), dump(0, [call(0)], 1, "cc" * 16, 2.0)
    report = reported(tmp_path, older, newer)
    assert report.dumps.job == "cccccccc-0"
    assert any("--job" in note for note in report.dumps.notes)
    assert reported(tmp_path, job="bb").dumps.job == "bbbbbbbb-0"
    with pytest.raises(UsageError, match="no dumps of job 'dd'"):
        reported(tmp_path, job="dd")


def test_files_that_are_cut_off_or_newer_are_named_and_other_jobs_are_not_read(tmp_path: Path) -> None:
    reported(tmp_path, dump(0, [call(0)], 3), dump(1, [call(0)], 3), dump(2, [call(0)], 3))
    whole = (tmp_path / "unisono-aaaaaaaa-0-rank-1.json").read_text()
    (tmp_path / "unisono-aaaaaaaa-0-rank-1.json").write_text(whole[:-100])
    (tmp_path / "newer.json").write_text(whole.replace('"version": 1', '"version": 2'))
    (tmp_path / "compact.json").write_text(json.dumps(json.loads(whole.replace("aa" * 16, "bb" * 16))))
    report = reported(tmp_path, job="aa")
    assert (report.dumps.job, report.dumps.missing) == ("aaaaaaaa-0", (1,))
    notes = "\n".join(report.dumps.notes)
    assert "rank-1.json is no JSON file, or only a part of one" in notes
    assert "newer.json has version 2 of the format; this Unisono reads 1" in notes
    assert "there are dumps of bbbbbbbb-0 too" in notes


def test_a_thousand_ranks_and_hostile_texts_and_files(tmp_path: Path) -> None:
    text = "<script>alert(1)</script>[red]x[/]"
    os.mkfifo(tmp_path / "unisono-aaaaaaaa-0-rank-\x1b[2J.json")
    dumps = [dump(rank, [call(0, text), call(1, text, "running")], 1000) for rank in range(1000) if rank != 7]
    report = reported(tmp_path, *dumps, dump(7, [call(0, text)], 1000))
    assert [finding.ranks for finding in report.findings] == [(7,)]
    assert "<script>" not in html(report)
    shown = unisono("postmortem", str(tmp_path), folder=tmp_path)
    assert shown.returncode == 0
    assert text in shown.stdout
    assert "is no regular file" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_control_characters_of_a_dump_reach_no_terminal(tmp_path: Path) -> None:
    reported(tmp_path, dump(0, [call(0, "\x1b]0;title\x07\x1b[2J")], 1))
    shown = unisono("postmortem", str(tmp_path), folder=tmp_path)
    assert r"\x1b]0;title\x07\x1b[2J" in shown.stdout
    assert "\x1b" not in shown.stdout


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium, which Debian has as a package")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    report = reported(tmp_path, dump(0, [call(0), call(1, state="running")]), dump(1, [call(0)]))
    (tmp_path / "page.html").write_text(html(report))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{tmp_path}/page.html"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    assert "Rank 1 has not called #1" in shown
    assert shown.count("<rect") == 4  # three calls, and the time in which rank 1 has not called
    assert shown.count('<rect class="idle"') == 1
