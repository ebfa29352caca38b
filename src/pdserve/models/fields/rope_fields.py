"""Every field of the rotary positions of a config.json (`rope_scaling`, `rope_parameters`); what each type needs."""

from __future__ import annotations

from pdserve.models.fields.treatment import Fields, each, harmless, refused, used

ROPE: Fields = {
    **each("rope_type type", used("how positions are stretched")),
    "rope_theta": used("the base of the angles"),
    "factor": used("how many times the context is stretched"),
    "original_max_position_embeddings": used("the context length before"),
    **each("low_freq_factor high_freq_factor", used("llama3: which waves are slowed")),
    **each("beta_fast beta_slow truncate", used("yarn: which waves are slowed")),
    **each(
        "attention_factor mscale mscale_all_dim", used("yarn and longrope: a factor on the angles' cosines and sines")
    ),
    **each(
        "short_factor long_factor", used("longrope: a factor of each wave; long texts are not served, see the context")
    ),
    "partial_rotary_factor": used("the share of a head that is rotated"),
    "finetuned": harmless("says how the model was made"),
    **each(
        "mrope_section mrope_interleaved alpha short_mscale long_mscale",
        refused("rotary positions that these families do not have", [], False, 1, 1.0),
    ),
}
"""What these fields are to all ten families."""

REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
"""Type → fields without which it means nothing."""
