"""The README's example runs as it stands there, and is as short as it says."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(example.splitlines()) <= 15
    monkeypatch.chdir(ROOT)
    (tmp_path / "example.py").write_text(example)
    names = runpy.run_path(str(tmp_path / "example.py"))
    assert names["result"].ints.shape == (1, 1, 3)
    assert int(names["result"].ints[0, 0, 0]) == 1
    assert len(names["answer"].tokens) > 10
    assert "tokens a step" in capsys.readouterr().out
