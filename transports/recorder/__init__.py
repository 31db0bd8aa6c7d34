"""The flight recorder of a rank, seen from outside of the native core: the calls and messages of the rank.

`memory.py`    reads the memory of a recorder, of this process or of another one
`dumps.py`     the file format of a dump: writes and reads it
`traces.py`    the file format of a trace, which Perfetto shows
`groups.py`    the groups of plans in traces, on request
`clocks.py`    puts the times of ranks on different hosts on one clock
`recorder.py`  the recorder of a session: it dumps on errors, signals and requests
`stacks.py`    lets SIGUSR2 write the Python stacks of a process, for other processes to read

Other processes of the user use these:

`live_ranks.py`   finds the ranks that run on this host
`activity.py`     what each of them does now
`live_stacks.py`  where each of them is in the program
"""
