"""`Events`: events of a device that are used again, because a driver takes microseconds to create or destroy one."""

from __future__ import annotations

from collections import deque

from unisono.transports.cuda.device import Device, Event

# The most events that are kept.
_MOST = 64


class Events:
    """Events of one device, for any thread. Each operation on the list is atomic, because finalizers return events.

    An event is given back when it has happened, and nobody asks for it any more.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._unused: deque[Event] = deque()
        self._is_closed = False

    def take(self) -> Event:
        """Return an event, which has happened if it was recorded before."""
        try:
            return self._unused.pop()
        except IndexError:
            return self._device.new_event()

    def give_back(self, event: Event) -> None:
        """Keep an event that is no longer used, or end it."""
        if self._is_closed or len(self._unused) >= _MOST:
            self._device.end_event(event)
        else:
            self._unused.append(event)

    def close(self) -> None:
        """End all events that are not in use. The others end when they are given back."""
        self._is_closed = True
        while self._unused:
            self._device.end_event(self._unused.pop())
