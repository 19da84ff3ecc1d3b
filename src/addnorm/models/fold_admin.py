"""Fold the ω of an Admin model into its weights: a plain post-norm model results."""

import torch
from torch import Tensor, nn

from addnorm.errors import ConfigError
from addnorm.layers.addnorm import Admin, Post
from addnorm.layers.stack import Stack
from addnorm.models.build import Model, build


@torch.no_grad()
def fold(model: Model) -> Model:
    """Return a post-norm model that computes the same function as an Admin model.

    N(ω ⊙ x + F(x)): the gain and offset of the preceding norm are multiplied by ω, so that its
    output is ω ⊙ x, and the matrices of F that read x are divided by ω. The first box has no
    preceding norm: its ω becomes the `input_gain` of the folded model. Liu et al. 2020, §4.3.

    Parameters
    ----------
    model : a model of addnorm=admin with norm=layer or norm=rms; it is not changed

    Examples
    --------
    >>> from addnorm import measure_, presets
    >>> model = build(presets.gpt2(vocab=20, width=16, depth=2, heads=2, addnorm="admin")).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> omegas = measure_(model, lambda: model(ids))
    >>> torch.allclose(fold(model)(ids), model(ids), atol=1e-5)
    True
    """
    config = model.config
    for name in {config.addnorm, config.decoder_addnorm or config.addnorm} - {"admin"}:
        raise ConfigError(f"only addnorm=admin can be folded: got {name!r}.")
    if config.norm not in ("layer", "rms"):
        raise ConfigError(
            f"folding needs a norm with a gain for each channel: norm={config.norm}. "
            "It works with layer and rms."
        )
    like = next(model.parameters())
    folded = build(
        config.replace(addnorm="post", addnorm_options={"input_gain": True}, decoder_addnorm=None)
    ).to(like)
    source = model.state_dict()
    folded.load_state_dict({name: source.get(name, t) for name, t in folded.state_dict().items()})
    for old, new in zip(_stacks(model), _stacks(folded), strict=True):
        _fold_stack_(old, new)
    return folded.train(model.training)


def _fold_stack_(old: Stack, new: Stack) -> None:
    omegas = [_omega(box) for _, box in old.steps()]
    assert isinstance(new.ends, Post.ends)
    assert new.ends.gain is not None
    if omegas:
        new.ends.gain.copy_(omegas[0])
    for i, (sublayer, box) in enumerate(new.steps()):
        sublayer.input.weight.div_(omegas[i])
        for parameter in box.norm.parameters():
            if i + 1 < len(omegas):
                parameter.mul_(omegas[i + 1])


def _omega(box: nn.Module) -> Tensor:
    assert isinstance(box, Admin)
    if bool((box.omega == 0).any()):
        raise ConfigError("an ω of exactly 0 cannot be folded: the branch would be divided by it.")
    return box.omega


def _stacks(model: nn.Module) -> list[Stack]:
    return [module for module in model.modules() if isinstance(module, Stack)]
