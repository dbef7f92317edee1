"""A file is the old one or the new one, never half of either."""

import pytest

from atlas_jax.files import written_whole


def test_an_error_changes_nothing_and_leaves_nothing(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with written_whole(path) as part:
        part.write_text("first")
        assert not path.exists()
    with pytest.raises(RuntimeError), written_whole(path) as part:
        part.write_text("half of the sec")
        raise RuntimeError
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]
