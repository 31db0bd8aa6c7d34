"""Communicators.

comm: communicators of one group.
intercomm: communicators between two groups.
failures: the calls after processes have failed.
jobs: communicators to other jobs, and spawned processes.
topology: communicators whose ranks have neighbours.
session: sessions, and the communicators that are always there.
window: windows.
file: files.
"""
