"""How values of the cache are stored: element formats as data.

A format says how many values one stored element holds, how wide that element is, and which parameters (scales, zero
points) go with each vector of one head and token. Nothing else in kvcore knows the size of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.errors import PolicyError

__all__ = ["CACHE_FORMATS", "DTYPES", "PACKED_RECORDS", "ElementFormat", "PackedRecord", "cache_format", "model_dtype"]

#: Bytes of one element of each dtype that a tensor can have.
DTYPES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """One cache dtype. ``parameters`` are stored for each vector of one head and token, in the model's dtype."""

    name: str
    dtype: str
    values_per_element: int = 1
    parameters: int = 0

    def elements(self, values: int) -> int | None:
        """Stored elements of a vector of ``values`` values, or None if they do not fill whole elements."""
        return None if values % self.values_per_element else values // self.values_per_element


#: The float formats keep no scale, fp8 one scale for a whole tensor, which is not part of a block. int8 and int4 keep
#: a scale and a zero point a vector, in the model's dtype (InternLM/lmdeploy: quantised cache, `[..., 2]`).
CACHE_FORMATS = {
    name: ElementFormat(name, dtype, values, parameters)
    for name, dtype, values, parameters in (
        ("float32", "float32", 1, 0),
        ("float16", "float16", 1, 0),
        ("bfloat16", "bfloat16", 1, 0),
        ("fp8_e4m3", "float8_e4m3fn", 1, 0),
        ("fp8_e5m2", "float8_e5m2", 1, 0),
        ("int8", "int8", 1, 2),
        ("int4", "uint8", 2, 2),
        # PaddlePaddle/FastDeploy: static scales are the model's; block_wise_fp8 keeps one a vector.
        ("int8_static", "int8", 1, 0),
        ("int4_static", "uint8", 2, 0),
        ("fp8_block_wise", "float8_e4m3fn", 1, 1),
    )
}

_ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """A latent vector as one record of bytes: quantised values, their scales, padding, and an exact rotary part."""

    name: str
    bits: int
    group: int
    scale_bytes: int
    padding: int
    rope_bytes: int

    def nbytes(self, lora_width: int, rope_width: int) -> int:
        """Bytes of one token's record."""
        values = lora_width * self.bits // 8
        scales = lora_width // self.group * self.scale_bytes
        return values + scales + self.padding + rope_width * self.rope_bytes


#: 512 + 16 + 128 = 656 bytes for DeepSeek's 512 + 64 (vllm: fp8_ds_mla), 256 + 32 + 16 + 128 = 432 (nvfp4).
PACKED_RECORDS = {
    record.name: record
    for record in (
        PackedRecord("fp8_ds_mla", 8, 128, 4, 0, 2),
        PackedRecord("nvfp4_ds_mla", 4, 16, 1, 16, 2),
    )
}


def model_dtype(name: str, where: str) -> str:
    """The dtype that activations have; raises :class:`PolicyError` for anything but fp32, fp16 and bf16."""
    known = _ALIASES.get(name, name)
    if known not in ("float32", "float16", "bfloat16"):
        raise PolicyError(
            "unknown dtype of the model",
            code="KV-POL-030",
            where=where,
            got=name,
            expected="float32, float16 or bfloat16 (fp32, fp16, bf16)",
        )
    return known


def cache_format(name: str | None, dtype: str) -> ElementFormat:
    """The format of the cache: the model's ``dtype`` if ``name`` is None or ``auto``."""
    wanted = dtype if name is None or name == "auto" else _ALIASES.get(name, name)
    known = CACHE_FORMATS.get(wanted)
    if known is None:
        raise PolicyError(
            "unknown dtype of the cache",
            code="KV-POL-031",
            where="kv_cache_dtype",
            got=name,
            expected=", ".join(("auto", *sorted({*CACHE_FORMATS, "fp8"}))),
        )
    return known
