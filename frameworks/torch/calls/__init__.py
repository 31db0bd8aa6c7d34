"""Calls on tensors, for process groups and for training.

- `tensors`: tensors as the memory of a call. `sparse`: the sum of sparse tensors.
- `work`: calls in flight, and their futures.
- `operations`, `errors`: operations and errors of torch and of Unisono.
- `dynamo_skip`: a decorator that keeps torch.compile out of the backend.
"""
