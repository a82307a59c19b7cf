"""The embedded pair in a cache folder that cannot be created."""

from pathlib import Path

import pytest

from specpool.engine.models.embedded_pair import embedded_pair


def test_a_cache_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"^cannot create .*/file/cache \(Not a directory\): set XDG_CACHE_HOME"):
        embedded_pair(tmp_path / "file" / "cache")
