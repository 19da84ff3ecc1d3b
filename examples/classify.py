"""Classify texts, starting from pretrained weights.

    python examples/classify.py [MODEL]

MODEL is a local directory of Hugging Face with an encoder, such as a MiniLM, or a run of
`addnorm train masked`. Without one, a tiny encoder is trained here on unlabelled texts, in seconds.
The words of the test texts are in no labelled text: what they mean must come from the unlabelled
ones. On 2026-11-18 100 % of the test texts were right from the pretrained weights, and
65 % from nothing (chance is 50 %). What published encoders gain is in docs/interop.md.
"""

# %% Data: reviews in four words; labels for a few of them, which use a third of the words
import random
import sys
import tempfile
from pathlib import Path

import addnorm

good = "great lovely superb charming brilliant moving tender witty splendid gripping honest fresh"
poor = "awful boring clumsy dull terrible tedious shallow noisy dreadful stale sloppy lifeless"
words = {"good": good.split(), "poor": poor.split()}
things = ["film", "book", "song", "play", "story", "show"]
rng = random.Random(0)


def write(count: int, some: slice = slice(None)) -> list[tuple[str, str]]:
    """Return reviews with their labels, of some of the words."""
    labels = list(words) * (count // 2)
    return [(f"{rng.choice(things)}: {' '.join(rng.sample(words[w][some], 4))}", w) for w in labels]


unlabelled = [text for text, _ in write(3000)]
labelled, test = write(24, slice(0, 4)), write(200, slice(4, None))
known, labels = [text for text, _ in labelled], [label for _, label in labelled]
print("labelled:", *labelled[0], "| to be predicted:", *test[0])

# %% A pretrained model: yours, or one that learns here which words occur together
folder = Path(tempfile.mkdtemp())
model = Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "encoder"
if len(sys.argv) == 1:
    small = {"model.width": 64, "model.depth": 1, "model.heads": 4, "model.dropout": 0.0}
    short = {"train.steps": 300, "train.batch": 768, "train.lr": 5e-3, "data.mask_rate": 0.25}
    masked = addnorm.train("masked", text=unlabelled, out=model, progress=False, set=small | short)
    print(f"a pretrained encoder of {masked.model.count():,} parameters: {model}")


def report(name: str, answers: list[dict[str, float]]) -> None:
    """Print how many answers are right."""
    pairs = zip(answers, test, strict=True)
    right = sum(max(answer, key=answer.__getitem__) == label for answer, (_, label) in pairs)
    print(f"{name}: {right / len(test):.0%} of {len(test)} held-out texts")


# %% Fine-tune it with 24 labels, and train the same from nothing
for name, start in (("from pretrained weights", str(model)), ("from nothing", None)):
    steps = {"train.steps": 60}
    run = addnorm.train("classify", known, label=labels, start=start, progress=False, set=steps)
    report(name, run.classify([text for text, _ in test]))

# %% Without training: a linear classifier of the encoder's vectors
encoder = addnorm.open(str(model))
report("from its vectors", encoder.classify_by_examples([text for text, _ in test], known, labels))
(answer,) = encoder.classify_by_examples(["song: tender honest witty"], known, labels)
print("song: tender honest witty →", {label: round(share, 2) for label, share in answer.items()})
