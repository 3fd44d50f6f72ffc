"""Agent and standby syncer are light: torch costs seconds of CPU and hundreds of megabytes per process."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["diloco_runtime.island", "diloco_runtime.syncer_main"])
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
