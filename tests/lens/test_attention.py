"""Head statistics on maps that are known, rollouts against their formulas."""

import math

import pytest
import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.lens.attention import (
    gradient_rollout,
    head_statistics,
    rollout,
    weigh_maps,
)
from addnorm.lens.look import look
from addnorm.lens.patching import logit_metric
from tests.conftest import close, inputs, make
from tests.lens.planted import planted
from tests.lens.test_look import table_model, table_rows


def test_a_planted_head_is_found() -> None:
    model, ids = planted(), torch.tensor([[4, 7, 3, 1, 2], [1, 2, 3, 4, 5]])
    found = head_statistics(look(model, ids), ids)
    assert found.ranked("previous")[0][0] == "decoder.0.attention.0"
    one, other = (found.of("decoder.0.attention", head) for head in (0, 1))
    assert one["previous"] == pytest.approx(1.0) and one["entropy"] == pytest.approx(0, abs=1e-6)
    assert one["positional"] > 0.7 > other["positional"]
    # Head 1 spreads its weight evenly over what it sees.
    expected = sum(math.log(n) for n in range(1, 6)) / 5
    assert other["entropy"] == pytest.approx(expected)
    assert math.isnan(one["duplicate"]) and math.isnan(one["induction"])  # no token occurs twice


def test_every_statistic_by_hand() -> None:
    ids = torch.tensor([[5, 6, 5, 6]])
    weights = torch.zeros(1, 1, 4, 4)
    weights[0, 0] = torch.tensor(
        [[1, 0, 0, 0], [0.25, 0.75, 0, 0], [0.2, 0.5, 0.3, 0], [0.1, 0.2, 0.4, 0.3]]
    )
    found = head_statistics({"encoder.0.attention": weights}, ids).of("encoder.0.attention", 0)
    assert found["own"] == pytest.approx((1 + 0.75 + 0.3 + 0.3) / 4)
    assert found["previous"] == pytest.approx((0.25 + 0.5 + 0.4) / 3)
    assert found["first"] == pytest.approx((0.25 + 0.2 + 0.1) / 3)
    assert found["duplicate"] == pytest.approx((0.2 + 0.2) / 2)
    assert found["induction"] == pytest.approx((0.5 + 0.4) / 2)
    entropies = [-sum(p * math.log(p) for p in row if p) for row in weights[0, 0].tolist()]
    assert found["entropy"] == pytest.approx(sum(entropies) / 4, rel=1e-5)


def test_padding_is_left_out() -> None:
    ids = torch.tensor([[5, 6, 5, 0, 0]])
    weights = torch.rand(1, 2, 5, 5).tril()
    whole = head_statistics({"a.attention": weights}, ids, real=ids != 0)
    part = head_statistics({"a.attention": weights[:, :, :3, :3]}, ids[:, :3])
    close(whole.values["a.attention"], part.values["a.attention"], 1e-5)


def test_memory_maps_have_no_statistics() -> None:
    model, batch = make("encoder-decoder"), inputs("encoder-decoder")
    found = head_statistics(look(model, batch), batch[1])
    assert set(found.values) == {"decoder.0.attention", "decoder.1.attention"}


def test_a_rollout_is_the_product_of_the_layers() -> None:
    one, other = (torch.rand(2, 3, 4, 4).softmax(dim=-1) for _ in range(2))
    half = torch.eye(4) / 2
    expected = (half + other.mean(dim=1) / 2) @ (half + one.mean(dim=1) / 2)
    close(rollout([one, other]), expected, 1e-6)
    close(rollout([one, other]).sum(dim=-1), torch.ones(2, 4), 1e-6)
    with pytest.raises(InputError, match="one map or more"):
        rollout([])


def test_a_rollout_of_a_look_is_of_one_side() -> None:
    seen = look(make("encoder-decoder"), inputs("encoder-decoder"))
    for side in ("encoder", "decoder"):
        own = [seen.maps[f"{side}.{layer}.attention"] for layer in range(2)]
        close(rollout(seen, side=side), rollout(own))
    close(rollout(seen), rollout(seen.maps, side="decoder"))
    with pytest.raises(InputError, match="there must be maps of the side: got 'encodr'"):
        rollout(seen, side="encodr")
    table = look(table_model("ft"), table_rows())
    close(rollout(table), rollout(list(table.maps.values())))


def explicit(
    model: object, ids: Tensor, place: str, head: int, q: int, k: int, by: float
) -> Tensor:
    """The output with one entry of one map moved: the head's mixed values shift by `by` times v."""
    from addnorm.lens.patching import Edit, edited

    seen = look(model, ids, (f"heads:{place}", f"reads:{place}"))
    step = model.decoder.stack.blocks[int(place.split(".")[1])].sublayers["attention"]
    values = step.input(seen.reads[place]).split(step.sizes, dim=-1)[2]
    own = slice(head * step.head_width, (head + 1) * step.head_width)
    value = seen.heads[place][..., own].clone()
    value[:, q] += by * values[:, k, own]
    with edited(model, [Edit(place=f"{place}.{head}", value=value)]), torch.no_grad():
        return model(ids)


def test_gradients_of_maps_are_right() -> None:
    model, (ids,) = make("decoder"), inputs("decoder", 1)
    metric, place = logit_metric(3), "decoder.0.attention"
    weighted = weigh_maps(model, ids, metric, [place])[place]
    weights = look(model, ids).maps[place]
    for head, q, k in ((0, 5, 2), (2, 5, 5), (3, 4, 0)):
        high, low = (metric(explicit(model, ids, place, head, q, k, by)) for by in (1e-4, -1e-4))
        slope = float((high - low) / 2e-4)
        assert float(weighted[0, head, q, k]) == pytest.approx(
            slope * float(weights[0, head, q, k]), rel=1e-4, abs=1e-9
        )


def test_gradient_rollouts_of_all_modes() -> None:
    model, batch = make("encoder-decoder"), inputs("encoder-decoder")
    metric = logit_metric(3)
    assert gradient_rollout(model, batch, metric).shape == (2, 6, 6)
    assert gradient_rollout(model, batch, metric, "encoder").shape == (2, 8, 8)
    found = weigh_maps(model, batch, metric, ["decoder.1.memory"])
    assert found["decoder.1.memory"].shape == (2, 4, 6, 8)
    assert bool(found["decoder.1.memory"].any())
    assert float(gradient_rollout(make("decoder"), batch[1], metric).triu(1).abs().max()) == 0


def test_a_table_rolls_out_to_its_summary() -> None:
    model, rows = table_model("ft"), table_rows()
    seen = look(model, rows)
    total = rollout(list(seen.maps.values()))
    assert total.shape == (5, 1, 5)
    close(total.sum(dim=-1), torch.ones(5, 1).double())
    found = gradient_rollout(model, rows, lambda output: output.mean(dim=1)[:, 0].sum())
    assert found.shape == (5, 1, 5)


def test_learned_keys_of_all_attention_are_no_positions() -> None:
    for mode in ("decoder", "encoder-decoder"):
        model, batch = make(mode, ffn="all-attention", ffn_width=5), inputs(mode)
        seen = look(model, batch)
        own = [seen.maps[f"decoder.{layer}.attention"] for layer in range(2)]
        assert all(weights.shape == (2, 4, 6, 11) for weights in own)
        found = head_statistics(seen, batch[-1])
        assert set(found.values) == {"decoder.0.attention", "decoder.1.attention"}
        total = rollout(own)
        assert total.shape == (2, 6, 6) and float(total.sum(dim=-1).max()) < 1
        half, parts = torch.eye(6).double() / 2, [each[..., :6].mean(dim=1) / 2 for each in own]
        close(total, (half + parts[1]) @ (half + parts[0]))
        assert gradient_rollout(model, batch, logit_metric(3)).shape == (2, 6, 6)
