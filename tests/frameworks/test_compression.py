"""Compression of gradients: codecs, the largest elements and factors by models, and reductions on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.deadlines import DEADLINE_S
from support.float_modes import MODES, mode
from support.outcomes import error_of

import unisono as un
from unisono.frameworks.gradients.blocks import BLOCK, CODECS
from unisono.frameworks.gradients.compression import COMPRESSIONS, compression_of
from unisono.frameworks.gradients.layout import Gradient, Piece, layout_of
from unisono.frameworks.gradients.power_sgd import matrices_of, orthonormal, product
from unisono.frameworks.gradients.top_k import largest
from unisono.launchers.launch import Pool

bounded = settings(max_examples=40, deadline=None, derandomize=True)
SIZE = 3
# Forms whose residuals of all ranks are together what the results lack.
# With 3 ranks, the first "topk" gathers elements, and the second one adds them up on the way.
EXACT = ("int8", "float8", "int4", "onebit", "topk:ratio=0.1", "topk:ratio=0.3", "powersgd:rank=2")


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    with Pool(SIZE) as pool:
        yield pool


def run(pool: Pool, program: Any, *args: Any) -> list[Any]:
    return pool.run(program, *args, timeout_s=DEADLINE_S)


# --- codecs --------------------------------------------------------------------------------------------------------


def of_one_block(form: str, block: Any) -> Any:
    """Return what a block says on the wire, element by element: the definition."""
    if form == "onebit":
        negative = [x for x in block if x < 0]
        others = [x for x in block if not x < 0]
        return [sum(negative) / len(negative) if x < 0 else sum(others) / len(others) for x in block]
    most = max(abs(x) for x in block)
    if most == 0:
        return [0.0] * len(block)
    if form == "float8":
        return [float(np.float32(x / (most / 448)).astype("float8_e4m3fn")) * (most / 448) for x in block]
    levels = {"int8": 127, "int4": 7}[form]
    return [round(x / (most / levels)) * (most / levels) for x in block]


@bounded
@given(st.sampled_from(sorted(CODECS)), st.integers(0, 3 * BLOCK), st.integers(-20, 20), st.integers(0, 2**32 - 1))
def test_block_codec_says_what_its_definition_says_and_keeps_the_rest(
    form: str, count: int, exponent: int, seed: int
) -> None:
    codec, random = CODECS[form], np.random.default_rng(seed)
    x, residual = (random.normal(size=(2, count)) * 10.0**exponent).astype(np.float32)
    total = x + residual
    wire = np.full(codec.nbytes(count) + 1, 99, np.uint8)
    codec.encode(wire, x, residual)
    assert wire[-1] == 99
    back = np.full_like(x, 7)
    codec.decode(back, wire)
    np.testing.assert_array_equal(residual, total - back)
    padded = np.zeros(-(-count // BLOCK) * BLOCK, np.float32)
    padded[:count] = total
    expected = [value for block in padded.reshape(-1, BLOCK).tolist() for value in of_one_block(form, block)][:count]
    # A quotient near the middle of two codes may be rounded to either.
    step = {"int8": 1 / 127, "int4": 1 / 7, "float8": 1 / 14, "onebit": 1e-5}[form]
    largest_of = np.repeat(np.abs(padded.reshape(-1, BLOCK)).max(axis=1), BLOCK)[:count] if count else padded
    is_near = np.abs(back - expected) <= 1e-5 * largest_of
    assert (np.abs(back - expected) <= 1.001 * step * largest_of).all()
    assert is_near.mean() > 0.98 if count else True
    twice = back.copy()
    codec.decode(twice, wire, adds=True)
    np.testing.assert_array_equal(twice, back + back)


@pytest.mark.parametrize("form", sorted(CODECS))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_block_with_a_nonfinite_element_is_nan_and_leaves_no_residual(form: str, value: float) -> None:
    x = np.ones(2 * BLOCK, np.float32)
    x[7] = value
    residual, back = np.zeros_like(x), np.empty_like(x)
    wire = np.zeros(CODECS[form].nbytes(x.size), np.uint8)
    CODECS[form].encode(wire, x, residual)
    CODECS[form].decode(back, wire)
    assert np.isnan(back[:BLOCK]).all()
    assert ((back[BLOCK:] == 1).all(), (residual == 0).all()) == (True, True)


# --- the largest elements, and factors ----------------------------------------------------------------------------


@bounded
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_largest_elements_are_no_smaller_than_any_other(elements: int, count: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=elements).astype(np.float32)
    indices = largest(x, count)
    assert sorted(set(indices.tolist())) == indices.tolist()
    assert len(indices) == min(count, elements)
    rest = np.delete(np.abs(x), indices)
    assert not rest.size or rest.max() <= np.abs(x[indices]).min()


@bounded
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_orthonormal_columns_span_those_of_the_matrix_also_if_these_depend_on_each_other(
    rows: int, columns: int, true_rank: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    p = (random.normal(size=(rows, true_rank)) @ random.normal(size=(true_rank, columns))).astype(np.float32)
    q = orthonormal(p)
    gram = q.T.astype(np.float64) @ q
    assert np.allclose(gram, np.diag(np.round(np.diag(gram))), atol=2e-3)
    assert np.linalg.norm(q @ (q.T @ p) - p) <= 1e-3 * max(1.0, float(np.linalg.norm(p)))
    np.testing.assert_allclose(product(p, p), p @ p.T, rtol=1e-4, atol=1e-4)


@bounded
@given(
    st.lists(st.lists(st.integers(0, 20), max_size=3).map(tuple), min_size=1, max_size=6),
    st.integers(64, 4000),
    st.integers(1, 4),
)
def test_matrices_are_whole_rows_of_gradients_wherever_buckets_cut_them(
    shapes: list[tuple[int, ...]], nbytes: int, rank: int
) -> None:
    gradients = [Gradient(f"p{index}", shape, "float32") for index, shape in enumerate(shapes)]
    layout = layout_of(gradients, nbytes)
    memory = np.full(layout.lengths["float32"], -1)
    for gradient in gradients:
        begin = layout.offsets[gradient.name]
        memory[begin : begin + gradient.elements] = np.arange(gradient.elements)
    for bucket in layout.buckets:
        part, pieces = memory[bucket.start : bucket.stop], layout.pieces_of(bucket)
        assert sum(piece.stop - piece.start for piece in pieces) == (part >= 0).sum()
        for matrix in matrices_of(pieces, rank):
            elements = matrix.of(part)
            assert (elements[:, 0] % matrix.columns == 0).all()
            assert elements.reshape(-1).tolist() == list(range(elements[0, 0], elements[0, 0] + elements.size))


def test_matrices_that_would_not_become_smaller_travel_as_they_are() -> None:
    assert matrices_of([Piece(0, 100, 1), Piece(100, 164, 8), Piece(164, 170, 2)], 4) == []
    assert [matrix.rows for matrix in matrices_of([Piece(0, 3 * 64 - 5, 64, 5)], 1)] == [2]


# --- reductions ----------------------------------------------------------------------------------------------------

SHAPES = {"a.w": (40, 24), "a.b": (24,), "b.w": (7, 5, 9), "c.w": (33, 65)}


def gradients_of(rank: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng([rank, step])
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def reduced_and_residuals(
    world: Any, compression: str, op: str, steps: int, bucket_nbytes: int
) -> tuple[dict[str, Any], dict[str, Any], list[bytes]]:
    """Return sums over steps of what was applied, with the last residuals, and of what should be; bits of all steps."""
    weight = world.size if op == "avg" else 1
    applied = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    expected = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    bits = []
    with un.GradientReducer(world, compression=compression, op=op, bucket_nbytes=bucket_nbytes) as reducer:
        for step in range(steps):
            for name, x in gradients_of(world.rank, step).items():
                reducer.ready(name, x.copy())
            result = reducer.finish()
            bits.append(b"".join(result[name].tobytes() for name in SHAPES))
            for name in SHAPES:
                applied[name] += weight * result[name].astype(np.float64)
                expected[name] += sum(gradients_of(rank, step)[name].astype(np.float64) for rank in range(world.size))
        residuals = reducer.state_dict()["residuals"]
    for name in SHAPES:
        applied[name] += world.allreduce(residuals[name].astype(np.float64))
    return applied, expected, bits


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    compression=st.sampled_from(EXACT),
    op=st.sampled_from(("avg", "sum")),
    steps=st.integers(1, 9),
    bucket_nbytes=st.sampled_from((700, 4000, 1 << 20)),
)
def test_results_and_residuals_of_all_ranks_are_together_the_gradients(
    three: Pool, compression: str, op: str, steps: int, bucket_nbytes: int
) -> None:
    every = run(three, reduced_and_residuals, compression, op, steps, bucket_nbytes)
    assert every[0][2] == every[1][2] == every[2][2]
    for applied, expected, _ in every:
        for name in SHAPES:
            np.testing.assert_allclose(applied[name], expected[name], atol=2e-4 * steps)


@pytest.mark.parametrize("compression", EXACT)
def test_each_compression_loses_no_part_of_a_gradient(three: Pool, compression: str) -> None:
    for applied, expected, _ in run(three, reduced_and_residuals, compression, "avg", 3, 3000):
        for name in SHAPES:
            np.testing.assert_allclose(applied[name], expected[name], atol=1e-3)


def factors_of_low_rank(world: Any) -> float:
    """Return the largest error of a matrix of rank 2 after some steps, which factors of rank 2 can represent."""
    random = np.random.default_rng(1)
    left = random.normal(size=(30, 2))
    own = (left @ np.random.default_rng(2 + world.rank).normal(size=(2, 20))).astype(np.float32)
    true = world.allreduce(own.astype(np.float64), "avg")
    with un.GradientReducer(world, compression="powersgd:rank=2") as reducer:
        before = np.zeros_like(own, np.float64)
        for _ in range(6):
            reducer.ready("w", own.copy())
            result = reducer.finish()["w"]
            before = result.astype(np.float64)
    return float(np.abs(before - true).max())


def test_factors_represent_a_matrix_of_their_rank_exactly(three: Pool) -> None:
    assert max(run(three, factors_of_low_rank)) < 1e-4


def with_momentum(world: Any, settings_: str) -> list[list[float]]:
    with un.GradientReducer(world, compression=f"topk:{settings_}") as reducer:
        results = []
        for _ in range(3):
            reducer.ready("w", np.array([4.0, 1.0, 0.0, 0.0], np.float32))
            results.append(reducer.finish()["w"].tolist())
    return results


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        ("ratio=0.25", [[4, 0, 0, 0], [4, 0, 0, 0], [4, 0, 0, 0]]),
        # The element that waits gathers 1, then 1 + 1.5, then 2.5 + 1.75; those that are sent begin anew.
        ("ratio=0.25,momentum=0.5", [[4, 0, 0, 0], [4, 0, 0, 0], [0, 4.25, 0, 0]]),
        # The norm of the gradient becomes 3 / sqrt(3).
        ("ratio=1,clip=3", [[4 * 0.42008, 0.42008, 0, 0]] * 3),
    ],
)
def test_top_elements_follow_the_paper(three: Pool, settings_: str, expected: list[list[float]]) -> None:
    for results in run(three, with_momentum, settings_):
        np.testing.assert_allclose(results, expected, rtol=1e-4)


def interrupted(world: Any, compression: str, lag: int, restart_after: int | None, by_rank_0: bool) -> list[bytes]:
    """Return the bits of 8 steps, on a reducer that is saved and made anew in between, or not."""
    reducer = un.GradientReducer(world, compression=compression, lag=lag, bucket_nbytes=4000)
    results = []
    for step in range(8):
        for name, x in gradients_of(world.rank, step).items():
            reducer.ready(name, x)
        result = reducer.finish()
        results.append(b"".join(result[name].tobytes() for name in SHAPES if name in result))
        if step == restart_after:
            state = reducer.state_dict()
            reducer.close()
            reducer = un.GradientReducer(world, compression=compression, lag=lag, bucket_nbytes=4000)
            reducer.load_state_dict(world.broadcast_object(state) if by_rank_0 else state)
    reducer.flush()
    reducer.close()
    return results


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("compression", ["onebit", "topk:ratio=0.1,momentum=0.5", "topk:ratio=0.3", "powersgd:rank=2"])
def test_compressed_training_resumes_from_its_state_with_equal_bits(three: Pool, compression: str, lag: int) -> None:
    once = run(three, interrupted, compression, lag, None, False)
    assert once[0] == once[1] == once[2]
    again = run(three, interrupted, compression, lag, 3, False)
    assert again[0] == again[1] == again[2]
    if lag == 0 or compression.startswith("topk"):  # a state ends the steps in flight, which changes their residuals
        assert again == once
    of_rank_0 = run(three, interrupted, compression, lag, 3, True)
    assert of_rank_0[0] == of_rank_0[1] == of_rank_0[2]


def in_mode(world: Any, name: str) -> list[bytes]:
    with mode(name if world.rank else "default"):
        return [interrupted(world, compression, 0, None, False)[-1] for compression in EXACT]


def test_compressed_results_have_equal_bits_in_every_floating_point_mode(three: Pool) -> None:
    for name in MODES:
        every = run(three, in_mode, name)
        assert every[0] == every[1] == every[2]


WRONG = {
    "1bit": "compression must be one of",
    "one_bit": "did you mean onebit?",
    "int8:rank=3": "sets 'rank', and it has no settings",
    "topk:ration=0.1": "did you mean ratio?",
    "topk:ratio=0": "sets ratio to '0': it must be a number",
    "topk:momentum=1": "it must be a number from 0 to 1",
    "powersgd:rank=1.5": "it must be an integer from 1 to 65536",
    "powersgd:rank=": "sets rank to ''",
}


def misuse(world: Any) -> list[tuple[str, str]]:
    return [error_of(partial(un.GradientReducer, world, compression=text)) for text in WRONG]


def test_unknown_compressions_and_settings_are_refused_with_a_near_name(three: Pool) -> None:
    for errors in run(three, misuse):
        for (kind, text), expected in zip(errors, WRONG.values(), strict=True):
            assert (kind, expected in text) == ("UsageError", True), text


def test_each_compression_says_how_many_bytes_an_element_takes() -> None:
    for name, codec in CODECS.items():
        nbytes = codec.nbytes(1000 * BLOCK) / (1000 * BLOCK)
        assert COMPRESSIONS[name].itemsize <= nbytes <= COMPRESSIONS[name].itemsize * 1.3
    assert compression_of("topk").state == ("residuals",)
    assert [compression_of("topk:ratio=0.1").described(ranks) for ranks in (5, 6)] == ["allgather", "sparse sum"]
    assert compression_of("int8").described(6) == "alltoall, allgather"
    assert compression_of("topk:momentum=0.9").state == ("residuals", "velocities")
