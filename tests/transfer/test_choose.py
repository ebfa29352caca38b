import pytest

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.transfer.base import Descriptor
from pdserve.transfer.choose import choose_backend, usable_transports
from pdserve.transfer.descriptor import seal
from pdserve.transfer.nixl.payload import NixlPayload, encode_payload, has_rdma, one_sided_ways


def nixl(**facts):
    payload = {
        "agent_name": "w:g:1",
        "metadata": b"",
        "base_address": 4096,
        "memory": "DRAM",
        "device_id": 0,
        "pid": 1,
        "token_address": 4096,
        "token": b"t" * 16,
        "node": "node-a",
        "ways": ["cma"],
    } | facts
    return descriptor("nixl", encode_payload(NixlPayload(**payload)))


def descriptor(backend, payload=b""):
    return seal(
        Descriptor(
            backend=backend,
            worker_id="w",
            generation="g",
            num_blocks=1,
            block_bytes=8,
            kv_signature="s",
            payload=payload,
        )
    )


TCP = descriptor("tcp")
NODE_B = {"node": "node-b"}
GPU = {"memory": "VRAM", "ways": ["cuda_ipc"]}


def choose(setting, own, peer, *, is_permitted=True):
    return choose_backend(setting, own, peer, probe=lambda payload: is_permitted)


@pytest.mark.parametrize(
    ("own", "peer", "is_permitted", "backend", "why"),
    [
        ({}, {}, True, "nixl", "cross-memory attach to the peer's process works"),
        ({}, {}, False, "tcp", "not permitted"),
        ({}, NODE_B, True, "tcp", "different machines"),
        ({"node": ""}, {"node": ""}, True, "tcp", "different machines"),
        ({"ways": []}, {}, True, "tcp", "UCX_TLS"),
        ({"ways": ["cma", "rdma"]}, NODE_B, True, "tcp", "different machines"),
        ({"ways": ["cma", "rdma"]}, NODE_B | {"ways": ["cma", "rdma"]}, False, "nixl", "RDMA"),
        (GPU, GPU, False, "nixl", "CUDA IPC"),
        (GPU, GPU | NODE_B, True, "tcp", "different machines"),
        (GPU, {}, True, "tcp", "one KV cache is in device memory"),
        ({"memory": "VRAM", "ways": ["rdma"]}, NODE_B | {"ways": ["cma", "rdma"]}, False, "nixl", "RDMA"),
    ],
)
def test_auto_takes_nixl_where_reads_are_one_sided_and_says_why(own, peer, is_permitted, backend, why):
    choice = choose("auto", [nixl(**own), TCP], [nixl(**peer), TCP], is_permitted=is_permitted)
    assert choice.backend == backend
    assert why in choice.why
    assert not choice.is_hazardous


def test_auto_takes_tcp_where_one_side_has_no_nixl():
    assert choose("auto", [nixl(), TCP], [TCP]) == ("tcp", "nixl is not usable on the peer", False)
    assert choose("auto", [TCP], [nixl(), TCP]) == ("tcp", "nixl is not usable on this worker", False)
    assert choose("auto", [TCP], [TCP]) == ("tcp", "nixl is usable on neither side", False)


def test_tcp_is_taken_when_asked_for():
    assert choose("tcp", [TCP], [nixl(), TCP]) == ("tcp", "TRANSPORT=tcp", False)


def test_forced_nixl_over_plain_tcp_names_the_hazard():
    choice = choose("nixl", [nixl()], [nixl(**NODE_B), TCP])
    assert choice.backend == "nixl"
    assert choice.is_hazardous
    assert "TRANSPORT=nixl" in choice.why
    assert "take the prefill worker's process down" in choice.why


def test_forced_nixl_over_shared_memory_is_no_hazard():
    assert not choose("nixl", [nixl()], [nixl(), TCP]).is_hazardous


def test_no_common_backend_is_an_error_that_says_what_to_set():
    with pytest.raises(TransferError, match=r"TRANSPORT=nixl.*TRANSPORT=auto or tcp"):
        choose("nixl", [nixl()], [TCP])
    with pytest.raises(TransferError, match="no common transport"):
        choose("auto", [nixl()], [TCP])


def no_nixl(**options):
    raise TransferError(TransferReason.LOOKUP, "NIXL cannot be imported")


def test_without_nixl_auto_is_tcp_and_says_so(caplog):
    caplog.set_level("INFO")
    transports = usable_transports("auto", make_nixl=no_nixl)
    assert [transport.name for transport in transports] == ["tcp"]
    assert "NIXL cannot be imported" in caplog.text


def test_without_nixl_asking_for_it_is_an_error():
    with pytest.raises(TransferError, match="cannot be imported"):
        usable_transports("nixl", make_nixl=no_nixl)


@pytest.mark.parametrize(("setting", "names"), [("auto", ["nixl", "tcp"]), ("nixl", ["nixl"]), ("tcp", ["tcp"])])
def test_usable_transports_of_this_machine_in_order_of_preference(setting, names):
    assert [transport.name for transport in usable_transports(setting)] == names


@pytest.mark.parametrize(
    ("ucx_tls", "ways"),
    [
        ("", ["cma", "rdma"]),
        ("all", ["cma", "rdma"]),
        ("tcp,self", []),
        ("tcp,self,cma", ["cma"]),
        ("shm,tcp", ["cma"]),
        ("rc,tcp", ["rdma"]),
        ("rc_x,sm", ["cma", "rdma"]),
        ("^cma", ["rdma"]),
        ("^ib,sm", []),
        ("^tcp", ["cma", "rdma"]),
    ],
)
def test_ucx_tls_decides_what_ucx_may_use(ucx_tls, ways):
    assert one_sided_ways("DRAM", ucx_tls, is_rdma_here=True) == ways


def test_device_memory_goes_over_cuda_ipc_or_rdma():
    assert one_sided_ways("VRAM", "", is_rdma_here=False) == ["cuda_ipc"]
    assert one_sided_ways("VRAM", "tcp,self", is_rdma_here=False) == []
    assert one_sided_ways("VRAM", "rc,cuda", is_rdma_here=True) == ["cuda_ipc", "rdma"]


def test_rdma_needs_an_active_port_and_access_to_it(tmp_path):
    devices, verbs = tmp_path / "infiniband", tmp_path / "dev"
    port = devices / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    verbs.mkdir()
    (port / "state").write_text("4: ACTIVE\n")
    assert not has_rdma(devices, verbs)
    (verbs / "uverbs0").touch()
    assert has_rdma(devices, verbs)
    (port / "state").write_text("1: DOWN\n")
    assert not has_rdma(devices, verbs)
    assert not has_rdma(tmp_path / "nothing", verbs)


@pytest.mark.parametrize("backend", ["nixl"], indirect=True)
def test_cross_memory_attach_is_found_out_by_reading_the_very_process(peer, local):
    choice = choose_backend("auto", [local.descriptor, TCP], [peer.descriptor, TCP])
    assert choice.backend == "nixl"
    assert "shared memory" in choice.why


@pytest.mark.parametrize("backend", ["nixl"], indirect=True)
def test_cross_memory_attach_to_a_dead_process_is_no_way(spawn_peer, local):
    dead = spawn_peer()
    assert dead.descriptor
    dead.kill()
    choice = choose_backend("auto", [local.descriptor, TCP], [dead.descriptor, TCP])
    assert choice.backend == "tcp"
    assert "not permitted" in choice.why
