"""How a call is checked, planned, run, started, grouped and counted.

- `dispatch.py`: dispatches calls that the call cache does not know.
- `arguments.py`: the arguments of a call as the user passed them, and the checks that need no array.
- `binding.py`: turns arguments into the memory that a plan reads and writes, and a call spec.
- `checking.py`: binds and plans calls, and chooses the kind of each.
- `executable.py`: the three kinds of checked calls: on host memory, on a device, and with a custom op. Each can be run,
  started, or made a persistent call.
- `planning.py`: returns the plan and the signature for a call spec; `HostLayout`, `AlgorithmRequest`, `CallSpec`.
- `places.py`: the ranks that share memory, a machine or a NUMA node, for `Communicator.split`.
- `prepared.py`: checked calls and their arrays.
- `row_blocks.py`: the rows of an array in which shares lie, by counts and displacements.
- `displaced.py`: calls whose shares lie at displacements.
- `shapes.py`: derives the shapes of all arrays of a collective from the shape of one.
- `views.py`: makes calls on arrays of other libraries by numpy views of them.
- `cached_methods.py`: the decorators of methods that the native core runs without Python.
- `host_side.py`: the calls of device routes on host memory.
- `work.py`: asynchronous calls; `Work`, and `wait_all` and its kin.
- `groups.py`: runs the calls of a with-block together, fused.
- `group_recorder.py`: records the calls of a group until it ends.
- `programs.py`: registers calls that compiled programs make without Python.
- `serial_queue.py`: runs functions one after the other.
- `verification.py`: compares the results of the ranks, if the option `verify_results` asks for it.
- `job_trials.py`: tries algorithms in the calls of a job, if the option `tune` asks for it.
- `taken_message.py`: messages that a probe has taken.
- `message_handoff.py`: the operands that `send` and `recv` hand to an executor.
- `statistics.py`: the counters that `Communicator.stats` returns.
- `metrics.py`: exports them to Prometheus and OpenTelemetry.
"""
