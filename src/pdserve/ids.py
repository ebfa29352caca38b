"""Names that look alike, each a type of its own: mixing two of them is an error of types, not of a running service.

They are texts, and stay texts on the bus. A plain `str` becomes an id where it is made, and where it enters.
"""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""Names one request of a client; made by the gateway, the same in every process."""
Nonce = NewType("Nonce", str)
"""Names one attempt of a sequence; unguessable, so that no other attempt is taken for it."""
GatewayId = NewType("GatewayId", str)
"""Names one gateway process; never used again."""
WorkerId = NewType("WorkerId", str)
"""Names one worker of a service, across its restarts."""
GenerationId = NewType("GenerationId", str)
"""Names one life of a process; another one whenever it starts or thaws."""
Fingerprint = NewType("Fingerprint", str)
"""Names a model by its weights, tokenizer and template: equal ones may continue each other's sequences."""
KvSignature = NewType("KvSignature", str)
"""Names a model with the geometry of its KV blocks: workers with equal ones may exchange blocks."""
