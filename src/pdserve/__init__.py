"""pdserve serves a language model with prefill and decode in separate, separately scaled pools.

This package holds what every process shares. The five folders at the top of the repository
(gateway, prefill_worker, decode_worker, operator, kernels) appear here as links, so that every
import reads `pdserve.gateway.…`, wherever a file lives.
"""

__version__ = "0.1.0"
