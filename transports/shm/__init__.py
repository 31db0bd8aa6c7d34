"""Messages through memory that two ranks of a host share: the transport `shm`.

`opener.py`           opens its channels
`socket_passing.py`   passes shared memory over a socket

The native core moves the messages (`transports/native/core/shm/shm_channel.h`).
"""
