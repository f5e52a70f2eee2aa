"""Several devices give the same numbers, and gather nothing."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.x64
@pytest.mark.parametrize("part", range(2))
def test_four_devices_agree_with_one(part):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
        + " --xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.run(
        [sys.executable, str(HERE / "sharded.py"), str(part), "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(process.stdout.splitlines()) >= 5
