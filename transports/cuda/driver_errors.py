"""Calls of the CUDA driver, with errors that say why a call failed and what to do."""

from __future__ import annotations

from typing import Any

from unisono.errors import InternalError, TransportUnavailableError, UsageError

INSTALL_BINDING = "pip install 'unisono[cuda]'"
INSTALL_DRIVER = "install NVIDIA's driver, of CUDA 13 (580) or newer, so that nvidia-smi shows the GPU"
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
# Calls whose result differs by driver and container where processes are isolated from each other.
_SHARING = ("cuIpcGet", "cuIpcOpen")
_APART = "memory and events of the GPU cannot be shared here (containers need the same IPC and process namespaces)"
_CAPTURED = "the stream records a graph, in which this cannot be done: make the call outside the capture"


class Driver:
    """The initialised driver: ``driver(name, …)`` calls the function `name` and returns its value.

    Attributes:
        api: the binding, with its types and constants.
        version: the CUDA version of the driver, major and minor.
    """

    def __init__(self) -> None:
        """Load and initialise the driver.

        Raises:
            TransportUnavailableError: the binding or the driver is missing, or it sees no GPU; says what to do.
        """
        self.api = _binding()
        version = self("cuDriverGetVersion")
        self.version = (version // 1000, version % 1000 // 10)
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call the function `name` and return its value, or None if it has none.

        Raises:
            TransportUnavailableError: the driver reports that something cannot be used here.
            UsageError: a stream records a graph.
            InternalError: the driver reports any other error.
        """
        result, *values = self.attempt(name, *arguments)
        if int(result):
            raise self.error(name, result)
        return values[0] if values else None

    def attempt(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call the function `name`; return its result code, followed by its values.

        Raises:
            TransportUnavailableError: there is no driver, or it lacks the function.
            InternalError: the binding does not know the result code.
        """
        try:
            returned: tuple[Any, ...] = getattr(self.api, name)(*arguments)
        except RuntimeError as error:
            why = f"NVIDIA's driver, or its {name}, was not found ({error})"
            raise TransportUnavailableError(f"{why}: {INSTALL_DRIVER}") from error
        except (ValueError, KeyError) as error:  # a driver newer than the binding; old bindings raise KeyError
            raise InternalError(f"the driver of the GPU failed in {name} with an unknown code: {error}") from error
        return returned

    def error(self, name: str, result: Any) -> Exception:
        """Return the error for a `result` of the function `name` that is not success."""
        code = result.name.removeprefix("CUDA_ERROR_")
        if code.startswith("STREAM_CAPTURE"):
            return UsageError(f"{name}: {_CAPTURED} ({code})")
        reason = _UNAVAILABLE.get(code, _APART if name.startswith(_SHARING) else None)
        if reason is not None:
            return TransportUnavailableError(f"the driver of the GPU refused {name} ({code}): {reason}")
        return InternalError(f"the driver of the GPU failed in {name}: {code}")


def _binding() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TransportUnavailableError(f"cuda.bindings is not installed ({error}): {INSTALL_BINDING}") from error
    return driver
