"""Every architecture that is read from Hugging Face: their maps, and exact sums of its logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from addnorm.interop.huggingface import read_model
from addnorm.lens.look import look
from addnorm.lens.readout import attribute_logits, logit_lens
from addnorm.lens.stream import decompose

pytest.importorskip("transformers", minversion="5.0")

from tests.conftest import close
from tests.interop.common import _PAIRS, make, save
from tests.theirs import MODELS

pytestmark = [pytest.mark.parity, pytest.mark.slow]


def draw(name: str) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """Return one input, by their names and for ours."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        image = torch.randn(1, 3, 12, 12, generator=generator)
        return {"pixel_values": image}, (image,)
    source, target = (torch.randint(3, 30, (1, n), generator=generator) for n in (9, 6))
    if MODELS[name] in _PAIRS:
        return {"input_ids": source, "decoder_input_ids": target}, (source, target)
    return {"input_ids": source}, (source,)


def their_maps(output: Any, side: str) -> dict[str, torch.Tensor]:
    """Return what they report as `output_attentions`, by our names of places."""
    tables = {f"{side}.{{}}.attention": output.get("attentions")}
    if "encoder_attentions" in output:
        tables = {
            "encoder.{}.attention": output.encoder_attentions,
            "decoder.{}.attention": output.decoder_attentions,
            "decoder.{}.memory": output.cross_attentions,
        }
    return {
        pattern.format(layer): each
        for pattern, layers in tables.items()
        for layer, each in enumerate(layers)
    }


@pytest.mark.parametrize("name", MODELS)
def test_maps_are_theirs_and_pieces_sum_to_logits(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    ours = read_model(save(theirs, tmp_path)).model
    arguments, batch = draw(name)
    with torch.no_grad():
        output = theirs(**arguments, output_attentions=True)
    maps = look(ours, batch).maps
    expected = their_maps(output, next(iter(maps)).split(".")[0])
    assert set(maps) == set(expected)
    for place, each in maps.items():
        torch.testing.assert_close(each, expected[place], rtol=0, atol=1e-5)
    ours = ours.double()
    batch = tuple(each.double() if each.is_floating_point() else each for each in batch)
    parts = decompose(ours, batch)
    assert parts.error <= 1e-9 and attribute_logits(parts).error <= 1e-9
    with torch.no_grad():
        close(logit_lens(ours, batch).logits[-1], ours(*batch))
