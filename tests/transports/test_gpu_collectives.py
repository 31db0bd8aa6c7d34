"""Every mapped collective of process-ranks on one GPU: each dtype and operation, against numpy.

Without a GPU, some of them run on the driver's double, which computes with kernels that are compiled for the host.
"""

from __future__ import annotations

import pytest
from support import fake_cuda
from support.deadlines import DEADLINE_S
from support.gpu_ranks import calls_of_all, check_calls

import unisono as un
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.transports.cuda.kernel_catalogue import reduction

pytest.importorskip("cuda.bindings.driver", reason="the binding of CUDA is not installed: make cuda")
pytestmark = pytest.mark.gpu

OPS = ("sum", "avg", "max")
# On the double, kernels take seconds to compile, and more dtypes show nothing new: kernels have tests of their own.
if fake_cuda.has_gpu():
    OF_DTYPES, SIZES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "complex64"), (2, 4)
    COUNTS: tuple[int, ...] = (1, 1000, 300_001)
else:
    OF_DTYPES, SIZES = ("float32", "bfloat16"), (2,)
    COUNTS = (1, 1000)


@pytest.mark.parametrize("size", SIZES)
def test_collectives_of_processes_on_one_gpu_are_right(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    kernels = {
        reduction(DTYPES[dtype], OPERATIONS[op], k)
        for dtype in OF_DTYPES
        for op in OPS
        for k in (1, size)
        if DTYPES[dtype].kind in OPERATIONS[op].kinds
    }
    fake_cuda.use(monkeypatch, sorted(kernels, key=lambda kernel: kernel.name))
    calls = calls_of_all(OF_DTYPES, OPS, COUNTS)
    assert un.launch(check_calls, size, calls, timeout_s=DEADLINE_S) == [[]] * size
