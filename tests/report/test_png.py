"""Pictures as PNG data: another library reads the same pixels."""

import base64
import io

import numpy as np
import pytest

from addnorm.errors import InputError
from addnorm.report.png import png_bytes, png_uri


@pytest.mark.parametrize("channels", (1, 3, 4))
def test_another_library_reads_the_same_pixels(channels: int) -> None:
    images = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels)).astype(np.uint8)
    data = base64.b64decode(png_uri(pixels).removeprefix("data:image/png;base64,"))
    with images.open(io.BytesIO(data)) as image:
        image.load()
        assert np.array_equal(np.asarray(image).reshape(5, 7, channels), pixels)


def test_mistakes_are_explained() -> None:
    for pixels in (np.zeros((2, 2, 1)), np.zeros((2, 2, 2), dtype=np.uint8)):
        with pytest.raises(InputError, match="1, 3 or 4 channels: got"):
            png_bytes(pixels)
