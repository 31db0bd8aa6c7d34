"""Prints sums of distributed Fourier transforms of mpi4py-fft, and of an array that is distributed anew."""

import numpy as np
from mpi4py import MPI
from mpi4py_fft import PFFT, DistArray, newDistArray

CASES = {
    "pencils": ((12, 14, 16), {"dtype": float}),
    "slabs": ((12, 14, 16), {"dtype": float, "slab": True}),
    "complex": ((9, 10), {"dtype": complex}),
    "padded": ((12, 14, 16), {"dtype": float, "padding": [1.5, 1.5, 1.5]}),
}
comm = MPI.COMM_WORLD
for name, (shape, options) in CASES.items():
    transform = PFFT(comm, shape, axes=tuple(range(len(shape))), **options)
    field = newDistArray(transform, False)
    whole = np.random.default_rng(1).standard_normal(transform.global_shape(False))
    field[:] = whole[transform.local_slice(False)]
    spectrum = transform.forward(field, normalize=True)
    if "padding" not in options:
        assert np.allclose(transform.backward(spectrum), field)
    power = comm.allreduce(float((abs(np.asarray(spectrum)) ** 2).sum()))
    if comm.rank == 0:
        print(name, round(power, 9))
slabs = DistArray((8, 6, 4), subcomm=(0, 0, 1), val=1.0)
slabs[:] = comm.rank + 1
total = comm.allreduce(float(slabs.redistribute(1).sum()))
if comm.rank == 0:
    print("distributed anew", total)
