"""The log of measurements: a file with one JSON object in each line, to which lines are only appended.

The log keeps times, not winners. A decision table follows from the times, and can be compiled again when there are
more. Two logs are merged by concatenation, because equal lines count once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unisono.errors import UsageError
from unisono.foundation import log
from unisono.foundation.json_checks import parsed_json
from unisono.tuning.machine.parameters import LEAST_S, MOST, MOST_S

_log = log.get("tuning")

FORMAT = 1


class Context(NamedTuple):
    """The context of a measurement. Times can be compared if their contexts are equal.

    Attributes:
        machine: the fingerprint of the machine.
        collective: "allreduce", "broadcast", …
        link: the slowest kind of link between the ranks.
        dtype: the class of dtypes: "plain" or "narrow".
        ranks: the number of ranks.
        ranks_per_host: the largest number of ranks on one host.
        memory: where the arrays are: "host" or "device".
    """

    machine: str
    collective: str
    link: str
    dtype: str
    ranks: int
    ranks_per_host: int
    memory: str = "host"


class Measurement(NamedTuple):
    """The time of one variant on vectors of one size.

    Attributes:
        context: where it was measured.
        variant: the algorithm with its parameters, in the notation of `algorithms/catalogue/variants.py`.
        nbytes: bytes of the vector.
        median_s: the median over blocks of the typical time of a call in a block. A call ends with its last rank.
        low_s, high_s: the bounds of the median's 95 % confidence interval, as far as so few blocks allow one.
        p10_s, p90_s: quantiles over the blocks.
        rounds: the number of blocks.
        job: the job in which the candidates raced. Times of one job compare best.
        placement: the placement of the cores, if it was measured.
        library: the version of Unisono.
        date: in ISO 8601.
        load: the load average of the machine when the campaign began; None if it is not known.
        trial: whether calls of a running job were timed, at the sizes that it happened to use.
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
    trial: bool = False


# The fields of a line, by type.
_TEXTS = ("machine", "collective", "link", "dtype", "memory", "variant", "job", "placement", "library", "date")
_WHOLES = ("ranks", "ranks_per_host", "nbytes", "rounds")
_SECONDS = ("median_s", "low_s", "high_s", "p10_s", "p90_s")


def line_of(measurement: Measurement) -> str:
    """Return the line of the log for a measurement."""
    own = {name: value for name, value in measurement._asdict().items() if name != "context"}
    return json.dumps({"v": FORMAT, **measurement.context._asdict(), **own}, sort_keys=True)


def read_line(line: str) -> Measurement:
    """Return the measurement in a line of the log.

    Raises:
        ValueError: the line is not a valid measurement, or has another format; says why.
    """
    fields: Any = parsed_json(line)
    if not isinstance(fields, dict) or fields.get("v") != FORMAT:
        version = fields.get("v") if isinstance(fields, dict) else None
        raise ValueError(f"it has format {version!r}, and this version reads {FORMAT}")
    for names, kinds in ((_TEXTS, str), (_WHOLES, int), (_SECONDS, (int, float))):
        for name in names:
            value = fields.get(name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"{name} cannot be {value!r}")
    are_times = all(LEAST_S <= fields[name] <= MOST_S for name in _SECONDS)
    are_counts = all(0 < fields[name] <= MOST for name in ("ranks", "ranks_per_host", "rounds"))
    if not are_times or not are_counts or not 0 <= fields["nbytes"] <= MOST:
        raise ValueError("its times and numbers are not positive, or too large")
    load = fields.setdefault("load", None)  # logs of earlier versions lack this field, and the next one
    if not isinstance(fields.setdefault("trial", False), bool):
        raise ValueError(f"trial cannot be {fields['trial']!r}")
    if load is not None and (not isinstance(load, (int, float)) or isinstance(load, bool)):
        raise ValueError(f"load cannot be {load!r}")
    context = Context(**{name: fields[name] for name in Context._fields})
    return Measurement(context, **{name: fields[name] for name in Measurement._fields if name != "context"})


class MeasurementStore:
    """A file of measurements, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, measurements: Iterable[Measurement]) -> None:
        """Append measurements in one write, on new lines even if an earlier writer did not finish its last line.

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
        """Return all measurements, equal ones once. Invalid lines are skipped, with one warning.

        Raises:
            UsageError: the file cannot be read.
        """
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"measurements cannot be read from {self.path}: {error.strerror}") from None
        by_identity, problems = dict[str, Measurement](), list[str]()
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                if line.strip():
                    measurement = read_line(line)
                    by_identity.setdefault(identity(measurement), measurement)
            except ValueError as error:
                problems.append(f"line {number}: {error}")
        if problems:
            _log.warning("%s: %d line(s) are ignored, the first is %s", self.path, len(problems), problems[0])
        return list(by_identity.values())

    def remove(self, measurements: Iterable[Measurement]) -> None:
        """Remove measurements from the file in one step; all other lines stay unchanged.

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
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise UsageError(f"measurements in {self.path} cannot be replaced: {error.strerror}") from None


def _identity_of_line(line: str) -> str | None:
    """Return the identity of the measurement in a line; None if the line is invalid."""
    try:
        return identity(read_line(line))
    except ValueError:
        return None


def identity(measurement: Measurement) -> str:
    """Return a hash that is equal for equal measurements."""
    return hashlib.sha256(line_of(measurement).encode()).hexdigest()


def merged(stores: Iterable[Iterable[Measurement]]) -> Iterator[Measurement]:
    """Yield the measurements of all stores, equal ones once."""
    seen = set[str]()
    for measurement in (each for store in stores for each in store):
        if (key := identity(measurement)) not in seen:
            seen.add(key)
            yield measurement
