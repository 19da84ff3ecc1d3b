"""Images with labels, from a folder or an .npz file, and their random distortion in training."""

import lzma
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from addnorm.data.text.files import unpacked_limit
from addnorm.errors import InputError, SavedError, require

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".tif", ".tiff")
"""Files of a folder that are images."""
MAX_IMAGE_BYTES = 4 * 2**30
"""Bytes that an .npz file may unpack to at most, and that images may have once they are squares."""
BROKEN_ARCHIVE = (
    *(OSError, ValueError, zipfile.BadZipFile, EOFError, KeyError, zlib.error, lzma.LZMAError),
    *(NotImplementedError, RuntimeError, MemoryError),  # unknown compression, encrypted, too large
)
"""What reading an array from a damaged .npz file may raise."""


def as_images(values: Any, name: str) -> NDArray[Any]:
    """Return images as (count, channels, side, side), padded with 0 to squares."""
    images = np.asarray(values)
    if images.dtype.kind == "b":
        images = images.astype(np.uint8)
    if images.dtype.kind not in "uif" or images.ndim not in (3, 4) or 0 in images.shape:
        raise InputError(
            f"{name} must be numbers of shape (images, height, width) or (images, height, width, "
            f"channels): got {images.dtype} of shape {images.shape}."
        )
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[3] not in (1, 3, 4):
        first = images.shape[1] in (1, 3, 4)
        raise InputError(
            f"{name} must have 1, 3 or 4 channels in the last place: got shape {images.shape}."
            + (" Try transpose(0, 2, 3, 1)." if first else "")
        )
    if images.dtype.kind == "f" and not np.isfinite(images).all():
        raise InputError(f"{name} must be finite numbers: got NaN or infinity.")
    side = max(images.shape[1:3])
    size = images.shape[0] * side**2 * images.shape[3] * images.itemsize
    if size > MAX_IMAGE_BYTES:
        raise InputError(
            f"{name} must have at most {MAX_IMAGE_BYTES:,} bytes as squares: {images.shape[0]:,} "
            f"of {side:,} × {side:,} pixels have {size:,}. Resize them, or take fewer."
        )
    room = [(0, 0), (0, side - images.shape[1]), (0, side - images.shape[2]), (0, 0)]
    return np.pad(images, room).transpose(0, 3, 1, 2)


def _read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def read_npz(path: Path) -> tuple[NDArray[Any], list[str] | None]:
    """Return the images of an .npz file, and their labels if it has any; nothing is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        limit = min(unpacked_limit(path.stat().st_size), MAX_IMAGE_BYTES)
        if size > limit:
            raise InputError(
                f"{str(path)!r} must unpack to at most {limit:,} bytes: its arrays have {size:,}. "
                f"If you trust it, raise the limit: addnorm --unpacked-limit={size} …, up to "
                f"{MAX_IMAGE_BYTES:,}."
            )
        with zipfile.ZipFile(path) as archive:
            names = [n.removesuffix(".npy") for n in archive.namelist()]
            images_name = next((n for n in ("images", "x", "data") if n in names), None)
            labels_name = next((n for n in ("labels", "y", "target") if n in names), None)
            if images_name is None:
                raise InputError(
                    f"{str(path)!r} must have an array 'images' (or x, data): it has "
                    f"{', '.join(names) or 'none'}."
                )
            images = _read_array(archive, images_name)
            labels = None if labels_name is None else _read_array(archive, labels_name)
    except InputError:
        raise
    except BROKEN_ARCHIVE as error:
        raise SavedError(f"{str(path)!r} is not an .npz file of arrays: {error}.") from None
    found = as_images(images, f"the images of {str(path)!r}")
    if labels is None:
        return found, None
    if labels.shape != (len(found),):
        raise InputError(
            f"{str(path)!r} must have one label for each image: {len(found)} images, labels of "
            f"shape {labels.shape}."
        )
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise InputError(f"the labels of {str(path)!r} must be known: got NaN or infinity.")
    if labels.dtype.kind == "S":
        labels = np.char.decode(labels, "utf-8", "replace")
    return found, [str(label) for label in labels.tolist()]


def read_folder(path: Path) -> tuple[NDArray[Any], list[str] | None]:
    """Return the images of a folder; labels are the names of its folders, if it has any.

    Hidden files and folders are passed over. If some images have colours, grey ones get them, too.
    """
    entries = [child for child in sorted(path.iterdir()) if not child.name.startswith(".")]
    folders = [child for child in entries if child.is_dir()]
    loose = [file for file in entries if is_image(file)]
    if folders and loose:
        raise InputError(
            f"{str(path)!r} must have its images in folders, one for each class: "
            f"{loose[0].name!r} is in none of them. Move it into the folder of its class."
        )
    images, labels = [], []
    first: tuple[Path, tuple[int, ...]] | None = None
    for folder in folders or [path]:
        for file in sorted(folder.iterdir()):
            if not is_image(file):
                continue
            pixels = read_image(file)
            first = first or (file, pixels.shape[:2])
            if pixels.shape[:2] != first[1]:
                raise InputError(
                    f"all images must have one size: {first[0].name!r} has {first[1]} (height, "
                    f"width), {file.name!r} has {pixels.shape[:2]}. Resize them first."
                )
            images.append(pixels)
            labels.append(folder.name)
    if not images:
        raise InputError(
            f"{str(path)!r} has no images ({', '.join(SUFFIXES[:4])}, …). Expected one folder for "
            "each class, with its images."
        )
    channels = max(pixels.shape[2] for pixels in images)
    images = [
        pixels if pixels.shape[2] == channels else pixels.repeat(channels, axis=2)
        for pixels in images
    ]
    return as_images(np.stack(images), f"the images of {str(path)!r}"), labels if folders else None


def is_image(path: Path) -> bool:
    """Return whether a path is an image by its name: hidden ones are not."""
    named = path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    return named and not path.is_dir()


def read_image(path: Path) -> NDArray[Any]:
    """Return the pixels of an image file, (height, width, 1 or 3), from 0 to 255.

    What is transparent is white. Pixels of 16 bits become fractions; those of 32 bits, which have
    no known range, stay as they are.
    """
    pillow = require("PIL.Image", "images")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(path) as image:
                pixels = _pixels(pillow, image)
    except pillow.DecompressionBombWarning:
        raise InputError(
            f"{str(path)!r} must have fewer pixels: got more than {pillow.MAX_IMAGE_PIXELS:,}. "
            "Resize it first."
        ) from None
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise InputError(f"{str(path)!r} is not an image that can be read: {error}.") from None
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _pixels(pillow: Any, image: Any) -> NDArray[Any]:
    """Return the pixels of an open image: grey ones (height, width), coloured ones with three."""
    if image.mode.startswith("I;16"):
        return np.asarray(image).astype(np.float32) / 257
    if image.mode in ("I", "F"):
        return np.asarray(image).astype(np.float32)
    grey = image.mode in ("1", "L", "LA")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("L" if grey else "RGB"))


def read_images(path: str | Path) -> tuple[NDArray[Any], list[str] | None]:
    """Return images, (count, channels, side, side), and their labels if the data have any."""
    path = Path(path)
    if not path.exists():
        raise SavedError(f"there is no file or folder {str(path)!r}. Check the path.")
    if path.is_dir():
        return read_folder(path)
    if path.suffix.lower() in SUFFIXES:
        return as_images(read_image(path)[None], f"{str(path)!r}"), None
    if path.suffix.lower() != ".npz":
        raise InputError(f"images are in a folder or an .npz file: got {str(path)!r}.")
    return read_npz(path)


def split_images(labels: Sequence[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the rows to train on and those held out: of each class the same share, at least one.

    >>> train, held = split_images([0, 0, 0, 0, 1, 1, 1, 1], 0.25, 0)
    >>> len(train), [row // 4 for row in held]
    (6, [0, 1])
    """
    generator = np.random.default_rng(seed)
    held: list[int] = []
    for label in sorted(set(labels)):
        rows = [row for row, other in enumerate(labels) if other == label]
        count = max(1, round(fraction * len(rows))) if len(rows) > 1 else 0
        held += generator.permutation(rows)[:count].tolist()
    chosen = set(held)
    return [row for row in range(len(labels)) if row not in chosen], sorted(held)


# ── Distortion ────────────────────────────────────────────────────────────────────────────────────


def draw_distortion(
    generator: np.random.Generator, shift: float, rotation: float, zoom: float
) -> NDArray[Any]:
    """Return the six numbers of a random affine map, rows (A, t): see `distort_images`.

    Parameters
    ----------
    generator
        Where the randomness comes from.
    shift
        Largest shift down and right, in pixels.
    rotation
        Largest angle, in degrees.
    zoom
        Largest change of height and of width, as a fraction.
    """
    down, right, turn, tall, wide = generator.uniform(-1, 1, 5)
    angle = np.deg2rad(rotation) * turn
    turned = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    scaled = turned * (1 + zoom) ** np.array([wide, tall])
    return np.column_stack((scaled, (shift * right, shift * down)))


def distort_images(images: Tensor, maps: Sequence[NDArray[Any]]) -> Tensor:
    """Return each image read at A p + t for each pixel p, by bilinear interpolation.

    p and t are (right, down) in pixels, p from the centre of the image. What lies outside repeats
    the edge, so that no map adds a border that the data do not have.

    >>> half = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
    >>> distort_images(torch.tensor([[[[0.0, 2.0], [4.0, 6.0]]]]), [half]).flatten().tolist()
    [1.0, 2.0, 5.0, 6.0]
    """
    side = images.shape[-1]
    theta = torch.from_numpy(np.stack(maps)).to(images.dtype)
    theta[:, :, 2] *= 2 / side  # torch measures from −1 to 1
    grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
