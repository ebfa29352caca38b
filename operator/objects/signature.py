"""Which workers of a service may exchange KV blocks, as far as the spec can tell.

Workers compare their full KV signature, made from the loaded model, before any hand-off. This digest of the fields
that go into it changes whenever that one does; the operator needs it before any worker runs, to roll both pools in
pairs. Pure.
"""

from __future__ import annotations

from pdserve.operator.api.spec import PoolSpec, ServiceSpec
from pdserve.operator.digest import digest_of
from pdserve.operator.names import DECODE, PREFILL


def kv_signature(spec: ServiceSpec, role: str, image: str) -> str:
    """KV signature of one pool's workers; the image counts, since another version may lay KV out differently."""
    model, engine = spec.model, spec.pools[role].engine
    return digest_of(
        [
            image,
            model.source,
            model.revision,
            model.dtype,
            model.quantization,
            _kv_dtype(spec.pools[role]),
            engine.block_size,
        ]
    )


def _kv_dtype(pool: PoolSpec) -> list[str | bool]:
    # `auto` follows the device: a GPU keeps the model's type, a CPU computes in float32.
    kv_dtype = pool.engine.kv_dtype
    return [kv_dtype, pool.accelerator is not None] if kv_dtype == "auto" else [kv_dtype]


def mismatch(spec: ServiceSpec, image: str) -> str | None:
    """Why the two pools of this spec could never exchange blocks; None when they can."""
    if kv_signature(spec, PREFILL, image) == kv_signature(spec, DECODE, image):
        return None
    return (
        "prefill and decode would never share KV blocks: engine.blockSize and engine.kvDtype must be equal in both "
        "pools, and with kvDtype auto both or neither need an accelerator"
    )
