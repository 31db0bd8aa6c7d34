"""Messages and collectives.

messages: the messages of a communicator of Unisono, as the calls need them.
point_to_point: the methods that send, receive and probe.
collectives: the collectives on buffers.
objects: the collectives on objects.
parcels: objects whose large parts are messages of their own.
ready: calls that can be run or started.
request: calls that have been started.
partitioned: messages whose parts become ready one by one.
"""
