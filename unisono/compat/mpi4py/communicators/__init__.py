"""Communicators.

comm: communicators of one group.
intercomm: communicators between two groups.
topology: communicators whose ranks have neighbours.
session: sessions, and the communicators that are always there.
window: windows.
file: files.
"""
