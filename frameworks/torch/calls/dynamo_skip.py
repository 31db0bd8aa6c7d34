"""`skip_dynamo`: a decorator for classes whose methods torch.compile must not compile.

Compiled code that calls a backend written in Python would compile each function of the backend too. That takes seconds,
or fails, because dynamo cannot read the attributes of a process group. `torch.compiler.disable` is no alternative: it
imports all of dynamo, and would add as much time to every call as a short message takes.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

Class = TypeVar("Class", bound=type)


def skip_dynamo(cls: Class) -> Class:
    """Exclude the methods of a class, and the functions that they call, from torch.compile; return the class."""
    if hasattr(eval_frame, "_FrameExecStrategy"):  # older versions of torch compile such calls without an error
        skip = eval_frame._FrameAction.SKIP
        for member in vars(cls).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return cls
