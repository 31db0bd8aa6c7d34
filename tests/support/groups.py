"""The group of a test, by the place of its file. `tests/README.md` says what each group is and when it runs."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

# Folders and files of tests/, and the mark of their tests. A file comes before its folder.
GROUPS = {
    "algorithms": "pure",
    "fuzz": "pure",
    "models": "pure",
    "package": "pure",
    "support": "pure",
    "tuning": "pure",
    "collectives": "contract",
    "transports": "contract",
    "launchers": "jobs",
    "collectives/test_end_of_program.py": "jobs",
    "collectives/test_grow.py": "jobs",
    "collectives/test_init.py": "jobs",
    "collectives/test_shrink.py": "jobs",
    "collectives/test_time_limits.py": "jobs",
    "transports/test_faults.py": "jobs",
    "transports/test_handshake.py": "jobs",
    "transports/test_openings.py": "jobs",
    "bench": "clients",
    "cli": "clients",
    "frameworks": "clients",
    "docs": "docs",
}


def group_of(path: Path) -> str:
    """Return the group of the tests in a file.

    Raises:
        KeyError: neither the file nor its folder has a group.
    """
    place = path.relative_to(TESTS)
    return GROUPS.get(str(place)) or GROUPS[place.parts[0]]
