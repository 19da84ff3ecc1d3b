"""What is asked of the machine, seen from outside the process that asks."""

import os
import platform
import subprocess
import sys

import pytest

ASK = (
    "from addnorm.cpu import reduce_thread_spinning; print(reduce_thread_spinning()); "
    "import os; os.system('env')"
)


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked")
@pytest.mark.parametrize(("given", "kept"), ((None, "30000"), ("7", "7")))
def test_thread_spinning_is_reduced_unless_the_user_set_it(given: str | None, kept: str) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {} if given is None else {"GOMP_SPINCOUNT": given}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True
    )
    assert f"GOMP_SPINCOUNT={kept}" in done.stdout.splitlines()
    assert "True" in done.stdout.splitlines()


@pytest.mark.process
def test_thread_spinning_is_set_before_torch_is_imported() -> None:
    look = "import sys, addnorm.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
