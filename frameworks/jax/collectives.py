"""The functions that users call: collectives and messages on arrays of JAX, inside programs and outside.

They have the names and results of the methods of `Communicator`, with three differences:

- A rank that gets no result gets zeros, because the shapes of a program are fixed. In a gather it gets no rows.
- With ``token=`` a function has no effect. It returns the result and the next token, and calls are made in the order in
  which the token passes through them. Without it, JAX keeps the calls in the order of the program.
- Derivatives are those of the sum of the results of all ranks.

Each function raises `UsageError` if the call is wrong. An error of a call that runs reaches the program as JAX's error,
whose text begins with the class of Unisono's error.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from unisono import Communicator, Op, UsageError
from unisono.frameworks.jax.calls import EXCHANGE, SUM, Call
from unisono.frameworks.jax.primitives import bind, bind_after
from unisono.operations import operation
from unisono.xla_programs import communicator_or_world

_MOST_TAG = (1 << 31) - 1


def allreduce(x: Any, op: str | Op = "sum", *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return the combination of the arrays of all ranks, element by element, on every rank.

    Args:
        x: an array, of the same shape and dtype on all ranks.
        op: the operation; not a Python function or ``premul_sum``. Only "sum" and "avg" have derivatives.
        comm: the communicator; by default the world that `unisono.init` has made.
        token: an array that `make_token` or an earlier call has returned; None keeps the order of the program.
    """
    return _called(Call("allreduce", communicator_or_world(comm), _operation(op)), x, token)


def reduce(x: Any, op: str | Op = "sum", root: int = 0, *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return the combination of the arrays of all ranks on rank `root`, and zeros on the other ranks.

    The other arguments are those of `allreduce`.
    """
    comm, combined = communicator_or_world(comm), _operation(op)
    name = combined.name
    call = Call("reduce", comm, SUM if name == "avg" and _is_inexact(x) else combined, _rank(comm, root, "root"))
    if call.op == combined:
        return _called(call, x, token)
    return _scaled(_called(call, x, token), comm.size, token)


def broadcast(x: Any, root: int = 0, *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return the array of rank `root` on every rank. The other ranks pass an array of the same shape and dtype."""
    comm = communicator_or_world(comm)
    return _called(Call("broadcast", comm, root=_rank(comm, root, "root")), x, token)


def allgather(x: Any, *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return the arrays of all ranks, concatenated along the first axis in the order of ranks; a scalar is a row."""
    return _called(Call("allgather", communicator_or_world(comm)), jnp.atleast_1d(x), token)


def reduce_scatter(x: Any, op: str | Op = "sum", *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return this rank's equal part of the rows of the combination of all arrays.

    The number of rows of `x` must be a multiple of the number of ranks.
    """
    comm = communicator_or_world(comm)
    return _called(Call("reduce_scatter", comm, _operation(op)), _cut(x, comm.size), token)


def alltoall(x: Any, *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return one part of each rank's array, in the order of ranks: rank i gets the ith part of the rows of each.

    The number of rows of `x` must be a multiple of the number of ranks.
    """
    comm = communicator_or_world(comm)
    return _called(Call("alltoall", comm), _cut(x, comm.size), token)


def gather(x: Any, root: int = 0, *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return what `allgather` returns on rank `root`, and an array without rows on the other ranks."""
    comm = communicator_or_world(comm)
    return _called(Call("gather", comm, root=_rank(comm, root, "root")), jnp.atleast_1d(x), token)


def scatter(x: Any, root: int = 0, *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return this rank's equal part of the rows of the array of rank `root`.

    The other ranks pass an array of the shape and dtype of the result, whose elements are ignored.
    """
    comm = communicator_or_world(comm)
    root = _rank(comm, root, "root")
    return _called(Call("scatter", comm, root=root), _cut(x, comm.size if comm.rank == root else 1), token)


def scan(x: Any, op: str | Op = "sum", *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return the combination of the arrays of ranks 0 to this one. Only "sum" has a derivative."""
    return _called(Call("scan", communicator_or_world(comm), _operation(op)), x, token)


def exscan(x: Any, op: str | Op = "sum", *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return the combination of the arrays of the ranks before this one, and zeros on rank 0."""
    return _called(Call("exscan", communicator_or_world(comm), _operation(op)), x, token)


def barrier(*, comm: Communicator | None = None, token: Any = None) -> Any:
    """Wait in the program until all ranks are in the barrier. Returns None, or the next token if there is one."""
    call = Call("barrier", communicator_or_world(comm))
    return bind(call, None) if token is None else bind_after(token, call, None)[1]


def send(x: Any, dest: int, tag: int = 0, *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Send an array to rank `dest`, which receives it by `recv` or `sendrecv`; return a zero.

    The zero is a scalar of the dtype of `x`. A program that differentiates through the message adds it to its result,
    so that JAX knows that the result depends on `x`.
    """
    comm = communicator_or_world(comm)
    return _called(Call(EXCHANGE, comm, dest=_peer(comm, dest, "dest"), tag=_tag(tag)), x, token)


def recv(like: Any, source: int, tag: int = 0, *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Return an array from rank `source`, of the shape and dtype of `like`, whose elements are ignored.

    A program that differentiates through the message passes a `like` that depends on the argument of the derivative, so
    that JAX sends the cotangent to `source`.
    """
    comm = communicator_or_world(comm)
    like = jnp.asarray(like)
    call = Call(EXCHANGE, comm, source=_peer(comm, source, "source"), tag=_tag(tag), received=like.shape)
    return _called(call, like, token)


def sendrecv(
    x: Any, dest: int, source: int, tag: int = 0, *, comm: Communicator | None = None, token: Any = None
) -> Any:
    """Send an array to rank `dest`, and return one of the same shape and dtype from rank `source`, both at once."""
    comm = communicator_or_world(comm)
    return _exchanged(comm, x, _peer(comm, dest, "dest"), _peer(comm, source, "source"), _tag(tag), token)


def permute(x: Any, pairs: Sequence[tuple[int, int]], *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Send arrays along pairs (source, dest); return the array from this rank's source, or zeros if it has none.

    All ranks pass the same pairs, as in ``jax.lax.ppermute``. Each rank is the source of at most one pair, and the dest
    of at most one.
    """
    comm = communicator_or_world(comm)
    sources = [_rank(comm, source, "the source of a pair") for source, _ in pairs]
    dests = [_rank(comm, dest, "the dest of a pair") for _, dest in pairs]
    if len(set(sources)) < len(sources) or len(set(dests)) < len(dests):
        raise UsageError(f"a rank is the source or the dest of two pairs in {list(pairs)}: each may be so once")
    dest = dict(zip(sources, dests, strict=True)).get(comm.rank)
    source = dict(zip(dests, sources, strict=True)).get(comm.rank)
    if dest == comm.rank:
        x = jnp.asarray(x)
        return x if token is None else (x, token)
    return _exchanged(comm, x, dest, source, 0, token)


def make_token() -> jax.Array:
    """Return the token of the first of several calls that have no effect; its elements have no meaning."""
    return jnp.zeros((), jnp.uint32)


def _exchanged(comm: Communicator, x: Any, dest: int | None, source: int | None, tag: int, token: Any) -> Any:
    x = jnp.asarray(x)
    if dest is None and source is None:
        zeros = jnp.zeros_like(x)
        return zeros if token is None else (zeros, token)
    return _called(Call(EXCHANGE, comm, dest=dest, source=source, tag=tag, received=x.shape), x, token)


def _called(call: Call, x: Any, token: Any) -> Any:
    x = _array(x)
    return bind(call, x) if token is None else bind_after(jnp.asarray(token), call, x)


def _array(x: Any) -> Any:
    """Return one array of JAX.

    Raises:
        UsageError: `x` is a tree of arrays, or no array at all.
    """
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"x is of type {type(x).__name__}, and must be one array: make the call on each array of a tree by "
            f"jax.tree.map ({error})"
        ) from None


def _scaled(result: Any, size: int, token: Any) -> Any:
    return result / size if token is None else (result[0] / size, result[1])


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _operation(op: str | Op) -> Op:
    combined = operation(op)
    if combined.function is not None or combined.factor is not None:
        raise UsageError(
            f"op {combined.name!r} runs Python, which a compiled program does not: use a named operation, and multiply "
            "by a factor beforehand"
        )
    return combined


def _integer(value: Any, name: str, least: int, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise UsageError(f"{name} must be an integer, {least} to {most}, not {value!r}; it is fixed in a program")
    return number


def _rank(comm: Communicator, rank: Any, name: str) -> int:
    return _integer(rank, name, 0, comm.size - 1)


def _peer(comm: Communicator, rank: Any, name: str) -> int:
    peer = _rank(comm, rank, name)
    if peer == comm.rank:
        raise UsageError(f"{name} is this rank itself ({peer}): messages go between two ranks")
    return peer


def _tag(tag: Any) -> int:
    return _integer(tag, "tag", 0, _MOST_TAG)


def _cut(x: Any, parts: int) -> Any:
    x = jnp.asarray(x)
    if x.ndim == 0 or x.shape[0] % parts:
        raise UsageError(f"x has the shape {x.shape}, and its rows cannot be divided equally among {parts} ranks")
    return x
