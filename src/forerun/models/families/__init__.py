"""The families of decoders that run natively, a file each.

Knows: the list. To add a family: write its file, add it here, add it to tests/models/factory.py.
"""

from __future__ import annotations

from forerun.models.families.cohere2 import COHERE2
from forerun.models.families.deepseek_v3 import DEEPSEEK_V3
from forerun.models.families.deepseek_v32 import DEEPSEEK_V32
from forerun.models.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from forerun.models.families.exaone4 import EXAONE4
from forerun.models.families.falcon_h1 import FALCON_H1
from forerun.models.families.gemma2 import GEMMA2
from forerun.models.families.gemma3 import GEMMA3_TEXT
from forerun.models.families.gemma4 import GEMMA4_TEXT
from forerun.models.families.glm4 import GLM4
from forerun.models.families.glm4_moe import GLM4_MOE
from forerun.models.families.glm4_moe_lite import GLM4_MOE_LITE
from forerun.models.families.gpt_oss import GPT_OSS
from forerun.models.families.granite import GRANITE
from forerun.models.families.granite_hybrid import GRANITE_HYBRID
from forerun.models.families.kimi_linear import KIMI_LINEAR
from forerun.models.families.lfm2 import LFM2, LFM2_MOE
from forerun.models.families.llama import LLAMA
from forerun.models.families.llama4 import LLAMA4_TEXT
from forerun.models.families.longcat_flash import LONGCAT_FLASH
from forerun.models.families.mimo import MIMO
from forerun.models.families.mimo_v2 import MIMO_V2_FLASH
from forerun.models.families.minimax_m2 import MINIMAX_M2
from forerun.models.families.ministral3 import MINISTRAL3
from forerun.models.families.mistral import MISTRAL
from forerun.models.families.mixtral import MIXTRAL
from forerun.models.families.nemotron_h import NEMOTRON_H
from forerun.models.families.olmo2 import OLMO2, OLMO3
from forerun.models.families.phi3 import PHI3
from forerun.models.families.qwen2 import QWEN2
from forerun.models.families.qwen2_moe import QWEN2_MOE
from forerun.models.families.qwen3 import QWEN3
from forerun.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from forerun.models.families.qwen3_moe import QWEN3_MOE
from forerun.models.families.qwen3_next import QWEN3_NEXT
from forerun.models.families.smollm3 import SMOLLM3
from forerun.models.families.step3p5 import STEP3P5
from forerun.models.family import Family

_WITH_SHARED = (ERNIE4_5_MOE, DEEPSEEK_V3, DEEPSEEK_V32, GLM4_MOE, GLM4_MOE_LITE, LLAMA4_TEXT, STEP3P5, LONGCAT_FLASH)
_MIXTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, GPT_OSS, MINIMAX_M2, MIMO_V2_FLASH, *_WITH_SHARED)
_LLAMA_LIKE = (LLAMA, MISTRAL, MINISTRAL3, QWEN2, MIMO, QWEN3, PHI3, GRANITE, SMOLLM3, GLM4, ERNIE4_5)
_OTHERS = (GEMMA2, GEMMA3_TEXT, GEMMA4_TEXT, OLMO2, OLMO3, EXAONE4, COHERE2)
_HYBRIDS = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, KIMI_LINEAR, LFM2, LFM2_MOE, GRANITE_HYBRID, FALCON_H1, NEMOTRON_H)
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*_LLAMA_LIKE, *_OTHERS, *_MIXTURES, *_HYBRIDS)}
