"""Measures the ways that an allreduce between processes takes on GPUs, and writes a decision table of the times.

The ways are the algorithms over CUDA IPC, and staging. The time of a call is that between two events of the device,
around several calls, on the slowest rank. Long copies hold up the device until the calls have been issued, so that the
time is the device's and not the host's; staged calls need no such copies, because the host waits in each of them.

The table goes to `gpu-table-RANKS.json` beside the other results. Where ranks share a GPU, the table says so, because
its times hold only there: all bytes of all ranks go through one memory.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import unisono as un
from unisono.algorithms.catalogue.on_devices import STAGED, mapped_names
from unisono.algorithms.catalogue.vendors import NCCL_NATIVE
from unisono.bench.gpu_stages.gpu import DeviceClock, MeasuredGpu
from unisono.bench.gpu_stages.results.records import tell
from unisono.bench.sizes import parse_sizes
from unisono.transports.nccl.collectives import SHARED_GPU_VARIABLE
from unisono.tuning.decide.device_routes import LINK
from unisono.tuning.decide.table import compiled, dumped, to_json
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.measure.measurement_log import Context, Measurement

COLLECTIVE = "allreduce"
TIMEOUT_S = 60.0
CALLS = 4  # between two events
# The time for which the device is held up, in multiples of the time that the host needs to issue the calls.
HELD_TIMES = 2.0
MOST_ONE_SHOT_NBYTES = 16 << 20  # beyond this size it is too slow to be chosen
BY_IPC, STAGING = "cuda_ipc,shm", "shm"


def shared_gpu(world: un.Communicator) -> str:
    """Return the name of the GPU that ranks share; "" if each has its own."""
    device = MeasuredGpu().device
    return device.name if len(set(world.allgather_object(device.uuid))) < world.size else ""


def times_of(world: un.Communicator, names: list[str], sizes: list[int], rounds: int, flush_nbytes: int) -> Any:
    """Return the seconds of each round on the slowest rank, by route and size."""
    gpu = MeasuredGpu()
    clock = DeviceClock(gpu, flush_nbytes)
    x = gpu.empty(max(sizes) // 4, np.dtype(np.float32))
    gpu.fill(x, np.zeros(1024, np.float32))
    times = {}
    for nbytes in sizes:
        part = x.part(slice(0, nbytes // 4))
        for name in names:
            if name == "one_shot" and nbytes > MOST_ONE_SHOT_NBYTES:
                continue
            forced = None if name == STAGED else name

            def calls(part: Any = part, forced: str | None = forced) -> None:
                for _ in range(CALLS):
                    world.allreduce(part, out=part, algorithm=forced)

            calls()
            started = time.perf_counter()
            calls()
            held_ms = 0.0 if name == STAGED else HELD_TIMES * (time.perf_counter() - started) * 1e3
            own = []
            for _ in range(rounds):
                world.barrier()
                own.append(clock.milliseconds(calls, held_ms=held_ms) / CALLS / 1e3)
            slowest = np.max(world.allgather_object(own), axis=0)
            times[name, nbytes] = [float(seconds) for seconds in slowest]
    return times


def measured(ranks: int, sizes: list[int], rounds: int, flush_nbytes: int) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of each round by route and size, measured by ranks that are processes."""
    times: dict[tuple[str, int], list[float]] = {}
    os.environ[SHARED_GPU_VARIABLE] = "1"  # the ranks may have to share a GPU
    for names, transports in ((mapped_names(COLLECTIVE), BY_IPC), ([STAGED], STAGING), ([NCCL_NATIVE], BY_IPC)):
        options = un.Options(transports=transports)
        arguments = (names, sizes, rounds, flush_nbytes)
        try:
            times |= un.launch(times_of, ranks, *arguments, options=options, timeout_s=TIMEOUT_S)[0]
        except un.TransportUnavailableError as error:  # of NCCL; the others go on
            sys.stderr.write(f"{', '.join(names)}: {error}\n")
    return times


def as_measurement(ranks: int, name: str, nbytes: int, times_s: list[float]) -> Measurement:
    """Return the times of a route as a measurement, from which decision tables are compiled."""
    context = Context(fingerprint(), COLLECTIVE, LINK, "plain", ranks, ranks, "device")
    median_s, low_s, high_s = statistics.median(times_s), min(times_s), max(times_s)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    bounds = (median_s, low_s, high_s, low_s, high_s)
    return Measurement(context, name, nbytes, *bounds, len(times_s), library=un.__version__, date=date)


def _default_folder() -> Path:
    """Return the folder that the variable OUT names, or else the folder of results."""
    return Path(os.environ.get("OUT") or Path(__file__).parents[2] / "results")


def main() -> int:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K:64M:8"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flush", type=int, default=64 << 20, help="the bytes that are written before a measurement")
    options = parser.parse_args()
    times = measured(options.ranks, list(options.sizes), options.rounds, options.flush)
    if not times:
        sys.stderr.write("no route could be measured\n")
        return 1
    gpu = un.launch(shared_gpu, options.ranks, timeout_s=TIMEOUT_S)[0]
    measurements = [as_measurement(options.ranks, *place, times_s) for place, times_s in times.items()]
    for each in measurements:
        about = {"ranks": options.ranks, "route": each.variant, "nbytes": each.nbytes, "rounds": each.rounds}
        tell("route", **about, device_us=each.median_s * 1e6, least_us=each.low_s * 1e6, greatest_us=each.high_s * 1e6)
    path = _default_folder() / f"gpu-table-{options.ranks}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumped(to_json(compiled(measurements), shared_gpu=gpu)))
    tell("table", ranks=options.ranks, path=str(path), shared_gpu=gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
