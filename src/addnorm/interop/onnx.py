"""Text models as ONNX, with any batch and length, compared with the model in onnxruntime.

    encoder            model.onnx   ids, real -> outputs
    decoder            model.onnx   ids -> logits;   step.onnx   ids, past -> logits, present
    encoder-decoder    model.onnx   source, real, target -> logits

`real` marks what is not padding. `past` and `present` are keys and values of the positions so far,
(depth, 2, batch, key/value heads, positions, head_width); the first step has 0 positions.
Sequences have 2 positions or more, except those of a step, which have 1.
"""

import contextlib
import io
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import ConfigError, SavedError, require
from addnorm.files import to_json, write_whole
from addnorm.layers.cache import Cache
from addnorm.layers.masks import Mask
from addnorm.models.build import Model
from addnorm.models.transformer import Decoder, EncoderDecoder

ONNX_TOLERANCE = 1e-4
"""Largest difference of an output that is accepted."""
LONGEST = 2048
"""Most positions: longer sequences would be computed in chunks, which is another graph."""
MAX_BATCH = 4096


class _Encode(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        return self.model(ids, mask=Mask.padding(real))


class _Predict(_Encode):
    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.model(ids, mask=Mask())


class _Translate(_Encode):
    def forward(  # type: ignore[override]
        self, source: Tensor, real: Tensor, target: Tensor
    ) -> Tensor:
        mask = Mask.padding(real)
        return self.model(source, target, source_mask=mask, target_mask=Mask())


class _Step(_Encode):
    def forward(self, ids: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        cache: Any = _GrowingCache(past)
        logits = self.model(ids, mask=Mask(), cache=cache)
        return logits[:, -1], torch.stack(cache.present)


class _GrowingCache(Cache):
    """A cache whose tensors are inputs and outputs of the graph, one (layer, …) tensor each."""

    def __init__(self, past: Tensor) -> None:
        self.store = self.past = past
        self.used = past.shape[4]
        self.present: list[Tensor] = []
        self.memory: dict[int, Any] = {}

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key = torch.cat((self.past[layer, 0], key), dim=2)
        value = torch.cat((self.past[layer, 1], value), dim=2)
        self.present.append(torch.stack((key, value)))
        return key, value

    def extend_padding(self, real: Tensor | None, batch: int, length: int) -> None:
        return None

    def advance(self, length: int) -> None:
        """Nothing to count: the caller passes `present` back as `past`."""


def export_onnx(
    model: Model,
    tokenizers: Mapping[str, Tokenizer],
    directory: str | Path,
    *,
    labels: Sequence[str] = (),
) -> list[str]:
    """Write a text model as ONNX, compare it with the model, and return notes.

    Parameters
    ----------
    model : the network.
    tokenizers : saved in the same directory, in addnorm's format.
    directory : where to write; it must not exist, or be empty.
    labels : names of the classes.
    """
    for package in ("onnx", "onnxscript"):
        require(package, "export")
    runtime = require("onnxruntime", "export")
    if model.config.input != "tokens":
        raise ConfigError(f"only models of tokens are written as ONNX: got {model.config.input}.")
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise SavedError(f"{str(directory)!r} is not empty. Choose another directory.")
    existed = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        difference = _write(model.eval(), directory, runtime)
        if not difference <= ONNX_TOLERANCE:
            raise SavedError(
                f"{str(directory)!r} does not compute what the model does: outputs differ by up to "
                f"{difference:.2g}, above {ONNX_TOLERANCE:g}."
            )
        for side, tokenizer in tokenizers.items():
            tokenizer.save(directory / ("tokenizer" if side == "text" else f"tokenizer-{side}"))
        special = {side: vars(tokenizer.special) for side, tokenizer in tokenizers.items()}
        facts = {"labels": list(labels), "special_ids": special, "length": _longest(model)}
        write_whole(directory / "model.json", f"{to_json(facts)}\n".encode())
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        if existed:
            directory.mkdir()
        raise
    names = ", ".join(sorted(path.name for path in directory.glob("*.onnx")))
    return [
        f"written as {names}.",
        f"run in onnxruntime {runtime.__version__}: outputs differ by up to {difference:.2g}.",
    ]


def _longest(model: Model) -> int:
    learned = model.config.positions == "learned"
    return min(model.config.length, LONGEST) if learned else LONGEST


def _write(model: Any, directory: Path, runtime: Any) -> float:
    """Write the files; return the largest difference of an output."""
    batch, length = Dim("batch", min=1, max=MAX_BATCH), Dim("length", min=2, max=_longest(model))
    rows = {0: batch, 1: length}
    ids, real = _draw(model.config.vocab, 2, 6)
    if isinstance(model, EncoderDecoder):
        target = _draw(model.config.output_vocab, 2, 5)[0]
        second = {0: batch, 1: Dim("target", min=2, max=_longest(model))}
        shapes: tuple[Any, ...] = (rows, rows, second)
        function: nn.Module = _Translate(model)
        _convert(function, (ids, real, target), shapes, directory / "model.onnx")
        more = (*_draw(model.config.vocab, 3, 9), _draw(model.config.output_vocab, 3, 4)[0])
        return _compare(function, [more], directory / "model.onnx", runtime)
    if isinstance(model, Decoder):
        function = _Predict(model)
        _convert(function, (ids,), (rows,), directory / "model.onnx")
        whole = [(_draw(model.config.vocab, 3, 9)[0],)]
        return max(
            _compare(function, whole, directory / "model.onnx", runtime),
            _write_step(model, directory / "step.onnx", runtime, batch),
        )
    function = _Encode(model)
    _convert(function, (ids, real), (rows, rows), directory / "model.onnx")
    return _compare(function, [_draw(model.config.vocab, 3, 9)], directory / "model.onnx", runtime)


def _write_step(model: Decoder, path: Path, runtime: Any, batch: Any) -> float:
    """Write one step of decoding; return its largest difference from the whole."""
    c = model.config
    past = torch.zeros(c.depth, 2, 2, c.effective_kv_heads, 3, c.effective_head_width)
    ids = _draw(c.vocab, 2, 1)[0]
    most = Dim("positions", min=1, max=_longest(model) - 1)
    _convert(_Step(model), (ids, past), ({0: batch}, {2: batch, 4: most}), path)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ids = _draw(c.vocab, 3, 7)[0]
    with torch.no_grad():
        expected = model(ids, mask=Mask())
    state = torch.zeros(c.depth, 2, 3, c.effective_kv_heads, 0, c.effective_head_width).numpy()
    worst = 0.0
    for place in range(ids.shape[1]):
        step = {"ids": ids[:, place : place + 1].numpy(), "past": state}
        logits, state = session.run(None, step)
        difference = (torch.from_numpy(logits) - expected[:, place]).abs().max()
        worst = max(worst, float(difference))
    return worst


def _draw(vocab: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Return random ids and which of them are real."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(vocab, (batch, length), generator=generator)
    lengths = torch.arange(batch)[:, None].mul(-2).add(length).clamp(min=1)
    return ids, torch.arange(length) < lengths


def _convert(
    function: nn.Module, inputs: tuple[Tensor, ...], shapes: tuple[Any, ...], path: Path
) -> None:
    """Write a function as ONNX; dimensions in `shapes` stay free."""
    with _quiet(), torch.no_grad():
        program = torch.export.export(function, inputs, dynamic_shapes=shapes, strict=False)
        converted = torch.onnx.export(program, dynamo=True)
        assert converted is not None
        converted.save(str(path))


def _compare(
    function: nn.Module, batches: Sequence[tuple[Tensor, ...]], path: Path, runtime: Any
) -> float:
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    worst = 0.0
    for batch in batches:
        with torch.no_grad():
            expected = function(*batch)
        given = {name: part.numpy() for name, part in zip(names, batch, strict=True)}
        output = torch.from_numpy(session.run(None, given)[0])
        worst = max(worst, float((output - expected).abs().max()))
    return worst


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's progress and warnings to itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
