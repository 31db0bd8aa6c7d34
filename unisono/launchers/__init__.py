"""Starting the ranks of a job on this machine: the processes, their output, and functions run in them."""
