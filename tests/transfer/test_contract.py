"""One contract for both backends, against real second processes (see `Transport`)."""

import threading
import time

import msgspec
import pytest
import torch
from connecting import wait_connected

from pdserve.errors import IncompatibleError, TransferError
from pdserve.reasons import TransferReason
from pdserve.transfer.base import PullState
from pdserve.transfer.descriptor import seal

UNTOUCHED = 0xAA


def assert_only(local, expected):
    """Local blocks hold what `expected` says by block id, and all others are untouched."""
    for block_id in range(local.blocks.shape[0]):
        if block_id in expected:
            assert torch.equal(local.blocks[block_id], expected[block_id]), f"block {block_id}"
        else:
            assert bool((local.blocks[block_id] == UNTOUCHED).all()), f"block {block_id} changed"


def failure_of(local, peer):
    """Why reading 20 blocks from a peer fails, whether at once or later."""
    try:
        result = local.read(peer, list(range(20)), list(range(20, 40)))
    except TransferError as refusal:
        return refusal.reason
    assert (result.state, result.is_terminal) == (PullState.FAILED, True)
    return result.reason


def late_results(local, *, is_open=True):
    """Results within a third of a second, with progress made: an agent writes late when it makes progress."""
    results = []
    until_s = time.monotonic() + 0.3
    while time.monotonic() < until_s:
        if is_open:
            results += local.transport.poll()
            local.transport.serve()
        time.sleep(0.001)
    return results


def test_a_read_copies_exactly_the_wanted_blocks_and_touches_no_other(local, peer):
    wait_connected(local.transport, peer.descriptor)
    result = local.read(peer, [3, 7, 12, 47], [10, 0, 63, 1])
    assert result.state is PullState.DONE, result
    assert_only(local, {10: peer.blocks[3], 0: peer.blocks[7], 63: peer.blocks[12], 1: peer.blocks[47]})


@pytest.fixture
def reader(local, backend):
    """Another reader beside the local transport; tests close it."""
    reader = local.transport.another_reader()
    if backend == "tcp":
        assert reader is None
        pytest.skip("tcp has no other reader: its connections have threads of their own")
    return reader


def test_another_reader_reads_into_the_same_blocks_and_comes_and_goes_on_its_own(local, reader, peer):
    wait_connected(local.transport, peer.descriptor)
    wait_connected(reader, peer.descriptor)
    handles = [reader.pull(peer.peer, "", [i], [i], time.monotonic() + 5) for i in (3, 4)]
    assert local.read(peer, [7], [10]).state is PullState.DONE
    ended = {result.handle: result.state for result in reader.poll()}
    assert ended == dict.fromkeys(handles, PullState.DONE)
    assert_only(local, {3: peer.blocks[3], 4: peer.blocks[4], 10: peer.blocks[7]})
    reader.recreate()
    reader.close()
    assert local.read(peer, [8], [11]).state is PullState.DONE
    assert local.transport.is_connected(peer.peer)


def test_a_reader_that_is_recreated_again_and_again_does_not_disturb_the_first_one(local, reader, peer):
    wait_connected(local.transport, peer.descriptor)
    failures = []

    def recreate():
        try:
            for _ in range(15):
                reader.recreate()
                wait_connected(reader, peer.descriptor)
        except TransferError as error:
            failures.append(error)

    thread = threading.Thread(target=recreate)
    thread.start()
    num_reads = 0
    while thread.is_alive():
        assert local.read(peer, list(range(48)), list(range(48))).state is PullState.DONE
        assert torch.equal(local.blocks[:48], peer.blocks)
        num_reads += 1
    reader.close()
    assert failures == []
    assert num_reads > 15


def test_an_agent_that_does_not_come_back_fails_cleanly_and_may_come_back_later(local, peer, backend, monkeypatch):
    if backend == "tcp":
        pytest.skip("tcp has no agent")

    def refuse(name, *, progress_thread):
        raise TransferError(TransferReason.LOOKUP, "no more file descriptors")

    wait_connected(local.transport, peer.descriptor)
    with monkeypatch.context() as patch:
        patch.setattr("pdserve.transfer.nixl.transport.NixlAgent", refuse)
        with pytest.raises(TransferError, match="no more file descriptors"):
            local.transport.recreate()
    local.transport.serve()
    assert local.transport.poll() == []
    assert local.transport.abort(1)
    for call in (local.transport.is_connected, lambda _: local.transport.start_connect(peer.descriptor)):
        with pytest.raises(TransferError) as caught:
            call(peer.peer)
        assert caught.value.reason == TransferReason.CONNECT
    local.transport.recreate()
    wait_connected(local.transport, peer.descriptor)
    assert local.read(peer, [1], [1]).state is PullState.DONE


def test_reads_on_their_way_together_do_not_mix(local, peer):
    wait_connected(local.transport, peer.descriptor)
    handles = [local.pull(peer.peer, [i, i + 1, i + 2], [i + 2, i, i + 1]) for i in range(0, 45, 3)]
    results = local.wait(*handles)
    assert {result.state for result in results.values()} == {PullState.DONE}
    expected = {}
    for i in range(0, 45, 3):
        expected |= {i + 2: peer.blocks[i], i: peer.blocks[i + 1], i + 1: peer.blocks[i + 2]}
    assert_only(local, expected)


def test_connecting_twice_is_connecting_once(local, peer):
    wait_connected(local.transport, peer.descriptor)
    wait_connected(local.transport, peer.descriptor)
    assert local.read(peer, [0], [0]).state is PullState.DONE


def test_block_pools_of_different_size_exchange_their_last_blocks(make_local, spawn_peer):
    peer = spawn_peer(num_blocks=128).expect_all()
    small = make_local(num_blocks=16)
    wait_connected(small.transport, peer.descriptor)
    assert small.read(peer, [127], [15]).state is PullState.DONE
    assert_only(small, {15: peer.blocks[127]})


def test_odd_block_sizes_work(make_local, spawn_peer):
    peer = spawn_peer(num_blocks=5, block_bytes=1028).expect_all()
    local = make_local(num_blocks=5, block_bytes=1028)
    wait_connected(local.transport, peer.descriptor)
    assert local.read(peer, [4, 1], [0, 3]).state is PullState.DONE
    assert_only(local, {0: peer.blocks[4], 3: peer.blocks[1]})


def test_a_block_that_the_peer_does_not_have_is_refused_before_the_read(local, peer):
    wait_connected(local.transport, peer.descriptor)
    for remote_id in (48, 10_000, -1):
        with pytest.raises(TransferError, match="geometry"):
            local.pull(peer.peer, [0, remote_id], [0, 1])
    assert local.read(peer, [0], [5]).state is PullState.DONE
    assert_only(local, {5: peer.blocks[0]})


def test_reading_from_a_peer_that_is_not_connected_is_refused(local, peer):
    with pytest.raises(TransferError, match="not connected"):
        local.pull(peer.peer, [0], [0])


def test_incompatible_peers_are_refused_by_name_and_others_keep_working(local, peer, spawn_peer):
    other = spawn_peer(kv_signature="model=tiny;kv_dtype=bfloat16;block_size=32")
    wide = spawn_peer(seed=3, block_bytes=128 * 1024)
    wait_connected(local.transport, peer.descriptor)
    with pytest.raises(IncompatibleError, match="kv_dtype: float32 here, bfloat16 there") as refusal:
        wait_connected(local.transport, other.descriptor)
    assert "block_size: 16 here, 32 there" in str(refusal.value)
    with pytest.raises(IncompatibleError, match="65536 bytes here, 131072 there"):
        wait_connected(local.transport, wide.descriptor)
    assert local.read(peer, [0], [0]).state is PullState.DONE


def test_damaged_descriptor_of_a_known_peer_is_refused_and_the_good_one_stays(local, peer):
    wait_connected(local.transport, peer.descriptor)
    good = peer.descriptor
    truncated = msgspec.structs.replace(good, payload=good.payload[: len(good.payload) // 2])
    with pytest.raises(TransferError, match="checksum"):
        wait_connected(local.transport, truncated)
    with pytest.raises(TransferError, match="unreadable"):
        wait_connected(local.transport, seal(truncated))
    assert local.read(peer, [2], [2]).state is PullState.DONE


def test_killed_peer_fails_its_reads_soon_and_nobody_elses(local, peer, spawn_peer):
    victim = spawn_peer().expect_all()
    wait_connected(local.transport, victim.descriptor)
    wait_connected(local.transport, peer.descriptor)
    assert local.read(victim, [1], [1]).state is PullState.DONE
    victim.kill()
    started_s = time.monotonic()
    reason = failure_of(local, victim)
    assert reason in {"post", "copy", "connect"}
    assert time.monotonic() - started_s < 3
    assert local.read(peer, [0], [0]).state is PullState.DONE


def test_connecting_to_a_dead_peer_fails_in_bounded_time(local, peer, spawn_peer):
    dead = spawn_peer()
    assert dead.descriptor
    dead.kill()
    started_s = time.monotonic()
    with pytest.raises(TransferError, match="connect"):
        wait_connected(local.transport, dead.descriptor)
    assert time.monotonic() - started_s < 2
    wait_connected(local.transport, peer.descriptor)
    assert local.read(peer, [0], [0]).state is PullState.DONE


def test_restarted_peer_is_a_new_peer_that_works_at_once(local, spawn_peer):
    old = spawn_peer(seed=2).expect_all()
    wait_connected(local.transport, old.descriptor)
    assert local.read(old, [1], [1]).state is PullState.DONE
    old.kill()
    new = spawn_peer(seed=2, generation="g2").expect_all()
    wait_connected(local.transport, new.descriptor)
    assert local.read(new, [1], [2]).state is PullState.DONE
    assert torch.equal(local.blocks[2], new.blocks[1])
    assert local.read(new, list(range(40)), list(range(20, 60))).state is PullState.DONE
    with pytest.raises(TransferError, match="connect"):
        local.pull(old.peer, [1], [1])


def test_same_worker_id_restarted_three_times_on_the_way(local, spawn_peer):
    for generation in ("g1", "g2", "g3"):
        peer = spawn_peer(generation=generation).expect_all()
        wait_connected(local.transport, peer.descriptor)
        assert local.read(peer, [5], [5]).state is PullState.DONE
        peer.kill()


@pytest.mark.alone
def test_frozen_peer_times_out_at_connect_and_works_after_it_thaws(local, peer, spawn_peer):
    frozen = spawn_peer().expect_all()
    frozen.freeze()
    started_s = time.monotonic()
    local.transport.start_connect(frozen.descriptor)
    assert time.monotonic() - started_s < 0.4, "start_connect waited for the peer"
    wait_connected(local.transport, peer.descriptor)
    assert local.read(peer, [0], [0]).state is PullState.DONE
    with pytest.raises(TransferError, match="connect"):
        wait_connected(local.transport, frozen.descriptor)
    assert time.monotonic() - started_s < 3
    frozen.thaw()
    wait_connected(local.transport, frozen.descriptor)
    assert local.read(frozen, [9], [9]).state is PullState.DONE
    assert_only(local, {0: peer.blocks[0], 9: frozen.blocks[9]})


def test_read_from_a_frozen_peer_ends_by_its_deadline(local, peer, spawn_peer):
    frozen = spawn_peer().expect_all()
    wait_connected(local.transport, frozen.descriptor)
    wait_connected(local.transport, peer.descriptor)
    frozen.freeze()
    started_s = time.monotonic()
    handle = local.pull(frozen.peer, list(range(48)), list(range(48)), within_s=0.3)
    assert local.read(peer, [0], [60]).state is PullState.DONE
    result = local.wait(handle)[handle]
    assert time.monotonic() - started_s < 2
    assert result.state is PullState.DONE or result.reason == TransferReason.TIMEOUT
    frozen.thaw()
    if not result.is_terminal:  # its blocks are quarantined until this says that they need not be
        last = local.wait(handle)[handle]
        assert (last.reason, last.is_terminal) == ("timeout", True)
    assert local.read(peer, [1], [61]).state is PullState.DONE


def test_disconnecting_fails_reads_on_their_way(local, spawn_peer):
    frozen = spawn_peer().expect_all()
    wait_connected(local.transport, frozen.descriptor)
    frozen.freeze()
    handle = local.pull(frozen.peer, list(range(48)), list(range(48)))
    local.transport.disconnect(frozen.peer)
    result = local.wait(handle)[handle]
    assert result.state is PullState.DONE or result.reason == TransferReason.DISCONNECTED
    with pytest.raises(TransferError, match="not connected"):
        local.pull(frozen.peer, [0], [0])


def test_aborted_read_writes_nothing_once_it_is_terminal(make_local, spawn_peer):
    size = {"num_blocks": 24, "block_bytes": 1 << 20}
    local, slow = make_local(**size), spawn_peer(**size).expect_all()
    wait_connected(local.transport, slow.descriptor)
    slow.freeze()  # what it has not sent yet, it sends when it thaws
    handle = local.pull(slow.peer, list(range(24)), list(range(24)))
    is_terminal = local.transport.abort(handle)
    if not is_terminal:
        slow.thaw()
        last = local.wait(handle)[handle]
        assert (last.state, last.reason, last.is_terminal) == (PullState.FAILED, "aborted", True)
    local.blocks.fill_(0x55)
    slow.thaw()
    assert late_results(local) == []
    assert bool((local.blocks == 0x55).all())


@pytest.mark.parametrize("teardown", ["close", "recreate"])
def test_teardown_is_a_fence(make_local, spawn_peer, teardown):
    size = {"num_blocks": 24, "block_bytes": 1 << 20}
    local, frozen = make_local(**size), spawn_peer(**size).expect_all()
    wait_connected(local.transport, frozen.descriptor)
    frozen.freeze()
    local.pull(frozen.peer, list(range(24)), list(range(24)))
    getattr(local.transport, teardown)()
    local.blocks.fill_(0x55)
    frozen.thaw()
    assert late_results(local, is_open=teardown == "recreate") == []
    assert bool((local.blocks == 0x55).all())
    assert frozen.is_alive


def test_recreated_side_reads_again_after_connecting_anew(local, peer):
    wait_connected(local.transport, peer.descriptor)
    descriptor = local.transport.recreate()
    assert descriptor.peer == local.descriptor.peer
    with pytest.raises(TransferError, match="not connected"):
        local.pull(peer.peer, [0], [0])
    wait_connected(local.transport, peer.descriptor)
    assert local.read(peer, [11], [11]).state is PullState.DONE


def test_closing_twice_is_closing_once(local):
    local.transport.close()
    local.transport.close()


def test_peer_survives_readers_that_come_and_go(make_local, peer):
    for _ in range(3):
        local = make_local(num_blocks=4)
        wait_connected(local.transport, peer.descriptor)
        assert local.read(peer, [6], [3]).state is PullState.DONE
        local.transport.close()
    assert peer.is_alive
