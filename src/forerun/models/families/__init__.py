"""The families of decoders that run natively, a file each.

Knows: the list. To add a family: write its file, add it here, add it to tests/models/factory.py.
"""

from __future__ import annotations

from forerun.models.families.deepseek_v3 import DEEPSEEK_V3
from forerun.models.families.deepseek_v32 import DEEPSEEK_V32
from forerun.models.families.glm4_moe import GLM4_MOE
from forerun.models.families.glm4_moe_lite import GLM4_MOE_LITE
from forerun.models.families.gpt_oss import GPT_OSS
from forerun.models.families.llama import LLAMA
from forerun.models.families.mistral import MISTRAL
from forerun.models.families.mixtral import MIXTRAL
from forerun.models.families.phi3 import PHI3
from forerun.models.families.qwen2 import QWEN2
from forerun.models.families.qwen2_moe import QWEN2_MOE
from forerun.models.families.qwen3 import QWEN3
from forerun.models.families.qwen3_moe import QWEN3_MOE
from forerun.models.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        PHI3,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        GPT_OSS,
        GLM4_MOE,
        GLM4_MOE_LITE,
    )
}
