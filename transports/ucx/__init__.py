"""The UCX library of this process, through its Python package.

`library.py`        opens UCX for the native core: the transport `ucx`
`python_links.py`   uses UCX through Python alone: the transport `ucx_core`
"""
