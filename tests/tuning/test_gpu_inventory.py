"""The inventory of GPUs, on a double of NVML: eight GPUs on a switch, GPUs in pairs, or none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.tuning.machine.gpu_inventory import gpus, islands


class NvmlError(Exception):
    """The exception of the library."""


class Nvml:
    """A driver of `number` GPUs.

    ``joined(a, b)`` says whether NVLink joins two of them. `open` counts unfinished sessions.
    """

    NVMLError = NvmlError
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def __init__(self, number: int, joined: Any, *, driver: bool = True) -> None:
        self.number, self.joined, self.driver, self.open = number, joined, driver, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise NvmlError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.number

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"handle {index}"

    def nvmlDeviceGetName(self, handle: str) -> bytes:  # noqa: N802
        return b"NVIDIA H200"

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"0000:{handle[-1]}0:00.0")

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, what: int) -> int:  # noqa: N802
        assert what == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if self.joined(int(one[-1]), int(other[-1])) else 5


def found_with(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    result = gpus()
    assert nvml.open == 0
    return result


def test_gpus_on_a_switch_are_one_island(monkeypatch: pytest.MonkeyPatch) -> None:
    results = found_with(Nvml(8, lambda one, other: True), monkeypatch)
    assert [result.number for result in results] == list(range(8))
    assert (results[3].name, results[3].bus, results[3].nvlinks) == (
        "NVIDIA H200",
        "0000:30:00.0",
        (0, 1, 2, 4, 5, 6, 7),
    )
    assert islands(results) == (frozenset(range(8)),)


def test_gpu_pairs_with_nvlink_are_islands_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    result = found_with(Nvml(5, lambda one, other: one // 2 == other // 2), monkeypatch)
    assert islands(result) == (frozenset({0, 1}), frozenset({2, 3}))


def test_gpu_without_nvlink_support_has_no_nvlinks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(one: int, other: int) -> bool:
        raise NvmlError("Not Supported")

    assert [device.nvlinks for device in found_with(Nvml(2, unknown), monkeypatch)] == [(), ()]


@pytest.mark.parametrize("nvml", [Nvml(0, None), Nvml(8, None, driver=False)])
def test_gpu_list_is_empty_without_gpus_or_a_driver(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_with(nvml, monkeypatch) == ()


def test_gpu_list_is_empty_without_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == ()
