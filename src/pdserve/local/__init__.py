"""One machine: the processes of a service as supervised children, an embedded Redis, and where to find them.

Everything that runs here runs unchanged in a cluster; nothing in the other packages knows of this one.

    one_machine.py   a whole service: model, bus, workers, gateways, in this order
    plan.py          which children with which settings, from `pdserve up`'s arguments (pure)
    supervisor.py    keeps them running, restarts the dead, stops all
    child.py         one of them: start, stage lines, log, readiness
    launch.py        the shim in front of a child: dies with its parent
    service_file.py  what runs, for `status`, `chat` and others
    redis_server.py  the embedded bus
    service.py       a service of one's own for a `with` block: verify, benchmarks, tests
"""
