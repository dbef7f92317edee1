"""A training run that is killed, with no warning and at any moment, ends with the parameters of one that is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_killed_and_resumed_is_bit_identical(tmp_path):
    """Two kills here; `python tests/train/kill_driver.py FOLDER 20 1 80`, and 0 kills beside it, is the long form."""

    def drive(name, kills):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, str(HERE / "kill_driver.py"), str(folder), str(kills), "1"]
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    straight, killed = drive("straight", 0), drive("killed", 2)
    assert killed["digest"] == straight["digest"]
    assert max(killed["reached"]) > 0  # a kill came after a checkpoint
