"""Writes the demo model at other precisions, as files for llama.cpp.

`python -m benchmarks.peers.write_gguf SOURCE FILE PRECISION`

Every weight is widened from the source and written as fp32, bf16 or q8_0, so that all engines start from the same
numbers; metadata and tokenizer are copied.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

TYPES = {
    "fp32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
FILE_TYPES = {
    "fp32": gguf.LlamaFileType.ALL_F32,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
_OWN_FIELDS = ("GGUF.", "general.file_type", "general.quantization_version", "general.architecture")


def rewrite(source: Path, destination: Path, precision: str) -> Path:
    """Write `destination`, whole or not at all; returns it."""
    reader = gguf.GGUFReader(source)
    unfinished = destination.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith(_OWN_FIELDS):
            kind = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=kind)
    writer.add_file_type(FILE_TYPES[precision])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = TYPES[precision] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(destination)


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
