"""The definition of quantisation on devices in numpy: codes, scales and residuals, and their way back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.transports.cuda.kernels.quantised_form import QUANTISED_BLOCK

GREATEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


class Quantised(NamedTuple):
    """An array as codes, and the float32 scale of each block; codes of 16 bits have no scales."""

    codes: NDArray[Any]
    scales: NDArray[Any]


def quantised(values: NDArray[Any], form: str) -> Quantised:
    """Return a flat array as codes of the dtype `form`."""
    with np.errstate(all="ignore"):
        if form not in GREATEST:
            return Quantised(values.astype(np.float32).astype(form), np.empty(0, np.float32))
        flat = np.zeros(-(-values.size // QUANTISED_BLOCK) * QUANTISED_BLOCK, np.float32)
        flat[: values.size] = values
        wide = flat.reshape(-1, QUANTISED_BLOCK)
        scales = np.abs(wide).max(axis=1) / np.float32(GREATEST[form])
        scales[~np.isfinite(wide).all(axis=1)] = np.nan
        quotients = np.clip(wide / scales[:, None], -GREATEST[form], GREATEST[form])
        quotients[~(scales > 0)] = 0
    made = np.rint(quotients).astype(np.int8) if form == "int8" else quotients.astype(form)
    return Quantised(made.reshape(-1)[: values.size], scales)


def dequantised(made: Quantised) -> NDArray[np.float32]:
    """Return the values that codes and scales stand for."""
    values = made.codes.astype(np.float32)
    if made.scales.size:
        with np.errstate(all="ignore"):
            values *= np.repeat(made.scales, QUANTISED_BLOCK)[: values.size]
    return values


def with_feedback(
    values: NDArray[Any], residual: NDArray[np.float32], form: str, *, feeds: bool = True, weight: float = 1.0
) -> Quantised:
    """Return an array as codes, and change its residual, as `Device.quantise` does."""
    with np.errstate(all="ignore"):
        wide = values.astype(np.float32)
        if feeds:
            wide += residual
        made = quantised(wide, form)
        lost = wide - dequantised(made)
        lost[~np.isfinite(lost)] = 0
        residual[:] = lost if feeds else residual + np.float32(weight) * lost
    return made
