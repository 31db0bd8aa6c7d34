"""Calls of the CUDA driver, with errors that say why a call failed and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.errors import InternalError, TransportUnavailableError, UsageError
from unisono.foundation.installing import install_command

INSTALL_DRIVER = (
    "install NVIDIA's driver, of CUDA 13 (580) or newer, so that nvidia-smi shows the GPU; "
    "for a driver of CUDA 12, install the extra cuda12 of Unisono in place of cuda"
)
_CONTAINERS = "in a container, it must be started with access to GPUs"

# The reasons for which the driver refuses something that cannot be used, and what to do. All other results are internal
# errors.
_UNAVAILABLE = {
    "NO_DEVICE": f"it sees no GPU; does nvidia-smi, and does CUDA_VISIBLE_DEVICES name one ({_CONTAINERS})",
    "INVALID_DEVICE": "there is no such GPU, and CUDA_VISIBLE_DEVICES decides which there are",
    "STUB_LIBRARY": "the libcuda.so.1 that was found is the toolkit's, for linking only, so put the driver's first",
    "SYSTEM_DRIVER_MISMATCH": "its library and its kernel module are of different versions, so restart the machine",
    "SYSTEM_NOT_READY": "the machine is not ready; does nvidia-fabricmanager run",
    "COMPAT_NOT_SUPPORTED_ON_DEVICE": f"a compatibility package of CUDA does not suit this GPU, so {INSTALL_DRIVER}",
    "INSUFFICIENT_LOADER_VERSION": INSTALL_DRIVER,
    "CALL_REQUIRES_NEWER_DRIVER": INSTALL_DRIVER,
    "UNSUPPORTED_PTX_VERSION": f"it is older than NVRTC, so {INSTALL_DRIVER}",
    "NO_BINARY_FOR_GPU": f"it is older than NVRTC, so {INSTALL_DRIVER}",
    "JIT_COMPILER_NOT_FOUND": "libnvidia-ptxjitcompiler.so.1, which belongs to it, is missing",
    "DEVICE_UNAVAILABLE": "another process has the GPU for itself (its compute mode is exclusive)",
    "OUT_OF_MEMORY": "the GPU has too little memory left",
    "NOT_SUPPORTED": "this GPU, or this system, cannot do it",
    "NOT_PERMITTED": "this process may not do it",
    "MAP_FAILED": "the memory cannot be mapped here",
    "PEER_ACCESS_UNSUPPORTED": "the two GPUs cannot use each other's memory",
    "TOO_MANY_PEERS": "the GPU uses the memory of too many others",
    "MPS_CONNECTION_FAILED": "the MPS server cannot be reached",
    "MPS_SERVER_NOT_READY": "the MPS server is not ready",
    "MPS_MAX_CLIENTS_REACHED": "the MPS server has too many clients",
}
# After one of these results, every call in the context returns it.
_ENDED = {
    *("ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION"),
    *("MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "ECC_UNCORRECTABLE"),
    *("NVLINK_UNCORRECTABLE", "CONTAINED", "EXTERNAL_DEVICE", "TENSOR_MEMORY_LEAK", "MPS_CLIENT_TERMINATED"),
}
_NO_CONTEXT = {"NOT_INITIALIZED", "DEINITIALIZED", "CONTEXT_IS_DESTROYED"}
_BY_A_KERNEL = (
    "a kernel issued earlier in this process, by any library, has ended the context, and the GPU cannot be used here "
    "any more: find that kernel with compute-sanitizer, and start a new process"
)
_FORKED = (
    "this process has no context, because it ends, or because it was forked from one that had used the GPU: start "
    "processes that use GPUs by the method 'spawn'"
)
# Calls that the driver forbids to a thread while another one captures a graph in the default mode; they would also make
# that capture fail. None of ours is a part of a capture, so they are made in the relaxed mode, which allows them.
_UNSAFE_IN_CAPTURES = {
    *("cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuIpcOpenMemHandle", "cuIpcCloseMemHandle"),
    *("cuEventQuery", "cuCtxRecordEvent", "cuCtxSynchronize", "cuMemHostRegister", "cuMemHostUnregister"),
    *("cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad", "cuOccupancyMaxActiveBlocksPerMultiprocessor"),
    "cuGraphInstantiate",
}

# Calls whose result differs by driver and container where processes are isolated from each other.
_SHARING = ("cuIpcGet", "cuIpcOpen")
_APART = "memory and events of the GPU cannot be shared here (containers need the same IPC and process namespaces)"
_CAPTURED = "the stream records a graph, in which this cannot be done: make the call outside the capture"


class ContextLostError(TransportUnavailableError):
    """The context of a device has ended: no call can use it any more, and its memory has been released."""


class Driver:
    """The initialised driver: ``driver(name, …)`` calls the function `name` and returns its value.

    Attributes:
        api: the binding, with its types and constants.
        number_of: a function of the binding that returns the number of a stream or an event.
        version: the CUDA version of the driver, major and minor.
    """

    def __init__(self) -> None:
        """Load and initialise the driver.

        Raises:
            TransportUnavailableError: the binding or the driver is missing, or it sees no GPU; says what to do.
        """
        self.api, self.number_of = _binding()
        version = self("cuDriverGetVersion")
        self.version = (version // 1000, version % 1000 // 10)
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call the function `name` and return its value, or None if it has none.

        Raises:
            TransportUnavailableError: the driver reports that something cannot be used here.
            ContextLostError: the context has ended.
            UsageError: a stream records a graph.
            InternalError: the driver reports any other error.
        """
        result, *values = self.attempt(name, *arguments)
        if int(result):
            raise self.error(name, result)
        return values[0] if values else None

    def relaxed(self, name: str, *arguments: Any) -> Any:
        """Call the function `name` as `__call__` does, also while another thread captures its work into a graph.

        Otherwise CUDA refuses some calls then. This thread uses the relaxed mode of capturing for the call.
        """
        result, *values = self._attempt_relaxed(name, *arguments)
        if int(result):
            raise self.error(name, result)
        return values[0] if values else None

    def attempt(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call the function `name`; return its result code, followed by its values.

        Raises:
            TransportUnavailableError: there is no driver, or it lacks the function.
            InternalError: the binding does not know the result code.
        """
        if name in _UNSAFE_IN_CAPTURES:
            return self._attempt_relaxed(name, *arguments)
        try:
            returned: tuple[Any, ...] = getattr(self.api, name)(*arguments)
        except (RuntimeError, ValueError, KeyError) as error:
            raise self._not_called(name, error) from error
        return returned

    def _attempt_relaxed(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        exchange = self.api.cuThreadExchangeStreamCaptureMode
        _, before = exchange(self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            returned: tuple[Any, ...] = getattr(self.api, name)(*arguments)
        except (RuntimeError, ValueError, KeyError) as error:
            raise self._not_called(name, error) from error
        finally:
            exchange(before)
        return returned

    def _not_called(self, name: str, error: Exception) -> Exception:
        """Return the error for a call of the function `name` in which the binding has raised `error`."""
        if not isinstance(error, RuntimeError):  # a driver newer than the binding; old bindings raise KeyError
            return self.unknown(name, error)
        why = f"NVIDIA's driver, or its {name}, was not found ({error})"
        return TransportUnavailableError(f"{why}: {INSTALL_DRIVER}")

    def unknown(self, name: str, error: Exception) -> Exception:
        """Return the error for a call of the function `name` whose result code the binding does not know."""
        return InternalError(f"the driver of the GPU failed in {name} with an unknown code: {error}")

    def failure(self, name: str, code: int) -> Exception:
        """Return the error for a call of the function `name` that returned the result `code`."""
        try:
            return self.error(name, self.api.CUresult(code))
        except ValueError as error:
            return self.unknown(name, error)

    def error(self, name: str, result: Any) -> Exception:
        """Return the error for a `result` of the function `name` that is not success."""
        code = result.name.removeprefix("CUDA_ERROR_")
        if code.startswith("STREAM_CAPTURE"):
            return UsageError(f"{name}: {_CAPTURED} ({code})")
        for codes, text in ((_ENDED, _BY_A_KERNEL), (_NO_CONTEXT, _FORKED)):
            if code in codes:
                return ContextLostError(f"{name} was refused ({code}): {text}")
        reason = _UNAVAILABLE.get(code, _APART if name.startswith(_SHARING) else None)
        if reason is not None:
            return TransportUnavailableError(f"the driver of the GPU refused {name} ({code}): {reason}")
        return InternalError(f"the driver of the GPU failed in {name}: {code}")


def _binding() -> tuple[Any, Callable[[Any], int]]:
    try:
        from cuda.bindings import driver
        from cuda.bindings.utils import get_cuda_native_handle
    except ImportError as error:
        raise TransportUnavailableError(
            f"cuda.bindings is not installed ({error}): {install_command('cuda')}"
        ) from error
    return driver, get_cuda_native_handle
