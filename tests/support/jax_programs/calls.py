"""Makes calls in programs of JAX and compares them with direct calls and with numerical derivatives. Prints faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from support.jax_programs.shard_maps import shard_map

import unisono as un
import unisono.jax as uj

jax.config.update("jax_enable_x64", True)
world = un.init()
RANK, SIZE = world.rank, world.size
RING = [(rank, (rank + 1) % SIZE) for rank in range(SIZE)]
ROOT = SIZE - 1
NEXT, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE


def expect(name: str, result: Any, expected: Any) -> None:
    try:
        np.testing.assert_allclose(np.asarray(result, dtype=complex), np.asarray(expected, dtype=complex), rtol=1e-6)
    except AssertionError as error:
        print(f"{name}: {error}")


def by_messages(x: Any) -> Any:
    """Pass `x` from rank 0 to rank 1 by send and recv, as a program does that differentiates through them."""
    if RANK == 0:
        return x + uj.send(x, 1, tag=3)
    return uj.recv(x, 0, tag=3) if RANK == 1 else x


def passed_on(x: Any) -> Any:
    return world.sendrecv(x, NEXT, np.empty_like(x), LAST)


# Each call with an array that ranks distribute in equal parts, and the same call made directly.
CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "allreduce": (uj.allreduce, world.allreduce),
    "average": (partial(uj.allreduce, op="avg"), partial(world.allreduce, op="avg")),
    "reduce": (partial(uj.reduce, root=ROOT), partial(world.reduce, root=ROOT)),
    "average at the root": (partial(uj.reduce, op="avg", root=ROOT), partial(world.reduce, op="avg", root=ROOT)),
    "broadcast": (partial(uj.broadcast, root=ROOT), partial(world.broadcast, root=ROOT)),
    "allgather": (uj.allgather, world.allgather),
    "reduce_scatter": (uj.reduce_scatter, world.reduce_scatter),
    "alltoall": (uj.alltoall, world.alltoall),
    "gather": (partial(uj.gather, root=ROOT), partial(world.gather, root=ROOT)),
    "scan": (uj.scan, world.scan),
    "exscan": (uj.exscan, world.exscan),
    "permute": (partial(uj.permute, pairs=RING), passed_on),
    "sendrecv": (partial(uj.sendrecv, dest=NEXT, source=LAST), passed_on),
}
MOVING = ("broadcast", "allgather", "alltoall", "gather", "permute")
DTYPES = (
    *(jnp.bool_, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32, jnp.int64, jnp.uint64),
    *(jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128),
    *(jnp.float8_e4m3fn, jnp.float8_e5m2),
)


def array(*shape: int, seed: int = 0) -> Any:
    """Return random numbers as an array of numpy, because JAX compiles each operation on its own arrays."""
    return np.random.default_rng([RANK, seed]).standard_normal(shape)


def values() -> None:
    x = array(2 * SIZE, 3)
    calls = {name: call for name, (call, _) in CALLS.items()}
    # Without the rows, which ranks distribute, the batch is the only axis.
    batch = np.stack([x, 2 * x, 3 * x], axis=1)
    arrays = [np.ones((SIZE, 2)).astype(dtype) for dtype in DTYPES]

    @jax.jit
    def program(x: Any, batch: Any, arrays: list[Any]) -> tuple[Any, ...]:
        return (
            {name: call(x) for name, call in calls.items()},
            {name: jax.vmap(call, 1, 1)(batch) for name, call in calls.items()},
            {name: [calls[name](array) for array in arrays] for name in MOVING},
        )

    whole, batched, moved = program(x, batch, arrays)
    for name, (_, direct) in CALLS.items():
        expected = direct(x)
        expected = np.zeros_like(whole[name]) if expected is None else expected
        expect(name, whole[name], expected)
        expect(f"batch of {name}", batched[name], np.stack([factor * expected for factor in (1, 2, 3)], 1))
    for name in MOVING:
        for elements, result in zip(arrays, moved[name], strict=True):
            expected = CALLS[name][1](elements)
            expect(f"{name} of {elements.dtype}", result, elements[:0] if expected is None else expected)
    expect("a scalar", uj.allgather(np.float32(RANK)), np.arange(SIZE))
    expect("no elements", uj.allreduce(np.zeros((0, 3))), np.zeros((0, 3)))
    rows = np.arange(2.0 * SIZE)
    expect("scatter", uj.scatter(rows if RANK == 0 else np.zeros(2)), rows[2 * RANK : 2 * RANK + 2])
    expect("maximum", uj.allreduce(RANK, "max"), SIZE - 1)


def derivatives() -> None:
    """Compare J·v with numerical derivatives, and Jᵀ·w with J·v: the sums over ranks of w·J·v and v·Jᵀ·w are equal."""
    calls = {name: call for name, (call, _) in CALLS.items()}
    calls.update({"scatter": partial(uj.scatter, root=ROOT), "send and recv": by_messages})
    rows = {name: 2 if name == "scatter" and RANK != ROOT else 2 * SIZE for name in calls}
    x, v = ({name: array(rows[name], 3, seed=seed) for name in calls} for seed in (0, 1))
    above, below = ({name: x[name] + step * v[name] for name in calls} for step in (1e-6, -1e-6))

    def results(x: dict[str, Any]) -> dict[str, Any]:
        return {name: jnp.tanh(call(jnp.sin(x[name]))) for name, call in calls.items()}

    w = {name: array(*y.shape, seed=2) for name, y in jax.eval_shape(results, x).items()}

    @jax.jit
    def program(x: Any, v: Any, w: Any, above: Any, below: Any) -> tuple[Any, ...]:
        forward = jax.jvp(results, (x,), (v,))[1]
        return forward, jax.vjp(results, x)[1](w)[0], results(above), results(below)

    forward, backward, above, below = jax.device_get(program(x, v, w, above, below))
    for name in calls:
        numerical = (above[name] - below[name]) / 2e-6
        if not np.allclose(forward[name], numerical, atol=1e-7):
            print(f"{name}: the derivative is not the numerical one")
        sums = world.allreduce(np.array([(w[name] * forward[name]).sum(), (v[name] * backward[name]).sum()]))
        expect(f"transpose of {name}", sums[0], sums[1])


def control_flow() -> None:
    x = array(4)
    total = world.allreduce(x)

    def step(carry: Any, _: Any) -> tuple[Any, Any]:
        return uj.allreduce(carry, "avg"), carry.sum()

    branches = (uj.allreduce, lambda x: x)

    @jax.jit
    def program(which: Any, x: Any) -> dict[str, Any]:
        return {
            "scan": jax.lax.scan(step, x, None, length=3)[0],
            "gradient of scan": jax.grad(lambda x: jax.lax.scan(step, x, None, length=3)[1].sum())(x),
            "cond": jax.lax.cond(x.shape[0] > 2, *branches, x),
            "cond by data": jax.lax.cond(which, *branches, x),
            "while": jax.lax.fori_loop(0, 3, lambda _, x: uj.allreduce(x, "avg"), x),
            "remat": jax.grad(jax.checkpoint(lambda x: jnp.sin(uj.allreduce(x)).sum()))(x),
        }

    expected = {
        "scan": total / SIZE,
        "gradient of scan": np.full(4, 3.0),
        "cond": total,
        "cond by data": total,
        "while": total / SIZE,
        "remat": SIZE * np.cos(total),
    }
    for name, result in program(True, x).items():
        expect(name, result, expected[name])
    expect("a donated array", jax.jit(uj.allreduce, donate_argnums=0)(jnp.asarray(x)), total)
    mesh, spec = Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data")
    sharded = shard_map(uj.allreduce, mesh=mesh, in_specs=spec, out_specs=spec)
    expect("shard_map", jax.jit(sharded)(x), total)


def order() -> None:
    """Make calls that do not depend on each other: on all ranks they must run in the order of the program."""
    large = np.ones(50_000)
    factors = range(10)

    @jax.jit
    def program(x: Any, token: Any) -> tuple[list[Any], list[Any], Any]:
        sums = [uj.allreduce(x * factor)[0] for factor in factors]
        with_token = []
        for factor in factors:
            y, token = uj.allreduce(x * factor, token=token)
            with_token.append(y[0])
        return sums, with_token, uj.barrier(token=token)

    for _ in range(5):
        sums, with_token, token = program(large, uj.make_token())
        expect("order", sums, SIZE * np.array(factors))
        expect("order by token", with_token, SIZE * np.array(factors))
        expect("token", token, 0)


def communicators() -> None:
    half = world.split(RANK % 2, key=-RANK)
    assert half is not None

    @jax.jit
    def program(x: Any) -> tuple[Any, Any]:
        inside = uj.allgather(x, comm=half)
        uj.barrier(comm=half)
        return inside, uj.allreduce(x)

    inside, total = program(float(RANK))
    expect("allgather of a half", inside, half.world_ranks)
    expect("allreduce beside it", total, SIZE * (SIZE - 1) / 2)
    direct = world.allreduce(jnp.ones(3))
    expect("a direct call on an array of JAX", direct, np.full(3, SIZE))


def refused(name: str, error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except error as raised:
        if words not in str(raised):
            print(f"{name}: {raised}")
    else:
        print(f"{name} is not refused")


def bad_input() -> None:
    x = jnp.ones(3)
    refused("a tracer", un.UsageError, "unisono.jax", lambda: jax.jit(world.allreduce)(x))
    refused("rows", un.UsageError, "divided equally", lambda: uj.alltoall(jnp.ones(SIZE + 1)))
    refused("op", un.UsageError, "op must be one of", lambda: uj.allreduce(x, "total"))
    refused("a function", un.UsageError, "runs Python", lambda: uj.allreduce(x, un.Op.from_function(np.add)))
    refused("op of a dtype", un.UsageError, "not defined", lambda: uj.allreduce(x, "band"))
    refused("dtype", un.UsageError, "int4", lambda: uj.allreduce(jnp.ones(3, jnp.int4)))
    refused("root", un.UsageError, "root must be", lambda: uj.broadcast(x, root=SIZE))
    refused("a traced root", un.UsageError, "root must be", lambda: jax.jit(uj.broadcast)(x, 1))
    refused("a tree", un.UsageError, "jax.tree.map", lambda: uj.allreduce({"x": x}))
    refused("itself", un.UsageError, "dest is this rank", lambda: uj.send(x, RANK))
    refused("pairs", un.UsageError, "two pairs", lambda: uj.permute(x, [(0, 1), (1, 1)]))
    refused("comm", un.UsageError, "must be a Communicator", lambda: uj.allreduce(x, comm="world"))
    maximum: Callable[[Any], Any] = lambda x: uj.allreduce(x, "max").sum()  # noqa: E731
    refused("derivative of max", NotImplementedError, "stop_gradient", lambda: jax.grad(maximum)(x))
    after: Callable[[Any], Any] = lambda x: uj.allreduce(x, token=uj.make_token())[0].sum()  # noqa: E731
    refused("derivative by token", un.UsageError, "leave token out", lambda: jax.grad(after)(x))
    refused("lowering for a GPU", un.UsageError, "CPU only", lambda: lowered_for("cuda"))


def lowered_for(platform: str) -> Any:
    return jax.jit(uj.allreduce).trace(jnp.ones(3)).lower(lowering_platforms=(platform,))


for part in (values, derivatives, control_flow, order, communicators, bad_input):
    part()
print("all calls were made")
world.close()
