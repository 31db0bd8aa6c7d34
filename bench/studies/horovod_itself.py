"""Measures the steps of Horovod itself beside those of `unisono.bench.programs.ddp`: ``unisono bench horovod_itself``.

It needs Horovod in its environment: see ``docs/measurements/horovod.md``. Horovod runs in ranks of its own, because its
threads exchange messages every millisecond, also between steps. So the two kinds of ranks train in turns, and
`exposed_…` is the difference to the steps without communication of the same ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import unisono as un
from unisono.bench.programs import ddp


def main() -> None:
    """Measure Horovod and Unisono in turns, and print the medians over turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3, help="of 3.2 million parameters each")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    sizes = options.ranks, options.layers, options.rounds
    turns = [{**ddp.measure(*sizes), **measure(*sizes)} for _ in range(options.turns)]
    row = {name: round(median(turn[name] for turn in turns), 1) for name in turns[0]}
    sys.stdout.write(json.dumps(row) + "\n")


def measure(ranks: int, layers: int, rounds: int) -> dict[str, float]:
    """Return medians over rounds for the slowest rank, and the times of the best rounds, in milliseconds."""
    results = un.launch(_measure_rank, ranks, layers, rounds)
    row: dict[str, float] = {name: max(one[name] for one in results) for name in results[0]}
    for kind in ("", "best_"):
        row[f"exposed_{kind}itself_ms"] = row[f"{kind}itself_ms"] - row.pop(f"{kind}alone_ms")
    return row


def _measure_rank(world: un.Communicator, layers: int, rounds: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.size))
    hvd = _started(world)
    plain, averaged = ddp.new_model(layers), ddp.new_model(layers)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(averaged.parameters(), lr=0.0), averaged.named_parameters())
    steps: dict[str, Callable[[], None]] = {
        "itself": lambda: ddp.step(averaged, optimizer.synchronize),
        "alone": lambda: ddp.step(plain),
    }
    taken = ddp.times_of(steps, world.barrier, rounds)
    hvd.shutdown()
    return taken


def _started(world: un.Communicator) -> Any:
    """Return ``horovod.torch``, initialized over Gloo on the ranks of `world`, which are on one host."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    port = 0
    if world.rank == 0:
        server = RendezvousServer()
        port = server.start()
        server.init(get_host_assignments(parse_hosts(f"localhost:{world.size}"), world.size))
    own = {"RANK": world.rank, "LOCAL_RANK": world.rank, "CROSS_RANK": 0}
    sizes = {"SIZE": world.size, "LOCAL_SIZE": world.size, "CROSS_SIZE": 1}
    gloo = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo", "HOSTNAME": "localhost"}
    meeting = {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": world.broadcast_object(port)}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in {**own, **sizes, **gloo, **meeting}.items()})
    import horovod.torch as hvd

    hvd.init()
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    return hvd


if __name__ == "__main__":
    main()
