"""Reads the dumps of a directory, and picks those of one job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from unisono.errors import UsageError
from unisono.records import record
from unisono.transports.recorder.dumps import Dump, read


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
    dumps, notes = list[Dump](), list[str]()
    for path in _files(places):
        try:
            dumps.append(read(path))
        except (ValueError, OSError) as error:
            notes.append(f"skipped: {error}")
    if not dumps:
        reasons = "".join(f"\n  {note}" for note in notes)
        raise UsageError(
            f"there are no dumps in {', '.join(map(str, places))}: set UNISONO_DUMP to a directory before the job, or "
            f"call world.dump(directory) in it{reasons}"
        )
    jobs: defaultdict[str, list[Dump]] = defaultdict(list)
    for dump in dumps:
        jobs[dump.snapshot.job].append(dump)
    chosen = _chosen(jobs, job)
    others = [name for name in jobs if name != chosen]
    if others:
        notes.append(
            f"these are the dumps of job {chosen}; there are dumps of {', '.join(others)} too (--job picks one)"
        )
    newest: dict[int, Dump] = {}
    for dump in sorted(jobs[chosen], key=lambda dump: dump.written_s):
        newest[dump.snapshot.rank] = dump
    size = max(dump.snapshot.size for dump in newest.values())
    return JobDumps(chosen, size, dict(sorted(newest.items())), tuple(notes))


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


def _chosen(jobs: dict[str, list[Dump]], job: str) -> str:
    matching = [name for name in jobs if name.startswith(job)]
    if not matching:
        raise UsageError(f"there are no dumps of job {job!r}: there are {', '.join(jobs)}")
    return max(matching, key=lambda name: max(dump.written_s for dump in jobs[name]))
