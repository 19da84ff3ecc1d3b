"""The request of a user: a task or TOML file, options, and `section.field=value` settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from addnorm.config import SCHEMA, Config
from addnorm.errors import ConfigError, nearest
from addnorm.files import read_text
from addnorm.section import parse_toml
from addnorm.tasks import TASKS

COMMON_OPTIONS = {
    "start": "run.start",
    "minutes": "run.minutes",
    "seed": "run.seed",
}
"""Options of every task, each with the configuration field that it sets."""


@dataclass(frozen=True)
class RunRequest:
    """The values that a user set, to be applied to a configuration.

    Parameters
    ----------
    table : sections with their fields, as in a TOML file.
    settings : `section.field=value` texts, which override the table.
    """

    table: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[str] = ()

    @staticmethod
    def load(path: str | Path, settings: Sequence[str] = ()) -> "RunRequest":
        """Return the request of a TOML file."""
        table = parse_toml(read_text(path), str(path))
        if table.get("schema", SCHEMA) != SCHEMA:
            raise ConfigError(
                f"{path} has schema {table['schema']!r}; this version reads schema {SCHEMA}. "
                "Rewrite it with the field names of `addnorm show base --fields`."
            )
        return RunRequest(table, settings)

    @property
    def preset(self) -> str | None:
        """The preset that the model section starts from."""
        return self.table.get("preset")

    @property
    def task(self) -> str | None:
        return self.over(Config()).run.task

    def _stated(self, path: str) -> Any:
        """Return the value of a field as it was set; the others may not be valid without more."""
        section, _, name = path.partition(".")
        for setting in reversed(self.settings):
            field, equals, text = setting.partition("=")
            if equals and field.strip() == path:
                return text.strip()
        values = self.table.get(section)
        return values.get(name) if isinstance(values, Mapping) else None

    def over(self, base: Config) -> Config:
        """Return a configuration with the values of the request applied."""
        sections = {k: v for k, v in self.table.items() if k not in ("schema", "preset")}
        return base.updated(sections).override(*self.settings)

    def with_values(self, values: Mapping[str, Any]) -> "RunRequest":
        """Return the request with some fields set, as {"section.field": value}."""
        table = {**self.table}
        for path, value in values.items():
            section, _, name = path.partition(".")
            table[section] = {**table.get(section, {}), name: value}
        return RunRequest(table, self.settings)

    def with_settings(self, *settings: str) -> "RunRequest":
        """Return the request with further settings, which override earlier ones."""
        return RunRequest(self.table, (*self.settings, *settings))

    def with_options(self, options: Mapping[str, Any]) -> "RunRequest":
        """Return the request with options of its task, named as on the command line.

        >>> RunRequest({"run": {"task": "language"}}).with_options({"txt": "book.txt"})
        Traceback (most recent call last):
        addnorm.errors.ConfigError: train language has no option 'txt'. Did you mean 'text'?
        """
        task = self._stated("run.task")
        known = {**COMMON_OPTIONS, **(TASKS[task].options if task in TASKS else {})}
        values = {name: value for name, value in options.items() if value is not None}
        for name in values:
            if name not in known:
                raise ConfigError(f"train {task} has no option {name!r}. {nearest(name, known)}")
        has_source = "source" in values or self._stated("data.source") is not None
        if task in ("language", "masked") and "text" in values and not has_source:
            values["source"] = values.pop("text")  # the text itself, not a column of a file
        return self.with_values({known[name]: value for name, value in values.items()})


def make_request(
    task: str | Path | None,
    options: Mapping[str, Any],
    settings: Sequence[str] | Mapping[str, Any] = (),
) -> RunRequest:
    """Return the request for a task or TOML file, with options and settings.

    Parameters
    ----------
    task : name of a task, or a TOML file that names one.
    options : options of the task, by their names on the command line.
    settings : `section.field=value` texts, or a mapping of "section.field" to value.
    """
    if task is None:
        raise ConfigError(f"train needs a task ({', '.join(TASKS)}), a TOML file or --resume RUN.")
    if isinstance(task, Path):
        task = str(task)
    if not isinstance(task, str):
        raise ConfigError(
            f"a task must be one of {', '.join(TASKS)}, or a TOML file: got {task!r:.60}. Try "
            "'language'."
        )
    settings = _require_settings(settings)
    if task in TASKS:
        request = RunRequest({"run": {"task": task}})
    elif task.endswith(".toml"):
        request = RunRequest.load(task)
    else:
        raise ConfigError(f"there is no task {task!r}. {nearest(task, TASKS)}")
    if isinstance(settings, Mapping):
        for path in settings:
            if "." not in path:
                raise ConfigError(
                    f"a setting must be named section.field: got {path!r}. Try 'model.depth'."
                )
        request = request.with_options(options)
        return request.with_values({path: settings[path] for path in settings})
    return RunRequest(request.table, settings).with_options(options)


def _require_settings(settings: Any) -> Sequence[str] | Mapping[str, Any]:
    """Return settings; ConfigError unless they are a mapping, texts or one text."""
    if isinstance(settings, str):
        return [settings]
    if isinstance(settings, bytes) or not isinstance(settings, Iterable):
        raise ConfigError(
            f"settings must be a dict or a list of str: got {settings!r:.60}. Try "
            "{'model.depth': 4}."
        )
    for each in settings:
        if not isinstance(each, str):
            raise ConfigError(f"a setting must be a str: got {each!r:.60}. Try 'model.depth=4'.")
    return settings if isinstance(settings, Mapping) else list(settings)


def as_settings(settings: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Return settings as `section.field=value` texts; the values of a list are joined by commas.

    >>> as_settings({"train.lr": 0.01, "model.addnorm": ["post", "pre"], "model.bias": True})
    ['train.lr=0.01', 'model.addnorm=post,pre', 'model.bias=true']
    """
    if isinstance(settings, str):
        return [settings]
    if not isinstance(settings, Mapping):
        return list(settings)

    def text(value: Any) -> str:
        if isinstance(value, list | tuple):
            return ",".join(text(each) for each in value)
        return str(value).lower() if isinstance(value, bool) else str(value)

    return [f"{path}={text(value)}" for path, value in settings.items()]
