"""Hosts of tests, which are network namespaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from support.ranks import Prefixed

from unisono.bench import wide_area
from unisono.bench.namespaces import address, inside, missing

needs_namespaces = pytest.mark.skipif(bool(missing()), reason=missing())
needs_wide_area = pytest.mark.skipif(bool(wide_area.missing()), reason=wide_area.missing())


class Hosts(Prefixed):
    """The hosts of a `network`, as the `Place` of a job.

    `per_host` is the number of ranks on each host, and `address_of` returns the address of a host. Further processes
    of a `LastingJob` start on the hosts `further`.
    """

    def __init__(
        self,
        namespaces: Sequence[str],
        per_host: Sequence[int],
        further: Sequence[int] = (),
        address_of: Callable[[int], str] = address,
    ) -> None:
        self._host_of = [*(host for host, ranks in enumerate(per_host) for _ in range(ranks)), *further]
        self._address_of = address_of
        super().__init__([inside(namespaces[host]) for host in self._host_of])
        self.size = sum(per_host)

    def variables(self, number: int) -> Mapping[str, str]:
        return {"UNISONO_BIND_ADDRESS": self._address_of(self._host_of[number])}
