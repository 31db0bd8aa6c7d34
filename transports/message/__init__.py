"""Message transports for the generic executor.

`local.py`            ranks that are threads of one process
`framed.py`           a complete transport over links that carry frames
`delegating.py`       the base of transports that wrap another one
`faulty.py`           delays, drops and duplicates messages, for tests
`supervised.py`       adds the failure detection of the job to a plugin transport
`plugin.py`           the contract of a plugin transport
`plugin_loading.py`   finds and opens plugin transports
"""
