"""Classify texts, starting from pretrained weights.

    python examples/classify.py [MODEL]

MODEL is a local directory of Hugging Face with an encoder, such as a MiniLM. Without one, a tiny
encoder is trained here on unlabelled texts and written as such a directory, so that the rest of the
program is the same.
"""

# %% Data: opinions about things; labels for a few of them only
import itertools
import random
import sys
import tempfile
from pathlib import Path

import addnorm

good = "great lovely superb fine charming brilliant".split()
poor = "awful boring bad clumsy dull terrible".split()
things = "film book song meal hotel play".split()
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
    small = {"model.width": 64, "model.depth": 2, "model.heads": 4, "train.steps": 300}
    masked = addnorm.train("masked", text=unlabelled, progress=False, set=small)
    masked.export(model)
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
    right = sum(next(iter(answer)) == label for answer, (_, label) in zip(answers, test))
    name = "from nothing" if start is None else "from pretrained weights"
    print(f"{name}: {right / len(test):.0%} of {len(test)} held-out texts")

# %% Without training: by the nearest labelled texts, with any encoder
(answer,) = addnorm.open(str(model)).classify(["a dull song"], examples=labelled)
print("a dull song:", answer)
