"""A rehearsal is Adam on one batch, and is forgotten."""

import pytest
import torch

from addnorm.clinic.objective import objective
from addnorm.clinic.rehearsal import Rehearsal, rehearse
from tests.clinic.patients import decoder, ids


def test_a_rehearsal_is_adam_and_is_forgotten() -> None:
    model, batch = decoder().eval(), ids(4, 8)
    aim = objective(model, batch, None)
    before = [p.detach().clone() for p in model.parameters()]
    found = rehearse(model, batch, aim, lr=0.01, warmup=5, steps=6)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    losses = []
    for step in range(1, 7):
        loss = aim(model, batch)
        losses.append(float(loss.detach()))
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, step / 3)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    with torch.no_grad():
        losses.append(float(aim(model, batch)))
    assert found.losses == pytest.approx(losses, rel=1e-4)


def test_what_counts_as_learning() -> None:
    assert Rehearsal((4.0, 3.0, 2.0, 1.0), 0.5, 0.5).learns
    assert not Rehearsal((4.0, 3.0, 2.0, 1.0), 0.5, 0.01).learns
    assert not Rehearsal((4.0, 5.0, 6.0, 7.0), 0.5, 0.5).learns
    assert not Rehearsal((4.0, float("nan")), 0.5, 0.5).learns
    assert Rehearsal((4.0, 3.0, 2.0, 1.0), 0.5, 0.5).gain == 3.0
