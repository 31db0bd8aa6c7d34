"""The parsers in Python as a target of libFuzzer: fuzz_parsers.py [OPTIONS OF LIBFUZZER] FOLDER..."""

import gc
import logging
import sys
from pathlib import Path
from types import FunctionType

import atheris  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.parsers import parse

if __name__ == "__main__":
    # An editable installation has an import hook of its own, so modules cannot be instrumented while they are imported.
    for function in [object_ for object_ in gc.get_objects() if isinstance(object_, FunctionType)]:
        if function.__module__ and function.__module__.startswith("unisono."):
            atheris.instrument_func(function)
    logging.disable()
    atheris.Setup(sys.argv, parse)
    atheris.Fuzz()
