"""CPU settings, observed in a child process."""

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = (
    "from addnorm.cpu import reduce_thread_spinning; print(reduce_thread_spinning()); "
    "import os; os.system('env')"
)


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it has an effect with glibc only")
@pytest.mark.parametrize(("user_value", "expected"), ((None, "30000"), ("7", "7")))
def test_thread_spinning_is_reduced_unless_the_user_set_it(
    user_value: str | None, expected: str
) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {} if user_value is None else {"GOMP_SPINCOUNT": user_value}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert f"GOMP_SPINCOUNT={expected}" in done.stdout.splitlines()
    assert "True" in done.stdout.splitlines()


@pytest.mark.process
def test_thread_spinning_is_set_before_torch_is_imported() -> None:
    look = "import sys, addnorm.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
