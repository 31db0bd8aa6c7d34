"""Tasks and their outcomes, as they travel between the master and a worker, and the program that workers import."""

from __future__ import annotations

import os
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# The name under which workers run the program of the master, so that `if __name__ == "__main__"` keeps its executors
# from being made again.
MAIN_RUN_NAME = "__worker__"
# Set while a worker imports the program of the master, which must not start workers then.
importing = threading.Event()


class Start(NamedTuple):
    """An initializer, which a worker runs before its first task of an executor.

    Attributes:
        number: the number of the executor.
    """

    number: int
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]


class Task(NamedTuple):
    """A call of a function, for one executor."""

    start: Start
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Return the result of the call."""
        return self.function(*self.args, **self.kwargs)


class RemoteTraceback(Exception):
    """The traceback of a worker, which is the cause of the exception that a future raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Outcome(NamedTuple):
    """The end of a task.

    Attributes:
        value: the result.
        error: the exception, or None.
        trace: the traceback of the exception on the worker.
        broken: the reason why the worker cannot run tasks of the executor; "" if it can.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    broken: str = ""

    @classmethod
    def of_error(cls, error: BaseException) -> Outcome:
        """Return the outcome of a call that has raised an exception."""
        return cls(error=error, trace="".join(traceback.format_exception(error)))

    def exception(self) -> BaseException | None:
        """Return the exception with the traceback of the worker as its cause; None if there is none."""
        if self.error is not None and self.trace:
            self.error.__cause__ = RemoteTraceback(self.trace)
        return self.error


class Welcome(NamedTuple):
    """The first message to a worker: the state of the master that tasks may need.

    Attributes:
        main: how the main module of the master is run: "" (it is not), "path" or "module", and its place.
        path: further entries of `sys.path`.
        folder: the current folder; "" leaves it as it is.
        environ: variables of the environment.
        names: variables of the main module before it runs.
    """

    main: tuple[str, str] = ("", "")
    path: tuple[str, ...] = ()
    folder: str = ""
    environ: Mapping[str, str] = {}
    names: Mapping[str, Any] = {}

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Welcome:
        """Return the message for the options of an executor, and name the main module as workers do."""
        sys.modules[MAIN_RUN_NAME] = sys.modules["__main__"]
        return cls(
            _main_program() if options.get("main", True) else ("", ""),
            (*sys.path, *map(os.fspath, options.get("path") or ())),
            os.fspath(options.get("wdir") or ""),
            dict(options.get("env") or {}),
            dict(options.get("globals") or {}),
        )

    def apply(self) -> None:
        """Make this process ready for tasks."""
        os.environ.update(self.environ)
        if self.folder:
            os.chdir(self.folder)
        sys.path += [entry for entry in self.path if entry not in sys.path]
        kind, place = self.main
        module = types.ModuleType(MAIN_RUN_NAME)
        vars(module).update(self.names)
        sys.modules["__main__"] = sys.modules[MAIN_RUN_NAME] = module
        if not kind:
            return
        run: Any = runpy.run_path if kind == "path" else runpy.run_module
        importing.set()
        try:
            vars(module).update(run(place, dict(self.names), MAIN_RUN_NAME))
        finally:
            importing.clear()


def _main_program() -> tuple[str, str]:
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return "module", spec.name
    return ("path", os.path.abspath(path)) if path and os.path.exists(path) else ("", "")
