"""Adapters of the libraries that can be measured, one module each, with a common interface.

Each runs in the ranks of its own library, in an environment where Unisono need not be installed. So these modules
import only the standard library, numpy and the measured library, and `worker` loads them by path. A module has one
function::

    connect() -> Adapter    joins the job that the library's own launcher has started; returns when all ranks are there

An adapter has:

    size: int               the number of ranks
    version: str            the library and its version, in one line
    call(collective, array, out)
                            a function that runs the collective once, as users do, on the flat numpy arrays: `array` is
                            this rank's input and `out` its result. They are the same array in these collectives:
                            "allreduce" and "scan" sum, "reduce" sums on rank 0, "broadcast" sends from rank 0, and
                            "barrier" ignores it. They are different arrays in "allgather", "reduce_scatter" (a sum),
                            "alltoall", "gather" to rank 0 and "scatter" from rank 0, with equal shares.
                            Raises NotImplementedError if the library lacks the collective or the dtype.
    barrier()               returns when all ranks have called it
    close()                 leaves the job in order
    memory                  only if its arrays are on a device: an object like `worker.NumpyMemory`; `call` then takes
                            such arrays, and returns when the device has finished

- `unisono_api.py`, `unisono_empty.py`, `unisono_cuda.py`: Unisono on arrays of numpy, of `un.empty` and of a GPU.
  `unisono_cuda_plan.py`: plans on arrays of a GPU that ranks read where they lie.
  `unisono_cuda_nccl.py`: calls on arrays of a GPU that NCCL carries out.
- `mpi.py`, `mpi_cuda.py`, `oneccl.py`, `torch_distributed.py`, `torch_cuda.py`: the peers.
- `jax_programs.py`: allreduces in programs of JAX, by Unisono, Gloo and mpi4jax.
- `bounds/`: bounds that no library can be below.
- `worker.py`: one rank of a measured library, which runs the commands of the driver.
"""
