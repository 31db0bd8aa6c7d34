"""The GPUs of a machine and their NVLink connections, according to the driver's library NVML.

The package nvidia-ml-py (`pynvml`) is used, which needs no CUDA. Without it, without a driver or without a GPU, the
list of GPUs is empty, and no error is raised.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        number: the index in NVML, which orders GPUs by bus address. CUDA may order them differently.
        name: "NVIDIA H200", …
        bus: its bus address.
        nvlinks: the numbers of the GPUs that it reaches over NVLink, directly or through switches.
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
        except nvml.NVMLError:  # The driver or the GPU does not support NVLink.
            return False
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    nvlinks = tuple(at for at, other in enumerate(handles) if at != index and is_joined(other))
    bus = nvml.nvmlDeviceGetPciInfo(handles[index]).busId
    return Gpu(index, _text(nvml.nvmlDeviceGetName(handles[index])), _text(bus), nvlinks)


def _text(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text  # older versions of pynvml return bytes


def islands(gpus_: tuple[Gpu, ...]) -> tuple[frozenset[int], ...]:
    """Return the sets of at least two GPUs that NVLink joins, sorted by their first GPU.

    >>> chain = [Gpu(0, "a", "", (1,)), Gpu(1, "a", "", (0, 2)), Gpu(2, "a", "", (1,)), Gpu(3, "a", "", ())]
    >>> [sorted(island) for island in islands(tuple(chain))]
    [[0, 1, 2]]
    """
    islands_ = list[set[int]]()
    for gpu in gpus_:
        mine = {gpu.number, *gpu.nvlinks}
        for other in [each for each in islands_ if each & mine]:
            islands_.remove(other)
            mine |= other
        islands_.append(mine)
    return tuple(sorted((frozenset(each) for each in islands_ if len(each) > 1), key=min))
