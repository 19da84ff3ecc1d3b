"""Text models as programs of torch.export, with free batch and length: model.pt2.

The program needs torch to run, and none of addnorm's code: torch.export.load("model.pt2").module().
Its inputs are those of model.onnx (`interop/onnx.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import ConfigError, SavedError
from addnorm.files import new_directory, require_empty, to_json, write_whole
from addnorm.interop.graphs import longest_sequence, quiet_exporter, whole_graph
from addnorm.interop.real_texts import RealTexts, where
from addnorm.models.build import Model

TORCH_TOLERANCE = 1e-5
"""Largest difference of an output that is accepted."""


def export_torch(
    model: Model,
    tokenizers: Mapping[str, Tokenizer],
    directory: str | Path,
    *,
    labels: Sequence[str] = (),
    texts: RealTexts | None = None,
    scales: Mapping[str, Sequence[float]] | None = None,
) -> list[str]:
    """Write a text model as a program of torch.export, compare it with the model, return notes.

    Parameters
    ----------
    model : the network.
    tokenizers : saved in the same directory, in addnorm's format.
    directory : where to write; it must not exist, or be empty.
    labels : names of the classes.
    texts : real texts to compare it on besides random ones.
    scales : for images, mean and scale of each channel, of pixels from 0 to 255.
    """
    if model.config.input == "vectors":
        raise ConfigError(
            f"only models of tokens and images are written so: got {model.config.input}."
        )
    if model.config.mode == "encoder-decoder":
        # The program would hold only for sources and targets of different lengths.
        raise ConfigError("encoder-decoders are not written so. Try --to onnx or ctranslate2.")
    directory = require_empty(directory)
    function, inputs, shapes, more = whole_graph(model.eval())
    with quiet_exporter(), torch.no_grad():
        program = torch.export.export(function, inputs, dynamic_shapes=shapes, strict=False)
    with new_directory(directory):
        with quiet_exporter(), torch.no_grad():
            torch.export.save(program, directory / "model.pt2")
            again = torch.export.load(directory / "model.pt2").module()
            batches = [more] if texts is None else [more, texts.inputs(model.config)]
            difference = max(float((again(*b) - function(*b)).abs().max()) for b in batches)
        if not difference <= TORCH_TOLERANCE:
            raise SavedError(
                f"{str(directory)!r} does not compute what the model does: outputs differ by up to "
                f"{difference:.2g}, above {TORCH_TOLERANCE:g}."
            )
        for side, tokenizer in tokenizers.items():
            tokenizer.save(directory / ("tokenizer" if side == "text" else f"tokenizer-{side}"))
        facts = {"labels": list(labels), "length": longest_sequence(model)}
        facts |= {} if scales is None else {"pixels": dict(scales)}
        write_whole(directory / "model.json", f"{to_json(facts)}\n".encode())
    return [
        "written as model.pt2, a program of torch.export.",
        f"loaded by torch {torch.__version__}: outputs differ by up to {difference:.2g} "
        f"({where(texts, model.config.input)}).",
    ]
