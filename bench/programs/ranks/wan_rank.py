"""One rank of `unisono bench wan`: makes allreduces that all ranks begin at the same moment, and prints their times.

Run by path as ``wan_rank.py REQUEST``, a JSON object with `sizes`, `algorithms`, `rounds` and `at_once`, and `map`, a
file for the measured network, or null. Unisono's variables say which rank this is. The ranks share a clock, because
their hosts are on one machine. So the time of a call lasts from the moment for which it was arranged to its end on the
last rank.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time

import numpy as np
from numpy.typing import NDArray

import unisono as un

Array = NDArray[np.float32]

PR_SET_PDEATHSIG = 1
# Calls up to this size follow each other, as steps of a program do, because one of them is over within a delay.
SHORT_NBYTES, IN_A_ROW = 1 << 16, 10
LEAD_S = 0.5


def timed(comms: list[un.Communicator], arrays: list[Array], algorithm: str | None, calls: int) -> list[float]:
    """Start an allreduce of each array on a communicator of its own at the same moment, `calls` times in a row.

    Returns, for each array, the seconds from that moment to the end on the last rank, divided by `calls`.
    """
    world = comms[0]
    moment = float(world.broadcast(np.array(time.monotonic() + LEAD_S)))
    time.sleep(max(0.0, moment - time.monotonic()))
    ends = [0.0] * len(arrays)
    for _ in range(calls):
        under_way = {
            k: comm.allreduce(array, "max", out=array, algorithm=algorithm, wait=False)
            for k, (comm, array) in enumerate(zip(comms, arrays, strict=True))
        }
        while under_way:
            k = [*under_way][un.wait_any([*under_way.values()])]
            under_way.pop(k).wait()
            ends[k] = time.monotonic() - moment
    return [float(end) / calls for end in world.allreduce(np.array(ends), "max")]


def main() -> None:
    """Time all calls. Rank 0 prints a list of [size, algorithm, name of the choice, rounds of times] as JSON."""
    request = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    world = un.init()
    if world.rank == 0 and request["map"]:
        if world.network is None:
            raise SystemExit("the hosts are too near each other to measure their network")
        world.network.write(request["map"])
    rows = []
    comms = [world, *(world.subgroup(range(world.size)) for _ in range(1, request["at_once"]))]
    for nbytes in request["sizes"]:
        arrays = [np.full(max(1, nbytes // 4), world.rank, np.float32) for _ in comms]
        calls = IN_A_ROW if nbytes <= SHORT_NBYTES else 1
        for name in request["algorithms"]:
            algorithm = None if name == "auto" else name
            timed(comms, [array[: 1 << 18] for array in arrays], algorithm, 1)  # so that connections are open
            rounds = [timed(comms, arrays, algorithm, calls) for _ in range(request["rounds"])]
            if not all((array == world.size - 1).all() for array in arrays):
                raise ValueError(f"{name} gives a wrong result")
            chosen = name if algorithm else world.explain("allreduce", nbytes, op="max").choice.shown
            rows.append([nbytes, name, chosen, rounds])
    if world.rank == 0:
        sys.stdout.write(json.dumps(rows))
    world.close()


if __name__ == "__main__":
    main()
