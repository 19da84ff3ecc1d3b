"""Images: an encoder over patches that predicts the class of an image (ViT).

Images are read from an .npz file (arrays `images` and `labels`) or from a folder with one folder
for each class. Dosovitskiy et al. 2021 (2010.11929).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from addnorm import presets
from addnorm.config import Config, ModelConfig
from addnorm.data.images import as_images, read_images
from addnorm.data.text.batches import shard
from addnorm.data.text.special_tokens import IGNORE
from addnorm.errors import InputError
from addnorm.files import read_document, write_document
from addnorm.metrics import classification_metrics
from addnorm.lens.explain import explain_image
from addnorm.lens.explanation import Background, SequenceExplanation
from addnorm.lens.image import displayed_pixels
from addnorm.models.build import build
from addnorm.models.saved import load_model, save
from addnorm.models.size import cost
from addnorm.models.transformer import Encoder
from addnorm.tasks.base import (
    DataFacts,
    Fields,
    Metrics,
    Say,
    Task,
    Trained,
    choose_row,
    load_matching_weights_,
    require_source,
    say_nothing,
    state_memory,
)
from addnorm.training import parallel
from addnorm.training.loop import Batch

IMAGES_FILE, IMAGES_KIND = "images.json", ("addnorm images", 1)
"""What prediction needs besides the model: the mean and scale of each channel."""
MAX_MEAN_SIDE = 32
"""Side of the mean image that is stored, to compare others with; a larger one is reduced."""
IMAGES_PER_CHUNK = 256
"""Images that are classified at a time."""

ImageAssets = Mapping[str, Any]
"""mean and scale of each channel; mean_image, (channels, side, side), or None."""


def vit_size(width: int, depth: int, heads: int, dropout: float) -> Fields:
    """Return the fields of an encoder over patches, of a size.

    The mean over patches is classified, without a summary token: Beyer et al. 2022 (2205.01580).
    """
    shape = {"width": width, "depth": depth, "heads": heads, "dropout": dropout}
    kind = {"input": "patches", "pool": "mean", "ffn": "gelu", "addnorm": "pre"}
    return {**shape, **kind, "positions": "sinusoidal", "vocab": 0}


def choose_patch(image: int) -> int:
    """Return a patch size that divides an image into 8 × 8 patches or fewer (14 × 14 if large).

    >>> choose_patch(8), choose_patch(28), choose_patch(32), choose_patch(224)
    (2, 4, 4, 16)
    """
    most = 14 if image >= 128 else 8
    sizes = [size for size in range(2, image + 1) if image % size == 0 and image // size <= most]
    return sizes[0] if sizes else image


def images_per_batch(count: int) -> int:
    """Return a batch size, a power of 2 from 16 to 64, that leaves 32 steps an epoch if it can.

    >>> images_per_batch(100), images_per_batch(1_300), images_per_batch(60_000)
    (16, 32, 64)
    """
    return next((size for size in (64, 32) if count >= 32 * size), 16)


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


# ── The trained model ─────────────────────────────────────────────────────────────────────────────


def save_image_assets(path: Path, assets: ImageAssets) -> None:
    """Write what prediction needs besides the model."""
    write_document(path / IMAGES_FILE, *IMAGES_KIND, dict(assets))


class TrainedImages(Trained):
    """A trained classifier of images."""

    @cached_property
    def model(self) -> Encoder:
        model = load_model(self.model_path)
        assert isinstance(model, Encoder)
        return model

    @cached_property
    def assets(self) -> ImageAssets:
        return Images.load_assets(self.path)

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
        state_memory(self.model, inputs, say)
        mean, name = mean_image(self.assets, self.config.model)
        title = f"image {number}" + (f" of {Path(images).name}" if is_path else "")
        options: dict[str, Any] = {} if limit is None else {"limit": limit}
        return explain_image(
            self.model.eval(),
            inputs,
            Background(inputs={"encoder": mean}, name=name),
            pixels=displayed_pixels(one[0]),
            name_of=self.labels.__getitem__,
            title=title,
            notes=[] if labels is None else [f"Its label is {labels[number - 1]}."],
            **options,
        )

    def evaluate(self, *data: Any, say: Say = say_nothing, **options: Any) -> Metrics:
        source = data[0] if data else options.get("source")
        if source is None:
            with torch.no_grad():
                task = Images.read(self.config, self.assets).bind(self.config)
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
    """Return (x − mean) / scale of each channel, with which the model was trained."""
    expected = (c.channels, c.image, c.image)
    if images.shape[1:] != expected:
        raise InputError(
            f"the model was trained on images of shape {expected} (channels, height, width): got "
            f"{images.shape[1:]}. Resize them first."
        )
    mean, scale = (torch.tensor(assets[name])[:, None, None] for name in ("mean", "scale"))
    return (torch.from_numpy(images.astype(np.float32)) - mean) / scale


# ── The task ──────────────────────────────────────────────────────────────────────────────────────


class Images(Task):
    """Learn to predict the class of an image."""

    name, trained, unit = "images", TrainedImages, "images"
    metrics = ("loss", "accuracy")
    epochs = 150.0
    train_defaults: ClassVar[Fields] = {
        "weight_decay": 0.05,
        "beta2": 0.999,
        "eps": 1e-8,
        "metric": "loss",
        "label_smoothing": 0.1,
    }
    sizes: ClassVar[dict[str, Fields]] = {
        "tiny": vit_size(64, 4, 4, 0.0),
        "small": vit_size(128, 6, 4, 0.0),
        "base": vit_size(384, 12, 6, 0.1),
        "big": vit_size(768, 12, 12, 0.1),
    }
    size_limits: ClassVar[tuple[tuple[int, str], ...]] = ((5_000, "tiny"), (100_000, "small"))

    def __init__(
        self,
        images: NDArray[Any],
        targets: list[int],
        labels: list[str],
        split: tuple[list[int], list[int]],
        assets: ImageAssets,
        notes: list[str],
    ) -> None:
        self.images, self.targets, self.labels = images, targets, labels
        self.train_rows, self.held_rows = split
        self.assets, self.notes = assets, notes

    @classmethod
    def read(cls, config: Config, assets: Any = None, start: Any = None) -> Self:
        source = require_source(config, "a folder of images or an .npz file")
        images, labels = read_images(source)
        if labels is None:
            raise InputError(
                f"{source!r} has no labels. Add an array 'labels', or one folder for each class."
            )
        if config.data.max_rows is not None:
            images, labels = images[: config.data.max_rows], labels[: config.data.max_rows]
        names = sorted(
            set(labels), key=lambda name: (len(name), name) if name.isdigit() else (0, name)
        )
        if len(names) < 2:
            raise InputError(f"{source!r} must have 2 labels or more: got {', '.join(names)}.")
        notes = [
            f"{source}: {len(images):,} images of {images.shape[1:]} read, {len(names)} labels."
        ]
        targets = number_labels(labels, names)
        fraction = 0.1 if config.data.valid_fraction is None else config.data.valid_fraction
        split = split_images(targets, fraction, config.run.seed)
        if config.data.valid_source is not None:
            held, held_labels = read_images(config.data.valid_source)
            if held_labels is None or held.shape[1:] != images.shape[1:]:
                raise InputError(
                    f"{config.data.valid_source!r} must have labels and images of "
                    f"{images.shape[1:]}: got {held.shape[1:]}."
                )
            first = len(images)
            images = np.concatenate((images, held))
            targets += number_labels(held_labels, names)
            split = list(range(first)), list(range(first, len(images)))
        if not split[0] or not split[1]:
            raise InputError("training and validation need an image each. Add images.")
        notes.append(f"{len(split[1]):,} images are held out for validation.")
        if assets is None:
            pixels = images[split[0]].astype(np.float64)
            scale = np.maximum(pixels.std(axis=(0, 2, 3)), 1e-6)
            assets = {"mean": pixels.mean(axis=(0, 2, 3)).tolist(), "scale": scale.tolist()}
            assets["mean_image"] = reduce_mean(pixels)
        return cls(images, targets, names, split, assets, notes)

    @classmethod
    def load_assets(cls, path: Path) -> ImageAssets:
        content = read_document(path / IMAGES_FILE, *IMAGES_KIND)
        known = {name: [float(value) for value in content[name]] for name in ("mean", "scale")}
        return {**known, "mean_image": content.get("mean_image")}

    def save_assets(self, path: Path) -> None:
        save_image_assets(path, self.assets)

    def facts(self) -> DataFacts:
        count, channels, side = len(self.train_rows), *self.images.shape[1:3]
        model = {"mode": "encoder", "input": "patches", "head": "class"}
        return DataFacts(
            size=count,
            batches=lambda config: -(-count // (config.train.batch or 64)),
            longest=lambda config: 1,
            model={**model, "image": side, "channels": channels, "outputs": len(self.labels)},
        )

    @classmethod
    def defaults(cls, request: Config, facts: DataFacts, preset: str | None) -> Config:
        known = [size for most, size in cls.size_limits if facts.size <= most]
        size = request.run.size or (known[0] if known else "base")
        fields = cls.sizes[size] if preset is None else {}
        model = presets.find(preset).model if preset is not None else ModelConfig(vocab=1)
        side = int(facts.model["image"])
        model = model.replace(**fields | facts.model | {"patch": choose_patch(side)})
        base = Config().replace(model=model)
        share = 0.1 if request.data.valid_fraction is None else request.data.valid_fraction
        shift = side // 8 if request.data.image_shift is None else request.data.image_shift
        return base.replace(
            data=base.data.replace(valid_fraction=share, image_shift=shift),
            train=base.train.replace(batch=images_per_batch(facts.size), **cls.train_defaults),
            run=base.run.replace(size=size),
        )

    def _bind(self, config: Config) -> None:
        self.size = config.train.batch or 64

    def make_model(self, start: nn.Module | None, say: Say) -> Any:
        torch.manual_seed(self.config.run.seed)
        model = build(self.config)
        if start is not None:
            say(load_matching_weights_(model, start))
        return model

    def empty_model(self) -> Any:
        return build(self.config)

    def save_model(self, model: nn.Module, state: Mapping[str, Tensor], directory: Path) -> None:
        save(model, directory, state)

    def epoch(self, number: int) -> Sequence[Sequence[int]]:
        generator = np.random.default_rng([self.config.run.seed, number])
        rows = generator.permutation(self.train_rows).tolist()
        return [rows[start : start + self.size] for start in range(0, len(rows), self.size)]

    def plan(self, epoch: int) -> Sequence[tuple[int, Sequence[int]]]:
        own = shard(self.epoch(epoch), parallel.rank(), parallel.world_size())
        return [(epoch, part) for part in own]

    def batch(self, part: tuple[int, Sequence[int]]) -> Batch:
        epoch, rows = part
        if not rows:  # a worker without examples takes part with one that has no target
            batch = self.collate(self.train_rows[:1])
            return batch | {"targets": torch.full_like(batch["targets"], IGNORE)}
        batch = self.collate(rows)
        largest = self.config.data.image_shift or 0
        if largest:
            shifts = [
                np.random.default_rng([self.config.run.seed, epoch, row]).integers(
                    -largest, largest + 1, 2
                )
                for row in rows
            ]
            batch["inputs"] = shift_images(batch["inputs"], shifts)
        return batch

    def collate(self, rows: Sequence[int]) -> Batch:
        """Return the normalised images of rows, and their classes."""
        inputs = normalise_images(self.images[list(rows)], self.assets, self.config.model)
        return {"inputs": inputs, "targets": torch.tensor([self.targets[row] for row in rows])}

    def tokens(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        smoothing = self.config.train.label_smoothing
        return self._total(model, batch, smoothing) / total

    @staticmethod
    def _total(model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        logits, targets = model(batch["inputs"]), batch["targets"]
        return functional.cross_entropy(
            logits, targets, reduction="sum", label_smoothing=smoothing, ignore_index=IGNORE
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        total = right = count = 0.0
        parts = [self.held_rows[i : i + 256] for i in range(0, len(self.held_rows), 256)]
        for part in shard(parts, parallel.rank(), parallel.world_size()):
            if not part:
                continue
            batch = {name: value.to(device) for name, value in self.collate(part).items()}
            logits = model(batch["inputs"])
            losses = functional.cross_entropy(logits, batch["targets"], reduction="sum")
            total, count = total + float(losses), count + len(part)
            right += float((logits.argmax(dim=-1) == batch["targets"]).sum())
        total, right = parallel.sum_over_workers(total, right)
        count = len(self.held_rows)
        return {"loss": total / count, "accuracy": right / count}

    def cost(self, model: nn.Module) -> Metrics:
        step = cost(self.config, batch=self.size)
        return {
            "parameters": step.parameters,
            "step_flops": step.forward + step.backward,
            "activation_bytes": step.activations,
        }

    def contents(self) -> Iterable[object]:
        yield from (self.images.tobytes(), self.targets, self.labels, self.held_rows)


def shift_images(images: Tensor, shifts: Sequence[NDArray[Any]]) -> Tensor:
    """Return each image moved by (down, right) pixels; what is uncovered repeats the edge.

    >>> shift_images(torch.arange(4.0).view(1, 1, 2, 2), [np.array([1, 0])]).flatten().tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    height, width = images.shape[2:]
    most = max(int(abs(shift).max()) for shift in shifts)
    wide = functional.pad(images, (most,) * 4, mode="replicate")
    corners = [(most - int(down), most - int(right)) for down, right in shifts]
    moved = [
        image[:, top : top + height, left : left + width]
        for image, (top, left) in zip(wide, corners, strict=True)
    ]
    return torch.stack(moved)
