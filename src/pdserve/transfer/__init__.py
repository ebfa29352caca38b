"""KV transfer: how a decode worker fetches KV blocks out of a prefill worker's memory.

`base.py` is the interface, `nixl.py` and `tcp.py` implement it, `choose.py` picks one per pair of workers,
`puller.py` is the thread that owns the active side, `lease.py` is the prefill side's promise to keep blocks.
"""
