"""Classify texts, starting from pretrained weights.

    python examples/classify.py [MODEL]

MODEL is a local directory of Hugging Face with an encoder, such as a MiniLM, or a run of
`addnorm train masked`. Without one, a tiny encoder is trained here on unlabelled texts. It shows
the steps, not the gain: on 2026-11-18 it was 72 % right, and 76 % from nothing. What published
encoders gain is in docs/interop.md.
"""

# %% Data: opinions about things; labels for a few of them only
import itertools
import random
import sys
import tempfile
from pathlib import Path

import addnorm

good = ["great", "lovely", "superb", "fine", "charming", "brilliant"]
poor = ["awful", "boring", "bad", "clumsy", "dull", "terrible"]
things = ["film", "book", "song", "meal", "hotel", "play"]
forms = ("the {b} was {a}", "a {a} {b}", "what a {a} {b} , really {c}", "{a} and {c} : this {b}")
texts = []
for words, label in ((good, "good"), (poor, "poor")):
    for form, thing in itertools.product(forms, things):
        for a, c in itertools.permutations(words, 2):
            texts.append((form.format(a=a, b=thing, c=c), label))
random.Random(0).shuffle(texts)
labelled, test, unlabelled = texts[:40], texts[40:240], [text for text, _ in texts[240:]]

# %% A pretrained model: yours, or one that is made here
folder = Path(tempfile.mkdtemp())
model = Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "encoder"
if len(sys.argv) == 1:
    small = {"model.width": 64, "model.depth": 1, "model.heads": 4, "train.steps": 60}
    masked = addnorm.train("masked", text=unlabelled, out=model, progress=False, set=small)
    print(f"a pretrained encoder of {masked.model.count():,} parameters: {model}")

# %% Fine-tune it with 40 labels, and train the same from nothing
labels = [label for _, label in labelled]
for start in (model, None):
    run = addnorm.train(
        "classify",
        [text for text, _ in labelled],
        label=labels,
        start=None if start is None else str(start),
        progress=False,
    )
    answers = run.classify([text for text, _ in test])
    pairs = zip(answers, test, strict=True)
    right = sum(next(iter(answer)) == label for answer, (_, label) in pairs)
    name = "from nothing" if start is None else "from pretrained weights"
    print(f"{name}: {right / len(test):.0%} of {len(test)} held-out texts")

# %% Without training: a linear classifier of the encoder's vectors
known = [text for text, _ in labelled]
(answer,) = addnorm.open(str(model)).classify_by_examples(["a dull song"], known, labels)
print("a dull song:", {label: round(share, 2) for label, share in answer.items()})
