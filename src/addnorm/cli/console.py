"""Messages to the user, which are not results: on stderr."""

import sys


def say(text: str) -> None:
    """Print a message; of several workers only the first one prints."""
    if is_first_worker():
        print(text, file=sys.stderr, flush=True)


def is_first_worker() -> bool:
    """Whether this is the only process, or the first of several."""
    if "torch" not in sys.modules:
        return True
    from addnorm.training.parallel import torchrun_ranks

    return (torchrun_ranks() or (0, 0, 1))[0] == 0
