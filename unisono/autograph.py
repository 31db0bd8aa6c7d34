"""What TensorFlow's AutoGraph calls as it is.

AutoGraph rewrites the Python source of all that a ``tf.function`` calls, and warns where it cannot.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

Class = TypeVar("Class", bound=type)


def unconverted(cls: Class) -> Class:
    """Mark the methods of a class for AutoGraph as ``tf.autograph.experimental.do_not_convert`` does; return the class.

    TensorFlow is not imported.
    """
    for member in vars(cls).values():
        function = member if isinstance(member, FunctionType) else getattr(member, "__wrapped__", None)
        if isinstance(function, FunctionType):
            vars(function)["autograph_info__"] = None
    return cls
