"""Folders that `train table` wrote: which they are, and what their reports say.

Nothing heavy is imported, so that runs can be listed without what tables need.
"""

import json
from pathlib import Path
from typing import Any

from addnorm.disk import read_text
from addnorm.errors import SavedError


def is_table_run(path: Path) -> bool:
    """Whether a folder holds a model for tables: all others have a configuration beside them."""
    others = ("config.toml", "config.json", "run.json")
    return (path / "model.safetensors").is_file() and not any((path / n).exists() for n in others)


def table_runs_in(folder: Path) -> list[Path]:
    """The runs of tables in a folder."""
    folders = {found.parent for found in folder.glob("**/model.safetensors")}
    return sorted(path for path in folders if is_table_run(path))


def tell_table_run(path: Path) -> dict[str, Any]:
    """What the report of a table's run says, in a few words."""
    report = path / "report.json"
    try:
        told = json.loads(read_text(report))
        finished, seconds = not told["stopped"], told["seconds"]
    except (ValueError, KeyError, TypeError) as error:
        raise SavedError(f"{str(report)!r} is damaged: {error}.") from None
    best = told.get("valid")
    return {"task": "table", "finished": finished, "seconds": seconds, "best": best}
