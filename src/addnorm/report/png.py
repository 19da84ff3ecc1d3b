"""Images as PNG data, for pages: no library is needed to write one."""

import base64
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from addnorm.errors import InputError

COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
"""By the number of channels, the colour type of a PNG file: grey, RGB, RGB with opacity."""


def png_bytes(pixels: NDArray[Any]) -> bytes:
    """Return an image as a PNG file (ISO/IEC 15948), without filters.

    Parameters
    ----------
    pixels : (height, width, channels) of uint8; 1, 3 or 4 channels.

    >>> png_bytes(np.zeros((2, 2, 1), dtype=np.uint8))[1:4]
    b'PNG'
    """
    channels = pixels.shape[2] if pixels.ndim == 3 else 0
    if pixels.dtype != np.uint8 or channels not in COLOUR_TYPES:
        raise InputError(
            "a picture must be uint8 of shape (height, width, channels), with 1, 3 or 4 channels: "
            f"got {pixels.dtype} of shape {pixels.shape}."
        )
    height, width = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # filter 0 before each line
    parts = {b"IHDR": header, b"IDAT": zlib.compress(lines.tobytes(), 9), b"IEND": b""}
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def png_uri(pixels: NDArray[Any]) -> str:
    """Return an image as a data URI; see `png_bytes`."""
    return f"data:image/png;base64,{base64.b64encode(png_bytes(pixels)).decode()}"
