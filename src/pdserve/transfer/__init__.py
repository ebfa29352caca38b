"""KV transfer: how a decode worker fetches KV blocks out of a prefill worker's memory.

`base.py` is the interface, `nixl/` and `tcp/` implement it, `choose.py` picks one per pair of workers, and `pulls/`
holds the threads that own the active side.
"""
