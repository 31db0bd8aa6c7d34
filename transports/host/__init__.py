"""The host of a rank, and the limits of its system.

`host_discovery.py`    finds out which ranks share memory
`sealed_memory.py`     creates shared memory of a fixed size
`whole_file.py`        writes files that appear as a whole
`bind_address.py`      resolves the option `bind_address`
`core_distance.py`     measures how far apart two cores are
`listening_ports.py`   lists the TCP ports on which this process listens
`fd_limit.py`          raises the limit of open files
`system_limits.py`     errors that name a limit of the system
"""
