"""Lets the stages of `bench/gpu.py` run on the double of the driver, with the kernels that they need there."""

from __future__ import annotations

import os

import pytest
from support import fake_cuda
from support.cuda_on_host import libraries_of

from unisono.bench.gpu_stages.checks import sanitizer
from unisono.bench.gpu_stages.speeds import variants
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.transports.cuda.kernels.catalogue import COPY_EXTENTS, dequantise, quantise, reduction, scaling

FLOAT, SUM = DTYPES["float32"], OPERATIONS["sum"]
KERNELS = (
    *(reduction(FLOAT, SUM, k) for k in (2, 3, 4, 8)),
    *(reduction(FLOAT, SUM, 2, variant) for variant in variants.OF_OPS["sum"]),
    *(scaling(FLOAT), COPY_EXTENTS),
)
BY_WARPS = [make(FLOAT, DTYPES[form]) for form in sanitizer.FORMS for make in (quantise, dequantise)]


def use_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs that the test starts run on the double; skip the test without NVRTC."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: make cuda")
    libraries = [*libraries_of(KERNELS), *libraries_of(BY_WARPS, "-DUNISONO_WARPS")]
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda.folder()), prepend=os.pathsep)
    monkeypatch.setenv(fake_cuda.KERNELS, os.pathsep.join(map(str, libraries)))
