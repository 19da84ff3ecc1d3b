"""The explanation of a sequence agrees with the views it is made of; its page is one safe file."""

import base64
import json
import re
from typing import Any

import pytest
import torch

from addnorm.errors import InputError
from addnorm.lens.attention import head_statistics
from addnorm.lens.explain import MOST_PROBABLE, RECURRENT_NOTE, SUMMARY, explain_sequence
from addnorm.lens.explanation import SequenceExplanation
from addnorm.lens.look import look
from addnorm.lens.page import MAX_MAP_BYTES, page_data
from addnorm.lens.stream import decompose
from addnorm.tasks import base
from tests.conftest import close, inputs, make
from tests.lens.planted import planted

EVIL = "</script><b>"


def explain_some(mode: str, **changes: Any) -> tuple[Any, Any, SequenceExplanation]:
    model, batch = make(mode, **changes), inputs(mode, 1)
    sides = ("encoder", "decoder") if mode == "encoder-decoder" else (mode,)
    tokens = {
        side: [f"{EVIL}{i}" for i in ids[0].tolist()]
        for side, ids in zip(sides, batch, strict=True)
    }
    return model, batch, explain_sequence(model, batch, tokens=tokens, name_of=str, title=EVIL)


@pytest.mark.parametrize("mode", ("decoder", "encoder-decoder"))
def test_it_agrees_with_the_model(mode: str) -> None:
    model, batch, found = explain_some(mode)
    logits = model(*batch)[0].detach()
    best = logits.argmax(dim=-1)
    assert found.outputs == [str(int(i)) for i in best]
    close(torch.tensor(found.probabilities), logits.softmax(-1).amax(-1).float(), 1e-6)
    names, values = found.pieces
    close(values.sum(dim=0), logits.amax(dim=-1))
    assert len(names) == len(values)
    assert (
        found.top_pieces(0, 3)
        == sorted(zip(names, values[:, 0].tolist(), strict=True), key=lambda p: -abs(p[1]))[:3]
    )
    assert [row[0] for row in found.layers[1][-1]] == [row[0] for row in found.candidates]
    assert found.to_dict()["outputs"][0]["pieces"][names[0]] == float(values[0, 0])
    json.dumps(found.to_dict())
    # A decoder's output rests on nothing after it.
    own = found.contributions["decoder"]
    assert float(own.triu(1).abs().max()) == 0 and bool(own.tril().abs().sum() > 0)


def test_heads_of_both_sides_have_statistics() -> None:
    _, batch, found = explain_some("encoder-decoder")
    sides = [f"{side}.{layer}" for side in ("encoder", "decoder") for layer in (0, 1)]
    assert list(found.statistics) == [f"{each}.attention.{n}" for each in sides for n in range(4)]
    maps = {name: each[None] for name, each in found.maps.items()}
    own = head_statistics(maps, batch[0])
    expected = own.of("encoder.0.attention", 2)["own"]
    assert found.statistics["encoder.0.attention.2"]["own"] == pytest.approx(expected)


def test_a_class_has_one_output() -> None:
    _, _, found = explain_some("encoder", head="class", outputs=3, pool="mean")
    assert len(found.outputs) == 1 and found.contributions["encoder"].shape == (1, 6)
    assert found.top_inputs()[0][0] == "encoder" and len(found.page().html()) < 100_000


def test_targets_can_be_chosen() -> None:
    model, ids = planted(), torch.tensor([[4, 7, 3]])
    found = explain_sequence(
        model,
        ids,
        tokens={"decoder": ["4", "7", "3"]},
        name_of=str,
        targets=[1, 4, MOST_PROBABLE],
    )
    assert found.outputs == ["1", "4", "5"]
    assert found.top_pieces(1)[0] == ("decoder.0.attention.0", pytest.approx(1.0))
    assert found.statistics["decoder.0.attention.0"]["previous"] == pytest.approx(1.0)
    with pytest.raises(InputError, match="there must be 3 targets"):
        explain_sequence(model, ids, tokens={}, name_of=str, targets=[1])
    with pytest.raises(InputError, match=r"about [\d.]+ [kM]B, more than the limit of 100 bytes"):
        explain_sequence(model, ids, tokens={}, name_of=str, limit=100)
    with pytest.raises(InputError, match="this model has no head: its outputs are vectors"):
        explain_sequence(make("encoder", head="none"), ids, tokens={}, name_of=str)
    with pytest.raises(InputError, match="a batch of one row"):
        explain_sequence(model, ids.expand(2, -1), tokens={}, name_of=str)


def test_the_page_holds_the_maps_and_escapes_the_words() -> None:
    _, _, found = explain_some("encoder-decoder")
    text = found.page().html()
    assert EVIL not in text and len(text) < 200_000
    (data,) = re.findall(r'id="w0-data">(.*?)</script>', text, re.DOTALL)
    content = json.loads(data)
    assert content["tokens"] == found.tokens
    memory = next(m for m in content["maps"] if m["name"] == "decoder.1.memory")
    assert len(memory["rows"]) == 6 and len(memory["columns"]) == 8
    weights = torch.frombuffer(bytearray(base64.b64decode(memory["data"])), dtype=torch.uint8)
    close(weights.view(4, 6, 8) / 255, found.maps["decoder.1.memory"].float(), 0.003)
    assert content["pieces"][0][-1][0] == "sum: the logit"
    assert found._repr_html_().startswith("<iframe")


def test_convolutions_have_pieces_and_no_maps_of_their_own() -> None:
    model, batch, found = explain_some("decoder", mixing="convolution", kernel=3)
    assert found.maps == {} and "decoder.1.attention" in found.pieces[0]
    with pytest.raises(InputError, match="this model has no maps: none of its sublayers has any"):
        look(model, batch, "maps")
    assert decompose(model, batch).error <= 1e-9
    assert found.contributions["decoder"].shape == (6, 6)
    assert "Attention" not in found.page().html().split("<script")[0]
    _, _, found = explain_some("encoder-decoder", mixing="convolution", kernel=3)
    assert list(found.maps) == ["decoder.0.memory", "decoder.1.memory"]


def test_a_recurrent_model_is_explained_without_pieces() -> None:
    model, batch, found = explain_some("encoder-decoder", mixing="recurrent", depth=1)
    maps: dict[str, torch.Tensor] = {}
    model(*batch, maps=maps)
    close(found.maps["decoder.0.memory"], maps["decoder.0.memory"][0])
    assert found.pieces[0] == [] and found.layers == ([], [])
    assert found.notes == [RECURRENT_NOTE] and len(found.alignment()) == 6
    assert "taken apart by layers" in str(found) and "; by" not in str(found)
    assert len(found.page().html()) < 100_000
    json.dumps(found.to_dict())
    # An output rests on nothing after it, and on every source token.
    assert float(found.contributions["decoder"].triu(1).abs().max()) == 0
    assert bool((found.contributions["encoder"] != 0).all())
    with pytest.raises(InputError, match="mixing=recurrent has no stack of blocks"):
        decompose(model, batch)


def test_a_summary_is_a_token() -> None:
    changes = {"head": "class", "outputs": 3, "summary": True}
    _, _, found = explain_some("encoder", **changes)
    assert found.tokens["encoder"][0] == SUMMARY and len(found.tokens["encoder"]) == 7
    assert float(found.contributions["encoder"][0, 0]) == 0
    found.page()


@pytest.mark.slow
def test_large_maps_are_averaged() -> None:
    _, _, found = explain_some("decoder")
    for depth, averaged, names in (
        (2, "heads", ["decoder.0.attention", "decoder.1.attention"]),
        (12, "heads and layers", ["decoder.*.attention"]),
    ):
        big = {f"decoder.{n}.attention": torch.rand(12, 600, 600) for n in range(depth)}
        tokens = {"decoder": [f"word{n}" for n in range(600)]}
        many = {
            "outputs": ["word"] * 64,
            "probabilities": [0.5] * 64,
            "candidates": [[("word", 0.5)] * 5] * 64,
            "pieces": (found.pieces[0], torch.rand(len(found.pieces[0]), 64)),
            "layers": (found.layers[0], [[[("word", 0.5)] * 3] * 64] * len(found.layers[0])),
            "contributions": {"decoder": torch.rand(64, 600)},
            "first": 536,
        }
        large = SequenceExplanation(**{**vars(found), "maps": big, "tokens": tokens, **many})
        data, what = page_data(large)
        assert what == averaged and [each["name"] for each in data["maps"]] == names
        assert {each["heads"] for each in data["maps"]} == {1}
        assert data["tokens"]["decoder"][-1] == "word599" and data["starts"] == {"decoder": 344}
        assert data["maps"][0]["start"] == 344 and len(data["maps"][0]["rows"]) == 256
        assert sum(len(each["data"]) for each in data["maps"]) < 1.4 * MAX_MAP_BYTES
        html = large.page().html()
        assert len(html.encode()) < 2_000_000 and "256 of the 600 tokens" in html


def test_memory_is_stated_of_what_runs_and_not_of_what_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(base, "explanation_bytes", lambda *_: 2**29)
    base.state_memory(None, None, 2**28, said.append)
    assert not said  # the error says it
    base.state_memory(None, None, 2**30, said.append)
    assert said == ["this explanation needs about 512 MB."]
