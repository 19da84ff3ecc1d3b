"""A small language model around any blocks, written by hand as users write theirs."""

from collections.abc import Iterable

from torch import Tensor, nn

VOCAB, WIDTH, MAX_LENGTH = 32, 32, 64


class LanguageOf(nn.Module):
    """Embeddings of tokens and positions, blocks, a final norm and a head.

    Blocks of a generator are made after the embeddings, so that they draw the same weights.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(MAX_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(self.norm(h))
        return out
