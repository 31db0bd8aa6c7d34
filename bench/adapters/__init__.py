"""The libraries that can be measured, one module each, all of the same shape.

Each runs in the ranks of its own library, in an environment where Unisono need not be installed: these modules import
the standard library, numpy and the measured library only, and `worker` loads them by path. A module has one
function::

    connect() -> Adapter    joins the job that the library's own launcher has started; returns when all ranks are there

and what it returns has:

    size: int               the number of ranks
    version: str            the library and its version, in one line
    call(collective, array, out)
                            a callable that runs the collective once, as users do, on the flat numpy arrays: `array` is
                            what this rank puts in, `out` what it gets. They are the same one where users would say so:
                            "allreduce" sums, "reduce" sums on rank 0, "broadcast" sends from rank 0, and "barrier"
                            ignores it; and they are separate in "allgather", "reduce_scatter" (a sum) and "alltoall",
                            of equal shares.
                            Raises NotImplementedError where the library lacks the collective or the dtype.
    barrier()               returns when all ranks have called it
    close()                 leaves the job in order
    memory                  where its arrays are not of numpy but of a device: an object as `worker.HostMemory`; `call`
                            gets those arrays, and returns when the device has done
"""
