"""Measurements as a tuner makes them, for tests of decision tables."""

from __future__ import annotations

from unisono.tuning.measure.measurement_log import Context, Measurement

HERE = Context("here", "allreduce", "shm", "plain", 4, 4)


def measurement_of(variant: str, nbytes: int, us: float, context: Context = HERE, rounds: int = 5) -> Measurement:
    return Measurement(context, variant, nbytes, us / 1e6, us / 1e6, us / 1e6, us / 1e6, us / 1e6, rounds)
