"""Phi-3, Phi-3.5 and Phi-4: q, k, v and gate, up stored joined; partly rotated heads; optionally a sliding window.

Long-context checkpoints (rope scaling `longrope`) run within their original context, where one set of factors holds
for every position; beyond it transformers switches the factors of the whole sequence, which nothing that keeps
computed keys can follow.
"""

from __future__ import annotations

from forerun.models.family import Family, TensorNames
from forerun.models.fields import Fields


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    for name in ("full_attn_mod", "interpolate_factor"):  # fields of Phi-4-mini
        fields.expect(name, 1)
    return (fields.integer("sliding_window", default=0, minimum=0),) * num_layers


PHI3 = Family(
    model_type="phi3",
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    fields=frozenset({"sliding_window", "full_attn_mod", "interpolate_factor"}),
    names=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    partial_rotary=True,
    rope_kinds=("default", "longrope"),
    windows=_windows,
)
