import msgspec
import pytest

from pdserve.errors import IncompatibleError, TransferError
from pdserve.transfer.base import Descriptor
from pdserve.transfer.descriptor import check_compatible, decode_descriptor, encode_descriptor, seal


def descriptor(**changes):
    fields = {
        "backend": "tcp",
        "worker_id": "p-1",
        "generation": "g1",
        "num_blocks": 64,
        "block_bytes": 4096,
        "kv_signature": "model=abc;kv_dtype=float32;block_size=16",
        "payload": b"\x01" * 40,
    }
    return seal(Descriptor(**(fields | changes)))


def test_encoding_is_reversible():
    assert decode_descriptor(encode_descriptor(descriptor())) == descriptor()


def test_every_truncated_descriptor_is_refused():
    encoded = encode_descriptor(descriptor())
    for length in range(len(encoded)):
        with pytest.raises(TransferError, match="lookup"):
            decode_descriptor(encoded[:length])


def test_every_damaged_byte_is_noticed():
    encoded = encode_descriptor(descriptor())
    for position in range(len(encoded)):
        damaged = bytearray(encoded)
        damaged[position] ^= 0x20
        try:
            decoded = decode_descriptor(bytes(damaged))
        except TransferError:
            continue
        pytest.fail(f"byte {position} was changed and gave {decoded}")


@pytest.mark.parametrize(
    "change",
    [{"num_blocks": 65}, {"generation": "g2"}, {"payload": b"\x01" * 39}, {"kv_signature": "x"}, {"backend": "nixl"}],
)
def test_changed_field_with_the_old_checksum_is_refused(change):
    forged = msgspec.structs.replace(descriptor(), **change)
    with pytest.raises(TransferError, match="checksum"):
        decode_descriptor(encode_descriptor(forged))


def test_descriptor_without_checksum_is_refused():
    with pytest.raises(TransferError, match="p-1:g1"):
        decode_descriptor(encode_descriptor(msgspec.structs.replace(descriptor(), checksum=b"")))


def test_oversized_descriptor_is_refused_unread():
    with pytest.raises(TransferError, match="too long"):
        decode_descriptor(bytes((1 << 20) + 1))


def test_unequal_pool_sizes_are_compatible():
    check_compatible(descriptor(), descriptor(worker_id="p-2", num_blocks=128))


def test_refusal_names_the_fields_that_differ():
    other = descriptor(worker_id="p-2", kv_signature="model=abc;kv_dtype=bfloat16;block_size=32")
    with pytest.raises(IncompatibleError) as refusal:
        check_compatible(descriptor(), other)
    assert "kv_dtype: float32 here, bfloat16 there" in str(refusal.value)
    assert "block_size: 16 here, 32 there" in str(refusal.value)
    assert "model:" not in str(refusal.value)


def test_unequal_block_bytes_are_refused_even_with_equal_signatures():
    with pytest.raises(IncompatibleError, match="4096 bytes here, 8192 there"):
        check_compatible(descriptor(), descriptor(worker_id="p-2", block_bytes=8192))
