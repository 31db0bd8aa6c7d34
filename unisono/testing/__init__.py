"""Tests of a communicator or a transport: random calls of every collective, with results checked by numpy.

For authors of backends and transports, and for users who want to know whether Unisono works on their machines. Any
object with the methods of `unisono.Communicator` can be tested.

- `check.py`: `check_collectives`, random calls with a verdict on which all ranks agree.
- `calls.py`, `cases.py`: one call on one rank, and calls as data.
- `programs.py`: `check_program`, several calls in flight on several communicators.
- `oracles.py`, `functions.py`, `differences.py`, `memory.py`: expected results, and comparison with them.
- `shrinking.py`, `sources.py`, `judges.py`: find the simplest call that fails, and print it as a program.
- `transports.py`, `transport_checks.py`, `transport_ranks.py`: `check_transport` for message transports.
- `device_double.py`: a simulated GPU on host memory, which works as late and in as bad an order as the rules allow.
- `device_gpu.py`, `device_streams.py`, `device_clocks.py`, `device_segments.py`, `device_arrays.py`,
  `quantisation.py`: its parts.
"""

from unisono.testing.calls import check_case as check_case
from unisono.testing.cases import Case as Case
from unisono.testing.check import Summary as Summary, check_collectives as check_collectives
from unisono.testing.differences import CheckError as CheckError
from unisono.testing.programs import (
    Again as Again,
    Make as Make,
    Program as Program,
    Step as Step,
    Together as Together,
    Wait as Wait,
    WaitForAny as WaitForAny,
    check_program as check_program,
)
from unisono.testing.transports import check_transport as check_transport

__all__ = [
    "Again",
    "Case",
    "CheckError",
    "Make",
    "Program",
    "Step",
    "Summary",
    "Together",
    "Wait",
    "WaitForAny",
    "check_case",
    "check_collectives",
    "check_program",
    "check_transport",
]
