"""Judging a communicator: random calls of every collective, and what numpy says must come of them.

For those who write a backend or a transport, and for those who want to know whether Unisono works on their machines.
Whatever has the methods of `unisono.Communicator` can be judged.
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
