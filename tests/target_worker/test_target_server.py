"""The target worker refuses drafts that read hidden states."""

from pathlib import Path

import pytest
from feature_drafts import save_feature_draft

from specpool.engine.config.sources import UnsupportedModelError
from target_worker.server import TargetWorkerSettings, load_verifier


def test_feature_drafts_are_no_targets(tmp_path: Path) -> None:
    settings = TargetWorkerSettings(model=str(save_feature_draft(tmp_path)), threads=1, startup_cache=False)
    with pytest.raises(UnsupportedModelError, match="is a draft that reads hidden states, not a target"):
        load_verifier(settings, lambda _: None)
