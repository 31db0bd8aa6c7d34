"""The session of a rank in its job, and the links that it opens.

`session.py`           the membership in a job: roster, listener, control links
`channels.py`          opens and accepts the channels of all communicators
`handshake.py`         the authenticated handshake, without I/O
`handshake_io.py`      the handshake over sockets
`tls.py`               TLS of connections, which follows the handshake
`listener.py`          accepts the connections of a rank
`dialer.py`            connects to other ranks
`event_loop.py`        the thread that waits for sockets and timers
`channel_openers.py`   the table of channel kinds, and how each is opened
`pending_sockets.py`    sockets on which a channel waits for the other rank
`resumption.py`         continues TCP channels whose connection has broken
`socket_passing.py`    passes shared memory over a socket
`meeting.py`           how all ranks connect to rank 0, and learn whether all have
`liveness.py`          heartbeats between hosts, and the process at the other end of a link
`tagged_fabrics.py`    UCX and MPI as libraries of tagged messages
`preference.py`        the transports that `transports=auto` means
`failures.py`          failure numbers of the native core and error classes
`survivors.py`         the agreement of the surviving ranks after a loss
`joiners.py`           how a process that joins a running job waits, and how its members reach it
`link_messages.py`     the messages of these two agreements
"""
