"""What torch.compile leaves as it is.

Compiled code that calls a backend written in Python would have each function of that compiled too, for seconds, or
refused: nobody may read an attribute of a process group there. `torch.compiler.disable` would import all of dynamo, and
cost every call as much as a short message.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

Class = TypeVar("Class", bound=type)


def untraced(cls: Class) -> Class:
    """Return a class whose methods, and all that they call, torch.compile does not compile."""
    if hasattr(eval_frame, "_FrameExecStrategy"):  # before torch had it, it refused nothing either
        skip = eval_frame._FrameAction.SKIP
        for member in vars(cls).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return cls
