"""The group of a test, by the place of its file. `tests/README.md` says what each group is and when it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from support.covering import beyond_each_value

TESTS = Path(__file__).resolve().parents[1]

# Patterns of files in tests/, and the mark of their tests. The first pattern that matches a file counts.
GROUPS = {
    "*/test_*gpu*": "device",
    "*/test_*device*": "device",
    "*/test_cuda_*": "device",
    "*/test_nccl.py": "device",
    "*/test_pinned_pool.py": "device",
    "*/test_registered_arrays.py": "device",
    "*/test_staging.py": "device",
    "*/test_ucx.py": "fabrics",
    "*/test_mpi_*": "fabrics",
    "*/test_cut_network.py": "hosts",
    "*/test_far_hosts.py": "hosts",
    "*/test_hosts.py": "hosts",
    "*/test_measured_topology.py": "hosts",
    "*/test_several_hosts.py": "hosts",
    "algorithms/*": "pure",
    "*/test_campaign.py": "bench",
    "cli/test_postmortem_torch.py": "frameworks",
    "fuzz/*": "pure",
    "models/*": "pure",
    "package/*": "pure",
    "support/*": "pure",
    "tuning/*": "pure",
    "*/test_kernels.py": "pure",
    "*/test_reductions.py": "pure",
    "*/test_end_of_program.py": "jobs",
    "transports/test_faults.py": "jobs",
    "*/test_grow.py": "jobs",
    "*/test_handshake.py": "jobs",
    "*/test_init.py": "jobs",
    "*/test_openings.py": "jobs",
    "*/test_shrink.py": "jobs",
    "launchers/*": "jobs",
    "swarm/*": "jobs",
    "collectives/*": "contract",
    "transports/*": "contract",
    "cli/*": "clients",
    "frameworks/test_data_parallel.py": "clients",
    "frameworks/test_gradients.py": "clients",
    "frameworks/*": "frameworks",
    "bench/*": "bench",
    "docs/*": "examples",
}

NAMES = frozenset(GROUPS.values())
# The groups of the gate whose tests start ranks, which takes most of their time.
OF_RANKS = ("contract", "jobs", "clients")


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


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark each test with its group, and with `night` what the gate leaves out.

    The gate runs tests of ranks with every value of every parameter, and not with every combination. A test that is
    marked with a group itself stays in it, with every combination.
    """
    of_functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if any(item.get_closest_marker(name) for name in NAMES):
            continue
        group = group_of(item.path)
        item.add_marker(group)
        if group in OF_RANKS and hasattr(item, "callspec"):
            of_functions[item.nodeid.partition("[")[0]].append(item)
    for of_function in of_functions.values():
        for position in beyond_each_value([item.callspec.params for item in of_function]):  # type: ignore[attr-defined]
            of_function[position].add_marker("night")
