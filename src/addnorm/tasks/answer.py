"""Generated text with its score and the log-probabilities of its tokens."""

from addnorm.data.text.tokenizer import Tokenizer
from addnorm.generate import Hypothesis


class Answer(str):
    """Generated text: a str with a score and the log-probability of each token.

    `score` is that of the search, `pieces` has each token as text, with its log-probability,
    `engine` names what computed it: torch, ctranslate2 or onnx.

    >>> answer = Answer("ein Haus", score=-0.3, pieces=[("ein", -0.1), (" Haus", -0.2)])
    >>> answer.upper(), answer.score
    ('EIN HAUS', -0.3)
    """

    score: float
    pieces: list[tuple[str, float]]
    engine: str

    def __new__(
        cls, text: str, *, score: float, pieces: list[tuple[str, float]], engine: str = "torch"
    ) -> "Answer":
        answer = super().__new__(cls, text)
        answer.score, answer.pieces, answer.engine = score, pieces, engine
        return answer


def make_answer(hypothesis: Hypothesis, tokenizer: Tokenizer, engine: str = "torch") -> Answer:
    """Return the text of a hypothesis of a search."""
    values = hypothesis.log_probabilities
    ids = [*hypothesis.tokens, tokenizer.end][: len(values)]
    pieces = [(tokenizer.piece(token), value) for token, value in zip(ids, values, strict=True)]
    text = tokenizer.decode(hypothesis.tokens)
    return Answer(text, score=hypothesis.score, pieces=pieces, engine=engine)
