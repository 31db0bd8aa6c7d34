"""Measurements that a tuner might have made, for tests of tables."""

from __future__ import annotations

from unisono.tuning.measure.measurement_log import Context, Measurement

HERE = Context("here", "allreduce", "shm", "plain", 4, 4)


def took(variant: str, nbytes: int, us: float, context: Context = HERE, rounds: int = 5) -> Measurement:
    return Measurement(context, variant, nbytes, us / 1e6, us / 1e6, us / 1e6, us / 1e6, us / 1e6, rounds)
