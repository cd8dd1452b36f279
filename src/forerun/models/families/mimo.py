"""MiMo-7B: Qwen2, with layers behind the last one that draft and that the model itself does not read.

Source: MiMo (2505.07608) and its modeling_mimo.py.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.models.families.qwen2 import QWEN2
from forerun.models.fields import words

MIMO = replace(QWEN2, model_type="mimo", fields=QWEN2.fields | words("attention_bias num_nextn_predict_layers"))
