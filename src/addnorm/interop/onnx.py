"""Models of texts and images as ONNX, with any batch and length, compared in onnxruntime.

    encoder            model.onnx   ids, real -> outputs;   of images   images -> outputs
    decoder            model.onnx   ids -> logits;   step.onnx   ids, past -> logits, present
    encoder-decoder    model.onnx   source, real, target -> logits
                       encoder.onnx source, real -> memory
                       step.onnx    ids, past, memory, real -> logits, present

`real` marks what is not padding. `past` and `present` are keys and values of the positions so far,
(depth, 2, batch, key/value heads, positions, head_width); the first step has 0 positions. `memory`
has those of the source, in the same layout.
Sequences have 2 positions or more, except those of a step, which have 1.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import ConfigError, SavedError, require
from addnorm.files import new_directory, require_empty, to_json, write_whole
from addnorm.interop.graphs import (
    MemoryGraph,
    StepGraph,
    TranslationStepGraph,
    draw_ids,
    longest_sequence,
    quiet_exporter,
    sequence_dims,
    whole_graph,
)
from addnorm.interop.real_texts import RealTexts, where
from addnorm.layers.masks import Mask
from addnorm.models.build import Model
from addnorm.models.transformer import Decoder, EncoderDecoder

ONNX_TOLERANCE = 1e-4
"""Largest difference of an output that is accepted."""


def export_onnx(
    model: Model,
    tokenizers: Mapping[str, Tokenizer],
    directory: str | Path,
    *,
    labels: Sequence[str] = (),
    texts: RealTexts | None = None,
    scales: Mapping[str, Sequence[float]] | None = None,
) -> list[str]:
    """Write a model as ONNX, compare it with the model, and return notes.

    Parameters
    ----------
    model : the network.
    tokenizers : saved in the same directory, in addnorm's format.
    directory : where to write; it must not exist, or be empty.
    labels : names of the classes.
    texts : real texts to compare it on besides random ones.
    scales : for images, mean and scale of each channel, of pixels from 0 to 255.
    """
    for package in ("onnx", "onnxscript"):
        require(package, "export")
    runtime = require("onnxruntime", "export")
    if model.config.input == "vectors":
        raise ConfigError(
            f"only models of tokens and images are written as ONNX: got {model.config.input}."
        )
    if model.config.mixing == "recurrent":
        raise ConfigError("models of mixing=recurrent are not written as ONNX.")
    directory = require_empty(directory)
    with new_directory(directory):
        difference = _write(model.eval(), directory, runtime, texts)
        if not difference <= ONNX_TOLERANCE:
            raise SavedError(
                f"{str(directory)!r} does not compute what the model does: outputs differ by up to "
                f"{difference:.2g}, above {ONNX_TOLERANCE:g}."
            )
        for side, tokenizer in tokenizers.items():
            tokenizer.save(directory / ("tokenizer" if side == "text" else f"tokenizer-{side}"))
        special = {side: vars(tokenizer.special) for side, tokenizer in tokenizers.items()}
        facts = {"labels": list(labels), "special_ids": special, "length": longest_sequence(model)}
        facts |= {} if scales is None else {"pixels": dict(scales)}
        write_whole(directory / "model.json", f"{to_json(facts)}\n".encode())
    names = ", ".join(sorted(path.name for path in directory.glob("*.onnx")))
    return [
        f"written as {names}.",
        f"run in onnxruntime {runtime.__version__}: outputs differ by up to {difference:.2g} "
        f"({where(texts, model.config.input)}).",
    ]


def _write(model: Any, directory: Path, runtime: Any, texts: RealTexts | None) -> float:
    """Write the files; return the largest difference of an output."""
    function, inputs, shapes, more = whole_graph(model)
    _convert(function, inputs, shapes, directory / "model.onnx")
    batches = [more] if texts is None else [more, texts.inputs(model.config)]
    worst = _compare(function, batches, directory / "model.onnx", runtime)
    batch, length = sequence_dims(model)
    if isinstance(model, EncoderDecoder):
        rows = {0: batch, 1: length}
        worst = max(worst, _write_translation_step(model, directory, runtime, rows))
    elif isinstance(model, Decoder):
        worst = max(worst, _write_step(model, directory / "step.onnx", runtime, batch))
    return worst


def _write_step(model: Decoder, path: Path, runtime: Any, batch: Any) -> float:
    """Write one step of decoding; return its largest difference from the whole."""
    c = model.config
    past = torch.zeros(c.depth, 2, 2, c.effective_kv_heads, 3, c.effective_head_width)
    ids = draw_ids(c.vocab, 2, 1)[0]
    most = Dim("positions", min=1, max=longest_sequence(model) - 1)
    _convert(StepGraph(model), (ids, past), ({0: batch}, {2: batch, 4: most}), path)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ids = draw_ids(c.vocab, 3, 7)[0]
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


def _write_translation_step(
    model: EncoderDecoder, directory: Path, runtime: Any, rows: Mapping[int, Any]
) -> float:
    """Write the encoder and one step of the decoder; return the largest difference."""
    c = model.config
    source, real = draw_ids(c.vocab, 2, 6)
    function = MemoryGraph(model)
    _convert(function, (source, real), (rows, rows), directory / "encoder.onnx")
    batch, length = rows[0], rows[1]
    depth, heads, width = c.depths["decoder"], c.effective_kv_heads, c.effective_head_width
    past = torch.zeros(depth, 2, 2, heads, 3, width)
    with torch.no_grad():
        memory = function(source, real)
    most = Dim("positions", min=1, max=longest_sequence(model) - 1)
    shapes = ({0: batch}, {2: batch, 4: most}, {2: batch, 4: length}, rows)
    inputs = (draw_ids(c.output_vocab, 2, 1)[0], past, memory, real)
    _convert(TranslationStepGraph(model), inputs, shapes, directory / "step.onnx")
    source, real = draw_ids(c.vocab, 3, 9)
    target = draw_ids(c.output_vocab, 3, 7)[0]
    with torch.no_grad():
        mask = Mask.padding(real)
        expected = model(source, target, source_mask=mask, target_mask=Mask())
    sessions = [
        runtime.InferenceSession(str(directory / name), providers=["CPUExecutionProvider"])
        for name in ("encoder.onnx", "step.onnx")
    ]
    (remembered,) = sessions[0].run(None, {"source": source.numpy(), "real": real.numpy()})
    state = torch.zeros(depth, 2, 3, heads, 0, width).numpy()
    worst = 0.0
    for place in range(target.shape[1]):
        step = {"ids": target[:, place : place + 1].numpy(), "past": state}
        step |= {"memory": remembered, "real": real.numpy()}
        logits, state = sessions[1].run(None, step)
        difference = (torch.from_numpy(logits) - expected[:, place]).abs().max()
        worst = max(worst, float(difference))
    return worst


def _convert(
    function: nn.Module, inputs: tuple[Tensor, ...], shapes: tuple[Any, ...], path: Path
) -> None:
    """Write a function as ONNX; dimensions in `shapes` stay free."""
    with quiet_exporter(), torch.no_grad():
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
