"""Messages hold elements in the order of their indices, and both ends compare shapes: in every layout and transport."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.ranks import ranks_fixture, start_ranks

import unisono as un
from unisono.testing.device_arrays import DoubleArray, device_double, read
from unisono.testing.device_double import GpuDouble
from unisono.transports.cuda.device import Stream

pytestmark = pytest.mark.timeout(120)

WHOLE = np.arange(24.0).reshape(4, 6)
SHAPE = WHOLE.shape
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
}


ranks = ranks_fixture((2, "generic"), (2, "shm"), (2, "tcp"), (2, "ucx"), (2, "openmpi"), (2, "mpich"))


def received(world: un.Communicator, how: str, x: Any, out: Any) -> Any:
    """Pass `x` to the other rank and return `out`, which that rank's `x` has reached in one of the ways."""
    peer = 1 - world.rank
    if how == "sendrecv":
        return world.sendrecv(x, peer, out, peer)
    if how == "to itself":
        return world.sendrecv(x, world.rank, out, world.rank)
    if how == "group":
        with world.group():
            world.send(x, peer)
            work = world.recv(out, peer)
        assert work.wait() is out
        return out
    source, tag = (un.ANY_SOURCE, un.ANY_TAG) if how == "any" else (peer, 3)
    sent = world.send(x, peer, 3, wait=False)
    work = world.recv(out, source, tag, wait=False)
    if how == "polled":
        while not work.done():
            pass
    else:
        assert work.wait() is out
        assert work.message() == un.Message(peer, 3, x.dtype.name, x.size)
    arrived = out.copy()
    assert work.wait() is out
    sent.wait()
    return arrived


WAYS = ("sendrecv", "to itself", "group", "polled", "any", "background")


def elements(world: un.Communicator) -> list[str]:
    wrong = []
    for how in WAYS:
        for sender, pack in LAYOUTS.items():
            for receiver in ("C", "F"):
                x, out = pack(WHOLE), LAYOUTS[receiver](np.zeros(SHAPE))
                if not np.array_equal(received(world, how, x, out), WHOLE):
                    wrong.append(f"{how}, {sender} to {receiver}")
                flat = received(world, how, x, np.zeros(WHOLE.size))
                if not np.array_equal(flat, WHOLE.ravel()):
                    wrong.append(f"{how}, {sender} to flat")
    return wrong


def test_element_arrives_at_its_index_in_every_layout(ranks: Any) -> None:
    assert ranks.run_calls(elements) == [[], []]


def blocking(world: un.Communicator) -> Any:
    out = np.zeros(SHAPE, order="F")
    if world.rank == 0:
        world.send(WHOLE.T.copy().T, 1)
        return world.recv(out, 1)
    world.recv(out, 0)
    world.send(out, 0)
    return out


def test_blocking_message_in_fortran_order_keeps_the_elements(ranks: Any) -> None:
    for out in ranks.run_calls(blocking):
        assert np.array_equal(out, WHOLE)


def fitting(world: un.Communicator) -> int:
    pairs: list[tuple[Any, Any]] = [
        ((24,), (4, 6)),
        ((2, 3, 4), (1, 24, 1)),
        ((1, 4, 6), (4, 1, 6)),
        ((), (1, 1)),
        ((0, 4), (7, 0)),
        ((2,) * 6, (1, *(2,) * 6)),
    ]
    for tag, shapes in enumerate(pairs):
        x, out = np.ones(shapes[world.rank]), np.zeros(shapes[world.rank])
        world.sendrecv(x, 1 - world.rank, out, 1 - world.rank, tag)
        assert (out == 1).all()
    return len(pairs)


def test_flat_arrays_and_axes_of_length_one_fit(ranks: Any) -> None:
    assert ranks.run_calls(fitting) == [6, 6]


def disagreement(world: un.Communicator, sent: Any, expected: Any, peeks: bool) -> tuple[str, str]:
    try:
        if world.rank == 0:
            world.send(np.zeros(sent), 1)
        else:
            if peeks:
                world.probe(0, un.ANY_TAG)
            world.recv(np.zeros(expected, order="F"), 0)
        world.barrier()
    except un.UnisonoError as error:
        return type(error).__name__, str(error)
    return "", "no error"


@pytest.mark.parametrize(
    ("sent", "expected", "text"),
    [
        ((6, 4), (4, 6), "float64[6,4]"),
        ((2, 3, 4, 5), (5, 4, 3, 2), "float64[2,3,4,5]"),
        ((2,) * 6, (2, 4, 8), "float64["),
        ((3 << 20, 2), (2, 3 << 20), "float64["),
    ],
)
@pytest.mark.parametrize("transport", ["generic", "shm", "tcp"])
def test_other_shape_is_a_mismatch_on_both_ranks(sent: Any, expected: Any, text: str, transport: str) -> None:
    with start_ranks(2, transport) as started:
        errors = started.run_calls(disagreement, sent, expected, transport != "generic")
    for kind, message in errors:
        assert kind == "MismatchError", message
        assert text in message
    assert "float64[" + ",".join(map(str, expected)) in errors[1][1]


def alone(world: un.Communicator) -> str:
    try:
        world.sendrecv(np.zeros((6, 4)), world.rank, np.zeros((4, 6)), world.rank)
    except un.UsageError as error:
        return str(error)
    return ""


def test_other_shape_is_refused_in_a_message_to_oneself(ranks: Any) -> None:
    for text in ranks.run_calls(alone):
        assert "x has shape (6, 4) and out has (4, 6)" in text


def on_double(world: un.Communicator) -> list[str]:
    with device_double() as gpu:
        stream = gpu.device().new_stream()
        with world.dup() as comm:
            wrong = [
                f"{sender} to {receiver}"
                for sender, receiver in itertools.product("CF", repeat=2)
                if not all(
                    np.array_equal(between_device, WHOLE)
                    for between_device in between_devices(comm, gpu, stream, sender, receiver)
                )
            ]
        gc.collect()
        gpu.device().end_stream(stream)
    return wrong


def between_devices(comm: un.Communicator, gpu: GpuDouble, stream: Stream, sender: str, receiver: str) -> list[Any]:
    """Return what arrives on this device from the other device, and from an array on the other host."""
    peer, x = 1 - comm.rank, LAYOUTS[sender](WHOLE)
    outs = [DoubleArray(gpu, LAYOUTS[receiver](np.zeros(SHAPE)), stream) for _ in range(2)]
    comm.sendrecv(DoubleArray(gpu, x, stream), peer, outs[0], peer)
    work = comm.recv(outs[1], peer, wait=False)
    comm.send(x, peer)
    return [read(gpu, outs[0]), read(gpu, work.wait())]


def test_element_arrives_at_its_index_on_a_device() -> None:
    with start_ranks(2, "shm") as started:
        assert started.run_calls(on_double) == [[], []]
