"""Descriptors on their way: sealing, encoding, and checking them before anything reaches native code.

NIXL destroys its entry of a known peer when it is handed truncated metadata, so nothing is handed on that does
not carry a matching checksum. A checksum is no signature: a process that may write the bus may announce workers.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from pdserve.errors import IncompatibleError, TransferError
from pdserve.models.identity import signature_difference
from pdserve.reasons import TransferReason
from pdserve.transfer.base import Descriptor

CHECKSUM_BYTES = 16
MAX_DESCRIPTOR_BYTES = 1 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Descriptor)


def checksum(descriptor: Descriptor) -> bytes:
    """BLAKE2b-128 over every field but the checksum itself."""
    bare = msgspec.structs.replace(descriptor, checksum=b"")
    return hashlib.blake2b(_encoder.encode(bare), digest_size=CHECKSUM_BYTES, person=b"pdserve-desc").digest()


def seal(descriptor: Descriptor) -> Descriptor:
    """The same descriptor with its checksum."""
    return msgspec.structs.replace(descriptor, checksum=checksum(descriptor))


def is_intact(descriptor: Descriptor) -> bool:
    """Whether the checksum matches the other fields."""
    return hmac.compare_digest(checksum(descriptor), descriptor.checksum)


def encode_descriptor(descriptor: Descriptor) -> bytes:
    """The descriptor in msgpack, as `WorkerRegistration.descriptors` carries it."""
    return _encoder.encode(descriptor)


def decode_descriptor(payload: bytes) -> Descriptor:
    """The inverse of `encode_descriptor`.

    Raises:
        TransferError: reason lookup: truncated, damaged, or not a descriptor.
    """
    if len(payload) > MAX_DESCRIPTOR_BYTES:
        raise TransferError(TransferReason.LOOKUP, f"a transport descriptor of {len(payload)} bytes is too long")
    try:
        descriptor = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise TransferError(
            TransferReason.LOOKUP, f"unreadable transport descriptor of {len(payload)} bytes: {error}"
        ) from error
    check_intact(descriptor)
    return descriptor


def check_intact(descriptor: Descriptor) -> None:
    """Refuse a damaged descriptor.

    Raises:
        TransferError: reason lookup.
    """
    if not is_intact(descriptor):
        raise TransferError(
            TransferReason.LOOKUP,
            f"the transport descriptor of {descriptor.peer} is damaged: its checksum does not match",
        )


def check_compatible(own: Descriptor, peer: Descriptor) -> None:
    """Refuse a peer whose blocks mean something else. Block pools of different size are fine.

    Raises:
        IncompatibleError: naming the fields that differ.
    """
    if own.kv_signature != peer.kv_signature:
        difference = signature_difference(own.kv_signature, peer.kv_signature)
        raise IncompatibleError(
            f"{own.peer} cannot take KV blocks from {peer.peer}: {difference}; start both with the same model, "
            "BLOCK_SIZE and KV_DTYPE"
        )
    if own.block_bytes != peer.block_bytes:
        raise IncompatibleError(
            f"{own.peer} cannot take KV blocks from {peer.peer}: a block has {own.block_bytes} bytes here, "
            f"{peer.block_bytes} there, though the KV signatures are equal"
        )
