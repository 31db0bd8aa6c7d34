"""Arrays of every library are accepted, and results have their library's class.

Unusable arrays are refused with advice.
"""

from __future__ import annotations

import array
import ctypes
import logging
import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from support.array_kinds import (
    INSTALLED,
    KINDS,
    StandardArray,
    StandardNamespace,
    WithArrayInterface,
    WithCudaInterface,
    WithDlpack,
)
from support.collective_calls import COLLECTIVES, cases
from support.ranks import Ranks, ranks_fixture

import unisono as un
from unisono.collectives.arrays import adapters
from unisono.collectives.arrays.dlpack import from_cuda_interface, from_dlpack
from unisono.data_parallel import average_metrics, broadcast_parameters, clip_global_norm
from unisono.dtypes import DTYPES
from unisono.testing.cases import PREFIXES, REDUCTIONS, Case, arguments_of
from unisono.testing.memory import laid_out
from unisono.testing.oracles import inputs, result_of


@pytest.fixture(scope="module")
def alone() -> Iterator[un.Communicator]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        with un.init() as world:
            yield world


ranks = ranks_fixture((2, "shm"), (3, "tcp"))


# --- every kind in every collective --------------------------------------------------------------------------------


def call_in_kind(world: un.Communicator, case: Case, name: str) -> None:
    """Make a call with numpy arrays and the same call with arrays of another kind, and compare the results."""
    kind = KINDS[name]
    xs = inputs(case, world.size)
    values, reference = xs[world.rank], result_of(case, xs, world.rank)
    call = getattr(world, case.collective)
    arguments = arguments_of(case, world.size, world.rank)
    x, _ = laid_out(values, case.layout, case.offset)
    needs_out = case.name == "scatter" and world.rank != case.root % world.size
    empty = None if reference is None else np.zeros(reference.shape, case.dtype)
    expected = call(x, **arguments, **({"out": empty} if needs_out else {}))
    # All ranks make the same three calls, even if some of them pass no `out`.
    for has_out in (False, True, True):
        out = None
        if needs_out or (has_out and empty is not None and case.layout != "F"):
            out = kind.make(np.zeros_like(reference)) if kind.writable else np.zeros_like(reference)
        result = call(kind.make(x), **arguments, **({} if out is None else {"out": out}))
        assert (result is None) == (expected is None)
        if expected is None:
            continue
        assert result is out if out is not None else type(result).__name__ == kind.result
        read = result if type(result) is np.ndarray else kind.read(result)
        assert (read.dtype, read.tobytes()) == (expected.dtype, expected.tobytes()), f"{name}, {case}"
        assert kind.axes == 1 or read.shape == expected.shape
        assert x.tobytes() == values.tobytes()


@pytest.mark.parametrize("name", INSTALLED)
@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_every_array_library_gives_numpy_results_in_every_collective(ranks: Ranks, name: str, data: Any) -> None:
    kind = KINDS[name]
    case = replace(data.draw(st.sampled_from(COLLECTIVES).flatmap(cases)), algorithm=None)
    if case.dtype not in kind.dtypes:
        possible = [
            (dtype, op)
            for dtype, op in REDUCTIONS
            if dtype in kind.dtypes and (case.name not in PREFIXES or op != "avg")
        ]
        dtype, op = data.draw(st.sampled_from(possible))
        case = replace(case, dtype=dtype, op=op)
    if kind.axes == 1:
        case = replace(case, rest=(), layout="C")
    ranks.run_calls(call_in_kind, case, name)


def message_in_kind(world: un.Communicator, name: str) -> Any:
    kind = KINDS[name]
    dtype = "uint8"
    x = kind.make(np.full(3, world.rank + 1, dtype))
    out = kind.make(np.zeros(3, dtype)) if kind.writable else np.zeros(3, dtype)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    assert world.sendrecv(x, right, out, left) is out
    received = [out]
    again = kind.make(np.zeros(3, dtype)) if kind.writable else np.zeros(3, dtype)
    if world.rank == 0:
        world.send(x, right)
        received.append(world.recv(again, left))
    else:
        received.append(world.recv(again, left))
        world.send(x, right)
    assert received[1] is again
    return [(kind.read(value) if type(value) is not np.ndarray else value).tolist() for value in received]


@pytest.mark.parametrize("name", INSTALLED)
def test_arrays_of_every_library_are_sent_and_received(ranks: Ranks, name: str) -> None:
    expected = [[[(rank - 1) % ranks.size + 1] * 3] * 2 for rank in range(ranks.size)]
    assert ranks.run_calls(message_in_kind, name) == expected


def kinds_mixed(world: un.Communicator) -> Any:
    x = [memoryview, np.asarray, WithArrayInterface][world.rank % 3](np.array([1.0, world.rank]))
    out = bytearray(16)
    assert world.allreduce(x, out=np.frombuffer(out)) is not None
    result = world.allreduce(x, "max")
    return type(result).__name__, result.tolist(), np.frombuffer(out).tolist()


def test_ranks_may_pass_arrays_of_different_libraries(ranks: Ranks) -> None:
    size = ranks.size
    expected = ("ndarray", [1.0, size - 1.0], [size * 1.0, size * (size - 1) / 2])
    assert ranks.run_calls(kinds_mixed) == [expected] * size


# --- views of memory -----------------------------------------------------------------------------------------------

LENDERS: dict[str, Callable[[Any], Any]] = {
    "memoryview": memoryview,
    "interface": WithArrayInterface,
    "DLPack": WithDlpack,
    "ctypes": (ctypes.c_double * 6).from_buffer,
}


@pytest.mark.parametrize("lender", LENDERS)
def test_adapter_view_shares_memory_and_keeps_it_alive(lender: str) -> None:
    values = np.arange(6.0)
    seen = adapters.view_to_write(LENDERS[lender](values), "out")
    assert seen.ctypes.data == values.ctypes.data
    seen[0] = 7
    assert values[0] == 7
    del values
    assert seen.tolist() == [7, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "buffer",
    [b"abc", memoryview(b"abc"), WithArrayInterface(np.frombuffer(b"abc", "u1"))],
    ids=lambda buffer: type(buffer).__name__,
)
def test_read_only_memory_is_accepted_as_input_and_refused_as_out(alone: un.Communicator, buffer: Any) -> None:
    assert alone.allreduce(buffer).tolist() == [97, 98, 99]
    with pytest.raises(un.UsageError, match="read-only"):
        alone.allreduce(np.zeros(3, "u1"), out=buffer)


def test_mmap_and_ctypes_arrays_are_accepted(alone: un.Communicator) -> None:
    with mmap.mmap(-1, 8) as memory:
        alone.allreduce(np.arange(8, dtype="u1"), out=memory)
        assert memory[:] == bytes(range(8))
    assert alone.allreduce((ctypes.c_int16 * 2)(3, 4)).tolist() == [3, 4]


def test_partial_array_interface_is_read_by_rules_of_numpy(alone: un.Communicator) -> None:
    described = WithArrayInterface(np.zeros(2, "<i4"))
    described.__array_interface__ = {"shape": (2,), "typestr": "<i4", "data": b"\1\0\0\0\2\0\0\0", "version": 3}
    assert alone.allreduce(described).tolist() == [1, 2]


VIEWS = {
    "whole": lambda values: values,
    "turned": lambda values: values.T,
    "every second": lambda values: values[:, ::2],
    "backwards": lambda values: values[::-1, ::-1],
    "repeated": lambda values: np.broadcast_to(values, (2, 3, 4)),
    "0-dimensional": lambda values: values[1, 1, ...],
    "empty": lambda values: values[:0],
    "unaligned": lambda values: laid_out(values, "C", offset=1)[0],
}


@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"bfloat16", "float8_e4m3fn", "float8_e5m2"}))
def test_device_memory_keeps_shape_dtype_strides_and_pointer(dtype: str, how: str) -> None:
    array = VIEWS[how](np.arange(12).astype(dtype).reshape(3, 4))
    for memory in (from_cuda_interface(WithCudaInterface(array), "x"), from_dlpack(WithDlpack(array, (2, 3)), "x")):
        assert (memory.pointer, memory.shape, memory.dtype) == (array.ctypes.data, array.shape, array.dtype)
        assert array.size < 2 or memory.strides == array.strides
        assert memory.stream is None
        assert not memory.is_on_host
        # The double's address is one of host memory.
        assert memory.view().tobytes() == array.tobytes()
        assert memory.view().flags.writeable == array.flags.writeable
    assert from_dlpack(WithDlpack(array, (2, 3)), "x").device == ("cuda", 3)


def test_cuda_array_interface_reports_stream_and_device() -> None:
    memory = from_cuda_interface(WithCudaInterface(np.zeros(3), stream=7, strides=None), "x")
    assert (memory.stream, memory.device, memory.strides) == (7, ("cuda", -1), (8,))


WRONG_INTERFACES: dict[str, tuple[dict[str, Any], str]] = {
    "a shape": ({"shape": None}, "that breaks the protocol"),
    "a type": ({"typestr": "none"}, "that breaks the protocol"),
    "a pointer": ({"data": 5}, "that breaks the protocol"),
    "a mask": ({"mask": np.zeros(3, bool)}, "masks are not reduced"),
    "a stream": ({"stream": 0}, "forbids"),
}


@pytest.mark.parametrize("what", WRONG_INTERFACES)
def test_invalid_cuda_array_interface_is_refused(what: str) -> None:
    changes, why = WRONG_INTERFACES[what]
    with pytest.raises(un.UsageError, match=why):
        from_cuda_interface(WithCudaInterface(np.zeros(3), **changes), "x")


def test_dlpack_exporter_that_raises_is_refused_with_its_reason() -> None:
    class Refusing(WithDlpack):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise BufferError("it is lazy")

    with pytest.raises(un.UsageError, match="it is lazy"):
        adapters.view(Refusing(np.zeros(3)), "x")


def test_dlpack_exporter_without_versions_is_accepted() -> None:
    class Old(WithDlpack):
        def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
            return self.values.__dlpack__()

    values = np.arange(3.0)
    seen = adapters.view_to_write(Old(values), "out")
    assert (seen.ctypes.data, seen.tolist()) == (values.ctypes.data, [0, 1, 2])


# --- refusals ------------------------------------------------------------------------------------------------------

ON_DEVICE = {"ROCm": WithDlpack(np.zeros((2, 2)), (10, 1)), "oneAPI": WithDlpack(np.zeros((2, 2)), (14, 0))}


def one_call(world: un.Communicator, collective: str, **arrays: Any) -> Any:
    case = Case(collective, "float64", rows=2, counts=(2,) * 5, rest=(2,))
    return getattr(world, collective)(**{"x": np.zeros((2, 2)), **arguments_of(case, 1, 0), **arrays})


@pytest.mark.parametrize("argument", ["x", "out"])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("kind", ON_DEVICE)
def test_every_collective_refuses_memory_of_unsupported_devices(
    alone: un.Communicator, kind: str, collective: str, argument: str
) -> None:
    with pytest.raises(un.TransportUnavailableError, match=f"{argument} is on the device .*copy it to the host"):
        one_call(alone, collective, **{argument: ON_DEVICE[kind]})
    assert one_call(alone, collective) is not None


REFUSED = {
    "a list of numbers": ([1.0], r"of type float: pass numpy\.asarray"),
    "a number": (2, "not int"),
    "a scalar of numpy": (np.float32(1), "not numpy.float32"),
    "text": ("abc", "not str"),
    "nothing": (None, "x is None in allreduce"),
    "a class": (np.ndarray, "array"),
    "a mask": (np.ma.masked_array([1.0], [True]), "masks"),
    "another byte order": (WithArrayInterface(np.zeros(2, ">f4")), "byte order"),
    "letters": (memoryview(b"ab").cast("c"), "only moved"),
    "an interface that is none": (type("Wrong", (), {"__array_interface__": 5})(), "cannot be read"),
    "a buffer of text": (array.array("u", "ab"), "."),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_objects_that_are_no_numeric_arrays_are_refused(alone: un.Communicator, what: str) -> None:
    wrong, why = REFUSED[what]
    with pytest.raises(un.UsageError, match=why):
        alone.allreduce(wrong)


def test_persistent_call_in_place_on_unwritable_array_is_refused(alone: un.Communicator) -> None:
    with pytest.raises(un.UsageError, match="StandardArray cannot be written"):
        alone.plan("allreduce", StandardArray(np.zeros(3)))
    out = np.zeros(3)
    assert alone.plan("allreduce", StandardArray(np.ones(3)), out=out)() is out
    assert StandardNamespace.asarray(out).values.tolist() == [1, 1, 1]


def test_persistent_call_reads_current_contents_of_its_array(alone: un.Communicator) -> None:
    x = bytearray(b"abc")
    plan = alone.plan("allreduce", x)
    x[0] = 100
    assert plan().tolist() == [100, 98, 99]


# --- torch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_torch_tensors_of_every_dtype_are_viewed_without_a_copy(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, 3).to(getattr(torch, name))
    for x in (tensor, tensor.T, tensor[:, ::2], tensor[0, 0], tensor[:0]):
        for seen in (adapters.view(x, "x"), adapters.view_to_write(x, "x"), adapters.view(WithDlpack(x), "x")):
            assert (seen.shape, seen.dtype) == (tuple(x.shape), np.dtype(name))
            assert x.numel() == 0 or seen.ctypes.data == x.data_ptr()
        back = adapters.adapter_of(x, "x").wrap(adapters.view(x, "x"), x)
        assert (back.dtype, back.shape, back.data_ptr()) == (x.dtype, x.shape, x.data_ptr())
        assert x.numel() == 0 or back.stride() == x.stride()


def wrong_tensors(torch: Any) -> list[tuple[Any, type[Exception], str]]:
    return [
        (torch.ones(2, requires_grad=True), un.UsageError, r"\.detach\(\)"),
        (torch.ones(2, dtype=torch.bfloat16, requires_grad=True), un.UsageError, "requires grad"),
        (torch.ones(2, dtype=torch.complex64).conj(), un.UsageError, "resolve_conj"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, un.UsageError, "resolve_neg"),
        (torch.eye(2).to_sparse(), un.UsageError, "to_dense"),
        (torch.ones(2, device="meta"), un.TransportUnavailableError, "device meta"),
        (torch.ones(2).to(torch.float8_e5m2fnuz), un.UsageError, "float8_e5m2fnuz"),
    ]


def test_torch_tensors_without_plain_memory_are_refused(alone: un.Communicator) -> None:
    for wrong, kind, why in wrong_tensors(pytest.importorskip("torch")):
        for arrays in ({"x": wrong}, {"x": np.ones(2), "out": wrong}):
            with pytest.raises(kind, match=why):
                alone.allreduce(**arrays)


def test_list_of_torch_tensors_follows_tensors_that_change_their_memory(alone: un.Communicator) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.ones(4), torch.ones(2, 3), torch.ones(4)]
    for op, factor, out in (("sum", 1, None), (un.Op.premul_sum(2.0), 2, None), (un.Op.premul_sum(2.0), 2, tensors)):
        for change in (lambda: None, lambda: None, *changes_of_memory(torch, tensors), lambda: None):
            change()
            expected = [(factor * x).tolist() for x in tensors]
            results = alone.allreduce(tensors, op, out=out)
            assert [x.tolist() for x in results] == expected
            assert out is None or all(x is y for x, y in zip(results, tensors, strict=True))


def changes_of_memory(torch: Any, tensors: list[Any]) -> list[Callable[[], Any]]:
    return [
        lambda: tensors[0].resize_(2).fill_(3),
        lambda: tensors[1].set_(torch.full((3, 2), 5.0)),
        lambda: setattr(tensors[2], "data", torch.full((7,), 7.0)),
        lambda: tensors.pop(0),
        lambda: tensors.insert(0, torch.full((4,), 9, dtype=torch.float64)),
    ]


def test_lists_of_several_libraries_give_results_of_the_same_libraries(alone: un.Communicator) -> None:
    torch = pytest.importorskip("torch")
    x = (np.ones(2), torch.ones(3, dtype=torch.bfloat16), memoryview(np.ones(2)), torch.ones(3, 2).T)
    for _ in range(2):
        results = alone.allgather(x)
        assert [type(own) for own in (results, *results)] == [tuple, np.ndarray, torch.Tensor, np.ndarray, torch.Tensor]
        assert [tuple(own.shape) for own in results] == [(2,), (3,), (2,), (2, 3)]
        assert results[1].dtype == torch.bfloat16


def test_lists_with_wrong_tensors_are_refused_in_every_call(alone: un.Communicator) -> None:
    torch = pytest.importorskip("torch")
    good = torch.ones(2)
    for wrong, kind, why in wrong_tensors(torch):
        with pytest.raises(kind, match=why):
            alone.allreduce([good, wrong])
    both = torch.zeros(3)
    for _ in range(2):
        alone.allreduce([good, good], out=[torch.zeros(2), torch.zeros(2)])
        for out, why in (([both[:2], both[1:]], "memory of another"), ([good], "2 arrays"), (good, "2 arrays")):
            with pytest.raises(un.UsageError, match=why):
                alone.allreduce([good, good], out=out)
    for x, why in (
        ([good, None], "must be an array"),
        ([good, [good]], "several arrays"),
        ([good, 1.0], "of type float"),
    ):
        with pytest.raises(un.UsageError, match=why):
            alone.allreduce(x)


def test_in_place_reduction_of_torch_tensor_is_visible_to_autograd(alone: un.Communicator) -> None:
    torch = pytest.importorskip("torch")
    x = torch.nn.Parameter(torch.ones(3))
    squares = (x * x).sum()
    out = x.detach()
    assert alone.allreduce(torch.full((3,), 2.0), out=out) is out
    assert x.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    with torch.inference_mode():
        assert alone.allreduce(torch.ones(2), out=torch.zeros(2)).tolist() == [1, 1]


def test_torch_out_must_be_contiguous(alone: un.Communicator) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(un.UsageError, match="not contiguous"):
        alone.allreduce(torch.ones(2), out=torch.zeros(4)[::2])
    turned = torch.zeros(3, 2).T
    assert alone.allreduce(torch.ones(3, 2).T, out=turned) is turned


# --- JAX and TensorFlow --------------------------------------------------------------------------------------------


def test_jax_arrays_are_refused_as_out(alone: un.Communicator) -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones(3)
    with pytest.raises(un.UsageError, match="cannot be written: pass a numpy array, or no out if the call can make"):
        alone.allreduce(x, out=x)
    with pytest.raises(un.UsageError, match="plan"):
        alone.plan("allreduce", x)
    with pytest.raises(un.UsageError, match="while JAX traces it"):
        jax.jit(alone.allreduce)(x)
    result = alone.allgatherv(x, (3,))
    assert (result.devices(), result.dtype) == (x.devices(), x.dtype)


def test_tensorflow_tensors_are_refused_as_out(alone: un.Communicator) -> None:
    tf = pytest.importorskip("tensorflow")
    x = tf.ones(3)
    with pytest.raises(un.UsageError, match="cannot be written"):
        alone.allreduce(x, out=x)
    with pytest.raises(un.UsageError, match="while TensorFlow traces it"):
        tf.function(alone.allreduce, autograph=False)(x)
    assert alone.allreduce(x).device == x.device


def test_objects_with_only_dunder_array_are_refused(alone: un.Communicator) -> None:
    class Convertible:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.zeros(2)

    for arguments in ({"x": np.ones(2), "out": Convertible()}, {"x": Convertible()}):
        with pytest.raises(un.UsageError, match=r"(out|x) must be an array, not .*Convertible: pass numpy\.asarray"):
            alone.allreduce(**arguments)


def test_autograph_does_not_convert_methods_and_does_not_warn(alone: un.Communicator) -> None:
    tf = pytest.importorskip("tensorflow")
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]

    @tf.function  # type: ignore[untyped-decorator]
    def program(x: Any) -> Any:
        alone.barrier()
        with alone.group():
            alone.allreduce(np.ones(2))
        reducer = un.GradientReducer(alone)
        reducer.ready("x", np.ones(2))
        total = reducer.finish()["x"]
        broadcast_parameters(alone, {"x": total})
        clip_global_norm([total], average_metrics(alone, {"most": 9.0})["most"])
        return x + alone.allreduce(total)[0] + alone.allgatherv(total, [2])[1] + len(alone.broadcast_object("one"))

    tf.get_logger().addHandler(handler)
    try:
        assert float(program(tf.constant(1.0))) == 6
    finally:
        tf.get_logger().removeHandler(handler)
    assert warned == []


def test_tensorflow_variables_are_accepted_as_input_and_refused_as_out(alone: un.Communicator) -> None:
    tf = pytest.importorskip("tensorflow")
    x = tf.Variable(tf.constant([1, 2], tf.bfloat16))
    for result in (alone.allreduce(x), alone.allreduce(x, wait=False).wait(), alone.allreduce([x, x])[1]):
        assert (type(result).__name__, result.dtype, result.numpy().tolist()) == ("EagerTensor", x.dtype, [1, 2])
    with pytest.raises(un.UsageError, match="pass no out, and assign the result to the variable"):
        alone.allreduce(x, out=x)
    with pytest.raises(un.UsageError, match="assigning to a ResourceVariable replaces its memory"):
        alone.plan("allreduce", x, out=np.zeros(2, "bfloat16"))
    with pytest.raises(un.UsageError, match="while TensorFlow traces it"):
        tf.function(lambda: alone.allreduce(x), autograph=False)()
    assert x.assign(alone.allreduce(x)).numpy().tolist() == [1, 2]
