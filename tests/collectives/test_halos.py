"""Halos: neighbours in a grid exchange the elements next to each other, compared with one array on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import array_shapes
from support.outcomes import error_of
from support.ranks import Ranks, ranks_fixture

import unisono as un
from unisono.transports import _core

pytestmark = pytest.mark.timeout(120)


four = ranks_fixture((4, "generic"), (4, "shm"), (4, "tcp"))
fresh = ranks_fixture((2, "shm"), (2, "tcp"), scope="function")


# dims, periodic, width, corners, trailing axes, dtype, layout, size of a part along each dimension
Case = tuple[tuple[int, ...], tuple[bool, ...], tuple[int, ...], bool, tuple[int, ...], str, str, int]


def whole_of(case: Case) -> Any:
    """Return the field of all ranks, without halos."""
    dims, *_, rest, dtype, _, length = case
    shape = [length * each for each in dims]
    return np.arange(np.prod([*shape, *rest])).reshape(*shape, *rest).astype(dtype)


def part_of(case: Case, coordinates: tuple[int, ...]) -> Any:
    """Return the part of a rank, with a halo of -1."""
    _, _, width, _, rest, dtype, layout, length = case
    shape = (*[length + 2 * each for each in width], *rest)
    if layout == "strided":
        part = np.zeros((*shape[:-1], 2 * shape[-1]), dtype)[..., ::-2]
    else:
        part = np.zeros(shape, dtype, order=layout)  # type: ignore[call-overload]
    part[...] = -1
    own = tuple(slice(each, each + length) for each in width)
    part[own] = whole_of(case)[tuple(slice(at * length, (at + 1) * length) for at in coordinates)]
    return part


def expected_of(case: Case, coordinates: tuple[int, ...]) -> Any:
    """Return the part of a rank after an exchange, cut out of the whole field with its halo."""
    dims, periodic, width, corners, _, dtype, _, length = case
    whole = whole_of(case)
    pads = [(each, each) for each in width]
    for axis, (pad, wraps) in enumerate(zip(pads, periodic, strict=True)):
        padding = [(0, 0)] * whole.ndim
        padding[axis] = pad
        if wraps:
            whole = np.pad(whole, padding, mode="wrap")
        else:
            whole = np.pad(whole, padding, constant_values=np.array(-1).astype(dtype))
    cut = tuple(slice(at * length, (at + 1) * length + 2 * each) for at, each in zip(coordinates, width, strict=True))
    expected = whole[cut].copy()
    if not corners:
        outside = np.zeros(expected.shape, int)
        for axis, each in enumerate(width):
            at = np.arange(expected.shape[axis])
            is_out = (at < each) | (at >= length + each)
            outside += is_out.reshape([-1 if other == axis else 1 for other in range(expected.ndim)])
        expected[outside > 1] = -1
    assert len(dims) == len(width)
    return expected


def exchanged(world: un.Communicator, cases: list[Case]) -> list[bool]:
    are_right = []
    for case in cases:
        dims, periodic, width, corners, *_ = case
        with world.grid(dims, periodic=periodic) as grid:
            part = part_of(case, grid.coordinates())
            halo = grid.halo(part, width, corners=corners)
            assert halo.exchange() is part
            once = np.array_equal(part, expected_of(case, grid.coordinates()))
            part[...] = part_of(case, grid.coordinates())
            halo.start()
            total = grid.allreduce(np.ones(1))
            assert (halo.wait() is part, total) == (True, 4)
            are_right.append(once and np.array_equal(part, expected_of(case, grid.coordinates())))
    return are_right


def cases_of(dims: tuple[int, ...]) -> st.SearchStrategy[Case]:
    each = len(dims)
    return st.tuples(
        st.just(dims),
        st.tuples(*[st.booleans()] * each),
        st.tuples(*[st.integers(0, 2)] * each),
        st.booleans(),
        st.sampled_from([(), (3,)]),
        st.sampled_from(["float64", "int8", "complex128", "float16"]),
        st.sampled_from(["C", "F", "strided"]),
        st.sampled_from([2, 5, 40 if each < 3 else 9]),
    )


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([(4,), (2, 2), (1, 4), (2, 1, 2), (4, 1, 1)]).flatmap(cases_of), min_size=15, max_size=15)
)
def test_exchange_fills_ghost_layers_with_the_elements_of_the_neighbours(four: Any, cases: list[Case]) -> None:
    for results in four.run_calls(exchanged, cases):
        assert results == [True] * len(cases), [
            case for case, is_right in zip(cases, results, strict=True) if not is_right
        ]


def large(world: un.Communicator) -> bool:
    case = ((2, 2), (True, False), (3, 2), True, (), "float64", "C", 9000)
    grid = world.grid([2, 2], periodic=[True, False])
    part = np.full((9000 + 6, 12 + 4), -1.0)
    part[3:-3, 2:-2] = grid.rank
    halo = grid.halo(part, (3, 2), corners=True)
    for _ in range(5):
        halo.exchange()
    row, column = grid.coordinates()
    assert case[0] == grid.dims
    along, across = part[3:-3, 2:-2], part[3:-3, :2] if column else part[3:-3, -2:]
    other = 2 * row + 1 - column
    return bool(
        (along == grid.rank).all() and (across == other).all() and (part[:3, 2:-2] == 2 - 2 * row + column).all()
    )


def test_faces_of_many_kilobytes_are_exchanged(four: Any) -> None:
    assert four.run_calls(large) == [True] * 4


def of_torch(world: un.Communicator) -> Any:
    import torch

    grid = world.grid([4], periodic=True)
    field = torch.full((3, 4), -1, dtype=torch.bfloat16).T
    field[1:-1] = grid.rank
    assert grid.halo(field).exchange() is field
    return field[:, 0].float().tolist()


def test_halo_takes_tensors_of_torch(four: Any) -> None:
    pytest.importorskip("torch")
    assert four.run_calls(of_torch) == [[(rank - 1) % 4, rank, rank, (rank + 1) % 4] for rank in range(4)]


FROZEN = np.ones((4, 4))
FROZEN.flags.writeable = False
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "read-only": (lambda grid: grid.halo(FROZEN), "array is read-only"),
    "too few axes": (lambda grid: grid.halo(np.ones(4)), "array has 1 axes, and the grid has 2 dimensions"),
    "too small": (
        lambda grid: grid.halo(np.ones((9, 5)), 2),
        "array has 5 elements along axis 1, but needs at least 6",
    ),
    "width of another length": (lambda grid: grid.halo(np.ones((4, 4)), [1]), "or one for each of 2 dimensions"),
    "negative width": (lambda grid: grid.halo(np.ones((4, 4)), [1, -1]), "width[1] must be an integer, 0 to"),
    "objects": (lambda grid: grid.halo(np.ones((4, 4), object)), "dtype object, which cannot be sent"),
    "no array": (lambda grid: grid.halo([1, 2]), "array must be an array"),
    "wait only": (lambda grid: grid.halo(np.ones((4, 4))).wait(), "no exchange has been started"),
}


def errors_of(world: un.Communicator) -> list[tuple[str, str]]:
    with world.grid(2) as grid:
        errors = [error_of(lambda call=call: call(grid)) for call, _ in WRONG.values()]  # type: ignore[misc]
        halo = grid.halo(np.ones((4, 4)))
        halo.start()
        errors += [error_of(halo.start), error_of(halo.exchange)]
        halo.wait()
    return [*errors, error_of(halo.exchange)]


def test_wrong_halos_are_refused(four: Any) -> None:
    texts = [part for _, part in WRONG.values()] + ["wait() for it first"] * 2 + ["closed"]
    for errors in four.run_calls(errors_of):
        assert [(kind, part in text) for (kind, text), part in zip(errors, texts, strict=True)] == [
            ("UsageError", True)
        ] * len(texts), errors


def of_other_lengths(world: un.Communicator) -> tuple[str, str]:
    grid = world.grid([2, 1])
    halo = grid.halo(np.ones((4, 4 + grid.rank)))

    def exchange() -> None:
        halo.exchange()
        grid.barrier()

    return error_of(exchange)


def test_parts_that_do_not_fit_get_an_error_with_both_sizes(fresh: Ranks) -> None:
    kinds, texts = zip(*fresh.run_calls(of_other_lengths), strict=True)
    assert set(kinds) == {"MismatchError"}
    assert any(text in texts[0] for text in ("rank 1 sent 24 bytes, where 16", "rank 0 sent 16 bytes, where 24")), texts


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=7),
    st.sampled_from(["int8", "float16", "float32", "float64", "complex128"]),
    st.tuples(*[st.slices(7)] * 4),
    st.booleans(),
    st.booleans(),
)
def test_regions_are_copied_whatever_their_strides(
    shape: tuple[int, ...], dtype: str, slices: tuple[slice, ...], is_flat: bool, is_packed: bool
) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    region = array[slices[: len(shape)]]
    other = np.zeros((*region.shape, 1 if is_flat else 2), dtype)[..., 0]
    dst, src = (other, region) if is_packed else (region, other)
    if not is_packed:
        other[...] = 1 + np.arange(other.size).reshape(other.shape)
    expected, before = src.copy(), array.copy()
    copies = [(dst.ctypes.data, src.ctypes.data, dst.shape, dst.strides, src.strides)]
    _core.StridedCopies(array.itemsize, copies * 2)()
    np.testing.assert_array_equal(dst, expected)
    if not is_packed:
        before[slices[: len(shape)]] = expected
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("copy", [(0, 0, [1, 2], [8], [8]), (0, 0, [-1], [8], [8]), (0, 0, [1], [8], [])])
def test_wrong_copy_is_refused(copy: Any) -> None:
    with pytest.raises(ValueError, match=r"a stride for each axis|negative"):
        _core.StridedCopies(8, [copy])
