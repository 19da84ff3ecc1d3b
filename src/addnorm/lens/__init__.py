"""The lens: why a model predicts what it predicts; from outside, for every mode and arrangement.

Examples
--------
>>> from addnorm import ModelConfig, build, lens
>>> model = build(ModelConfig(mode="decoder", vocab=9, width=8, heads=2, depth=2)).eval()
>>> ids = torch.tensor([[3, 1, 4]])
>>> tuple(lens.look(model, ids, "maps:decoder.1.attention").maps["decoder.1.attention"].shape)
(1, 2, 3, 3)
>>> lens.decompose(model, ids).error < 1e-5
True
"""

from addnorm.lens import circuits, columns, positions, tuned_lens
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
    "circuits",
    "columns",
    "decompose",
    "head_statistics",
    "integrated_gradients",
    "logit_lens",
    "look",
    "patch",
    "positions",
    "rollout",
    "tuned_lens",
]
