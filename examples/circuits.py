"""Circuits: train two layers of attention on repetitions, and find the induction head in them.

    python examples/circuits.py

To continue a repetition, a head must find the earlier copy of the current token and attend to what
followed it. Two layers do it together (Elhage et al. 2021; Olsson et al. 2022, 2209.11895).
"""

# %% Data: random tokens, continued by phrases from anywhere before
import torch
from torch.nn import functional as F

import addnorm
from addnorm import lens
from addnorm.lens.circuits import composition, copying_score

VOCAB, LENGTH, NEW, PHRASE, HEADS = 32, 48, 16, 4, 4
torch.manual_seed(0)


def draw(rows: int) -> torch.Tensor:
    """Return sequences of tokens, (rows, LENGTH)."""
    ids = torch.randint(VOCAB, (rows, NEW))
    while ids.shape[1] < LENGTH:
        start = torch.randint(ids.shape[1] - PHRASE, (rows, 1))
        ids = torch.cat((ids, ids.gather(1, start + torch.arange(PHRASE))), dim=1)
    return ids


# %% Train
sizes = {"vocab": VOCAB, "width": 64, "heads": HEADS, "depth": 2, "ffn_width": 1, "length": LENGTH}
plain = {"tie_embeddings": "none", "scale_embedding": False, "attention_bias": "none"}
model = addnorm.build(
    addnorm.ModelConfig(
        mode="decoder", addnorm="pre", positions="learned", init="normal", **sizes, **plain
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(401):
    ids = draw(64)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.2f}")
model.eval()

# %% Which heads? By their attention
test = draw(64)
heads = lens.head_statistics(lens.look(model, test), test)
for kind in ("previous", "induction"):
    name, score = heads.ranked(kind)[0]
    print(f"{kind}: {name}, {score:.2f} of its attention")

# %% By their weights: does the head copy, and does it read the other one?
induction = heads.ranked("induction")[0][0]
print(f"{induction} copies: {copying_score(model, induction):.2f}")
previous = heads.ranked("previous")[0][0]
reads = {part: f"{share:.2f}" for part, share in composition(model, previous, induction).items()}
print(f"what it reads of {previous}:", reads)

# %% What did each part write into the logit of the likeliest next token?
parts = lens.decompose(model, test[:1, :-1], positions=[-1])
for name, value in lens.attribute_logits(parts).ranked()[:4]:
    print(f"{name}: {value:+.2f}")
