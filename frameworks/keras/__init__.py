"""Data-parallel training by Keras 3, on its backends torch, TensorFlow and JAX: `unisono.keras`.

Theory of operation. Keras passes the gradients of a step to a method of the optimizer: to `apply` or `apply_gradients`
on torch and TensorFlow, and to `stateless_apply` inside a compiled program on JAX. `DistributedOptimizer` puts an
average over ranks in front of these methods. The callbacks do the rest, so `model.fit` stays as it is.

- `trainable.py`: the methods that get gradients, and the average of a step's gradients on each backend.
- `optimizer.py`: `DistributedOptimizer`.
- `outer.py`: `DiLoCo`, `BlockMomentum` and `LocalSGD`, callbacks with which ranks train alone for many batches.
- `callbacks.py`: equal variables at the start, metrics of all ranks, learning rates, and checkpoints of rank 0.
"""
