"""`unconverted`: a decorator for classes whose methods TensorFlow's AutoGraph must not rewrite.

AutoGraph rewrites the Python source of all functions that a ``tf.function`` calls, and warns if it cannot.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

Class = TypeVar("Class", bound=type)


def unconverted(cls: Class) -> Class:
    """Mark the methods of a class so that AutoGraph calls them unchanged; return the class.

    The mark is that of ``tf.autograph.experimental.do_not_convert``. TensorFlow is not imported.
    """
    for member in vars(cls).values():
        function = member if isinstance(member, FunctionType) else getattr(member, "__wrapped__", None)
        if isinstance(function, FunctionType):
            vars(function)["autograph_info__"] = None
    return cls
