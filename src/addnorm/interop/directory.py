"""A directory of Hugging Face files, read strictly: `config.json` and safetensors, sharded or not.

Only regular files inside the directory are opened. Names, shapes and dtypes are known from the
headers before any tensor is read, so that a wrong one is refused before memory is allocated.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from addnorm.errors import SavedError
from addnorm.files import read_bytes, require_regular

HF_CONFIG, HF_WEIGHTS, HF_INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.pkl")
"""Weights in formats that can hold code, or that need another library."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of weights that are read, by their names in safetensors."""
MAX_TENSORS = 1_000_000
"""Tensors that a directory may have; more are not those of one model."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor is, and what the header says about it."""

    file: str
    shape: Shape
    dtype: str


def inside(directory: Path, name: str) -> Path:
    """Return the path of a file in a directory; raise SavedError if it is elsewhere."""
    path = directory / name
    require_regular(path)
    if path.resolve().parent != directory.resolve():
        raise SavedError(
            f"{str(path)!r} must be a file of that directory: it is a link to another place. "
            f"Copy the directory without links: cp -rL {directory} COPY"
        )
    return path


def read_json_object(directory: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of the directory."""
    path = inside(directory, name)
    try:
        content = json.loads(read_bytes(path).decode())
    except (ValueError, RecursionError) as error:
        raise SavedError(f"{str(path)!r} is not JSON: {type(error).__name__}.") from None
    if not isinstance(content, dict):
        raise SavedError(f"{str(path)!r} must hold a JSON object: got {type(content).__name__}.")
    return content


class Weights(Mapping[str, TensorEntry]):
    """The tensors of a directory, by name: their headers at once, their values on request.

    Use it as a context manager; the files are closed at its end.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._entries: dict[str, TensorEntry] = {}
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def _open(self) -> None:
        index = self._index()
        for name in [HF_WEIGHTS] if index is None else sorted(set(index.values())):
            path = inside(self.directory, name)
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                names: list[str] = list(file.keys())
                headers = [file.get_slice(key) for key in names]
                entries = [
                    TensorEntry(name, tuple(header.get_shape()), str(header.get_dtype()))
                    for header in headers
                ]
            except (SafetensorError, OSError, ValueError, OverflowError) as error:
                raise SavedError(
                    f"{str(path)!r} is damaged or not a safetensors file: {error}."
                ) from None
            self._files[name] = file
            for key, entry in zip(names, entries, strict=True):
                if key in self._entries:
                    raise SavedError(
                        f"each tensor must be in one file: {key!r} is in {name!r} and in "
                        f"{self._entries[key].file!r} of {str(self.directory)!r}."
                    )
                self._entries[key] = entry
        if len(self._entries) > MAX_TENSORS:
            raise SavedError(f"{str(self.directory)!r} has more than {MAX_TENSORS:,} tensors.")
        if index is not None:
            self._compare(index)

    def _index(self) -> dict[str, str] | None:
        """Return the file of each tensor of a sharded directory; None if there is one file."""
        directory = self.directory
        if (directory / HF_WEIGHTS).exists():
            return None
        if not (directory / HF_INDEX).exists():
            raise SavedError(_no_weights(directory))
        table = read_json_object(directory, HF_INDEX).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise SavedError(f"{str(directory / HF_INDEX)!r} must have a weight_map: it has none.")
        for name in table.values():
            if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
                raise SavedError(
                    f"{str(directory / HF_INDEX)!r} may name only .safetensors files in its "
                    f"directory: got {str(name)[:80]!r}."
                )
        return dict(table)

    def _compare(self, index: Mapping[str, str]) -> None:
        for key in sorted(index.keys() | self._entries.keys()):
            actual = self._entries[key].file if key in self._entries else "no file"
            if index.get(key) != actual:
                raise SavedError(
                    f"{HF_INDEX} does not match the files in {str(self.directory)!r}: it says that "
                    f"{key!r} is in {index.get(key, 'no file')!r}, but it is in {actual!r}."
                )

    def tensor(self, name: str) -> Tensor:
        """Return one tensor."""
        entry = self._entries[name]
        if entry.dtype not in DTYPES:
            raise SavedError(
                f"{name!r} in {str(self.directory)!r} must be of floating point "
                f"({', '.join(DTYPES)}): got {entry.dtype}. Convert quantised weights first."
            )
        try:
            value: Tensor = self._files[entry.file].get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise SavedError(f"{entry.file!r} is damaged at {name!r}: {error}.") from None
        return value

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _no_weights(directory: Path) -> str:
    """Return the message about a directory without safetensors."""
    pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
    if not pickled:
        return f"there is no {HF_WEIGHTS} in {str(directory)!r}. Check the path."
    kind = "AutoModel"
    try:
        names = read_json_object(directory, HF_CONFIG).get("architectures")
        if isinstance(names, list) and names and str(names[0]).isidentifier():
            kind = str(names[0])
    except SavedError:
        pass  # the message below does without the class
    return (
        f"{str(directory)!r} has weights only as {pickled[0]}, which can hold code and is never "
        "read. Convert it where you trust it: python -c 'import transformers as t; "
        f't.{kind}.from_pretrained("{directory}").save_pretrained("CONVERTED")\''
    )
