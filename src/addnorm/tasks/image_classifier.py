"""A trained classifier of images: predictions, metrics and explanations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.data.images import as_images, read_images
from addnorm.errors import InputError
from addnorm.files import read_document, write_document
from addnorm.lens.explain import explain_image
from addnorm.lens.explanation import Background, SequenceExplanation
from addnorm.lens.image import displayed_pixels
from addnorm.lens.look import LIMIT
from addnorm.metrics import classification_metrics
from addnorm.models.saved import load_model
from addnorm.models.transformer import Encoder
from addnorm.tasks.base import Metrics, Say, Trained, choose_row, say_nothing, state_memory

IMAGES_FILE, IMAGES_KIND = "images.json", ("addnorm images", 1)
"""What prediction needs besides the model: the mean and scale of each channel."""
MAX_MEAN_SIDE = 32
"""Side of the mean image that is stored, to compare others with; a larger one is reduced."""
IMAGES_PER_CHUNK = 256
"""Images that are classified at a time."""

ImageAssets = Mapping[str, Any]
"""mean and scale of each channel; mean_image, (channels, side, side), or None."""


def save_image_assets(path: Path, assets: ImageAssets) -> None:
    """Write what prediction needs besides the model."""
    write_document(path / IMAGES_FILE, *IMAGES_KIND, dict(assets))


def load_image_assets(path: Path) -> ImageAssets:
    """Return what prediction needs besides the model."""
    content = read_document(path / IMAGES_FILE, *IMAGES_KIND)
    known = {name: [float(value) for value in content[name]] for name in ("mean", "scale")}
    return {**known, "mean_image": content.get("mean_image")}


class TrainedImages(Trained):
    """A trained classifier of images."""

    @cached_property
    def model(self) -> Encoder:
        model = load_model(self.model_path)
        assert isinstance(model, Encoder)
        return model

    @cached_property
    def assets(self) -> ImageAssets:
        return load_image_assets(self.path)

    def preload(self, model: Encoder, assets: ImageAssets) -> None:
        """Use a model and its assets that are in memory, not those of the directory."""
        self.__dict__["model"], self.__dict__["assets"] = model, assets

    def iter_labels(
        self, images: Iterable[Any], chunk: int | None = None, say: Say = say_nothing
    ) -> Iterator[dict[str, float]]:
        """Yield the probability of every label for each image, (channels, side, side), in order."""
        places = iter(images)
        while part := list(islice(places, chunk or IMAGES_PER_CHUNK)):
            for image in part:
                if not isinstance(image, np.ndarray):
                    raise InputError(
                        f"images are read from files: got {type(image).__name__}. Pass an .npz "
                        "file, an image or a folder."
                    )
            for row in self.probabilities(np.stack(part)).tolist():
                yield dict(zip(self.labels, row, strict=True))

    def iter_file_texts(self, path: str, say: Say = say_nothing) -> Iterable[Any]:
        """Return the images of a file or folder, for `addnorm classify`."""
        return list(read_images(path)[0])

    @torch.no_grad()
    def probabilities(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return the probability of each label, (images, labels)."""
        inputs = normalise_images(images, self.assets, self.config.model)
        parts = [self.model(part) for part in torch.split(inputs, IMAGES_PER_CHUNK)]
        return torch.cat(parts).float().softmax(dim=-1).numpy()

    def classify(self, images: Any) -> list[dict[str, float]]:
        """Return the probability of every label for each image, the most probable label first.

        Parameters
        ----------
        images : a folder, an .npz or image file, or an array (images, height, width[, channels]).
        """
        is_path = isinstance(images, str | Path)
        pixels = read_images(images)[0] if is_path else as_images(images, "images")
        return [
            dict(sorted(row.items(), key=lambda pair: -pair[1])) for row in self.iter_labels(pixels)
        ]

    def explain(
        self,
        images: Any,
        row: int | None = None,
        *,
        limit: int | None = None,
        say: Say = say_nothing,
    ) -> SequenceExplanation:
        """Return an explanation of the class of an image: patches, pieces, layers, attention.

        Parameters
        ----------
        images : a folder, an .npz or image file, or an array (images, height, width[, channels]).
        row : which of several images, counted from 1; the first by default.
        limit : bytes above which the explanation is refused, with its size; 1 GB by default.
        say : receives messages for the user.
        """
        is_path = isinstance(images, str | Path)
        pixels, labels = read_images(images) if is_path else (as_images(images, "images"), None)
        number = choose_row(len(pixels), row, "image", say)
        one = pixels[number - 1 : number]
        inputs = normalise_images(one, self.assets, self.config.model)
        limit = LIMIT if limit is None else limit
        state_memory(self.model, inputs, limit, say)
        mean, name = mean_image(self.assets, self.config.model)
        title = f"image {number}" + (f" of {Path(images).name}" if is_path else "")
        return explain_image(
            self.model.eval(),
            inputs,
            Background(inputs={"encoder": mean}, name=name),
            pixels=displayed_pixels(one[0]),
            name_of=self.labels.__getitem__,
            title=title,
            notes=[] if labels is None else [f"Its label is {labels[number - 1]}."],
            limit=limit,
        )

    def evaluate(self, *data: Any, say: Say = say_nothing, **options: Any) -> Metrics:
        source = data[0] if data else options.get("source")
        if source is None:
            with torch.no_grad():
                task = self.task.read(self.config, self.assets).bind(self.config)
                return dict(task.evaluate(self.model))
        images, labels = read_images(source)
        if labels is None:
            raise InputError(f"{str(source)!r} has no labels to evaluate with.")
        numbers = number_labels(labels, self.labels)
        return {
            **classification_metrics(self.probabilities(images), np.array(numbers)),
            "images": len(numbers),
        }


def number_labels(labels: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the number of each label among the known names."""
    unknown = sorted(set(labels) - set(names))
    if unknown:
        raise InputError(f"the model does not know the label {unknown[0]!r}: {', '.join(names)}.")
    places = {name: number for number, name in enumerate(names)}
    return [places[label] for label in labels]


def mean_image(assets: ImageAssets, c: ModelConfig) -> tuple[Tensor, str]:
    """Return the normalised mean of the training images, (1, channels, side, side), and its name.

    A model without one (imported, or trained by addnorm 0.1) has its mean colour.
    """
    means = assets.get("mean_image")
    if not means:
        return torch.zeros(1, c.channels, c.image, c.image), "an image of the mean colour"
    image = np.array(means, dtype=np.float32)
    times = c.image // image.shape[-1]
    full = image.repeat(times, axis=1).repeat(times, axis=2)
    return normalise_images(full[None], assets, c), "the mean of the training images"


def reduce_mean(pixels: NDArray[Any]) -> list[Any]:
    """Return the mean of images, (channels, side, side), by blocks if the side is large."""
    mean, side = pixels.mean(axis=0), pixels.shape[-1]
    sizes = [size for size in range(1, side + 1) if side % size == 0]
    size = next(size for size in sizes if side // size <= MAX_MEAN_SIDE)
    blocks = mean.reshape(len(mean), side // size, size, side // size, size).mean(axis=(2, 4))
    reduced: list[Any] = np.round(blocks, 2).tolist()
    return reduced


def normalise_images(images: NDArray[Any], assets: ImageAssets, c: ModelConfig) -> Tensor:
    """Return (x − mean) / scale of each channel, with which the model was trained.

    Grey images are what they are in colours for a model of colours.
    """
    expected = (c.channels, c.image, c.image)
    if images.shape[1] == 1 and c.channels == 3:
        images = images.repeat(3, axis=1)
    if images.shape[1:] != expected:
        raise InputError(
            f"the model was trained on images of shape {expected} (channels, height, width): got "
            f"{images.shape[1:]}. Resize them first."
        )
    mean, scale = (torch.tensor(assets[name])[:, None, None] for name in ("mean", "scale"))
    return (torch.from_numpy(images.astype(np.float32)) - mean) / scale
