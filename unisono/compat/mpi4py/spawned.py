"""Runs the program of this rank in a job that `MPI.Comm.Spawn` or `Spawn_multiple` has started.

``python -m unisono.compat.mpi4py.spawned JSON``: the text has for each program its words, its number of processes and
its folder, in the order of ranks. A program of Python runs in this process, so that `import mpi4py` finds this package.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

from unisono.compat.mpi4py import run
from unisono.options import variable


def main() -> None:
    """Run the program."""
    programs = json.loads(sys.argv[1])
    ends = itertools.accumulate(program["count"] for program in programs)
    rank = int(os.environ[variable("rank")])
    program = next(program for program, end in zip(programs, ends, strict=True) if rank < end)
    if program["folder"] is not None:
        os.chdir(program["folder"])
    words = program["words"]
    if Path(words[0]).name.startswith("python") and words[1:] and (words[1][0] != "-" or words[1] in {"-m", "-c"}):
        run.main(words[1:])
    elif words[0].endswith(".py"):
        run.main(words)
    else:
        os.execvp(words[0], words)


if __name__ == "__main__":
    main()
