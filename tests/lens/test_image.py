"""An image is explained by its patches, from the mean image; the page shows it whole."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from addnorm import ModelConfig, build
from addnorm.errors import InputError
from addnorm.lens.explain import SUMMARY, explain_image
from addnorm.lens.explanation import Background, SequenceExplanation
from addnorm.lens.image import MAX_SIDE, ImageView, PatchGrid, displayed_pixels
from addnorm.lens.input_contributions import TOLERANCE
from addnorm.lens.look import look
from addnorm.lens.page import MAX_MAP_BYTES, page_data
from tests.conftest import close, make


def image_model(**changes: Any) -> Any:
    fields: dict[str, Any] = {"mode": "encoder", "input": "patches", "image": 8, "patch": 2}
    fields |= {"channels": 3, "vocab": 0, "width": 16, "heads": 2, "depth": 2}
    fields |= {"head": "class", "outputs": 3, "pool": "mean", "positions": "learned"}
    torch.manual_seed(0)
    model = build(ModelConfig(**fields | changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def explain_some(model: Any, image: torch.Tensor | None = None) -> SequenceExplanation:
    image = torch.randn(1, 3, 8, 8).double() if image is None else image
    return explain_image(
        model,
        image,
        Background(inputs={"encoder": torch.zeros_like(image)}, name="the mean image"),
        pixels=displayed_pixels(image[0].numpy()),
        name_of="abc".__getitem__,
    )


@pytest.mark.parametrize("addnorm", ("pre", "post", "res-post", "dual"))
@pytest.mark.parametrize("pool", ("mean", "first"))
def test_it_agrees_with_the_model(addnorm: str, pool: str) -> None:
    model = image_model(addnorm=addnorm, pool=pool, summary=pool == "first")
    image = torch.randn(1, 3, 8, 8).double()
    found = explain_some(model, image)
    assert torch.equal(look(model, image).output, model(image))
    logits, start = model(image)[0].detach(), model(torch.zeros_like(image))[0].detach()
    best = int(logits.argmax())
    assert found.outputs == ["abc"[best]] and found.kind == "margin"
    margin, margin_start = (
        float(each[best] - (each.sum() - each[best]) / 2) for each in (logits, start)
    )
    close(found.pieces[1].sum(), torch.tensor(margin, dtype=torch.float64))
    total = float(found.contributions["encoder"].sum())
    change = margin - margin_start
    assert total - change == pytest.approx(found.completeness, abs=1e-9)
    assert abs(found.completeness) <= TOLERANCE * max(1, abs(change))
    names = found.tokens["encoder"]
    assert names[-16:] == [f"r{r}c{c}" for r in range(1, 5) for c in range(1, 5)]
    assert (names[0] == SUMMARY) == (pool == "first")
    assert found.maps["encoder.1.attention"].shape == (2, len(names), len(names))
    assert found.contributions["encoder"].shape == (1, len(names))
    assert found.layers[0][-1] == "encoder.1.ffn" and not found.statistics
    assert json.loads(json.dumps(found.to_dict()))["patches"]["columns"] == 4


def test_only_patches_that_differ_from_the_background_contribute() -> None:
    image = torch.zeros(1, 3, 8, 8).double()
    image[:, :, 4:6, 2:4] = 1.0  # row 3, column 2
    values = explain_some(image_model(), image).contributions["encoder"][0]
    assert int(values.abs().argmax()) == 2 * 4 + 1
    assert int(values.count_nonzero()) == 1


def test_the_page_holds_the_image_and_its_grid() -> None:
    found = explain_some(image_model(summary=True, pool="first"))
    text = found.page().html()
    (data,) = re.findall(r'id="w0-data">(.*?)</script>', text, re.DOTALL)
    image = json.loads(data)["image"]
    assert image["uri"].startswith("data:image/png;base64,") and image["first"] == 1
    assert (image["rows"], image["columns"], image["patch"]) == (4, 4, 2)
    assert json.loads(data)["pooled"] and len(text) < 200_000
    assert "Patches and layers" in text and "Words, layers" not in text


def test_large_images_fit_on_a_page() -> None:
    found, count = explain_some(image_model()), 28 * 28
    view = ImageView(
        PatchGrid(rows=28, columns=28, patch=16, first=0),
        np.random.default_rng(0).integers(0, 255, (448, 448, 3)),
    )
    maps = {f"encoder.{n}.attention": torch.rand(4, count, count) for n in range(2)}
    changes: dict[str, Any] = {"image": view, "maps": maps}
    changes |= {"tokens": {"encoder": view.grid.names()}}
    changes |= {"contributions": {"encoder": torch.rand(1, count)}}
    large = SequenceExplanation(**{**vars(found), **changes})
    data, averaged = page_data(large)
    assert averaged == "heads and layers" and len(data["contributions"]["encoder"][0]) == count
    assert data["maps"][0]["columns"] == view.grid.names() and count**2 < 2 * MAX_MAP_BYTES
    assert len(large.page().html().encode()) < 2_000_000
    names = PatchGrid(rows=33, columns=33, patch=8, first=0).names()
    huge: dict[str, Any] = {"maps": {name: torch.rand(1, 1089, 1089) for name in maps}}
    huge |= {"tokens": {"encoder": names}}
    data, averaged = page_data(SequenceExplanation(**{**vars(large), **huge}))
    assert averaged and data["maps"] == []


def test_pixels_are_shown_from_0_to_255() -> None:
    whole = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    assert np.array_equal(displayed_pixels(whole), whole.transpose(1, 2, 0))
    assert displayed_pixels(np.full((1, 2, 2), 200.0)).max() == 200.0
    stretched = displayed_pixels(np.array([[[-1.0, 1.0], [0.0, 0.5]]]))
    assert stretched.min() == 0 and stretched.max() == 255
    big = ImageView(PatchGrid(rows=1, columns=1, patch=600, first=0), np.zeros((600, 600, 1)))
    assert MAX_SIDE < 600 and len(big.uri()) < 2000


def test_mistakes_are_explained() -> None:
    with pytest.raises(InputError, match="needs a model that reads patches of images"):
        explain_some(make("encoder"))
