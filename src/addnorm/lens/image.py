"""An image that was explained: its pixels, and the grid of its patches."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from addnorm.report.png import png_uri

MAX_SIDE = 256
"""Larger images are shown with one pixel for each block of pixels."""


@dataclass(frozen=True, kw_only=True)
class PatchGrid:
    """The square patches of an image, which are the tokens of the model, row by row.

    Parameters
    ----------
    rows, columns
        Number of patches.
    patch
        Side of a patch, in pixels.
    first
        Number of tokens before the first patch: 1 with a summary.
    """

    rows: int
    columns: int
    patch: int
    first: int

    def names(self) -> list[str]:
        """Return the names of the patches: row and column, from 1."""
        return [f"r{r}c{c}" for r in range(1, self.rows + 1) for c in range(1, self.columns + 1)]


@dataclass(frozen=True)
class ImageView:
    """What a page shows of an image.

    Parameters
    ----------
    grid
        Its patches.
    pixels
        (side, side, 1 or 3 or 4), from 0 to 255.
    """

    grid: PatchGrid
    pixels: NDArray[Any]

    def uri(self) -> str:
        """Return the image as a data URI, reduced if it is large."""
        pixels = np.asarray(self.pixels, dtype=np.float64)
        size = -(-max(pixels.shape[:2]) // MAX_SIDE)
        if size > 1:
            height, width = (length // size * size for length in pixels.shape[:2])
            blocks = pixels[:height, :width].reshape(height // size, size, width // size, size, -1)
            pixels = blocks.mean(axis=(1, 3))
        return png_uri(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


def displayed_pixels(image: NDArray[Any]) -> NDArray[Any]:
    """Return an image (channels, side, side) as (side, side, channels), from 0 to 255.

    Whole numbers from 0 to 255 stay as they are; other values are stretched to this range.
    """
    pixels = np.asarray(image).transpose(1, 2, 0)
    if pixels.dtype == np.uint8:
        return pixels
    low, high = float(pixels.min()), float(pixels.max())
    if low >= 0 and 1 < high <= 255:
        return pixels
    return (pixels - low) / max(high - low, 1e-12) * 255
