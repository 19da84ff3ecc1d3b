"""Messages to the user, on stderr; results go to stdout."""

import sys


def say(text: str) -> None:
    """Print a message on stderr; of several workers, only the first prints."""
    if is_first_worker():
        print(text, file=sys.stderr, flush=True)


def is_first_worker() -> bool:
    """Return whether this is the only process, or the first of several workers."""
    if "torch" not in sys.modules:
        return True
    from addnorm.training.parallel import torchrun_ranks

    return (torchrun_ranks() or (0, 0, 1))[0] == 0
