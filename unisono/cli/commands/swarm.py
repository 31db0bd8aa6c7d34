"""``unisono swarm``: serves the place where the members of a swarm meet."""

from __future__ import annotations

import signal
import threading

import click

from unisono.cli.groups import SuggestingGroup
from unisono.cli.messages import tell
from unisono.swarm.meeting_place import MeetingPlace

# After the URL of a place that listens on all addresses; its host is a name, or 0.0.0.0.
_EVERYWHERE = ", on all addresses of this machine; pass one of them to `un.Swarm`"


@click.group(cls=SuggestingGroup, short_help="Serve the place where the members of a swarm meet.")
def command() -> None:
    """Tools for swarms, whose processes enter and leave while the others go on."""


@command.command()
@click.argument("url", default="tcp://0.0.0.0:29400")
def serve(url: str) -> None:
    """Serve a meeting place at URL until Ctrl-C or SIGTERM, for the key in the file of UNISONO_KEY_FILE.

    It holds nothing that must last, so it may be started anew or at another address at any time. The calls of the
    members need no meeting place.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with MeetingPlace(url) as place:
        tell(f"a meeting place is served at {place.url}{_EVERYWHERE if place.is_everywhere else ''}")
        ended.wait()
