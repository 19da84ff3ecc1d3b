"""Sections of the page of a run that show what a text model does on held-out texts."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from addnorm.data.text.collate import collate_pairs
from addnorm.data.text.labelled import LabelledTexts
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import ExtraError
from addnorm.metrics import bleu, chrf, sentence_chrf
from addnorm.models.transformer import EncoderDecoder
from addnorm.report import Page, attention_map, heat_map, line_chart
from addnorm.report.svg import Svg

MAX_CONFUSED = 25
"""Labels in the confusion matrix: the most frequent ones."""
MAX_ERRORS = 12
MAX_CHARACTERS = 200
"""Longer texts are shortened on a page."""
PAGE_SECONDS = 4.0
"""Seconds after which no further texts are generated for a page."""
MAX_MAP_TOKENS = 24
"""Tokens of a side of an attention map."""


def shorten_text(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return the beginning of a long text, with an ellipsis.

    >>> shorten_text("a long line", 6)
    'a lon…'
    """
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def add_results_table(page: Page, results: Sequence[Mapping[str, Any]]) -> None:
    """Add a table with a column for each row of results."""
    names = dict.fromkeys(name for row in results for name in row if name not in ("model", "on"))
    page.table(
        ["", *(f"{row['model']} · {row['on']}" for row in results)],
        [
            [
                name.replace("_seconds", " s").replace("_", " "),
                *(
                    float(f"{row[name]:.3g}") if name.endswith("_seconds") else row.get(name)
                    for row in results
                ),
            ]
            for name in names
        ],
    )
    page.text(
        "Best weights and temperature were chosen on the same held-out texts, which favours this "
        "model a little over the baseline. A file that was used for neither gives an unbiased "
        "figure: addnorm evaluate RUN FILE."
    )


def add_confusion(page: Page, probabilities: NDArray[Any], rows: LabelledTexts) -> None:
    """Add the confusion matrix of held-out texts, and the errors of the highest probability."""
    targets, predicted = np.array(rows.targets), probabilities.argmax(axis=1)
    labels = np.bincount(targets, minlength=len(rows.names))
    chosen = sorted(np.argsort(-labels, kind="stable")[:MAX_CONFUSED].tolist())
    names = [rows.names[index] for index in chosen]
    counts = [
        [float(((targets == label) & (predicted == other)).sum()) for other in chosen]
        for label in chosen
    ]
    page.section("Confusion")
    part = f"the {len(chosen)} most frequent labels of " if len(chosen) < len(labels) else ""
    page.figure(
        heat_map(counts, names, names, title="Confusion", x="predicted", y="label", low=0.0),
        f"Number of texts, for {part}{len(rows):,} held-out texts.",
    )
    wrong = np.flatnonzero(predicted != targets)
    confident = probabilities[wrong, predicted[wrong]]
    wrong = wrong[np.argsort(-confident, kind="stable")][:MAX_ERRORS]
    page.section("Most confident errors")
    if not len(wrong):
        page.text("None of these texts was misclassified.")
        return
    page.table(
        ["text", "label", "predicted", "probability", "of the label"],
        [
            [
                shorten_text(rows.texts[row]),
                rows.labels[row],
                rows.names[predicted[row]],
                float(probabilities[row, predicted[row]]),
                float(probabilities[row, targets[row]]),
            ]
            for row in wrong.tolist()
        ],
    )


def within_seconds(parts: Sequence[Any], seconds: float = PAGE_SECONDS) -> Iterator[Any]:
    """Yield the first part, and further ones until the time is over."""
    start = time.perf_counter()
    for number, part in enumerate(parts):
        if number and time.perf_counter() - start > seconds:
            return
        yield part


def add_translations(
    page: Page, sources: Sequence[str], outputs: Sequence[str], references: Sequence[str]
) -> None:
    """Add BLEU and chrF of translations, and the worst, median and best ones.

    Parameters
    ----------
    page : page to add to.
    sources, outputs, references : held-out texts, their translations, and the reference of each.
    """
    page.section("Translations")
    count = f"{len(outputs):,} held-out pair{'s'[: len(outputs) != 1]}"
    try:
        scores = {"BLEU": bleu(outputs, references), "chrF": chrf(outputs, references)}
        short = bleu(references, references)["score"] == 0
        quality = sentence_chrf(outputs, references)
    except ExtraError:
        page.text("Without the package sacrebleu there are no scores: pip install 'addnorm[text]'.")
        first = list(zip(sources, outputs, references, strict=True))[:9]
        page.table(
            ["source", "translation", "reference"], [list(map(shorten_text, r)) for r in first]
        )
        return
    exact = sum(map(str.__eq__, outputs, references)) / len(outputs)
    if short:
        del scores["BLEU"]
        page.text(
            "No reference has four words, the longest sequences that BLEU counts: it is left out."
        )
    facts = [(name, f"{score['score']:.1f}") for name, score in scores.items()]
    page.facts([*facts, ("equal to the reference", f"{exact:.1%}"), ("translated", count)])
    signatures = ", ".join(f"{name} {score['signature']}" for name, score in scores.items())
    page.text(f"Greedy decoding; {signatures}")
    ranked = sorted(range(len(outputs)), key=lambda row: quality[row])
    for name, rows in sample_ranks(ranked).items():
        page.table(
            ["source", "translation", "reference", "chrF"],
            [
                [
                    *(shorten_text(texts[row]) for texts in (sources, outputs, references)),
                    round(quality[row], 1),
                ]
                for row in rows
            ],
            caption=f"{name} by sentence chrF",
        )


def sample_ranks(ranked: Sequence[int], each: int = 3) -> dict[str, list[int]]:
    """Return the first, middle and last items of a ranking; no item twice.

    >>> sample_ranks([7, 5, 3, 1, 0, 2, 4, 6, 8])
    {'Worst': [7, 5, 3], 'Median': [1, 0, 2], 'Best': [4, 6, 8]}
    >>> sample_ranks([4, 2])
    {'Worst': [4], 'Best': [2]}
    """
    each = max(1, min(each, len(ranked) // 3))
    middle = (len(ranked) - each) // 2
    parts = {
        "Worst": list(ranked[:each]),
        "Median": list(ranked[middle : middle + each]) if len(ranked) > 2 else [],
        "Best": list(ranked[-each:]) if len(ranked) > 1 else [],
    }
    return {name: rows for name, rows in parts.items() if rows}


@torch.no_grad()
def cross_attention_map(
    model: EncoderDecoder,
    tokenizers: tuple[Tokenizer, Tokenizer],
    pair: tuple[Sequence[int], Sequence[int]],
    title: str,
) -> Svg:
    """Return a map of the last decoder block's attention to the source, averaged over its heads.

    Parameters
    ----------
    model : the translation model.
    tokenizers : those of source and target.
    pair : token ids of a source and its translation.
    title : title of the picture.
    """
    source, target = tokenizers
    batch = collate_pairs([pair[0]], [pair[1]], source.special, target.special)
    maps: dict[str, torch.Tensor] = {}
    model(batch.source, batch.target_in, maps=maps)
    last = max(
        (name for name in maps if name.startswith("decoder") and "memory" in name),
        key=lambda name: [int(part) for part in name.split(".") if part.isdecimal()],
    )
    weights = maps[last][0].mean(dim=0).tolist()
    columns = [source.piece(int(token)) for token in batch.source[0]]
    rows = [target.piece(token) for token in (*pair[1], target.end)]
    return attention_map(weights, columns, rows, title=title)


def position_curve(losses: NDArray[Any], bins: int = 32) -> list[tuple[float, float]]:
    """Return (position, perplexity) of losses by position, averaged over ranges of positions.

    Ranges grow with the position, because the first positions differ most.

    Parameters
    ----------
    losses : mean loss at each position.
    bins : number of ranges, at most.

    >>> position_curve(np.zeros(3))
    [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]
    """
    edges = np.unique(np.geomspace(1, len(losses) + 1, bins + 1).round().astype(int))
    return [
        ((low + high - 1) / 2, math.exp(min(700.0, float(losses[low - 1 : high - 1].mean()))))
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]


def add_perplexity(page: Page, losses: NDArray[Any], windows: int) -> None:
    """Add a chart of the perplexity of held-out text at each position of the context."""
    page.section("Perplexity by position")
    curve = {"perplexity": position_curve(losses)}
    page.figure(
        line_chart(curve, title="Perplexity", x="position", y="perplexity", log_x=True),
        f"Perplexity of a token by the number of tokens before it, plus 1, over {windows:,} "
        "windows of held-out text. It falls as far as the model makes use of its context.",
    )
