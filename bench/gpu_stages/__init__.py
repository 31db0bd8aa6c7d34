"""What `bench/gpu.py` runs on a machine with a GPU: each module is a stage, in a process of its own.

A stage prints what it finds as records, one line of JSON each, as soon as it has found it, so that little is lost of
one that is ended by its deadline.
"""
