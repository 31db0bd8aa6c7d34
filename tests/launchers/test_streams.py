from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

import pytest
from support.deadlines import DEADLINE_S

from unisono.foundation import streams

LONG = b"0123456789" * 50_000


class Pipe:
    """A non-blocking pipe, and a thread that begins to read it when `read` is called."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.data = b""
        self._thread = threading.Thread(target=self._read)

    def read(self) -> None:
        self._thread.start()

    def close(self) -> bytes:
        os.close(self.writer)
        self._thread.join(DEADLINE_S)
        os.close(self.reader)
        return self.data

    def _read(self) -> None:
        while data := os.read(self.reader, 5000):
            self.data += data


def test_write_all_writes_everything_to_a_nonblocking_pipe() -> None:
    pipe = Pipe()
    looks = iter(range(1_000_000))

    def keep_waiting() -> bool:
        if next(looks) == 2:
            pipe.read()
        return True

    streams.write_all(pipe.writer, LONG, keep_waiting)
    assert pipe.close() == LONG


def test_write_all_drops_the_rest_when_go_on_returns_false() -> None:
    pipe = Pipe()
    streams.write_all(pipe.writer, LONG, lambda: False)
    pipe.read()
    data = pipe.close()
    assert 0 < len(data) < len(LONG)
    assert LONG.startswith(data)


def test_write_all_drops_text_for_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    streams.write_all(writer, b"text")
    os.close(writer)
    streams.write_all(writer, b"text")


def test_write_all_raises_when_the_disk_is_full() -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space left"):
        streams.write_all(full.fileno(), b"text")


def test_write_puts_text_after_the_buffered_text_of_the_stream() -> None:
    pipe = Pipe()
    with open(pipe.writer, "w", encoding="ascii", closefd=False) as stream:
        stream.write("first, ")
        pipe.read()
        streams.write(stream, "30 \u00b5s \u2192 \u2713 \u732b \udcff\n")
    assert pipe.close() == b"first, 30 us -> + ? \xff\n"


@pytest.mark.parametrize("make", [io.StringIO, lambda: io.TextIOWrapper(io.BytesIO(), "latin-1")])
def test_write_accepts_streams_that_are_not_files(make: Any) -> None:
    stream = make()
    streams.write(stream, "\u00b5 \u2192")
    stream.seek(0)
    assert stream.read() in {"\u00b5 \u2192", "\u00b5 ->"}


def test_write_accepts_a_gzip_stream(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "file", "wt") as stream:
        streams.write(stream, "text")
    assert gzip.decompress((tmp_path / "file").read_bytes()) == b"text"


class BrokenPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, BrokenPipe(), closed()])
def test_write_drops_text_for_a_missing_broken_or_closed_stream(stream: TextIO | None) -> None:
    streams.write(stream, "text")


ENDURING = """
import sys
from unisono.foundation.streams import protect_standard_streams
protect_standard_streams()
print("x" * 200_000 + "\u00b5")
print(sys.stdout.isatty(), sys.stdout.encoding, file=sys.stderr)
"""


def test_program_prints_everything_to_a_nonblocking_pipe_after_endure() -> None:
    pipe = Pipe()
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = subprocess.Popen(
        [sys.executable, "-c", ENDURING], stdout=pipe.writer, stderr=subprocess.PIPE, env=environ
    )
    pipe.read()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, b"False ascii\n")
    assert pipe.close() == b"x" * 200_000 + b"u\n"
