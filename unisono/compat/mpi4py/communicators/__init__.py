"""Communicators.

comm: communicators of one group.
intercomm: communicators between two groups.
topology: communicators whose ranks have neighbours.
session: sessions, and the communicators that are always there.
absent: the classes of windows and files, of which there are none.
"""
