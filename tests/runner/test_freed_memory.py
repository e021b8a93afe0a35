"""A training on the CPU takes memory from the kernel once, not in every step."""

import os
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
from samewise.runner.processes.this_process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    made = [bytearray(size << 20) for size in (48, 5, 33)]
    for one in made:
        one[::4096] = bytes(len(one) // 4096)
    return made
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


def faults(way: str, **variables: str) -> int:
    """Pages taken from the kernel by a step that allocates 86 MB, which are 22,016 pages."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", STEPS, way], env=clean | variables, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="malloc is glibc's on Linux")
def test_freed_memory_is_reused_unless_the_environment_configures_malloc():
    assert faults("not kept") > 15_000
    assert faults("kept") < 1_500
    assert faults("kept", MALLOC_ARENA_MAX="4") > 15_000
