"""The call cache reads tensors of torch without views. A tensor that Python refuses is refused in every call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks, ranks_fixture

import unisono as un
from unisono.dtypes import DTYPES

torch = pytest.importorskip("torch")
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch exports no functions that read tensors", allow_module_level=True)

ranks = ranks_fixture((2, "shm"))
# The first call is planned, and the others come from the call cache.
TIMES = 3


def is_cached(world: un.Communicator, x: Any, out: Any) -> bool:
    return world._cache.contains("allreduce", x, out, "sum", None, None)


def forms_of(dtype: str) -> list[Any]:
    tensor = (torch.arange(24) % 5).reshape(2, 3, 4).to(getattr(torch, dtype))
    return [tensor, tensor[1], tensor.permute(2, 1, 0), tensor[0, 0, 1], tensor[:0], tensor[:, :1, :]]


def elements(x: Any) -> list[Any]:
    return [each.to(torch.complex128).tolist() for each in (x if isinstance(x, list) else [x])]


def repeated(world: un.Communicator, call: Callable[[Any], Any], x: Any) -> list[Any]:
    return [elements(call(x)) for _ in range(TIMES)]


def calls_on_all_forms(world: un.Communicator) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in sorted(DTYPES.keys() - {"bool"}):  # which has no sum
        for index, x in enumerate(forms_of(name)):
            for mode, call in {
                "new": world.allreduce,
                "out": lambda x: world.allreduce(x, out=torch.empty_like(x)),
                "list": lambda x: world.allreduce([x, x]),
                "started": lambda x: world.allreduce([x, x], wait=False).wait(),
            }.items():
                results[f"{name} {index} {mode}"] = (elements(x), repeated(world, call, x))
    return results


def test_repeated_calls_on_tensors_give_the_result_of_the_first(ranks: Ranks) -> None:
    for results in ranks.run_calls(calls_on_all_forms):
        for key, (x, repetitions) in results.items():
            assert all(result == repetitions[0] for result in repetitions), key
            if key.startswith(("float32", "int64")):
                doubled = (2 * np.array(x[0])).tolist()
                assert all(one == doubled for result in repetitions for one in result), key


def rows_of_all_collectives(world: un.Communicator) -> list[list[Any]]:
    x = torch.arange(4, dtype=torch.float32).reshape(4, 1) + 10 * world.rank
    calls: list[Callable[[], Any]] = [
        lambda: world.allgather(x),
        lambda: world.reduce_scatter(x),
        lambda: world.alltoall(x),
        lambda: world.broadcast(x, root=1),
        lambda: world.reduce(x, root=1),
        lambda: world.gather(x, root=0),
        lambda: world.scan(x),
        lambda: world.exscan(x),
    ]
    return [
        [None if (y := call()) is None else (type(y) is torch.Tensor, y.tolist()) for call in calls] for _ in range(3)
    ]


def test_repeated_collectives_on_tensors_give_the_result_of_the_first(ranks: Ranks) -> None:
    for first, *others in ranks.run_calls(rows_of_all_collectives):
        assert all(other == first for other in others)
        assert all(result is None or result[0] for result in first)


@pytest.fixture
def alone() -> un.Communicator:
    with un.init(un.Options()) as world:
        yield world


def freed() -> Any:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


# Tensors with the shape and dtype of a good one, of which the cache has the call.
WRONG: dict[str, tuple[Callable[[], Any], Callable[[], Any], type[Exception], str]] = {
    "grad": (lambda: torch.ones(2), lambda: torch.ones(2, requires_grad=True), un.UsageError, r"\.detach"),
    "conjugated": (
        lambda: torch.ones(2, dtype=torch.complex64),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        un.UsageError,
        "resolve_conj",
    ),
    "negated": (lambda: torch.ones(2), lambda: torch._neg_view(torch.ones(2)), un.UsageError, "resolve_neg"),
    "sparse": (lambda: torch.ones(2), lambda: torch.ones(2).to_sparse(), un.UsageError, "to_dense"),
    "meta": (lambda: torch.ones(2), lambda: torch.ones(2, device="meta"), un.TransportUnavailableError, "meta"),
    "freed": (lambda: torch.ones(2), freed, un.UsageError, "no memory"),
    "parameter": (lambda: torch.ones(2), lambda: torch.nn.Parameter(torch.ones(2)), un.UsageError, r"\.detach"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_refused_after_good_ones_of_their_form(alone: un.Communicator, name: str) -> None:
    good, wrong, kind, why = WRONG[name]
    for _ in range(TIMES):
        alone.allreduce(good(), out=good())
        alone.allreduce([good(), good()])
    assert is_cached(alone, good(), good())
    assert not is_cached(alone, wrong(), good())
    assert not is_cached(alone, good(), wrong())
    for call in (
        lambda: alone.allreduce(wrong(), out=good()),
        lambda: alone.allreduce(good(), out=wrong()),
        lambda: alone.allreduce([good(), wrong()]),
        lambda: alone.allreduce(wrong(), out=good(), wait=False),
    ):
        with pytest.raises(kind, match=why):
            call()


def test_overlapping_and_strided_tensors_are_no_hits(alone: un.Communicator) -> None:
    memory = torch.zeros(8)
    for _ in range(TIMES):
        alone.allreduce(memory[:4], out=memory[4:])
    assert is_cached(alone, memory[:4], memory[4:])
    assert not is_cached(alone, memory[:4], memory[2:6])
    assert not is_cached(alone, memory[:4], memory[::2])
    assert not is_cached(alone, memory[:4], torch.zeros(1).expand(4))
    with pytest.raises(un.UsageError, match="overlap"):
        alone.allreduce(memory[:4], out=memory[2:6])


def test_a_mode_that_sees_functions_of_torch_is_no_hit(alone: un.Communicator) -> None:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    alone.allreduce(x, out=x)
    assert is_cached(alone, x, x)
    with Mode():
        assert not is_cached(alone, x, x)
        assert alone.allreduce(x, out=x) is x


def test_cached_calls_tell_autograd_which_tensors_they_write(alone: un.Communicator) -> None:
    x, out = torch.ones(3), torch.zeros(3)
    lists: Any = [torch.ones(3), np.ones(3, np.float32), torch.ones(2)]
    for _ in range(TIMES):
        before = [each._version for each in (x, out, lists[0], lists[2])]
        alone.allreduce(x, out=out)
        alone.allreduce(lists, out=lists)
        alone.allreduce(lists, out=lists, wait=False).wait()
        after = [each._version for each in (x, out, lists[0], lists[2])]
        assert [a > b for a, b in zip(after, before, strict=True)] == [False, True, True, True]
    with torch.inference_mode():
        inferred = torch.ones(3)
        for _ in range(TIMES):
            alone.allreduce(inferred, out=inferred)
            alone.allreduce([inferred, x], out=[inferred, x])


def test_new_results_have_memory_of_their_own(alone: un.Communicator) -> None:
    x = torch.arange(6.0).reshape(2, 3).T
    results = [alone.allreduce(x) for _ in range(TIMES)]
    assert all(result.stride() == x.stride() and not result.requires_grad for result in results)
    assert len({result.data_ptr() for result in (x, *results)}) == TIMES + 1
    expected = x.tolist()
    del x
    gc.collect()
    results[1].fill_(7)
    assert results[0].tolist() == results[2].tolist() == expected
    (results[0] @ torch.ones(2)).sum()  # operations of torch take it
    grown = results[2].clone().resize_(100)
    assert grown.numel() == 100


def drop_started_call(world: un.Communicator) -> list[float]:
    x, result = torch.ones(1000), torch.ones(1000)
    world.allreduce(x, out=result)
    world.barrier()
    for _ in range(20):
        world.allreduce([torch.ones(1000), result], out=[torch.ones(1000), result], wait=False)
    gc.collect()
    world.allreduce(x, out=x)
    return [float(result.min()), float(result.max())]


def test_started_calls_on_tensors_go_on_when_the_program_drops_them(ranks: Ranks) -> None:
    assert ranks.run_calls(drop_started_call) == [[2.0**21, 2.0**21]] * 2
