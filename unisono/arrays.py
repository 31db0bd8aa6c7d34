"""Recognises arrays of other libraries, by the same table as the collectives.

Used by: `unisono.frameworks.arrays`. Importing this module imports none of the libraries.
"""

from __future__ import annotations

from typing import Any

from unisono.collectives.arrays.adapters import library_of
from unisono.collectives.arrays.refusals import traced_by_tensorflow

__all__ = ["class_name_of", "traced_by_tensorflow"]


def class_name_of(x: Any) -> str | None:
    """Return the library class of an array, such as ``torch.Tensor``; None if it is of no class in the table."""
    cls: type = type(x)
    library = library_of(cls)
    return None if library is None else library.name
