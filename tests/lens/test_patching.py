"""Ablation and patching do what they say, to the right part, and find planted parts."""

import pytest
import torch

from addnorm.errors import InputError
from addnorm.lens.look import look
from addnorm.lens.patching import (
    Edit,
    ablate,
    edited,
    list_places,
    logit_metric,
    patch,
    token_loss_metric,
)
from tests.conftest import close, inputs, make
from tests.lens.planted import PROMOTED, planted

IDS = torch.tensor([[4, 7, 3]])


def test_an_edit_replaces_one_head_at_some_positions() -> None:
    model, (ids,) = make("decoder"), inputs("decoder")
    plain = look(model, ids, "heads:decoder.0.attention").heads["decoder.0.attention"]
    with edited(model, [Edit(place="decoder.0.attention.1", positions=(2, -1))]):
        found = look(model, ids, "heads:decoder.0.attention").heads["decoder.0.attention"]
    zero = plain.clone()
    zero[:, [2, -1], 4:8] = 0
    assert torch.equal(found, plain) or torch.equal(found, zero)
    assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("addnorm", ("post", "pre", "hyper"))
def test_zeroing_a_sublayer_is_zeroing_its_output_weights(addnorm: str) -> None:
    model, batch = make("encoder-decoder", addnorm=addnorm), inputs("encoder-decoder")
    with edited(model, [Edit(place="decoder.1.memory")]):
        found = model(*batch)
    output = model.decoder.stack.blocks[1].sublayers["memory"].output  # type: ignore[union-attr]
    with torch.no_grad():
        output.weight.zero_()
        output.bias.zero_()
    close(found, model(*batch))


def test_zeroing_all_heads_leaves_the_offset_of_the_output() -> None:
    model, batch = make("decoder"), inputs("decoder")
    with edited(model, [Edit(place=f"decoder.0.attention.{h}") for h in range(4)]):
        found = look(model, batch, "branches:decoder.0.attention").branches["decoder.0.attention"]
    bias = model.decoder.stack.blocks[0].sublayers["attention"].output.bias  # type: ignore[union-attr]
    close(found, bias.expand_as(found))


def test_planted_parts_have_the_effects() -> None:
    model = planted()
    copied = ablate(model, IDS, logit_metric(7), method="zero")
    assert dict(copied.ranked())["decoder.0.attention.0"] == pytest.approx(-1.0)
    promoted = ablate(model, IDS, logit_metric(PROMOTED), method="zero")
    assert promoted.ranked()[0] == ("decoder.0.ffn", pytest.approx(-3.0))
    assert promoted.base == pytest.approx(3.0)


def test_the_ways_to_ablate() -> None:
    model, (ids,) = make("decoder"), inputs("decoder", 4)
    metric = token_loss_metric(ids.roll(-1, dims=1))
    base = float(metric(model(ids)).detach())
    for method in ("zero", "mean", "resample"):
        effects = ablate(model, ids, metric, method=method)
        assert effects.names == tuple(list_places(model)) and effects.base == pytest.approx(base)
        assert bool(effects.values.abs().gt(0).all())
    # Resampling from equal rows changes nothing.
    same = ablate(model, ids[:1].expand(4, -1), metric, method="resample")
    close(same.values, torch.zeros(len(same.values)), 1e-6)
    # The mean over a reference of one position is what was written there.
    single = ablate(model, ids[:1, :1], logit_metric(3), method="mean")
    close(single.values, torch.zeros(len(single.values)), 1e-6)


def test_a_reference_may_have_another_number_of_rows() -> None:
    model, (ids,), (other,) = make("decoder"), inputs("decoder", 1), inputs("decoder", 3)
    metric, place = logit_metric(3), "decoder.1.attention.2"

    for reference in (other, (other,), other[:1], {"tokens": other}):
        rows = reference["tokens"] if isinstance(reference, dict) else reference
        rows = rows if isinstance(rows, torch.Tensor) else rows[0]
        found = ablate(model, ids, metric, places=[place], method="resample", reference=reference)
        value = look(model, rows[-1:], "heads:decoder.1.attention").heads["decoder.1.attention"]
        with edited(model, [Edit(place=place, value=value[..., 8:12])]):
            expected = float(metric(model(ids)).detach()) - found.base
        assert float(found.values) == pytest.approx(expected, rel=1e-6)
    mean = ablate(model, ids, metric, places=[place], reference=other)
    assert float(mean.values) != 0
    two = ablate(model, other, metric, places=[place], method="resample", reference=ids)
    assert two.values.shape == (1,)
    with pytest.raises(InputError, match=r"got 3 rows of \[\(4,\)\], and inputs of \[\(6,\)\]"):
        ablate(model, ids, metric, method="resample", reference=other[:, :4])


def test_patterns_name_heads_and_sublayers() -> None:
    model, ids = make("decoder"), torch.tensor([[1, 2]])
    found = ablate(model, ids, logit_metric(3), places=["*.1.attention.*", "*.ffn"], method="zero")
    heads = [f"decoder.1.attention.{head}" for head in range(4)]
    assert list(found.names) == [*heads, "decoder.0.ffn", "decoder.1.ffn"]


def test_patching_restores_what_was_corrupted() -> None:
    model, corrupted = planted(), torch.tensor([[4, 2, 3]])
    found = patch(model, IDS, corrupted, logit_metric(7), by_position=True)
    table = dict(zip(found.names, found.values.tolist(), strict=True))
    assert table["decoder.0.attention.0"] == pytest.approx([0, 0, 1])  # copied at the last position
    assert table["decoder.0.ffn"] == pytest.approx([0, 0, 0])
    whole = patch(model, IDS, corrupted, logit_metric(7), places=["*.attention.0"])
    assert whole.values.tolist() == pytest.approx([1.0])


def test_sides_of_other_lengths_are_patched_too() -> None:
    model = make("encoder-decoder")
    clean, corrupted = inputs("encoder-decoder", 1), inputs("encoder-decoder", 1)
    found = patch(model, clean, corrupted, logit_metric(3), places=["*.0.ffn"], by_position=True)
    assert found.values.shape == (2, 8)
    assert bool(found.values[1, 6:].isnan().all()) and bool(found.values[0].isfinite().all())


def test_mistakes_are_explained() -> None:
    model, (ids,) = make("decoder"), inputs("decoder", 1)
    with pytest.raises(InputError, match="method must be one of zero, mean, resample: got 'one'"):
        ablate(model, ids, logit_metric(1), method="one")
    with pytest.raises(InputError, match="two rows or more"):
        ablate(model, ids, logit_metric(1), method="resample")
    with pytest.raises(InputError, match="same shapes"):
        patch(model, ids, ids[:, 1:], logit_metric(1))
    with pytest.raises(InputError, match="must differ in the metric"):
        patch(model, ids, ids, logit_metric(1))
    with (
        pytest.raises(InputError, match=r"no place 'decoder\.9\.ffn'"),
        edited(model, [Edit(place="decoder.9.ffn")]),
    ):
        pass
    with (
        pytest.raises(InputError, match="has 4 heads"),
        edited(model, [Edit(place="decoder.0.attention.4")]),
    ):
        pass


def test_positions_that_do_not_exist_are_refused() -> None:
    model, (ids,) = make("decoder"), inputs("decoder")
    metric = logit_metric(3)
    last, same = (ablate(model, ids, metric, positions=[p]).values for p in (-1, 5))
    assert torch.equal(last, same)
    for wrong in ([6], [-7], []):
        with pytest.raises(InputError, match="positions must be one or more of 0 to 5"):
            ablate(model, ids, metric, positions=wrong)
