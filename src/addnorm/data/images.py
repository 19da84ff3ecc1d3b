"""Images from an .npz file, a folder or an image file, as one array; nothing is unpickled."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from addnorm.errors import InputError, SavedError, require

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".tif", ".tiff")
"""Files of a folder that are images."""
MAX_IMAGE_BYTES = 4 * 2**30
"""Bytes that an .npz file may unpack to."""


def as_images(values: Any, name: str) -> NDArray[Any]:
    """Return images as (count, channels, side, side), padded with 0 to squares."""
    images = np.asarray(values)
    if images.dtype.kind not in "uif" or images.ndim not in (3, 4) or 0 in images.shape:
        raise InputError(
            f"{name} must be numbers of shape (images, height, width) or (images, height, width, "
            f"channels): got {images.dtype} of shape {images.shape}."
        )
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[3] not in (1, 3, 4):
        raise InputError(
            f"{name} must have 1, 3 or 4 channels in the last place: got shape {images.shape}."
        )
    if images.dtype.kind == "f" and not np.isfinite(images).all():
        raise InputError(f"{name} must be finite numbers: got NaN or infinity.")
    side = max(images.shape[1:3])
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
        if size > MAX_IMAGE_BYTES:
            raise InputError(f"{str(path)!r} unpacks to {size:,} bytes: too many to read.")
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
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, KeyError) as error:
        raise SavedError(f"{str(path)!r} is not an .npz file of arrays: {error}.") from None
    found = as_images(images, f"the images of {str(path)!r}")
    if labels is None:
        return found, None
    if labels.shape != (len(found),):
        raise InputError(
            f"{str(path)!r} must have one label for each image: {len(found)} images, labels of "
            f"shape {labels.shape}."
        )
    return found, [str(label) for label in labels.tolist()]


def read_folder(path: Path) -> tuple[NDArray[Any], list[str] | None]:
    """Return the images of a folder; labels are the names of its folders, if it has any."""
    folders = sorted(child for child in path.iterdir() if child.is_dir())
    groups = [(folder.name, folder) for folder in folders] or [("", path)]
    images, labels = [], []
    first: tuple[Path, tuple[int, ...]] | None = None
    for label, folder in groups:
        for file in sorted(folder.iterdir()):
            if file.suffix.lower() not in SUFFIXES:
                continue
            pixels = read_image(file)
            first = first or (file, pixels.shape)
            if pixels.shape != first[1]:
                raise InputError(
                    f"all images must have one size: {first[0].name!r} has {first[1][:2]}, "
                    f"{file.name!r} has {pixels.shape[:2]}. Resize them first."
                )
            images.append(pixels)
            labels.append(label)
    if not images:
        raise InputError(
            f"{str(path)!r} has no images ({', '.join(SUFFIXES[:4])}, …). Expected one folder for "
            "each class, with its images."
        )
    return as_images(np.stack(images), f"the images of {str(path)!r}"), labels if folders else None


def read_image(path: Path) -> NDArray[Any]:
    """Return the pixels of an image file, (height, width, 1 or 3), from 0 to 255."""
    pillow = require("PIL.Image", "images")
    try:
        with pillow.open(path) as image:
            grey = image.mode in ("1", "L", "I", "I;16", "F")
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise InputError(f"{str(path)!r} is not an image that can be read: {error}.") from None
    return pixels[..., None] if pixels.ndim == 2 else pixels


def read_images(path: str | Path) -> tuple[NDArray[Any], list[str] | None]:
    """Return images, (count, channels, side, side), and their labels if the data have any."""
    path = Path(path)
    if path.is_dir():
        return read_folder(path)
    if path.suffix.lower() in SUFFIXES:
        return as_images(read_image(path)[None], f"{str(path)!r}"), None
    if path.suffix.lower() != ".npz":
        raise InputError(f"images are in a folder or an .npz file: got {str(path)!r}.")
    if not path.is_file():
        raise SavedError(f"there is no file {str(path)!r}. Check the path.")
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
