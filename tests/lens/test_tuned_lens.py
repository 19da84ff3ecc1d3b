"""The tuned lens starts as the logit lens, ends with the model, and reads early layers better."""

import pytest
import torch

from addnorm.errors import InputError
from addnorm.lens.readout import logit_lens
from addnorm.lens.tuned_lens import TunedLens, fit_tuned_lens
from tests.conftest import close, draw, inputs, make


@pytest.mark.parametrize("addnorm", ("pre", "post", "dual", "hyper"))
def test_it_starts_as_the_logit_lens(addnorm: str) -> None:
    model, batch = make("decoder", addnorm=addnorm), inputs("decoder")
    plain, tuned = logit_lens(model, batch), TunedLens(model).table(model, batch)
    assert plain.names == tuned.names
    close(plain.logits, tuned.logits)


@pytest.mark.slow
@pytest.mark.trains
def test_training_brings_early_layers_closer_to_the_output() -> None:
    model = make("decoder", addnorm="pre")
    before = [p.clone() for p in model.parameters()]
    lens = fit_tuned_lens(model, [draw(8, 8) for _ in range(5)], steps=25, rate=0.02)
    test = draw(8, 8)
    plain, tuned = logit_lens(model, test).divergence(), lens.table(model, test).divergence()
    assert bool((tuned[:-1].mean(dim=(1, 2)) < plain[:-1].mean(dim=(1, 2))).all())
    close(lens.table(model, test).logits[-1], model(test).detach())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_mistakes_are_explained() -> None:
    with pytest.raises(InputError, match="one batch of inputs or more"):
        fit_tuned_lens(make("decoder"), [])
    with pytest.raises(InputError, match="evaluation mode"):
        TunedLens(make("decoder").train())
