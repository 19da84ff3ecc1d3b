"""Decoding with a cache: translate, generate and score; models packed or in int8 for inference."""

from addnorm.generate.decode import generate, score, translate
from addnorm.generate.frozen import pack, quantise
from addnorm.generate.samplers import SAMPLERS
from addnorm.generate.search import Hypothesis
from addnorm.generate.settings import PENALTIES, Decoding

__all__ = [
    "PENALTIES",
    "SAMPLERS",
    "Decoding",
    "Hypothesis",
    "generate",
    "pack",
    "quantise",
    "score",
    "translate",
]
