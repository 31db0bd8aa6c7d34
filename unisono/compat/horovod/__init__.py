"""The API of Horovod 0.28 over Unisono. A script imports, for example, `unisono.compat.horovod.torch` as ``hvd``.

Modules that all frameworks share:
    job: starting and ending, ranks, and the state between.
    process_sets: groups of ranks with calls of their own.
    negotiation: matches the calls of ranks by name.
    coordinator: the table of names, which rank 0 keeps.
    requests: what ranks tell each other about calls.
    entries: a call on this rank, from its start to its result.
    execution: makes the matched calls on a communicator.
    arguments: reductions, names, roots and numbers of rows.
    arrays: the calls on arrays of numpy.
    objects: Python objects that ranks exchange.
    variables: variables of TensorFlow and Keras.
    reducers: averages of gradients, in whose steps ranks that have joined take part.
    averaging: lists of gradients of Keras and TensorFlow.
    compression: the forms in which tensors travel.
    adasum: the reduction "Adasum".
    elastic: training that goes on when ranks are lost or join.
    settings: the variables ``HOROVOD_*``.
    timeline: a file with the times of calls.
    errors: the errors, with the names that Horovod gives them.

The frameworks:
    torch: ``horovod.torch``.
    tensorflow: ``horovod.tensorflow``, and in it ``keras``.
    keras: ``horovod.keras``.
"""
