"""Training on top of the public interface of Unisono: gradients, parameters, and the backend of torch.distributed.

arrays: arrays of any library as flat numpy arrays.
pending: the protocol of a call in flight.
sparse_sums: sums of sparse vectors, for the largest elements of gradients and sparse tensors.
data_parallel/: parameters, samples, metrics, norms and hybrid groups.
gradients/: the gradient engine.
outer/: training in which ranks take many steps alone, and an outer optimizer joins their changes.
training/: the part of distributed optimizers that no framework defines.
jax/: the collectives of JAX programs on CPUs.
torch/: the backend of torch.distributed, and an optimizer.
tensorflow/: collectives and training of TensorFlow.
keras/: an optimizer and callbacks for Keras.
transparent/: programs for one process, which train data-parallel without a change.
"""
