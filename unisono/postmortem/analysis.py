"""The report about the dumps of a job: what happened, who did what wrong, and the last calls."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from unisono.foundation.records import record
from unisono.postmortem.culprits import CallOfRanks, Finding, dead, findings_of, first_error, ranks_text, rows_of
from unisono.postmortem.loading import JobDumps


@record
class Report:
    """The findings from the dumps of a job.

    Attributes:
        dumps: the dumps.
        findings: the faults, the most certain first.
        rows: the last collectives of each communicator, in the order of their numbers.
    """

    dumps: JobDumps
    findings: tuple[Finding, ...]
    rows: tuple[CallOfRanks, ...]

    @property
    def summary(self) -> str:
        """One paragraph: what happened, and who did what wrong."""
        job = self.dumps
        ranks = f"{job.size} rank{'s' if job.size != 1 else ''}"
        first = f"Job {job.job} of {ranks}; {_all_or_some(job)}."
        error = first_error(job)
        happened = f"It failed with {error['type']}: {sentence(error['text'])}" if error else "It has not failed."
        known = error["text"] if error else ""
        found = [sentence(finding.text) for finding in self.findings if finding.kind not in ("mismatch",) or not known]
        if not found and not error:
            found = ["No rank waits for another one."]
        return " ".join((first, happened, *found))

    def to_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {
            "job": self.dumps.job,
            "size": self.dumps.size,
            "missing": list(self.dumps.missing),
            "error": first_error(self.dumps),
            "summary": self.summary,
            "findings": [
                {"kind": finding.kind, "ranks": list(finding.ranks), "text": finding.text} for finding in self.findings
            ],
            "rows": [
                {
                    "communicator": f"{row.communicator:016x}",
                    "sequence": row.sequence,
                    "call": row.text,
                    "ranks": {
                        str(rank): None if call is None else {"call": call.text, "state": call.state, "site": call.site}
                        for rank, call in row.by_rank.items()
                    },
                }
                for row in self.rows
            ],
            "notes": list(self.dumps.notes),
        }


def analyse(dumps: JobDumps, most_rows: int = 12) -> Report:
    """Return the report on the dumps of a job.

    Args:
        dumps: the dumps.
        most_rows: how many of the last collectives of each communicator the report shows.
    """
    rows = rows_of(dumps)
    findings = findings_of(dumps, rows, list(dead(dumps)))
    shown: defaultdict[int, list[CallOfRanks]] = defaultdict(list)
    for row in rows:
        shown[row.communicator].append(row)
    return Report(dumps, tuple(findings), tuple(row for own in shown.values() for row in own[-most_rows:]))


def _all_or_some(dumps: JobDumps) -> str:
    if not dumps.missing:
        return "every rank wrote a dump" if dumps.size > 1 else "it wrote a dump"
    return f"no dump of {ranks_text(dumps.missing)}"


def sentence(text: str) -> str:
    """Return a text as a sentence of its own."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
