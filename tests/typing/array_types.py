"""Calls whose types the type checkers must infer. This file is never run, so it needs neither torch nor JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import unisono as un

if TYPE_CHECKING:
    from typing_extensions import assert_type


class Tensor:
    """An array of a library, as a type checker sees it."""

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> object: ...


def results_have_the_type_of_their_arrays(world: un.Communicator, x: Tensor, y: NDArray[np.float32]) -> None:
    assert_type(world.allreduce(x), Tensor)
    assert_type(world.allreduce(y, "max"), NDArray[np.float32])
    assert_type(world.reduce(x, root=1), Tensor | None)
    assert_type(world.allgatherv(x, (1, 2)), Tensor)
    assert_type(world.scatter(None, out=x), Tensor)
    assert_type(world.allreduce(x, out=x), Tensor)
    assert_type(world.allreduce([x, x]), list[Tensor])
    assert_type(world.reduce((x, y)), tuple[Tensor, NDArray[np.float32]] | None)


def messages_may_be_buffers(world: un.Communicator, x: bytes, out: bytearray, y: Tensor) -> None:
    world.send(x, 1)
    world.send(y, 1)
    assert_type(world.recv(out, 1), bytearray)
    assert_type(world.sendrecv(x, 1, y, 1), Tensor)
    plan: Any = world.plan("allreduce", x, out=out)
    plan()


def other_values_than_arrays_are_rejected(world: un.Communicator, wrong: list[float]) -> None:
    # If a checker accepted these calls, it would report the comments as unused.
    world.allreduce(wrong)  # type: ignore[type-var]
    world.send(wrong, 1)  # type: ignore[call-overload]
    world.recv(3.0, 1)  # type: ignore[call-overload]
