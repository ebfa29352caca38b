"""Reads a Llama-like checkpoint from safetensors and packs it for the CPU kernels; transformers is never imported.

Weights become fp32, bf16 or int8 (symmetric, one scale per output row). Packed matrices share one piece of memory:
a mapping of our own that asks for huge pages, or a file (packed_file.py). Embedding rows stay in the mapped
checkpoint when its dtype allows: only rows that occur are read.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pdserve.engine.executors.cpu.layout import WeightLayout, padded_columns, padded_intermediate
from pdserve.engine.executors.cpu.packed_file import PackedMemory
from pdserve.engine.executors.cpu.shape import CpuShape
from pdserve.errors import ModelError
from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.models.weight_files import find_weights

_SOURCE_TYPES = {torch.float32: cpu_ops.F32, torch.bfloat16: cpu_ops.BF16, torch.float16: cpu_ops.F16}
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_Place = tuple[str, int, int, int, int]
"""Tensor name, rows, group, stride, offset: where a matrix goes among packed columns, as in `cpu_ops.pack`."""


def map_memory(num_bytes: int) -> Tensor:
    """A zeroed uint8 tensor on memory of its own, in huge pages where the system grants them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Private: a shared mapping is kept in files of the memory file system, which has no huge pages by default.
        mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
    else:
        mapping = mmap.mmap(-1, max(num_bytes, 1))
    return torch.frombuffer(mapping, dtype=torch.uint8)


class Checkpoint:
    """Named tensors over one or several safetensors files, mapped, not copied.

    Raises:
        ModelError: the folder has no safetensors weights, or a file or a tensor is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        weights = find_weights(path)
        if not weights.is_safetensors:
            raise ModelError(f"{path} has no *.safetensors weights; convert the model with save_pretrained first")
        tensors = weights.tensors()
        opened: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in weights.files}
        self._files = {name: opened[file] for name, file in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def path(self) -> Path:
        """The model folder that it was read from."""
        return self._path

    @property
    def names(self) -> frozenset[str]:
        """Names of all its tensors."""
        return frozenset(self._files)

    def get(self, name: str) -> Tensor:
        """Read one tensor by name, contiguous.

        Raises:
            ModelError: it is missing or of a dtype that is no float.
        """
        if name not in self._files:
            raise ModelError(f"{self._path} lacks the tensor {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tensor.dtype not in _SOURCE_TYPES:
            raise ModelError(f"tensor {name} is {tensor.dtype}; the CPU kernels read float32, bfloat16 and float16")
        return tensor.contiguous()


@dataclass(frozen=True, slots=True)
class PackedModel:
    """The model as the kernels read it, and everything its addresses point to."""

    model: cpu_ops.Model
    owners: tuple[object, ...]
    num_bytes: int
    """Bytes that the packed weights take."""


def pack_model(
    checkpoint: Checkpoint,
    shape: CpuShape,
    *,
    layout: WeightLayout,
    kv_dtype: torch.dtype,
    block_size: int,
    rope: tuple[Tensor, Tensor],
    num_threads: int,
    memory: PackedMemory | None = None,
) -> PackedModel:
    """Pack every matrix of a model.

    Args:
        layout: the one that the context which computes asks for.
        kv_dtype: float32 or bfloat16.
        rope: cosines and sines `[positions, head_dim / 2]`.
        memory: of `packed_bytes`, perhaps filled by an earlier call with the same arguments; None: our own.

    Raises:
        ModelError: a tensor is missing or has an unexpected shape.
    """
    packer = _Packer(checkpoint, shape, layout, num_threads, memory or own_memory(layout.packed_bytes(shape)))
    layers = (cpu_ops.Layer * shape.num_layers)(*(packer.layer(index) for index in range(shape.num_layers)))
    embed = checkpoint.get("model.embed_tokens.weight")
    # Physical tensors win, as in transformers: a head of its own is used even if the configuration calls it tied.
    is_shared = shape.is_tied and "lm_head.weight" not in checkpoint
    head_name = "model.embed_tokens.weight" if is_shared else "lm_head.weight"
    head = packer.matrix([head_name], [shape.vocab_size], shape.hidden_size)
    embed = embed.float() if embed.dtype == torch.float16 else embed
    final_norm = packer.vector("model.norm.weight", shape.hidden_size)
    packer.refuse_unread()
    model = cpu_ops.Model(
        num_layers=shape.num_layers,
        hidden=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        weight_type=layout.packed_type,
        kv_type=_SOURCE_TYPES[kv_dtype],
        embed_type=_SOURCE_TYPES[embed.dtype],
        norm_eps=shape.norm_eps,
        softmax_scale=shape.head_dim**-0.5,
        embed=embed.data_ptr(),
        final_norm=final_norm,
        head=head,
        rope_cos=rope[0].data_ptr(),
        rope_sin=rope[1].data_ptr(),
        layers=layers,
    )
    return PackedModel(model, (embed, layers, *rope, *packer.owners), packer.num_bytes)


class _Packer:
    def __init__(
        self, checkpoint: Checkpoint, shape: CpuShape, layout: WeightLayout, num_threads: int, memory: PackedMemory
    ) -> None:
        self._checkpoint = checkpoint
        self._shape = shape
        self._layout = layout
        self._num_threads = num_threads
        self._memory = memory
        self._places: set[str] = set()
        self.num_bytes = 0
        self.owners: list[object] = [memory.owner]

    def layer(self, index: int) -> cpu_ops.Layer:
        shape, prefix = self._shape, f"model.layers.{index}."
        attention = prefix + "self_attn."
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        qkv_names = [f"{attention}{name}_proj.weight" for name in "qkv"]
        qk_norms = {
            name: self.vector(f"{attention}{name}.weight", shape.head_dim)
            for name in ("q_norm", "k_norm")
            if shape.has_qk_norm
        }
        return cpu_ops.Layer(
            qkv=self.matrix(qkv_names, [heads, kv_heads, kv_heads], shape.hidden_size),
            o=self.matrix([f"{attention}o_proj.weight"], [shape.hidden_size], heads),
            gate_up=self._gate_up(prefix + "mlp."),
            down=self._down(f"{prefix}mlp.down_proj.weight"),
            attention_norm=self.vector(prefix + "input_layernorm.weight", shape.hidden_size),
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight", shape.hidden_size),
            window=shape.windows[index],
            **qk_norms,
        )

    def matrix(self, names: Sequence[str], rows: Sequence[int], k: int) -> cpu_ops.Matrix:
        """Matrices `[rows, k]` below each other."""
        offsets = [sum(rows[:i]) for i in range(len(rows))]
        places = [(name, n, n, 0, offset) for name, n, offset in zip(names, rows, offsets, strict=True)]
        return self._pack(places, sum(rows), k, k)

    def _down(self, name: str) -> cpu_ops.Matrix:
        """Its k is as wide as the gate's whole groups."""
        rows, k = self._shape.hidden_size, self._shape.intermediate_size
        return self._pack([(name, rows, rows, 0, 0)], rows, k, padded_intermediate(self._shape))

    def _gate_up(self, prefix: str) -> cpu_ops.Matrix:
        rows, group = self._shape.intermediate_size, cpu_ops.GATE_GROUP
        columns = 2 * padded_intermediate(self._shape)
        places = [
            (f"{prefix}gate_proj.weight", rows, group, 2 * group, 0),
            (f"{prefix}up_proj.weight", rows, group, 2 * group, group),
        ]
        return self._pack(places, columns, self._shape.hidden_size, self._shape.hidden_size)

    def _pack(self, places: list[_Place], columns: int, k: int, k_packed: int) -> cpu_ops.Matrix:
        n = padded_columns(columns)
        panels = self._take(self._layout.matrix_bytes(columns, k_packed))
        scale = self._take(self._layout.scale_bytes(columns)) if self._layout.has_scales else 0
        bias = self._bias(places, n)
        for name, rows, group, stride, offset in places if not self._memory.is_filled else ():
            source = self._checkpoint.get(name)
            if tuple(source.shape) != (rows, k):
                raise ModelError(f"tensor {name} has shape {tuple(source.shape)}, config.json says {(rows, k)}")
            cpu_ops.pack(
                *(source.data_ptr(), _SOURCE_TYPES[source.dtype], rows, k),
                panels=panels,
                weight_type=self._layout.packed_type,
                k_packed=k_packed,
                num_threads=self._num_threads,
                scale=scale,
                group=group,
                stride=stride,
                offset=offset,
            )
        return cpu_ops.Matrix(panels=panels, scale=scale or None, bias=bias, k=k_packed, n=n)

    def _bias(self, places: list[_Place], n: int) -> int | None:
        named = [(place[0].replace(".weight", ".bias"), place) for place in places]
        expected = [name for name, _ in named if name.split(".")[-2] in self._shape.biased_projections]
        self._places.update(name for name, *_ in places)
        self._places.update(expected)
        if not expected:
            return None
        bias = torch.zeros(n)
        for name, (_, rows, group, stride, offset) in named:
            row = torch.arange(rows)
            bias[row // group * stride + offset + row % group] = self._checkpoint.get(name).float()
        self.owners.append(bias)
        return bias.data_ptr()

    def vector(self, name: str, size: int) -> int:
        """An fp32 copy of a norm's weight."""
        self._places.add(name)
        source = self._checkpoint.get(name)
        if source.numel() != size:
            raise ModelError(f"tensor {name} has {source.numel()} values, config.json says {size}")
        copy = source.to(torch.float32, copy=True)
        self.owners.append(copy)
        return copy.data_ptr()

    def refuse_unread(self) -> None:
        """Refuse a checkpoint with weights in a layer, or at the head, that had no place."""
        for name in sorted(self._checkpoint.names - self._places):
            layer = _OF_LAYER.match(name)
            is_ours = name.startswith("lm_head.") or (layer and int(layer[1]) < self._shape.num_layers)
            if is_ours and name.endswith((".weight", ".bias")):
                raise ModelError(
                    f"{self._checkpoint.path} has the tensor {name}, for which its config.json leaves no room: "
                    "correct the configuration (for example model_type, attention_bias or mlp_bias)"
                )

    def _take(self, num_bytes: int) -> int:
        address = self._memory.address + self.num_bytes
        self.num_bytes += num_bytes
        assert self.num_bytes <= self._memory.num_bytes, (self.num_bytes, self._memory.num_bytes)
        return address


def own_memory(num_bytes: int) -> PackedMemory:
    """Memory that no other process maps, in huge pages where the system grants them."""
    memory = map_memory(num_bytes)
    return PackedMemory(memory.data_ptr(), memory.numel(), is_filled=False, owner=memory)
