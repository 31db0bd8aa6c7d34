"""Plants faults in real jobs, and shows which sources of information name the culprit.

    sudo unisono bench faults [FAULT...] [--out bench/results/faults.jsonl] [--json]

Each fault is a job of three ranks (`faulty_rank.py`), mostly with rank 1 as the culprit. There are four
sources: the errors of the other ranks, `unisono postmortem` on the dumps, `unisono top` while the job hangs or is slow,
and the log of the ranks with the lines of the launcher. A source names the culprit if it has a sentence with the number
of the rank and the reason; `FAULTS` has these as regular expressions.

Two faults need several hosts, which are those of `bench.namespaces`, and one needs a full disk, which is a small tmpfs.
So these three need root. If a fault happens on another host, `top` is run where that host's processes cannot be seen.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from unisono.bench.namespaces import address, inside, ip, missing, network
from unisono.foundation.program import begin

RANK = Path(__file__).resolve().parent / "faulty_rank.py"
RANKS = 3
CULPRIT = 1
SOURCES = ("error", "postmortem", "top", "log")
RUN_LIMIT_S = 60.0
SETTINGS = {"UNISONO_TIMEOUT_S": "8", "UNISONO_WARN_AFTER_S": "1"}
_SLOW = {"UNISONO_TIMEOUT_S": "100"}
SLOW_RATE = ("rate", "4mbit", "burst", "128kb", "limit", "2mb")

AT_ONCE = "the job ends at once"
NO_FAILURE = "the job does not fail"


class RankPlaces(NamedTuple):
    """Where the ranks of a job run.

    Attributes:
        prefix: words before the command of each rank.
        foreign: the ranks on a host other than that of rank 0.
    """

    prefix: tuple[str, ...] = ()
    foreign: tuple[int, ...] = ()


class PlannedFault(NamedTuple):
    """A fault.

    Attributes:
        name: the fault, for people.
        function: the function of `faulty_rank.py`.
        says: for each source, the words that it must contain; or a reason in brackets why it cannot say anything.
        place: makes the place of the ranks, from a folder for files.
        environ: settings other than `SETTINGS`.
        is_slow: whether the job is slow and does not fail. Then SIGUSR1 asks for dumps.
    """

    name: str
    function: str
    says: dict[str, str]
    place: Callable[[Path], contextlib.AbstractContextManager[RankPlaces]] = lambda folder: contextlib.nullcontext(
        RankPlaces()
    )
    environ: dict[str, str] = {}  # noqa: RUF012
    is_slow: bool = False


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[RankPlaces]:
    """Yield a place with rank 1 on a host of its own."""
    with network(2) as names:
        yield _on_hosts(names, folder, "$((UNISONO_RANK % 2))", (CULPRIT,))


@contextlib.contextmanager
def slow_link(folder: Path) -> Iterator[RankPlaces]:
    """Yield a place with one host for each rank. The link of rank 1's host is slow."""
    with network(RANKS) as names:
        switch = f"{names[0].removesuffix('0')}switch"
        for namespace, device in ((names[CULPRIT], "eth0"), (switch, f"port{CULPRIT}")):
            ip("tc", "qdisc", "add", "dev", device, "root", "tbf", *SLOW_RATE, namespace=namespace)
        yield _on_hosts(names, folder, "$UNISONO_RANK", ())


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[RankPlaces]:
    """Yield a place in which rank 1 sees another disk at the directory of the dumps, which has no room for one."""
    mount = (
        'mount -t tmpfs -o size=4k none "$UNISONO_DUMP" && head -c 4096 /dev/zero >"$UNISONO_DUMP/full" && exec "$@"'
    )
    script = f'[ "$UNISONO_RANK" = {CULPRIT} ] || exec "$@"; exec unshare --mount sh -c \'{mount}\' sh "$@"'
    yield RankPlaces(("sh", "-c", script, "sh"))


def _on_hosts(names: Sequence[str], folder: Path, host: str, foreign: tuple[int, ...]) -> RankPlaces:
    start = names[0].removesuffix("0")
    network_address = address(0).removesuffix("1")
    script = (
        f"export UNISONO_STORE=file://{folder}/store UNISONO_BIND_ADDRESS={network_address}$(({host} + 1)); "
        f'exec {" ".join(inside(f"{start}{host}"))} "$@"'
    )
    return RankPlaces(("sh", "-c", script, "sh"), foreign=foreign)


NOT_CALLED = r"rank 1 has not called (it|#\d+ allreduce)"
DEADLOCK = r"^(?=.*rank 0 )(?=.*rank 1 )(?=.*rank 2 ).*wait for each other"
HANG = {
    "error": NOT_CALLED,
    "postmortem": rf"{NOT_CALLED}.*: it is in user code, at .*faulty_rank.py:\d+ in ",
    "top": rf"{NOT_CALLED}.*: it is in user code",
    "log": NOT_CALLED,
}
FAULTS = (
    PlannedFault(
        "mismatched call",
        "mismatched",
        dict.fromkeys(SOURCES, r"rank 1 called barrier\(\).*, where ranks 0 and 2 called allreduce")
        | {"top": f"({AT_ONCE})"},
    ),
    PlannedFault("skipped collective", "skipping", HANG),
    PlannedFault("endless loop in user code", "looping", HANG),
    PlannedFault(
        "SIGSTOP",
        "stopping",
        {
            "error": r"rank 1 does not answer \(is it stopped",
            "postmortem": "rank 1 did not answer and wrote no dump: .* stopped",
            "top": "rank 1 is stopped",
            "log": r"rank 1 does not answer \(is it stopped",
        },
    ),
    PlannedFault(
        "SIGKILL",
        "dying",
        {
            "error": "rank 1 died",
            "postmortem": "rank 1 died first",
            "top": f"({AT_ONCE})",
            "log": "rank 1 was killed by SIGKILL",
        },
    ),
    PlannedFault(
        "slow link",
        "sending_much",
        dict.fromkeys(SOURCES, "link from rank (1 to rank .|. to rank 1) is slow") | {"error": f"({NO_FAILURE})"},
        slow_link,
        _SLOW,
        is_slow=True,
    ),
    PlannedFault("slow rank", "computing_long", HANG | {"error": f"({NO_FAILURE})"}, environ=_SLOW, is_slow=True),
    PlannedFault("deadlock of messages", "receiving_in_a_cycle", dict.fromkeys(SOURCES, DEADLOCK)),
    PlannedFault(
        "wrong order on two communicators",
        "ordering_wrongly",
        {
            "error": "rank 1 has not called it|only rank 1 called it",
            "postmortem": "rank 1 used communicators in another order",
            "top": "rank 1 used communicators in another order",
            "log": "only rank 1 called it",
        },
    ),
    PlannedFault(
        "exception in one rank",
        "raising",
        {
            "error": "rank 1 has left: ValueError: this sample is broken",
            "postmortem": "rank 1 has left: ValueError: this sample is broken",
            "top": f"({AT_ONCE})",
            "log": "rank 1 exited with code 1",
        },
    ),
    PlannedFault(
        "full disk during the dump",
        "mismatched",
        {
            "error": r"rank 1 called barrier\(\)",
            "postmortem": "rank 1 wrote no dump: .*could not write",
            "top": f"({AT_ONCE})",
            "log": r"\[1\] .*no dump could be written to .*: No space left on device",
        },
        full_disk,
    ),
    PlannedFault(
        "endless loop on another host",
        "looping",
        HANG | {"top": "waits? for rank 1, which does not run on this host"},
        two_hosts,
    ),
)


class SourceAnswers(NamedTuple):
    """The answers of the sources about a fault, and whether each named the culprit: None if it cannot know of it."""

    fault: PlannedFault
    texts: dict[str, str]
    named: dict[str, bool | None]


def ask(fault: PlannedFault, folder: Path) -> SourceAnswers:
    """Run the job with a fault, and ask all sources.

    Args:
        fault: the fault.
        folder: an empty folder for the files of the job.
    """
    dumps = folder / "dumps"
    dumps.mkdir()
    with fault.place(folder) as place, (folder / "errors").open("w+") as errors:
        command = [*_unisono("run", "--verbose", "-n", str(RANKS), "--"), *place.prefix, sys.executable, str(RANK)]
        environ = {**os.environ, **SETTINGS, **fault.environ, "UNISONO_DUMP": str(dumps)}
        with subprocess.Popen(
            [*command, fault.function], stdout=subprocess.PIPE, stderr=errors, env=environ, text=True
        ) as launcher:
            try:
                assert launcher.stdout is not None
                launcher.stdout.readline()
                top = _top(launcher, place)
                summary = ""
                if fault.is_slow:
                    _ask_for_dumps(launcher, dumps)
                    summary = _summary(dumps)  # before the end of the job replaces the dumps
                    launcher.terminate()
                launcher.communicate(timeout=RUN_LIMIT_S)
            finally:
                launcher.kill()
        errors.seek(0)
        lines = errors.read().splitlines()
    texts = {
        "error": "\n".join(line for line in lines if _is_error_of_survivor(line)),
        "postmortem": summary or _summary(dumps),
        "top": "\n".join(top),
        "log": "\n".join(line for line in lines if line.startswith("unisono: ") or "] unisono [" in line),
    }
    texts = {source: _without_folders(text, folder) for source, text in texts.items()}
    return SourceAnswers(fault, texts, {source: _names(fault.says[source], texts[source]) for source in SOURCES})


def _without_folders(text: str, folder: Path) -> str:
    return text.replace(f"{RANK.parent}/", "").replace(f"{folder}/", "")


def _names(pattern: str, text: str) -> bool | None:
    return None if pattern.startswith("(") else re.search(pattern, text, re.IGNORECASE | re.MULTILINE) is not None


def _top(launcher: subprocess.Popen[str], place: RankPlaces) -> list[str]:
    """Return the findings of `unisono top`, which is run again until it has some or the job has ended."""
    while launcher.poll() is None:
        ranks = [rank for rank in json.loads(_output(_unisono("top", "--once", "--json"))) if _is_of(launcher, rank)]
        hidden = [rank["pid"] for rank in ranks if rank["rank"] in place.foreign]
        if hidden:
            hide = "".join(f"mount -t tmpfs none /proc/{pid} && " for pid in hidden)
            output = _output(["unshare", "--mount", "sh", "-c", f'{hide}exec "$@"', "sh", *_unisono("top", "--json")])
            ranks = [rank for rank in json.loads(output) if _is_of(launcher, rank)]
        findings = list(dict.fromkeys(text for rank in ranks for text in rank["findings"]))
        if findings:
            return findings
    return []


def _is_of(launcher: subprocess.Popen[str], rank: dict[str, Any]) -> bool:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{rank['pid']}/stat").read_text().rpartition(")")[2].split()[1]) == launcher.pid
    return False


def _ask_for_dumps(launcher: subprocess.Popen[str], dumps: Path) -> None:
    launcher.send_signal(signal.SIGUSR1)
    end = time.monotonic() + RUN_LIMIT_S
    while len(list(dumps.glob("unisono-*.json"))) < RANKS and time.monotonic() < end:
        time.sleep(0.05)


def _summary(dumps: Path) -> str:
    return str(json.loads(_output(_unisono("postmortem", "--json", str(dumps))))["summary"])


def _is_error_of_survivor(line: str) -> bool:
    return re.match(r"\[[02]\] unisono\.errors\.\w+: ", line) is not None


def _unisono(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "unisono", *arguments]


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=RUN_LIMIT_S, check=True).stdout


def show(answers: Sequence[SourceAnswers]) -> Table:
    """Return a table of the faults, with the sentence of each source that names the culprit."""
    table = Table("fault", *SOURCES, title="Does the source name the culprit?", show_lines=True)
    for each in answers:
        table.add_row(each.fault.name, *(_cell(each, source) for source in SOURCES))
    return table


def _cell(answers: SourceAnswers, source: str) -> str:
    named = answers.named[source]
    if named is None:
        return f"– {answers.fault.says[source]}"
    return "yes" if named else "[red]NO[/]"


def document(answers: SourceAnswers) -> dict[str, Any]:
    """Return the answers as values for JSON."""
    return {"fault": answers.fault.name, "named": answers.named, "said": answers.texts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the faults; the exit code is 1 if a source does not name a culprit that it could name."""
    parser = argparse.ArgumentParser(prog="unisono bench faults", description=__doc__.partition("\n")[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="names of faults (default: all)")
    parser.add_argument("--out", type=Path, help="file to write the results to, one line for each fault")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    options = parser.parse_args(arguments)
    names = options.faults or [fault.name for fault in FAULTS]
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(f.name for f in FAULTS)}")
    if missing():
        parser.error(missing())
    answers = []
    with Console(stderr=True).status("") as status:
        for fault in FAULTS:
            if fault.name in names:
                status.update(fault.name)
                with tempfile.TemporaryDirectory(prefix="unisono-faults-") as folder:
                    answers.append(ask(fault, Path(folder)))
    documents = [document(each) for each in answers]
    if options.out is not None:
        options.out.write_text("".join(f"{json.dumps(each)}\n" for each in documents))
    if options.json:
        sys.stdout.write(f"{json.dumps(documents, indent=1)}\n")
    else:
        (Console() if sys.stdout.isatty() else Console(width=160)).print(show(answers))
    return int(any(named is False for each in answers for named in each.named.values()))


if __name__ == "__main__":
    begin()
    sys.exit(main())
