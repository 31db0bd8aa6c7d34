"""The methods that show a communicator and make no calls: its place, its choices of algorithms and its last calls."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from unisono.algorithms.ir.contracts import VECTOR_CALLS
from unisono.collectives.calls.arguments import checked_integer
from unisono.collectives.calls.dispatch import Dispatcher
from unisono.collectives.calls.planning import algorithm_request
from unisono.collectives.custom_ops.functions import is_by_function
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.operations import Op, operation
from unisono.tuning.decide.choice import Explanation, explain

if TYPE_CHECKING:
    from pathlib import Path

    from unisono.tuning.machine.inventory import Topology
    from unisono.tuning.machine.network_map import NetworkMap

_MOST_NBYTES = (1 << 63) - 1


class Observation(Dispatcher):
    """The methods that show a communicator; no other rank takes part."""

    hosts: tuple[tuple[int, ...], ...]

    @property
    def topology(self) -> Topology:
        """Where the ranks are, and the parts of this rank's machine: processors, NUMA nodes, GPUs, interfaces.

        Each access reads the machine anew, which takes some milliseconds. It asks no other rank.
        """
        from unisono.tuning.machine.inventory import Topology, machine

        host = next(index for index, ranks in enumerate(self.hosts) if self.rank in ranks)
        return Topology(self.hosts, host, machine())

    @property
    def network(self) -> NetworkMap | None:
        """The measured network between the hosts, in the order of `hosts`; None if it is not measured.

        Hosts measure it when their ranks meet, if they are far apart. `network.write(path)` makes a file for
        ``unisono explain --map``.
        """
        return self.tuner_state.network

    def explain(
        self,
        collective: str,
        nbytes: int,
        dtype: str = "float32",
        op: str | Op = "sum",
        *,
        algorithm: str | None = None,
        reproducible: bool = False,
        accumulate: str | None = None,
    ) -> Explanation:
        """Return an explanation that can be printed: which algorithm a call would use, why, and over which transports.

        Pass the arguments of the call; with an `algorithm`, its candidate is the choice. Nothing is sent. For calls
        with counts, such as ``"allgatherv"``, `nbytes` counts the bytes of all shares.

        Raises:
            UsageError: `nbytes`, `dtype` or `accumulate` is wrong, or `op` is a Python function.
            NoAlgorithmError: no algorithm, or not the named one, carries out such a call.
        """
        nbytes = checked_integer(nbytes, "nbytes", 0, _MOST_NBYTES)
        if dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        if is_by_function(op):
            raise UsageError(
                "a reduction by a Python function has no algorithm of its own: it exchanges arrays by allgather, "
                "gather or alltoall, so explain one of these"
            )
        request = algorithm_request(algorithm, reproducible, accumulate)
        reduced = [(DTYPES[dtype], operation(op))]
        name, varying = VECTOR_CALLS.get(collective, collective), collective in VECTOR_CALLS
        explanation = explain(self._planner.question(name, nbytes, reduced, request, varying=varying), self.tuner_state)
        return replace(
            explanation, links=self._executor.links(), on_device=self._devices.route(name, nbytes, DTYPES[dtype])
        )

    def dump(self, directory: str | os.PathLike[str]) -> Path:
        """Write a dump of this rank's last calls to a directory, and return the path of the file.

        The dump is for `unisono postmortem`, which compares the dumps of all ranks. Other ranks do not take part, so
        each rank that is to have a dump calls this. Any thread may do so, also while a call is in progress. The
        directory is made if it is missing; an older dump of this rank in it is replaced.

        Raises:
            UsageError: this communicator has no recorder, because its ranks are threads of one process.
            OSError: the file cannot be written. No part of it stays.
        """
        return self._executor.dump(directory)

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace of this rank's last calls to a file, and return its path.

        The file has Chrome's trace event format, which https://ui.perfetto.dev shows. The trace has the last
        `recorded_calls` calls on all communicators of the job. `unisono trace merge` puts the traces of all ranks into
        one file. Other ranks do not take part, and any thread may call this.

        Raises:
            UsageError: this communicator has no recorder, because its ranks are threads of one process.
            OSError: the file cannot be written. No part of it stays.
        """
        return self._executor.trace(path)
