"""Translate: train on pairs of phrases, ask for one that was never seen, and see why.

    python examples/translate.py

Cells start with `# %%`, so editors and Jupyter (jupytext) open this file as a notebook.
"""

# %% Data: 215 of the 216 phrases of a number, a look and a thing
import addnorm

numbers = {"two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs", "seven": "sieben"}  # fmt: skip  # noqa: E501
looks = {"red": "rote", "green": "grüne", "old": "alte", "new": "neue", "small": "kleine", "big": "große"}  # fmt: skip  # noqa: E501
things = {"houses": "Häuser", "books": "Bücher", "dogs": "Hunde", "trees": "Bäume", "cars": "Autos", "cups": "Tassen"}  # fmt: skip  # noqa: E501
pairs = {
    f"{a} {b} {c}": f"{numbers[a]} {looks[b]} {things[c]}"
    for a in numbers
    for b in looks
    for c in things
}
del pairs["five old books"]

# %% Train: without `set=`, size and steps are chosen from the data
run = addnorm.train(
    "translate",
    source=list(pairs),
    target=list(pairs.values()),
    progress=False,
    set={
        **{"model.width": 64, "model.depth": 1, "train.steps": 100, "train.batch": 1024},
        **{"train.lr": 0.01, "train.evaluate_every": 50},
    },
)
print(run)

# %% Ask
for answer in run.translate("five old books", beam=5, nbest=3)[0]:
    print(f"{answer.score:6.2f}  {answer}")

# %% Why?
print(run.explain("five old books"))
