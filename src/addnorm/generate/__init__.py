"""Decoding: translate, continue and score, with a cache; samplers, beam search, int8."""

from addnorm.generate.decode import generate, translate
from addnorm.generate.hypothesis import PENALTIES, Hypothesis
from addnorm.generate.int8 import quantise
from addnorm.generate.packed import pack
from addnorm.generate.samplers import SAMPLERS
from addnorm.generate.scoring import score

__all__ = [
    "PENALTIES",
    "SAMPLERS",
    "Hypothesis",
    "generate",
    "pack",
    "quantise",
    "score",
    "translate",
]
