"""The contracts of transports and executors, as protocols and values without behaviour.

`call.py`              a call: arguments, signature, extents, plan
`byte_dtypes.py`       the dtypes of elements that are moved as bytes: dates, texts and structures
`executor.py`          `Executor`, which runs plans, and `Operation`, a started call
`transport.py`         `MessageTransport` and `MappedTransport`, which the generic executor uses
`wildcards.py`         `ANY_SOURCE`, `ANY_TAG` and `NOBODY`
`communicator_id.py`   the id of a communicator
"""
