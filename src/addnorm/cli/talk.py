"""Talk, which is not a result: on stderr, and warnings in the same voice."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

NO_NUMBERS = "column .* are no numbers"


def say(text: str) -> None:
    """Talk: not a result."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def spoken() -> Iterator[None]:
    """Warnings as talk, without the place in the code that they come from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=NO_NUMBERS)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        say(text)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warning on values that are no numbers, where that is said in our own words."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NO_NUMBERS)
        yield
