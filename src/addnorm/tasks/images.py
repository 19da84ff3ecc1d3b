"""Images: an encoder over patches that predicts the class of an image (ViT).

Images are read from an .npz file (arrays `images` and `labels`) or from a folder with one folder
for each class. Dosovitskiy et al. 2021 (2010.11929).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from addnorm import presets
from addnorm.config import Config, ModelConfig
from addnorm.data.images import (
    distort_images,
    draw_distortion,
    read_images,
    split_images,
)
from addnorm.data.text.batches import shard
from addnorm.data.text.special_tokens import IGNORE
from addnorm.errors import InputError
from addnorm.models.build import build
from addnorm.models.saved import save
from addnorm.models.size import cost
from addnorm.tasks.base import (
    DataFacts,
    Fields,
    Metrics,
    Say,
    Task,
    fine_tuning,
    load_matching_weights_,
    require_source,
)
from addnorm.tasks.image_classifier import (
    ImageAssets,
    TrainedImages,
    load_image_assets,
    normalise_images,
    number_labels,
    reduce_mean,
    save_image_assets,
)
from addnorm.training import parallel
from addnorm.training.loop import Batch


def vit_size(width: int, depth: int, heads: int, dropout: float) -> Fields:
    """Return the fields of an encoder over patches, of a size.

    The mean over patches is classified, without a summary token: Beyer et al. 2022 (2205.01580).
    """
    shape = {"width": width, "depth": depth, "heads": heads, "dropout": dropout}
    kind = {"input": "patches", "pool": "mean", "ffn": "gelu", "addnorm": "pre"}
    return {**shape, **kind, "positions": "sinusoidal", "vocab": 0}


def choose_patch(image: int) -> int:
    """Return a patch size that divides an image into 8 × 8 patches or fewer (14 × 14 if large).

    Patches have 4 pixels or more to a side if that leaves two to a side: smaller ones hold too
    little to be told apart before attention joins them.

    >>> choose_patch(8), choose_patch(9), choose_patch(28), choose_patch(32), choose_patch(224)
    (4, 3, 4, 4, 16)
    """
    most = 14 if image >= 128 else 8
    sizes = (*range(4, image), 3, 2)
    return next((s for s in sizes if image % s == 0 and 2 <= image // s <= most), image)


def images_per_batch(count: int) -> int:
    """Return a batch size, a power of 2 from 16 to 64, that leaves 32 steps an epoch if it can.

    >>> images_per_batch(100), images_per_batch(1_300), images_per_batch(60_000)
    (16, 32, 64)
    """
    return next((size for size in (64, 32) if count >= 32 * size), 16)


def epochs_of_images(count: int) -> float:
    """Return the passes over the images that make 2,000 steps, but 50 at least and 300 at most.

    >>> epochs_of_images(100), epochs_of_images(1_300), epochs_of_images(60_000)
    (285.7, 50.0, 50.0)
    """
    steps = -(-count // images_per_batch(count))
    return min(300.0, max(50.0, round(2000 / steps, 1)))


def _start_model(start: ModelConfig, fields: Fields) -> ModelConfig:
    """Return the model to start from with the classes of the data; its images must be theirs."""
    expected = (start.channels, start.image, start.image)
    actual = (fields["channels"], fields["image"], fields["image"])
    if expected != actual:
        raise InputError(
            f"images must have the shape of the model to start from, {expected} (channels, height, "
            f"width): got {actual}. Resize them first."
        )
    return start.replace(**fields)


class Images(Task):
    """Learn to predict the class of an image."""

    name, trained, unit = "images", TrainedImages, "images"
    metrics = ("loss", "accuracy")
    epochs = 50.0
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
        self.start: ModelConfig | None = None

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
            if start is not None:  # the model was trained with its own scales
                assets |= {name: list(start[1][name]) for name in ("mean", "scale")}
            assets["mean_image"] = reduce_mean(pixels)
        task = cls(images, targets, names, split, assets, notes)
        task.start = None if start is None else start[0].config
        return task

    @classmethod
    def load_assets(cls, path: Path) -> ImageAssets:
        return load_image_assets(path)

    def save_assets(self, path: Path) -> None:
        save_image_assets(path, self.assets)

    def facts(self) -> DataFacts:
        count, channels, side = len(self.train_rows), *self.images.shape[1:3]
        held = len(self.held_rows)
        model = {"mode": "encoder", "input": "patches", "head": "class"}
        return DataFacts(
            size=count,
            batches=lambda config: -(-count // (config.train.batch or 64)),
            longest=lambda config: 1,
            evaluation=lambda config: held / (3 * (config.train.batch or 64)),
            model={**model, "image": side, "channels": channels, "outputs": len(self.labels)},
            start=self.start,
        )

    @classmethod
    def defaults(cls, request: Config, facts: DataFacts, preset: str | None) -> Config:
        known = [size for most, size in cls.size_limits if facts.size <= most]
        size = request.run.size or (known[0] if known else "base")
        fields = cls.sizes[size] if preset is None else {}
        model = presets.find(preset).model if preset is not None else ModelConfig(vocab=1)
        side, train = int(facts.model["image"]), cls.train_defaults
        model = model.replace(**fields | facts.model | {"patch": choose_patch(side)})
        if facts.start is not None:
            model = _start_model(facts.start, facts.model)
            train = train | {"lr": fine_tuning(model.width, facts.size, 1)["lr"]}
        base = Config().replace(model=model)
        share = 0.1 if request.data.valid_fraction is None else request.data.valid_fraction
        shift = side / 16 if request.data.image_shift is None else request.data.image_shift
        return base.replace(
            data=base.data.replace(valid_fraction=share, image_shift=shift),
            train=base.train.replace(
                batch=images_per_batch(facts.size),
                epochs=epochs_of_images(facts.size),
                **train,
            ),
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
        data = self.config.data
        largest = (data.image_shift or 0.0, data.image_rotation, data.image_zoom)
        if any(largest):
            generators = (np.random.default_rng([self.config.run.seed, epoch, r]) for r in rows)
            maps = [draw_distortion(generator, *largest) for generator in generators]
            batch["inputs"] = distort_images(batch["inputs"], maps)
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
