"""One-sided access: a rank reads and changes memory of other ranks, which make no call for it (MPI-4.1, chapter 12).

- `window.py`: the class `Window`: its operations, and its epochs as methods.
- `creation.py`: how the ranks of a communicator make a window together.
- `memory.py`: the memory of a window: an array of the user, or a segment that the ranks of a host share.
- `elements.py`: which elements of a part an operation touches, and the checks of its arguments.
- `operations.py`: the operations of accumulates, and the dtypes of windows.
- `contracts.py`: the contract of a target, which is the part of one rank as an origin accesses it.
- `mapped.py`: the target whose memory this rank maps.
- `remote.py`: the target whose memory it does not map: requests to the server of its rank.
- `epochs.py`: which targets the program may access now.
- `exposure.py`: the messages by which groups of ranks open and end epochs: post, start, complete, wait.
- `definition.py`: the definition of the operations on a part, in numpy.
"""
