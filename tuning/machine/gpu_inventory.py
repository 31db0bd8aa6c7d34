"""The GPUs of a machine: which there are, and which of them NVLink joins, as the driver says by NVML.

The library is `pynvml` (package nvidia-ml-py), which needs no CUDA. Without it, without a driver or without a GPU there
are none, and that is no error.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        number: as NVML counts, by the address on the bus; CUDA may count otherwise.
        name: "NVIDIA H200", …
        bus: its address.
        nvlinks: the numbers of the others that it reaches over NVLink, through switches too.
    """

    number: int
    name: str
    bus: str
    nvlinks: tuple[int, ...]


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_gpu(pynvml, index, handles) for index in range(len(handles)))
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handles: list[Any]) -> Gpu:
    def is_joined(other: Any) -> bool:
        try:
            status = nvml.nvmlDeviceGetP2PStatus(handles[index], other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except nvml.NVMLError:  # A driver or a GPU that knows no NVLink.
            return False
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    nvlinks = tuple(at for at, other in enumerate(handles) if at != index and is_joined(other))
    bus = nvml.nvmlDeviceGetPciInfo(handles[index]).busId
    return Gpu(index, _text(nvml.nvmlDeviceGetName(handles[index])), _text(bus), nvlinks)


def _text(found: str | bytes) -> str:
    return found.decode() if isinstance(found, bytes) else found  # older versions give bytes


def islands(found: tuple[Gpu, ...]) -> tuple[frozenset[int], ...]:
    """Return the sets of GPUs that NVLink joins, each of at least two, in the order of their first ones.

    >>> chain = [Gpu(0, "a", "", (1,)), Gpu(1, "a", "", (0, 2)), Gpu(2, "a", "", (1,)), Gpu(3, "a", "", ())]
    >>> [sorted(island) for island in islands(tuple(chain))]
    [[0, 1, 2]]
    """
    islands_ = list[set[int]]()
    for gpu in found:
        mine = {gpu.number, *gpu.nvlinks}
        for other in [each for each in islands_ if each & mine]:
            islands_.remove(other)
            mine |= other
        islands_.append(mine)
    return tuple(sorted((frozenset(each) for each in islands_ if len(each) > 1), key=min))
