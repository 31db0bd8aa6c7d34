"""Executors: they run the plan of one rank on arrays.

`generic.py`       the generic executor, in pure Python, which defines the meaning of a plan
`native.py`        the native executor, which translates calls for the C++ core
`lane.py`          one lane of a running collective, for the generic executor
`own_messages.py`  the messages of a rank to itself, in the generic executor
`matching.py`      matches point-to-point messages to receives, for the generic executor
`call_records.py`  records the calls of the generic executor in the flight recorder
`call_memory.py`   maps the spans of a plan to views of arrays
`plan_checks.py`   checks a plan against its executor
`polling.py`       waits for an operation by polling
"""
