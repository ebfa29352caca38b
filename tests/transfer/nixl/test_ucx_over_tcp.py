"""NIXL over plain TCP, the pair that `auto` never makes: is our quarantine a real one, and is the hazard still there?

A READ from a frozen peer, given up and released, still writes its blocks when the peer thaws; and
the peer may die of the reader's going ("Endpoint timeout"). The first is what quarantine and teardown are for, and
must hold. The second is printed (`pytest -rP`): where it never shows any more, a newer UCX has cured it.
"""

import json
import socket
import sys

import pytest

from pdserve.transfer.descriptor import encode_descriptor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NIXL exists for Linux")

OVER_TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}


@pytest.mark.parametrize("backend", ["nixl"], indirect=True)
@pytest.mark.parametrize("teardown", ["none", "recreate", "close"])
def test_blocks_of_a_given_up_read_change_no_more_once_it_is_terminal(nursery, spawn_peer, teardown):
    peer = spawn_peer(env=OVER_TCP, num_blocks=32, block_bytes=1 << 20)
    options = {
        "env": OVER_TCP,
        "peer_descriptor": encode_descriptor(peer.descriptor).hex(),
        "peer_pid": peer.pid,
        "peer_process_nonce": "n",
        "kv_signature": peer.descriptor.kv_signature,
        "teardown": teardown,
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(nursery)
        with connection.makefile("rw") as stream:
            print(json.dumps(options), file=stream, flush=True)
            stream.readline()  # its process id
            found = json.loads(stream.readline())
    assert not found["was_terminal_at_once"], "the READ of a frozen peer cannot have ended"
    assert found["num_changed_bytes"] == 0
    backend, why, _ = found["auto"]
    assert (backend, "UCX_TLS" in why) == ("tcp", True)
    print(f"the passive side {'survived' if peer.is_alive else 'died of its reader'}")
