"""Measurements, and the files that keep them: one JSON object in each line, appended and never changed.

Times are kept, not winners: what is best follows from them (`tuning.table`) and can be found again when there are more.
Files are merged by putting one after the other; equal lines count once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unisono import log
from unisono.errors import UsageError

_log = log.get()

FORMAT = 1


class Context(NamedTuple):
    """Where times can be compared: all of it is the same for the candidates of a race.

    Attributes:
        machine: the fingerprint of the machine.
        collective: "allreduce", "broadcast", …
        link: the slowest kind of link between the ranks.
        dtype: the class of dtypes, see `dtype_class`.
        ranks: the number of ranks.
        ranks_per_host: the most on one host.
        memory: where the arrays are; "host".
    """

    machine: str
    collective: str
    link: str
    dtype: str
    ranks: int
    ranks_per_host: int
    memory: str = "host"


class Measurement(NamedTuple):
    """How long a variant of an algorithm took on vectors of so many bytes.

    Attributes:
        context: where.
        variant: the algorithm with its parameters, as `algorithms.variants` writes it.
        nbytes: of the vector.
        median_s: the median over rounds of what a round's calls typically took; a call ends with its last rank.
        low_s, high_s: the bounds of the median's 95 % confidence interval, as far as so many rounds have one.
        p10_s, p90_s: quantiles of the rounds.
        rounds: how many there were.
        job: the job in which all candidates were raced; the same for times that can be compared best.
        placement: how far apart the cores were, if it was measured.
        library: the version of Unisono.
        date: when, in ISO 8601.
        load: the load average of the machine when the campaign began; None if that is not known.
    """

    context: Context
    variant: str
    nbytes: int
    median_s: float
    low_s: float
    high_s: float
    p10_s: float
    p90_s: float
    rounds: int
    job: str = ""
    placement: str = ""
    library: str = ""
    date: str = ""
    load: float | None = None


# Fields as files have them.
_TEXTS = ("machine", "collective", "link", "dtype", "memory", "variant", "job", "placement", "library", "date")
_WHOLES = ("ranks", "ranks_per_host", "nbytes", "rounds")
_SECONDS = ("median_s", "low_s", "high_s", "p10_s", "p90_s")


def line_of(measurement: Measurement) -> str:
    """Return the line of a file that keeps a measurement."""
    own = {name: value for name, value in measurement._asdict().items() if name != "context"}
    return json.dumps({"v": FORMAT, **measurement.context._asdict(), **own}, sort_keys=True)


def read_line(line: str) -> Measurement:
    """Return the measurement that a line keeps.

    Raises:
        ValueError: it keeps none, or is of a newer format; says why.
    """
    found: Any = json.loads(line)
    if not isinstance(found, dict) or found.get("v") != FORMAT:
        version = found.get("v") if isinstance(found, dict) else None
        raise ValueError(f"it is of format {version!r}, and this version reads {FORMAT}")
    for names, kinds in ((_TEXTS, str), (_WHOLES, int), (_SECONDS, (int, float))):
        for name in names:
            value = found.get(name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"its {name} is {value!r}")
    if not all(found[name] > 0 for name in (*_SECONDS, "ranks", "ranks_per_host", "rounds")) or found["nbytes"] < 0:
        raise ValueError("its times and numbers are not positive")
    load = found.setdefault("load", None)  # which files of earlier versions do not have
    if load is not None and (not isinstance(load, (int, float)) or isinstance(load, bool)):
        raise ValueError(f"its load is {load!r}")
    context = Context(**{name: found[name] for name in Context._fields})
    return Measurement(context, **{name: found[name] for name in Measurement._fields if name != "context"})


class Store:
    """A file of measurements, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, measurements: Iterable[Measurement]) -> None:
        """Add measurements, in one write; a line that an earlier writer has not finished stays a line of its own.

        Raises:
            UsageError: the file cannot be written.
        """
        data = "".join(f"{line_of(each)}\n" for each in measurements).encode()
        try:
            with open(self.path, "ab+") as file:
                if file.tell() and not self._ends_well(file.fileno(), file.tell()):
                    data = b"\n" + data
                file.write(data)
        except OSError as error:
            raise UsageError(f"measurements cannot be kept in {self.path}: {error.strerror}") from None

    @staticmethod
    def _ends_well(descriptor: int, nbytes: int) -> bool:
        return os.pread(descriptor, 1, nbytes - 1) == b"\n"

    def read(self) -> list[Measurement]:
        """Return all measurements, equal ones once; lines that cannot be read are left out, with one warning.

        Raises:
            UsageError: the file cannot be read.
        """
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"measurements cannot be read from {self.path}: {error.strerror}") from None
        found, problems = dict[str, Measurement](), list[str]()
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                if line.strip():
                    measurement = read_line(line)
                    found.setdefault(identity(measurement), measurement)
            except (ValueError, RecursionError) as error:
                problems.append(f"line {number}: {error}")
        if problems:
            _log.warning("%s: %d line(s) are left out, the first is %s", self.path, len(problems), problems[0])
        return list(found.values())

    def remove(self, measurements: Iterable[Measurement]) -> None:
        """Take measurements out of the file, in one step; all other lines stay as they are.

        Raises:
            UsageError: the file cannot be read or written.
        """
        removed = {identity(each) for each in measurements}
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            text = self.path.read_text(encoding="utf-8", errors="surrogateescape")
            lines = [line for line in text.splitlines(keepends=True) if _identity_of_line(line) not in removed]
            scratch.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
            scratch.replace(self.path)
        except OSError as error:
            raise UsageError(f"measurements in {self.path} cannot be replaced: {error.strerror}") from None


def _identity_of_line(line: str) -> str | None:
    """Return the identity of the measurement that a line keeps; None if it keeps none that can be read."""
    try:
        return identity(read_line(line))
    except (ValueError, RecursionError):
        return None


def identity(measurement: Measurement) -> str:
    """Return a hash by which equal measurements are known."""
    return hashlib.sha256(line_of(measurement).encode()).hexdigest()


def merged(stores: Iterable[Iterable[Measurement]]) -> Iterator[Measurement]:
    """Yield the measurements of all, equal ones once."""
    seen = set[str]()
    for each in (measurement for store in stores for measurement in store):
        if (key := identity(each)) not in seen:
            seen.add(key)
            yield each
