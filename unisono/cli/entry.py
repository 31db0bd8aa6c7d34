"""The function that the command `unisono` calls. From its first statement on, Ctrl-C shows no traceback."""

from __future__ import annotations

from unisono.foundation import interrupts


def command() -> int:
    """Run the command line of this process, and return its exit code."""
    interrupts.end_process()
    from unisono.cli.main import main

    interrupts.raise_error()
    try:
        return main()
    finally:
        interrupts.end_process()
