"""`SyncBatchNorm`: batch normalisation with the mean and the variance of the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from unisono.compat.horovod import job
from unisono.compat.horovod.arguments import Sum
from unisono.compat.horovod.torch.gradients import allreduce


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]
    """Like ``torch.nn.BatchNorm``, with statistics over the batches of all ranks, which may differ in size.

    All ranks call it in the same order. Arguments and state are those of ``torch.nn.BatchNorm1d``. Horovod's class
    needs a GPU, and this one does not.
    """

    def forward(self, input: Any) -> Any:
        """Return the normalised input, of shape [batch, features, …]."""
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes an input of two or more dimensions, not of {input.dim()}")
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or job.size() == 1:
            return super().forward(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        count = torch.full((1,), float(input.numel() // input.shape[1]), dtype=x.dtype, device=x.device)
        sums = allreduce(torch.cat([x.sum(axes), count]), op=Sum)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = x - _along(mean, x)
        variance = allreduce(centred.square().sum(axes), op=Sum) / total
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach(), total)
        result = centred * _along(torch.rsqrt(variance + self.eps), x)
        if self.affine:
            result = result * _along(self.weight, x) + _along(self.bias, x)
        return result.to(input.dtype)

    def _check_input_dim(self, input: Any) -> None:
        """Check nothing: `forward` has."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _track(self, mean: Any, variance: Any, total: Any) -> None:
        """Update the running statistics, as torch does: with the unbiased variance."""
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (total / (total - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


def _along(values: Any, x: Any) -> Any:
    """Return a value for each feature in the shape that multiplies the second dimension of `x`."""
    return values.reshape(1, -1, *(1 for _ in x.shape[2:]))
