"""Two dials for most settings: a size, and a time. What they stand for, and how it is chosen.

A configuration is settled in layers, the later winning: the recipe of task and size, a preset if
one is named, the user's file, the user's settings. What is still left out is then worked out from
the data, and the whole is kept with the run.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from addnorm import presets
from addnorm.config import SCHEMA, Config, DataConfig, ModelConfig
from addnorm.disk import read_text
from addnorm.errors import ConfigError
from addnorm.runs.tasks.base import TextTask, Tokenizers

Fields = dict[str, Any]

_TEXT: Fields = dict(addnorm="pre", ffn="gelu", positions="rotary", scale_embedding=False)
_DECODER: Fields = _TEXT | dict(
    norm="rms", ffn="swiglu", attention_bias="none", ffn_bias=False, init="normal"
)
_ENCODER: Fields = _TEXT | dict(positions="learned", init="normal", pool="mean")

MODELS: dict[str, dict[str, Fields]] = {
    "translate": {
        "tiny": dict(width=128, depth=4, heads=4, ffn_width=256, dropout=0.3, addnorm="post"),
        "small": dict(width=256, depth=6, heads=4, ffn_width=1024, dropout=0.2, addnorm="pre"),
        "base": dict(width=512, depth=6, heads=8, ffn_width=2048, dropout=0.1, addnorm="pre"),
        "big": dict(width=1024, depth=6, heads=16, ffn_width=4096, dropout=0.3, addnorm="pre"),
    },
    "language": {
        "tiny": _DECODER
        | dict(width=128, depth=4, heads=4, ffn_width=352, length=128, dropout=0.0),
        "small": _DECODER | dict(width=384, depth=6, heads=6, ffn_width=1024, length=256),
        "base": _DECODER | dict(width=768, depth=12, heads=12, ffn_width=2048, length=1024),
        "big": _DECODER | dict(width=1024, depth=24, heads=16, ffn_width=2752, length=1024),
    },
    "masked": {
        "tiny": _ENCODER | dict(width=128, depth=2, heads=4, length=130),
        "small": _ENCODER | dict(width=256, depth=4, heads=4, length=130),
        "base": _ENCODER | dict(width=768, depth=12, heads=12, length=514),
        "big": _ENCODER | dict(width=1024, depth=24, heads=16, length=514),
    },
    "classify": {
        "tiny": _ENCODER | dict(width=128, depth=2, heads=4, length=258, dropout=0.3),
        "small": _ENCODER | dict(width=256, depth=4, heads=4, length=258, dropout=0.2),
        "base": _ENCODER | dict(width=768, depth=12, heads=12, length=514, dropout=0.1),
        "big": _ENCODER | dict(width=1024, depth=24, heads=16, length=514, dropout=0.1),
    },
}
"""The network of each task and size; translate base and big as in Vaswani et al. 2017, table 3."""

TRAINS: dict[str, Fields] = {
    "translate": dict(smoothing=0.1, average=5, batch=4096),
    "language": dict(weight_decay=0.1, beta2=0.99, eps=1e-8, batch=1024),
    "masked": dict(weight_decay=0.01, eps=1e-8, batch=4096),
    "classify": dict(weight_decay=0.1, eps=1e-8, batch=1024, metric="accuracy"),
}
"""How each task is trained."""

EPOCHS: dict[str, float] = {"translate": 40, "language": 10, "masked": 40, "classify": 8}
"""Times that a small text is read, unless a time is given."""
MOST_TOKENS = 300_000_000
"""Tokens after which a larger text is not read again."""

LIMITS: dict[str, Sequence[tuple[int, str]]] = {
    "translate": ((4_000_000, "tiny"), (60_000_000, "small")),
    "language": ((20_000_000, "tiny"), (300_000_000, "small")),
    "masked": ((5_000_000, "tiny"), (300_000_000, "small")),
    "classify": ((5_000_000, "tiny"), (100_000_000, "small")),
}
"""Tokens of text up to which a size is the one to choose; beyond all of them it is base."""


@dataclass(frozen=True)
class Wish:
    """What a user asked for: a file of settings, and settings, over whatever they are laid."""

    table: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[str] = ()

    @staticmethod
    def load(path: str | Path, settings: Sequence[str] = ()) -> "Wish":
        """A wish from a TOML file."""
        try:
            table = tomllib.loads(read_text(path))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}.") from None
        if table.get("schema", SCHEMA) != SCHEMA:
            raise ConfigError(
                f"{path} has schema {table['schema']!r}; this version reads schema {SCHEMA}. "
                "Update addnorm to open it."
            )
        return Wish(table, settings)

    @property
    def preset(self) -> str | None:
        """The published model it begins from."""
        return self.table.get("preset")

    def over(self, base: Config) -> Config:
        """The base, changed as wished."""
        sections = {k: v for k, v in self.table.items() if k not in ("schema", "preset")}
        return base.updated(sections).override(*self.settings)


def suit_size(task: str, tokens: int) -> str:
    """The size for so much text.

    >>> suit_size("translate", 900_000), suit_size("language", 10**9)
    ('tiny', 'base')
    """
    return next((size for most, size in LIMITS[task] if tokens <= most), "base")


def settle(wish: Wish, task: TextTask, start: ModelConfig | None = None) -> Config:
    """The whole configuration, for data that have been read; makes the task ready for it.

    `start` is the model whose weights to begin with, if there is one.
    """
    size = wish.over(Config()).run.size or suit_size(task.name, task.size)
    model = ModelConfig(vocab=1).replace(**MODELS[task.name][size])
    if wish.preset is not None:
        model = presets.find(wish.preset).model
    if start is not None:
        model = start.replace(dropout=MODELS[task.name][size].get("dropout", 0.1))
    base = Config().replace(model=model.replace(**task.fields()))
    base = base.replace(train=base.train.replace(**TRAINS[task.name]))
    base = base.replace(run=base.run.replace(size=size))
    config = wish.over(base)
    config = config.replace(data=suit_reading(config.data, task, start, task.tokenizers))
    for name, value in task.fields().items():
        if getattr(config.model, name) != value:
            raise ConfigError(
                f"model.{name} must be {value!r}, which the task and its text decide: "
                f"got {getattr(config.model, name)!r}. Leave it out."
            )
    return _work_out(config, task)


def suit_reading(
    data: DataConfig,
    task: TextTask | type[TextTask],
    start: ModelConfig | None = None,
    tokenizers: Tokenizers | None = None,
) -> DataConfig:
    """How text is read, with what was left out: how long it may be, and the vocabulary once known.

    A model to begin with may have learnt fewer positions than the task would read.
    """
    longest = task.longest
    if start is not None and longest is not None and start.positions == "learned":
        longest = min(longest, start.length - task.ends)
    known = {}
    if tokenizers is not None:
        sizes = [tokenizer.size for tokenizer in tokenizers.values()]
        kind = next(iter(tokenizers.values())).kind
        known = {"tokenizer": data.tokenizer or kind, "vocab": data.vocab or max(sizes)}
    return data.replace(longest=data.longest or longest, **known)


def _work_out(config: Config, task: TextTask) -> Config:
    """Fill in what was left out, from what was read."""
    train = config.train
    task.prepare(config)
    if config.model.positions == "learned" and task.reach() > config.model.length:
        raise ConfigError(
            f"model.length must hold the longest text, of {task.reach()} tokens: "
            f"got {config.model.length}. Try data.longest={config.model.length - task.ends}."
        )
    parts = len(task.epoch(0))
    epochs = min(EPOCHS[task.name], max(1.0, MOST_TOKENS / max(task.size, 1)))
    steps = train.steps or max(1, round(epochs * parts / train.accumulate))
    return fit(config, steps)


def fit(config: Config, steps: int) -> Config:
    """What depends on the number of steps: warm-up, evaluations, checkpoints."""
    train = config.train
    warmup = train.warmup
    if warmup is None:
        warmup = min(4000 if train.schedule in ("noam", "inverse-sqrt") else 1000, steps // 10)
    evaluate = train.evaluate or max(1, steps // 40)
    return config.replace(
        train=train.replace(
            steps=steps,
            lr=train.lr or suit_rate(config.model.width),
            warmup=warmup,
            evaluate=evaluate,
            save=train.save or evaluate,
        )
    )


def suit_rate(width: int) -> float:
    """A highest rate for Adam: 1e-3 at width 256, and as the root of the width from there.

    >>> suit_rate(256), round(suit_rate(512), 6)
    (0.001, 0.000707)
    """
    return float(f"{1e-3 * (256 / width) ** 0.5:.3g}")
