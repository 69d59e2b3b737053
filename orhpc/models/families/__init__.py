"""Model families: tensor names, defaults of ``config.json``, and differences between layers; without torch.

To add a family:

1. Describe it as a :class:`~orhpc.models.families.family.Family`, in the file of its publisher's other
   families or in a new one.  Names and defaults are those of its class in transformers.  Start from the most
   similar row with :func:`dataclasses.replace`; a rule that several files need goes into ``layer_rules.py``.
2. Add it to ``FAMILIES`` below.
3. Add a tiny config to ``TINY`` in ``tests/model_configs.py``, and a real one with its published number of
   parameters to ``REAL``.  ``tests/unit/models/test_tensors.py`` compares the row with transformers, tensor
   by tensor; ``tests/unit/models/test_shape.py`` fails if a family has no config there.
4. For the Megatron backend, fill in :class:`~orhpc.models.families.family.MegatronTraits` and add the tiny
   config's name to ``FAMILIES`` in ``tests/megatron/test_layouts.py``, which compares log-probabilities and
   gradients with transformers and FSDP.  If megatron-core cannot build the family, say why in ``not_built``.
5. If packed attention lacks something that the class in transformers does, write an adapter in
   ``orhpc/train/attention`` and add it to ``ADAPTERS`` in ``adapters.py`` there.
   ``tests/unit/models/test_forward_check.py`` compares packed samples with transformers.

6. If it sees images, describe its tower (``vision``, :mod:`orhpc.models.families.vision`).
   ``tests/unit/models/test_images.py`` compares rendering, pixels and positions with its processor.

Other modules read fields of a row and never compare a family's name
(``tests/unit/models/test_family_names.py``).  Chat formats are independent of families
(:mod:`orhpc.models.chat_formats`).
"""

from __future__ import annotations

from orhpc.models.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V32
from orhpc.models.families.family import Family, Layer, MegatronTraits
from orhpc.models.families.gemma import GEMMA2, GEMMA3, GEMMA3_TEXT
from orhpc.models.families.glm import GLM4, GLM4_MOE, GLM4_MOE_LITE
from orhpc.models.families.llama import LLAMA
from orhpc.models.families.llama4 import LLAMA4, LLAMA4_TEXT
from orhpc.models.families.minimax import MINIMAX_M2
from orhpc.models.families.mistral import MISTRAL, MIXTRAL
from orhpc.models.families.qwen import QWEN2, QWEN2_5_VL, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_VL

__all__ = ["FAMILIES", "Family", "Layer", "MegatronTraits"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        GEMMA2,
        GEMMA3,
        GEMMA3_TEXT,
        GLM4,
        GLM4_MOE,
        GLM4_MOE_LITE,
        LLAMA,
        LLAMA4,
        LLAMA4_TEXT,
        MINIMAX_M2,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN2_5_VL,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        QWEN3_VL,
    )
}
"""By ``model_type``."""
