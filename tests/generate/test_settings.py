"""Settings of decoding: what they mean, and which are refused."""

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from addnorm.errors import ConfigError, InputError
from addnorm.generate import PENALTIES, SAMPLERS, Decoding
from addnorm.generate.samplers import Greedy, Sampler
from tests.generate import naive

SAMPLE: dict[str, Any] = {"sampler": "sample"}
MAX_TOKENS = (
    r"^max_tokens must be an integer, or a pair \(factor, integer\), that allows 1 token or more "
    r"for every source: got {}\. Try 100, or \(1\.0, 50\) for the length of the source and 50 "
    r"more\.$"
)


def test_the_limit_is_a_number_or_depends_on_the_length() -> None:
    assert [Decoding(max_tokens=7).limit(length) for length in (1, 50)] == [7, 7]
    assert [Decoding(max_tokens=(1.5, 2)).limit(length) for length in (1, 2, 5)] == [3, 5, 9]
    assert Decoding().limit(10) == 60


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("alpha", (0, 0.6, 1.0, 1.8))
def test_penalties_by_length(penalty: str, alpha: float) -> None:
    penalties = Decoding(penalty=penalty, alpha=alpha).penalties(9).tolist()
    assert penalties[1:] == [naive.divisor(length, penalty, alpha) for length in range(1, 10)]


def test_the_sampler_has_the_settings() -> None:
    sampler = Decoding(**SAMPLE, temperature=0.5, top_k=4, top_p=0.9).make_sampler()
    assert sampler == Sampler(temperature=0.5, top_k=4, top_p=0.9)
    assert set(SAMPLERS) == {"greedy", "sample"} and isinstance(Decoding().make_sampler(), Greedy)


def test_settings_are_immutable() -> None:
    decoding = Decoding(beam=5)
    assert decoding == Decoding(beam=5) and hash(decoding) == hash(Decoding(beam=5))
    with pytest.raises(FrozenInstanceError):
        decoding.beam = 1  # type: ignore[misc]
    assert Decoding(beam=np.int64(5), alpha=np.float32(1)) == decoding


# ── What is refused ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("beam", "nbest"), ((0, 1), (3, 4), (3, 0), (-1, -1)))
def test_invalid_beams_are_refused(beam: int, nbest: int) -> None:
    message = (
        rf"^nbest must be 1 or more, and at most beam: got nbest={nbest}, beam={beam}\. "
        rf"Try beam={max(nbest, 1)}\.$"
    )
    with pytest.raises(InputError, match=message):
        Decoding(beam=beam, nbest=nbest)


@pytest.mark.parametrize("alpha", (-0.5, float("nan"), float("inf")))
def test_a_penalty_must_not_decrease(alpha: float) -> None:
    message = (
        rf"^alpha must be 0 or more and finite: got {alpha}\. "
        r"Try 1\.0, or 0\.6 with penalty='gnmt'\.$"
    )
    with pytest.raises(InputError, match=message):
        Decoding(alpha=alpha)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"^penalty has no choice 'gnmtt'\. Did you mean 'gnmt'"):
        Decoding(penalty="gnmtt")
    with pytest.raises(ConfigError, match=r"^sampler has no choice 'sampel'\. Did you mean 'samp"):
        Decoding(sampler="sampel")


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        (
            SAMPLE | {"temperature": 0.0},
            r"^temperature must be above 0 and finite: got 0\.0\. For t",
        ),
        (SAMPLE | {"temperature": -1.0}, r"^temperature must be above 0 and finite: got -1\.0\."),
        (SAMPLE | {"temperature": float("nan")}, r"^temperature must be above 0 .*: got nan\."),
        (SAMPLE | {"temperature": float("inf")}, r"^temperature must be above 0 .*: got inf\."),
        (SAMPLE | {"temperature": 1e308}, r"^temperature must be at most 1e\+06: got 1e\+308\."),
        (SAMPLE | {"top_k": 0}, r"^top_k must be 1 or more: got 0\. Try 40\.$"),
        (SAMPLE | {"top_p": 0.0}, r"^top_p must be above 0 and at most 1: got 0\.0\. Try 0\.9\.$"),
        (SAMPLE | {"top_p": 1.1}, r"^top_p must be above 0 and at most 1: got 1\.1\."),
        ({"top_k": 5}, r"^top_k has no effect with sampler='greedy': got 5\. Try sampler='sample'"),
        ({"top_p": 0.5}, r"^top_p has no effect with sampler='greedy': got 0\.5\."),
        ({"temperature": 0.5}, r"^temperature has no effect with sampler='greedy': got 0\.5\."),
        (
            SAMPLE | {"beam": 2},
            r"^beam search needs sampler='greedy': got beam=2, sampler='sample'\. Try beam=1\.$",
        ),
    ),
)
def test_invalid_samplers_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Decoding(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        ({"beam": 1_000_000}, r"^beam must be at most 1,000: got 1,000,000\. Try 5\.$"),
        ({"seed": 2**70}, r"^seed must be at most 2\*\*62: got 11805\d+\. Try 0\.$"),
        ({"seed": -(2**70)}, r"^seed must be at most 2\*\*62: got -11805\d+\. Try 0\.$"),
    ),
)
def test_impossible_numbers_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Decoding(**settings)


@pytest.mark.parametrize("name", ("batch_tokens", "read_ahead", "workers"))
def test_invalid_batch_sizes_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"^{name} must be 1 or more: got 0\.$"):
        Decoding(**{name: 0})


@pytest.mark.parametrize(
    ("value", "shown"),
    (
        (0, "0"),
        (-1, "-1"),
        (2.5, r"2\.5"),
        (None, "None"),
        ("9", "'9'"),
        ((0.2, 0), r"\(0\.2, 0\)"),
        ((-1.0, 50), r"\(-1\.0, 50\)"),
        ((float("inf"), 1), r"\(inf, 1\)"),
        ((float("nan"), 1), r"\(nan, 1\)"),
        ((1.0, 2.5), r"\(1\.0, 2\.5\)"),
        ((1.0, 2, 3), r"\(1\.0, 2, 3\)"),
    ),
)
def test_invalid_limits_are_refused(value: Any, shown: str) -> None:
    with pytest.raises(InputError, match=MAX_TOKENS.format(shown)):
        Decoding(max_tokens=value)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    (
        ("beam", "5", "an integer"),
        ("nbest", 1.0, "an integer"),
        ("seed", None, "an integer"),
        ("workers", "2", "an integer"),
        ("top_k", 2.5, "an integer or None"),
        ("alpha", None, "a number"),
        ("temperature", "1", "a number"),
        ("top_p", "0.9", "a number or None"),
    ),
)
def test_values_of_another_type_are_refused(name: str, value: Any, kind: str) -> None:
    with pytest.raises(InputError, match=rf"^{name} must be {kind}: got {value!r}\.$"):
        Decoding(**SAMPLE | {name: value})
