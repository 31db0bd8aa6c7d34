"""A decision table with times on a device chooses how calls on GPU arrays travel; `explain` shows it."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.testing.device_arrays import DoubleArray, device_double, read
from unisono.tuning.decide.device_routes import LINK
from unisono.tuning.decide.table import compiled, dumped, to_json
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.measure.measurement_log import Context, Measurement

SMALL, LARGE = 1 << 10, 1 << 16


def written(path: Path) -> Path:
    """Write a table in which small calls are staged and large ones are two-shot, unlike the rule without a table."""
    context = Context(fingerprint(), "allreduce", LINK, "plain", 2, 2, "device")
    times_us = {"staged": (5, 900), "two_shot": (50, 100), "one_shot": (60, 110)}
    measurements = [
        Measurement(context, name, nbytes, *[us / 1e6] * 5, rounds=3)
        for name, times in times_us.items()
        for nbytes, us in zip((SMALL, LARGE), times, strict=True)
    ]
    path.write_text(dumped(to_json(compiled(measurements))))
    return path


def routes_taken(world: un.Communicator) -> list[tuple[int, bool, str]]:
    """Return, for a call of each size, the bytes that it staged, whether it used CUDA IPC, and the explanation."""
    taken = []
    with device_double(world.rank) as gpu:
        stream = gpu.device().new_stream()
        with world.dup() as comm:
            for nbytes in (SMALL, LARGE):
                before = comm.stats().on_device
                x = DoubleArray(gpu, np.ones(nbytes // 8), stream)
                assert (read(gpu, comm.allreduce(x)) == comm.size).all()
                after = comm.stats().on_device
                by_ipc = [sum(traffic.sent_nbytes for traffic in stats.by_ipc.values()) for stats in (before, after)]
                staged = after.to_host_nbytes - before.to_host_nbytes
                taken.append((staged, by_ipc[1] > by_ipc[0], comm.explain("allreduce", nbytes).on_device))
            del x
        gc.collect()
        gpu.device().end_stream(stream)
    return taken


def test_table_chooses_the_route_of_calls_on_gpu_arrays(tmp_path: Path) -> None:
    options = un.Options(transports="cuda_ipc,shm", table=str(written(tmp_path / "table.json")))
    for small, large in un.launch(routes_taken, 2, options=options, timeout_s=DEADLINE_S):
        assert small[:2] == (SMALL, False)
        assert small[2].startswith("staged through the host, chosen by tier 'table', measured: staged 5.0")
        assert large[:2] == (0, True)
        assert large[2].startswith("cuda_ipc by two_shot, chosen by tier 'table'")


def test_rule_chooses_the_route_without_a_table() -> None:
    for small, large in un.launch(routes_taken, 2, options=un.Options(transports="cuda_ipc,shm"), timeout_s=DEADLINE_S):
        assert (small[:2], large[:2]) == ((0, True),) * 2
        assert small[2] == "cuda_ipc by one_shot, chosen by tier 'rule'"
