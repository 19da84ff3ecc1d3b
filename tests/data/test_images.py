"""Images: reading, and their random distortion against a loop."""

from pathlib import Path

import numpy as np
import pytest
import torch

from addnorm.data.images import as_images, distort_images, draw_distortion, read_images
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
