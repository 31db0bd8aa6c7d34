"""Messages over TCP connections: the transport `tcp`.

`opener.py`       opens its channels
`streams.py`      the connections of one channel
`resumption.py`   continues channels and control links whose connection has broken
`tcp_info.py`     the measurements of the kernel on a connection
`tls.py`          TLS of connections, which follows the handshake

The native core moves the messages (`transports/native/core/tcp/tcp_channel.h`).
"""
