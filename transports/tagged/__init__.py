"""Messages over libraries of tagged messages: the transports `ucx` and `mpi`.

`opener.py`    opens their channels
`fabrics.py`   the libraries of a rank, and how two ranks agree on a channel

The native core moves the messages (`transports/native/core/tagged/tagged_channel.h`).
"""
