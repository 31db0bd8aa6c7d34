"""Runs a benchmark of mpi4py's folder `demo` with few repetitions, and prints the first column, which has the sizes.

With a second argument it makes more repetitions, runs the benchmark as often as the argument says, and prints all
columns.
"""

import contextlib
import importlib
import inspect
import io
import os
import sys

FEW = {"skip": 1, "loop": 3, "skip_large": 1, "loop_large": 2, "MAX_MSG_SIZE": 1 << 16}
MORE = {"skip": 10, "loop": 50, "skip_large": 1, "loop_large": 4, "MAX_MSG_SIZE": 1 << 20}
MORE |= {"skip_small": 10, "loop_small": 50, "window_size": 16, "window_size_large": 16}

runs = int(sys.argv[2]) if len(sys.argv) > 2 else 0
repetitions = MORE if runs else FEW
sys.path.insert(0, os.getcwd())
benchmark = getattr(importlib.import_module(sys.argv[1]), sys.argv[1])
text = io.StringIO()
arguments = {name: repetitions[name] for name in inspect.signature(benchmark).parameters if name in repetitions}
with contextlib.redirect_stdout(text):
    for _ in range(runs or 1):
        benchmark(**arguments)
print(text.getvalue() if runs else [line.split()[:1] for line in text.getvalue().splitlines()])
