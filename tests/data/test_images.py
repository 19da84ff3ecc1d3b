"""Images: reading, and their random distortion against a loop."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.data.images import (
    as_images,
    distort_images,
    draw_distortion,
    read_image,
    read_images,
)
from addnorm.data.text.files import limits
from addnorm.errors import InputError, SavedError
from tests.tasks.test_images import make_images


def test_images_are_read_from_npz_and_folders(tmp_path: Path) -> None:
    from PIL import Image

    pixels, labels = make_images(8)
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        folder = tmp_path / "photos" / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    images, names = read_images(tmp_path / "photos")
    assert images.shape == (8, 1, 8, 8) and names == [f"class{n}" for n in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert np.array_equal(images[::2, 0], pixels[:4]) and np.array_equal(
        images[1::2, 0], pixels[4:]
    )
    one, none = read_images(tmp_path / "photos/class1/1.png")
    assert np.array_equal(one[0, 0], pixels[1]) and none is None
    np.savez(tmp_path / "quarters.npz", images=make_images()[0], labels=make_images()[1])
    whole, names = read_images(tmp_path / "quarters.npz")
    assert whole.shape == (48, 1, 8, 8) and names == [str(n % 4) for n in range(48)]
    assert as_images(np.ones((2, 3, 5, 3)), "images").shape == (2, 3, 5, 5)


def test_images_are_read_at_turned_scaled_and_shifted_places() -> None:
    generator, side = np.random.default_rng(0), 6
    images = torch.from_numpy(generator.normal(size=(3, 2, side, side)))
    maps = [draw_distortion(generator, 1.5, 40, 0.3) for _ in images]
    moved, middle = distort_images(images, maps), (side - 1) / 2
    for number, theta in enumerate(maps):
        for down in range(side):
            for right in range(side):
                x, y = theta[:, :2] @ (right - middle, down - middle) + theta[:, 2] + middle
                x, y = (min(max(v, 0), side - 1) for v in (x, y))
                i, j = min(int(y), side - 2), min(int(x), side - 2)
                corners = images[number, :, i : i + 2, j : j + 2]
                weights = torch.tensor(np.outer((i + 1 - y, y - i), (j + 1 - x, x - j)))
                expected = (corners * weights).sum(dim=(1, 2))
                assert moved[number, :, down, right].tolist() == pytest.approx(expected.tolist())


def test_distortions_stay_within_their_limits() -> None:
    generator = np.random.default_rng(0)
    maps = [draw_distortion(generator, 2.0, 30, 0.25) for _ in range(200)]
    for theta in maps:
        lengths = np.linalg.norm(theta[:, :2], axis=0)
        assert (lengths >= 0.8).all() and (lengths <= 1.25).all()
        assert abs(theta[:, 2]).max() <= 2
        assert abs(np.degrees(np.arctan2(theta[1, 0], theta[0, 0]))) <= 30
        assert theta[:, 0] @ theta[:, 1] == pytest.approx(0)
    assert max(abs(theta[:, 2]).max() for theta in maps) > 1.9
    identity = draw_distortion(generator, 0, 0, 0)
    image = torch.randn(1, 1, 5, 5)
    assert torch.allclose(distort_images(image, [identity]), image, atol=1e-6)


def test_mistakes_are_explained(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match="there is no file"):
        read_images(tmp_path / "missing.npz")
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    with pytest.raises(SavedError, match=r"is not an \.npz file of arrays"):
        read_images(tmp_path / "bad.npz")
    np.savez(tmp_path / "objects.npz", images=np.array([{}], dtype=object))
    with pytest.raises(SavedError, match=r"is not an \.npz file of arrays"):
        read_images(tmp_path / "objects.npz")
    np.savez(tmp_path / "other.npz", pictures=np.zeros((1, 2, 2)))
    with pytest.raises(InputError, match=r"must have an array 'images'.*it has pictures"):
        read_images(tmp_path / "other.npz")
    np.savez(tmp_path / "few.npz", images=np.zeros((2, 2, 2)), labels=np.zeros(3))
    with pytest.raises(InputError, match="one label for each image: 2 images"):
        read_images(tmp_path / "few.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no images"):
        read_images(tmp_path / "empty")
    with pytest.raises(InputError, match="1, 3 or 4 channels"):
        as_images(np.zeros((2, 4, 4, 2)), "images")


def test_every_kind_of_pixel_keeps_what_it_shows(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (8, 8), dtype=np.uint8)
    deep = rng.integers(0, 65536, (8, 8)).astype(np.uint16)
    share = rng.random((8, 8)).astype(np.float32)
    files: dict[str, tuple[Any, Any]] = {
        "grey.png": (Image.fromarray(grey), grey),
        "bits.png": (Image.fromarray(grey).convert("1"), None),
        "deep.png": (Image.fromarray(deep), deep / 257),
        "deep.tiff": (Image.fromarray(deep.astype(np.int32)), deep),
        "share.tiff": (Image.fromarray(share), share),
    }
    for name, (image, expected) in files.items():
        image.save(tmp_path / name)
        pixels = read_image(tmp_path / name)
        assert pixels.shape == (8, 8, 1) and len(np.unique(pixels)) > 1, name
        if expected is not None:
            assert np.allclose(pixels[..., 0], expected, rtol=1e-5), name


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    from PIL import Image

    ink = np.zeros((4, 4, 4), dtype=np.uint8)  # black ink, and black below what is transparent
    ink[1:3, 1:3, 3] = 255
    expected = np.full((4, 4, 1), 255, dtype=np.uint8)
    expected[1:3, 1:3] = 0
    image = Image.fromarray(ink)
    image.save(tmp_path / "colour.png")
    image.convert("LA").save(tmp_path / "grey.png")
    two = Image.fromarray((expected[..., 0] == 0).astype(np.uint8), "P")
    two.putpalette([0] * 6)  # two colours that are both black
    two.save(tmp_path / "palette.png", transparency=bytes([0, 255]))
    two.save(tmp_path / "palette.gif", transparency=0)
    for file, channels in (("colour.png", 3), ("grey.png", 1), ("palette.png", 3)):
        assert (read_image(tmp_path / file) == expected.repeat(channels, axis=2)).all(), file
    assert (read_image(tmp_path / "palette.gif") == expected.repeat(3, axis=2)).all()


def test_grey_images_among_coloured_ones_are_coloured(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (8, 8), dtype=np.uint8)
    for name in ("a", "b", ".ipynb_checkpoints"):
        (tmp_path / name).mkdir()
    Image.fromarray(grey).save(tmp_path / "a/1.png")
    Image.fromarray(grey).save(tmp_path / ".ipynb_checkpoints/1.png")
    Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / "b/1.png")
    (tmp_path / "a/._1.png").write_bytes(b"not an image")
    images, labels = read_images(tmp_path)
    assert images.shape == (2, 3, 8, 8) and labels == ["a", "b"]
    assert (images[0] == grey).all()
    (tmp_path / "1.png").write_bytes((tmp_path / "a/1.png").read_bytes())
    with pytest.raises(InputError, match=r"'1.png' is in none of them\. Move it"):
        read_images(tmp_path)


def test_labels_may_be_bytes_and_pixels_truths(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, images=np.ones((2, 3, 3), dtype=bool), labels=np.array(["é".encode(), b"b"]))
    images, labels = read_images(path)
    assert images.dtype == np.uint8 and images.all() and labels == ["é", "b"]


def damaged_archives() -> dict[str, Callable[[bytes], bytes]]:
    """Return ways to damage an .npz file of compressed arrays."""

    def replaced(data: bytes, place: int, value: int) -> bytes:
        return data[:place] + bytes([value]) + data[place + 1 :]

    def of_entries(data: bytes, offsets: tuple[int, int], value: int) -> bytes:
        for signature, offset in zip((b"PK\3\4", b"PK\1\2"), offsets, strict=True):
            data = replaced(data, data.find(signature) + offset, value)
        return data

    return {
        "bits": lambda d: d[:60] + bytes(b ^ 0x5A for b in d[60:160]) + d[160:],
        "encrypted": lambda d: of_entries(d, (6, 8), 1),
        "method": lambda d: of_entries(d, (8, 10), 99),
        "cut": lambda d: d[: len(d) // 2],
    }


@pytest.mark.parametrize("damage", damaged_archives())
def test_damaged_archives_are_one_error(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, images=np.random.default_rng(0).random((4, 8, 8)), labels=[0] * 4)
    path.write_bytes(damaged_archives()[damage](path.read_bytes()))
    with pytest.raises(SavedError, match=r"is not an \.npz file of arrays"):
        read_images(path)


def test_a_shape_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    shape = "{'descr': '<f8', 'fortran_order': False, 'shape': (100000000, 100000, 8), }"
    header = b"\x93NUMPY\x01\x00v\x00" + shape.ljust(117).encode() + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", header)
    with pytest.raises(SavedError, match=r"is not an \.npz file of arrays"):
        read_images(tmp_path / "a.npz")
    with pytest.raises(InputError, match=r"must have at most .* as squares"):
        as_images(np.broadcast_to(np.uint8(0), (2, 1, 60_000)), "images")


@pytest.mark.filterwarnings("default")
def test_large_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    Image.new("L", (40, 40)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match=r"fewer pixels: got more than 1,000\. Resize it"):
        read_image(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InputError, match="not an image that can be read"):
        read_image(tmp_path / "large.png")


def test_more_mistakes_are_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Try transpose\(0, 2, 3, 1\)"):
        as_images(np.zeros((4, 3, 8, 8)), "images")
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 2, 2)), labels=[0.0, np.nan])
    with pytest.raises(InputError, match=r"labels of .* must be known"):
        read_images(tmp_path / "a.npz")


def test_what_an_npz_file_unpacks_to_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, labels = make_images(8)
    np.savez_compressed(tmp_path / "x.npz", images=pixels, labels=labels)
    monkeypatch.setattr(limits, "unpacked", 700)
    with pytest.raises(InputError, match=r"must unpack to at most 700 bytes: its arrays have .*"):
        read_images(tmp_path / "x.npz")
    monkeypatch.setattr(limits, "unpacked", 10_000)
    assert len(read_images(tmp_path / "x.npz")[0]) == 8
