"""Judging a communicator: random calls of every collective, and what numpy says must come of them.

For those who write a backend or a transport, and for those who want to know whether Unisono works on their machines.
Whatever has the methods of `unisono.Communicator` can be judged.
"""

from unisono.testing.calls import check_case as check_case
from unisono.testing.cases import Case as Case
from unisono.testing.check import Summary as Summary, check_collectives as check_collectives
from unisono.testing.differences import CheckError as CheckError

__all__ = ["Case", "CheckError", "Summary", "check_case", "check_collectives"]
