"""Errors for arrays that a call cannot take, where several modules raise the same one."""

from __future__ import annotations

from unisono.errors import TransportUnavailableError, UsageError


def in_device_memory(name: str, device: str) -> TransportUnavailableError:
    """Return the error for an array, called `name`, in memory that only a device can use."""
    return TransportUnavailableError(
        f"{name} is on the device {device}, and no transport here moves device memory: "
        "copy it to the host, and the result back"
    )


def traced_by_tensorflow(name: str) -> UsageError:
    """Return the error for a tensor, called `name`, that stands for a value of a ``tf.function`` being traced."""
    return UsageError(f"{name} has no elements while TensorFlow traces it: call by tf.numpy_function")
