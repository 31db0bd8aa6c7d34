"""The session of a rank in its job, and the links that it opens.

`session.py`           the membership in a job: roster, listener, control links
`channels.py`          opens and accepts the channels of all communicators
`handshake.py`         the authenticated handshake, without I/O
`handshake_io.py`      the handshake over sockets
`listener.py`          accepts the connections of a rank
`dialer.py`            connects to other ranks
`event_loop.py`        the thread that waits for sockets and timers
`channel_kinds.py`     the table of the transports of the native core
`opener.py`            the contract of those which open the channels of one transport
`wire_lanes.py`        the lane of a channel on the wire
`pending_sockets.py`    sockets on which a channel waits for the other rank
`meeting.py`           how all ranks connect to rank 0, and learn whether all have
`network_probes.py`   the delays and rates between hosts that are far apart
`probe_turns.py`       one turn of a host that measures them
`liveness.py`          heartbeats between hosts, and the process at the other end of a link
`preference.py`        the transports that `transports=auto` means
`failures.py`          failure numbers of the native core and error classes
`survivors.py`         the agreement of the surviving ranks after a loss
`joiners.py`           how a process that joins a running job waits, and how its members reach it
`link_messages.py`     the messages of these two agreements
"""
