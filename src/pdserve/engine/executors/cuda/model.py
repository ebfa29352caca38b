"""Model code for the CUDA executor: a fused decoder for Llama-like models, stock transformers modules for others.

The fused decoder takes the weights out of a transformers model and swaps its modules: one product for Q, K and V, one
for gate and up, RMSNorm with the residual addition, RoPE together with the KV write. It never waits for the device,
so that its decode steps can be captured. Others keep their modules and get our attention and KV write alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.executors.cuda.batch import StepLayout, StepTensors
from pdserve.engine.executors.cuda.kernels import KernelSet
from pdserve.engine.executors.stock.attention_route import ProbeContext, connect

_FUSED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_STEADY_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""A position's angles do not depend on the batch."""


def why_not_fused(config: Any) -> str | None:
    """Why the fused decoder does not serve this transformers text configuration; None when it does."""
    if config.model_type not in _FUSED_MODEL_TYPES:
        return f"model type {config.model_type!r} has modules of its own"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act!r} is not SwiGLU"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in _STEADY_ROPE:
        return f"RoPE of type {rope.get('rope_type')!r} depends on the batch"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "RoPE rotates a part of each head"
    return None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends."""

    scaling: float
    sliding_window: int | None
    softcap: float | None

    @classmethod
    def of(cls, head_dim: int, options: dict[str, Any]) -> AttentionOptions:
        """Read the options that a transformers attention module hands over."""
        scaling = options.get("scaling") or head_dim**-0.5
        return cls(float(scaling), options.get("sliding_window"), options.get("softcap"))


class OptionsProbe(ProbeContext):
    """A probe that learns how each layer attends, too."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[int, AttentionOptions] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Record how one layer attends, then do as `ProbeContext`."""
        self.options[layer] = AttentionOptions.of(query.shape[-1], options)
        return super().attend(layer, query, key, value, options)


def attend(
    kernels: KernelSet,
    query: Tensor,
    kv_layer: Tensor,
    step: StepTensors,
    layout: StepLayout,
    how: AttentionOptions,
) -> Tensor:
    """Attention of a step `[num_tokens, num_heads, head_dim]`, its own KV written already."""
    options = {"scaling": how.scaling, "sliding_window": how.sliding_window, "softcap": how.softcap}
    split = layout.num_decodes
    parts = []
    if split:
        parts.append(
            kernels.paged_decode_attention(
                query[:split],
                kv_layer,
                step.block_tables[:split],
                step.context_lens[:split],
                max_context_len=layout.max_decode_context,
                **options,
            )
        )
    if layout.num_prefills:
        parts.append(
            kernels.paged_prefill_attention(
                query[split:],
                kv_layer,
                step.query_starts,
                step.context_lens[split:],
                step.block_tables[split:],
                max_query_len=layout.max_prefill_queries,
                **options,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class StockDecoder:
    """A transformers model whose attention is ours; see `PagedContext` for how it gets here."""

    is_fused = False

    def __init__(self, model: Any, kernels: KernelSet) -> None:
        self._model, self._kernels = model, kernels
        self._kv_cache: Tensor | None = None
        self._step: tuple[StepTensors, StepLayout] | None = None
        connect(model, self)

    def forward(self, step: StepTensors, layout: StepLayout, kv_cache: Tensor) -> Tensor:
        """Run one step; returns fp32 logits `[num_logits, vocab_size]`."""
        self._kv_cache, self._step = kv_cache, (step, layout)
        try:
            output = self._model(
                input_ids=step.token_ids[None],
                position_ids=step.positions[None],
                use_cache=False,
                logits_to_keep=step.logit_rows,
            )
        finally:
            self._kv_cache = self._step = None
        logits: Tensor = output.logits[0].float()
        return logits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Attend in one layer; the model's attention module calls this."""
        assert self._kv_cache is not None, "no step is running"
        assert self._step is not None, "no step is running"
        step, layout = self._step
        kv_layer = self._kv_cache[:, layer]
        self._kernels.write_kv(key, value, kv_layer, step.slot_mapping)
        how = AttentionOptions.of(query.shape[-1], options)
        return attend(self._kernels, query, kv_layer, step, layout, how)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of one layer, merged."""

    input_norm: Tensor
    qkv: torch.nn.Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: torch.nn.Linear
    mlp_norm: Tensor
    gate_up: torch.nn.Linear
    down: torch.nn.Linear
    how: AttentionOptions


class FusedDecoder:
    """A Llama-like model with fused modules.

    Args:
        model: a transformers causal model that `why_not_fused` lets pass; its modules are taken apart.
        kernels: to call.
        max_model_len: tokens; the RoPE tables cover them.
        options: how each layer attends.
    """

    is_fused = True

    def __init__(
        self, model: Any, kernels: KernelSet, max_model_len: int, options: dict[int, AttentionOptions]
    ) -> None:
        config = model.config.get_text_config()
        self._kernels = kernels
        self._eps = float(config.rms_norm_eps)
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads = int(config.num_key_value_heads)
        body = model.model
        self._embedding: Tensor = body.embed_tokens.weight.detach()
        self._final_norm: Tensor = body.norm.weight.detach()
        self._head = model.lm_head
        positions = torch.arange(max_model_len, device=self._embedding.device)[None]
        cos, sin = body.rotary_emb(self._embedding[:1], positions)
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        self.layers = [_fuse_layer(layer, options[index]) for index, layer in enumerate(body.layers)]

    @torch.no_grad()
    def forward(self, step: StepTensors, layout: StepLayout, kv_cache: Tensor) -> Tensor:
        """Launch one step, never wait for it; returns fp32 logits `[num_logits, vocab_size]`."""
        hidden = F.embedding(step.token_ids, self._embedding)
        angles = self._cos[step.positions], self._sin[step.positions]
        residual = None
        for index, layer in enumerate(self.layers):
            normed, residual = self._kernels.rms_norm(hidden, layer.input_norm, self._eps, residual)
            hidden = self._attention(layer, normed, angles, step, layout, kv_cache[:, index])
            normed, residual = self._kernels.rms_norm(hidden, layer.mlp_norm, self._eps, residual)
            hidden = layer.down(self._kernels.swiglu(layer.gate_up(normed)))
        normed, _ = self._kernels.rms_norm(hidden, self._final_norm, self._eps, residual)
        logits: Tensor = self._head(normed[step.logit_rows])
        return logits.float()

    def _attention(
        self,
        layer: FusedLayer,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        step: StepTensors,
        layout: StepLayout,
        kv_layer: Tensor,
    ) -> Tensor:
        states = layer.qkv(normed).unflatten(1, (self._num_heads + 2 * self._num_kv_heads, -1))
        query, key, value = torch.split(states, [self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm_heads(query, layer.query_norm), self._norm_heads(key, layer.key_norm)
        query = self._kernels.rope_and_write_kv(query, key, value, *angles, kv_layer, step.slot_mapping)
        mixed = attend(self._kernels, query, kv_layer, step, layout, layer.how)
        hidden: Tensor = layer.output(mixed.flatten(1))
        return hidden

    def _norm_heads(self, states: Tensor, weight: Tensor) -> Tensor:
        normed, _ = self._kernels.rms_norm(states.reshape(-1, states.shape[2]), weight, self._eps)
        return normed.view(states.shape)


def _fuse_layer(layer: Any, how: AttentionOptions) -> FusedLayer:
    """Take a decoder layer apart; what was merged is freed."""
    attention, mlp = layer.self_attn, layer.mlp
    return FusedLayer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=_merge(attention, "q_proj", "k_proj", "v_proj"),
        query_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        output=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_merge(mlp, "gate_proj", "up_proj"),
        down=mlp.down_proj,
        how=how,
    )


@torch.no_grad()
def _merge(parent: Any, *names: str) -> torch.nn.Linear:
    """One linear layer in place of several on the same input."""
    parts = [getattr(parent, name) for name in names]
    weights = [part.weight for part in parts]
    has_bias = parts[0].bias is not None
    merged = torch.nn.Linear(
        weights[0].shape[1],
        sum(weight.shape[0] for weight in weights),
        bias=has_bias,
        device=weights[0].device,
        dtype=weights[0].dtype,
    )
    merged.weight.copy_(torch.cat(weights))
    if has_bias:
        merged.bias.copy_(torch.cat([part.bias for part in parts]))
    for name in names:
        setattr(parent, name, None)
    return merged.requires_grad_(False)
