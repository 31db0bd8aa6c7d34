"""Collectives and data-parallel training for TensorFlow, in eager mode, in ``tf.function`` and in sessions.

Theory of operation. In eager mode, a collective is a call of the communicator on the memory of the tensors. In a graph,
it is a ``tf.numpy_function``, which makes the same call when the graph runs. TensorFlow may run operations of a graph
in any order that their data allow, but all ranks must make their calls in the same order. So each call of a graph of a
``tf.function`` has a control dependency on the call before it. The gradients of a step are averaged in one call.

calls: calls of the communicator in both modes.
collectives: the collectives, with their gradients.
trainable: gradients as dense tensors, in both modes.
training: the gradient tape, the optimizers, and the variables.
sessions: hooks for sessions of TensorFlow 1.
"""
