"""Data-parallel training by a program for one process, unchanged: ``unisono run -n 4 --data-parallel train.py``.

Theory of operation. `program.run` starts the program as ``python train.py`` would, on each rank. Before that, it
arranges that the libraries with which programs train are changed as soon as the program imports them:

- All ranks begin with the random state of rank 0, so they initialise, split and shuffle alike.
- An optimizer copies its parameters from rank 0 when it is made, and averages the gradients before each step.
- A loader that shuffles gives each rank its share of every epoch. Any other loader gives each rank all samples.
- Only rank 0 prints and writes checkpoints.

Each change is reported in a line on standard error, with the place in the program. A program that cannot be changed
safely ends with a `UsageError` that says why.

Worked example. On 2 ranks, a loader with ``batch_size=32, shuffle=True`` draws an order of all samples on rank 0. Rank
r reads the samples r, r + 2, r + 4, ... of this order in batches of 32. So the two batches together are the next 64
samples, and the average of the two gradients is that of one process with ``batch_size=64``.

program: running the program.
imports: changing a module when it is imported.
changes: what all changes need: the ranks, and the report.
torch_optimizers, torch_loaders, torch_files: the changes of torch.
keras_training, keras_batches: the changes of Keras.
"""
