"""Reads the dumps of a directory, and picks those of one job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from unisono.errors import UsageError
from unisono.foundation.printable import printable
from unisono.foundation.records import record
from unisono.options import variable
from unisono.transports.recorder.dumps import Dump, read, read_head

T = TypeVar("T")


@record
class JobDumps:
    """The dumps of the ranks of one job.

    Attributes:
        job: its id and epoch, such as "1a2b3c4d-0".
        size: the number of its ranks.
        by_rank: the dump of each rank that wrote one.
        notes: sentences about files that could not be used, and about other jobs in the directory.
    """

    job: str
    size: int
    by_rank: dict[int, Dump]
    notes: tuple[str, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks without a dump."""
        return tuple(rank for rank in range(self.size) if rank not in self.by_rank)


def load(places: Sequence[Path], job: str = "") -> JobDumps:
    """Return the dumps of one job, from files and directories.

    Args:
        places: files, or directories with dumps.
        job: the beginning of the id of the job; empty for the job with the newest dump.

    Raises:
        UsageError: a place does not exist, there is no dump, or none of this job.
    """
    notes: list[str] = []
    heads = {path: head for path in _files(places) if (head := _read_or_note(read_head, path, notes)) is not None}
    newest_s: dict[str, float] = {}
    for head in heads.values():
        newest_s[head.job] = max(head.written_s, newest_s.get(head.job, 0.0))
    chosen = _chosen(newest_s, job)
    own = [path for path, head in heads.items() if head.job == chosen]
    dumps = [dump for path in own if (dump := _read_or_note(read, path, notes)) is not None]
    if not dumps:
        reasons = "".join(f"\n  {note}" for note in notes)
        raise UsageError(
            f"there are no dumps in {', '.join(map(str, places))}: {_how_to_dump()}, or call world.dump(directory) "
            f"in the job{reasons}"
        )
    others = [name for name in newest_s if name != chosen]
    if others:
        notes.append(
            f"these are the dumps of job {chosen}; there are dumps of {', '.join(others)} too (--job picks one)"
        )
    newest: dict[int, Dump] = {}
    for dump in sorted(dumps, key=lambda dump: dump.written_s):
        newest[dump.snapshot.rank] = dump
    size = max(dump.snapshot.size for dump in newest.values())
    return JobDumps(chosen, size, dict(sorted(newest.items())), tuple(notes))


def _how_to_dump() -> str:
    place = os.environ.get(variable("dump"))
    if not place:
        return f"set {variable('dump')} to a directory before the job"
    return (
        f"{variable('dump')} is {place!r} here, and ranks write dumps when a job fails or they get SIGUSR1, unless the "
        "program passes the option dump itself"
    )


def _read_or_note(function: Callable[[Path], T], path: Path, notes: list[str]) -> T | None:
    try:
        return function(path)
    except (ValueError, OSError) as error:
        notes.append(printable(f"skipped: {error}"))
        return None


def _files(places: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for place in places:
        if place.is_dir():
            files += sorted(place.glob("*.json"))
        elif place.exists():
            files.append(place)
        else:
            raise UsageError(f"there is no file or directory {str(place)!r}")
    return files


def _chosen(newest_s: Mapping[str, float], job: str) -> str:
    """Return the job that begins with `job` and has the newest dump; empty if there are no dumps."""
    matching = [name for name in newest_s if name.startswith(job)]
    if newest_s and not matching:
        raise UsageError(f"there are no dumps of job {job!r}: there are {', '.join(newest_s)}")
    return max(matching, key=lambda name: newest_s[name], default="")
