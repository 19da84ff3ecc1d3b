"""The tuned lens: a small affine map for each depth, so that early layers can be read.

    logits_l = head(h_l + A_l h_l + b_l),   trained to minimise KL(final ‖ logits_l)

h_l is the stream after box l, closed by the arrangement's own ends. Belrose et al. 2023
(2303.08112), §2. With A = b = 0, where training starts, it is the logit lens.
"""

import time
from collections.abc import Iterable
from itertools import cycle

import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.lens.look import Look, look
from addnorm.lens.places import ModelInputs, find_sides, find_sublayers, require_eval
from addnorm.lens.readout import LensTable, apply_head, close_stream, streams_of


class TunedLens(nn.Module):
    """Affine maps of the stream, one for the input and one after each box but the last."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        require_eval(model, "a tuned lens")
        self.side = list(find_sides(model))[-1]
        names = [step.name for step in find_sublayers(model) if step.side == self.side]
        self.places = ("input", *names)
        width, like = find_sublayers(model)[-1].box.place.width, next(model.parameters())
        self.maps = nn.ModuleList(
            nn.Linear(width, width, dtype=like.dtype, device=like.device) for _ in names
        )
        for each in self.maps.parameters():
            nn.init.zeros_(each)

    def read(self, seen: Look) -> Tensor:
        """Return the logits after every box, (places, batch, ...); the last row is the model's."""
        streams = streams_of(seen, self.side)
        rows = []
        for place, stream in enumerate(streams.values()):
            hidden = close_stream(seen, self.side, stream)
            if place < len(self.maps):
                hidden = hidden + self.maps[place](hidden)
            rows.append(apply_head(seen, hidden))
        return torch.stack(rows)

    def table(self, model: nn.Module, inputs: ModelInputs) -> LensTable:
        """Return what the model would predict if it ended after each box."""
        with torch.no_grad():
            return LensTable(names=self.places, logits=self.read(self._look(model, inputs)))

    def _look(self, model: nn.Module, inputs: ModelInputs) -> Look:
        prefix = f"{self.side}." if self.side else ""
        return look(model, inputs, f"stream:{prefix}*")


def fit_tuned_lens(
    model: nn.Module,
    batches: Iterable[ModelInputs],
    *,
    steps: int = 250,
    rate: float = 1e-3,
    seconds: float = 60.0,
) -> TunedLens:
    """Return a tuned lens for a model, trained on inputs without targets.

    Parameters
    ----------
    model
        A model in evaluation mode; its weights do not change.
    batches
        ModelInputs; repeated if there are fewer than steps.
    steps
        Steps of Adam.
    rate
        Its learning rate.
    seconds
        Time after which training ends in any case.
    """
    lens, given = TunedLens(model), list(batches)
    if not given:
        raise InputError("a tuned lens needs one batch of inputs or more: got none.")
    optimizer = torch.optim.Adam(lens.parameters(), lr=rate)
    end = time.monotonic() + seconds
    for step, inputs in enumerate(cycle(given)):
        if step == steps or time.monotonic() > end:
            break
        seen = lens._look(model, inputs)
        logits = lens.read(seen)
        final = logits[-1].detach().log_softmax(dim=-1)
        here = logits[:-1].log_softmax(dim=-1)
        loss = (final.exp() * (final - here)).sum(dim=-1).mean()
        weights = list(lens.parameters())
        for weight, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = grad
        optimizer.step()
    return lens
