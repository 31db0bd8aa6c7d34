"""The group of a test, by the place of its file. `tests/README.md` says what each group is and when it runs."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

# Patterns of files in tests/, and the mark of their tests. The first pattern that matches a file counts.
GROUPS = {
    "*/test_*gpu*": "device",
    "*/test_*device*": "device",
    "*/test_cuda_*": "device",
    "*/test_nccl.py": "device",
    "*/test_pinned_pool.py": "device",
    "*/test_staging.py": "device",
    "*/test_ucx.py": "fabrics",
    "*/test_mpi_*": "fabrics",
    "algorithms/*": "pure",
    "fuzz/*": "pure",
    "models/*": "pure",
    "package/*": "pure",
    "support/*": "pure",
    "tuning/*": "pure",
    "*/test_end_of_program.py": "jobs",
    "*/test_faults.py": "jobs",
    "*/test_grow.py": "jobs",
    "*/test_handshake.py": "jobs",
    "*/test_init.py": "jobs",
    "*/test_openings.py": "jobs",
    "*/test_shrink.py": "jobs",
    "launchers/*": "jobs",
    "collectives/*": "contract",
    "transports/*": "contract",
    "cli/*": "clients",
    "frameworks/test_data_parallel.py": "clients",
    "frameworks/test_gradients*.py": "clients",
    "frameworks/test_horovod.py": "clients",
    "frameworks/test_jax.py": "clients",
    "frameworks/test_torch.py": "clients",
    "frameworks/*": "frameworks",
    "bench/*": "bench",
    "docs/*": "examples",
}


def group_of(path: Path) -> str:
    """Return the group of the tests in a file.

    Raises:
        ValueError: no pattern matches the path.
    """
    place = str(path.relative_to(TESTS))
    for pattern, group in GROUPS.items():
        if fnmatchcase(place, pattern):
            return group
    raise ValueError(f"no pattern of {__name__}.GROUPS matches {place}")
