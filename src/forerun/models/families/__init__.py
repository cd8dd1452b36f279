"""The families of decoders that run natively, a file each.

Knows: the list. To add a family: write its file, add it here, add it to tests/models/factory.py.
"""

from __future__ import annotations

from forerun.models.families.llama import LLAMA
from forerun.models.families.mistral import MISTRAL
from forerun.models.families.phi3 import PHI3
from forerun.models.families.qwen2 import QWEN2
from forerun.models.families.qwen3 import QWEN3
from forerun.models.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3)
}  # fmt: skip
