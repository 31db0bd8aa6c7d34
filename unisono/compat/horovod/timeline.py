"""The timeline: a file in Chrome's trace event format with the times of calls, by name."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from unisono.errors import UsageError

# By the event, the name of the span that it begins, as in Horovod's files.
_SPANS = {"begin": "NEGOTIATE_{}", "start": "{}"}


class HorovodTimeline:
    """Records the spans of calls between `start` and `stop`. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._rank = 0
        self._began_s = 0.0
        self._events: list[dict[str, Any]] = []
        self._open: dict[str, int] = {}  # by key, the number of spans that have begun

    def start(self, path: str | os.PathLike[str], rank: int) -> None:
        """Begin to record; only the file of rank 0 is written.

        Raises:
            UsageError: it is recording already, or the folder of the file does not exist.
        """
        with self._lock:
            if self._path is not None:
                raise UsageError(f"the timeline is being written to {self._path}: call stop_timeline() first")
            if not Path(path).absolute().parent.is_dir():
                raise UsageError(f"the folder of the timeline {os.fspath(path)!r} does not exist: make it first")
            self._path, self._rank, self._began_s = Path(path), rank, time.monotonic()

    def stop(self) -> None:
        """Write the file, and stop. Without `start` before, this does nothing."""
        with self._lock:
            path, self._path = self._path, None
            events, self._events, self._open = self._events, [], {}
        if path is not None and self._rank == 0:
            path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def note(self, key: str, event: str) -> None:
        """Note that a call has begun ("begin"), that it is made ("start"), or that it has ended ("end")."""
        if self._path is None or self._rank != 0:
            return
        with self._lock:
            now_us = (time.monotonic() - self._began_s) * 1e6
            place = {"pid": self._rank, "tid": key, "ts": now_us}
            if event == "begin":
                self._open[key] = 0
            if key not in self._open:
                return
            if self._open[key]:
                self._events.append({"ph": "E", **place})
                self._open[key] = 0
            if event in _SPANS:
                name = _SPANS[event].format(key.partition(".")[0].upper())
                self._events.append({"ph": "B", "name": name, "cat": "horovod", **place})
                self._open[key] = 1
