"""Measures calls in programs of JAX over Unisono and Gloo: ``python -m unisono.bench.jax_calls [-n 2] [--json]``.

Both are called by the same processes, and their programs alternate in rounds. A program makes several allreduces, each
of the result of the one before. A time is an allreduce's mean in a round, on the slower rank: the median of all rounds,
and that of the best round, which other programs of the machine disturb the least.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

import unisono as un

LIBRARIES = ("gloo", "unisono")
STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": median, "best": min}
# By size, library and statistic, microseconds.
Rows: TypeAlias = "dict[str, dict[str, dict[str, float]]]"
SIZES = {"8 B": 8, "1 KiB": 1 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
# The calls of a program, which take as long as its start, and the bytes that limit them.
_MOST_CALLS, _MOST_NBYTES = 50, 64 << 20


def main() -> None:
    """Measure the calls, and print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bind", choices=["core"], help="bind each rank, with all its threads, to a core")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    version, rows = measure(options.ranks, options.rounds, options.bind)
    if options.json:
        sys.stdout.write(
            json.dumps({"jax": version, "ranks": options.ranks, "bind": options.bind, "rows": rows}) + "\n"
        )
        return
    columns = [f"{library} {statistic}, µs" for statistic in STATISTICS for library in LIBRARIES]
    table = Table("allreduce", *columns, title=f"JAX {version}, {options.ranks} ranks")
    for name, times in rows.items():
        table.add_row(name, *(f"{times[library][each]:,.1f}" for each in STATISTICS for library in LIBRARIES))
    Console().print(table)


def measure(ranks: int, rounds: int, bind: str | None) -> tuple[str, Rows]:
    """Return the version of JAX, and the times; `bind` is that of `unisono.launch`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (version, rows), *others = un.launch(_measure_rank, ranks, address, rounds, bind=bind)
    for _, row in others:
        for name, times in row.items():
            rows[name] = {
                library: {each: max(rows[name][library][each], times[library][each]) for each in STATISTICS}
                for library in LIBRARIES
            }
    return version, rows


def _measure_rank(world: un.Communicator, address: str, rounds: int) -> tuple[str, Rows]:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, world.size, world.rank)
    times = {}
    for name, nbytes in SIZES.items():
        calls = max(1, min(_MOST_CALLS, _MOST_NBYTES // nbytes))
        programs = {"gloo": _by_gloo(world, nbytes // 4, calls), "unisono": _by_unisono(world, nbytes // 4, calls)}
        times[name] = _alternate(programs, world, rounds, calls)
    world.barrier()
    jax.distributed.shutdown()
    return jax.__version__, times


def _by_gloo(world: un.Communicator, elements: int, calls: int) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    spec = PartitionSpec("ranks")

    def repeated(x: Any) -> Any:
        def mean(_: int, x: Any) -> Any:
            return jax.lax.pcast(jax.lax.psum(x, "ranks"), "ranks", to="varying") / world.size

        return jax.lax.fori_loop(0, calls, mean, x)

    program = jax.jit(jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec))
    own = jnp.ones((1, elements), jnp.float32)
    sharding = NamedSharding(mesh, spec)
    x = jax.make_array_from_single_device_arrays((world.size, elements), sharding, [own])
    return lambda: program(x).block_until_ready()


def _by_unisono(world: un.Communicator, elements: int, calls: int) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    import unisono.jax as uj

    def mean(_: int, x: Any) -> Any:
        return uj.allreduce(x, comm=world) / world.size

    program = jax.jit(lambda x: jax.lax.fori_loop(0, calls, mean, x))
    x = jnp.ones((1, elements), jnp.float32)
    return lambda: program(x).block_until_ready()


def _alternate(
    programs: dict[str, Callable[[], Any]], world: un.Communicator, rounds: int, calls: int
) -> dict[str, dict[str, float]]:
    """Run the programs in turn; return the statistics of each, in microseconds for one of its calls."""
    times: dict[str, list[float]] = {library: [] for library in programs}
    for number in range(rounds + 2):
        for library, program in programs.items():
            world.barrier()
            began = time.perf_counter()
            program()
            if number >= 2:  # the first two compile and warm up
                times[library].append((time.perf_counter() - began) * 1e6 / calls)
    return {library: {name: take(each) for name, take in STATISTICS.items()} for library, each in times.items()}


if __name__ == "__main__":
    main()
