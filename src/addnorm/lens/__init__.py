"""The lens: why a model answers as it does; from outside, for every mode and arrangement."""

from addnorm.lens.attention import head_statistics, rollout
from addnorm.lens.attribution import integrated_gradients
from addnorm.lens.look import Look, look
from addnorm.lens.patching import ablate, patch
from addnorm.lens.readout import attribute_logits, logit_lens
from addnorm.lens.stream import decompose

__all__ = [
    "Look",
    "ablate",
    "attribute_logits",
    "decompose",
    "head_statistics",
    "integrated_gradients",
    "logit_lens",
    "look",
    "patch",
    "rollout",
]
