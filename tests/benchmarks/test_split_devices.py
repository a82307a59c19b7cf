"""The benchmark of two devices runs to its end on a small load, and its bounds are those of the fakes' clock."""

import argparse
import json
import sys

import pytest

from benchmarks import split_devices

OPTIONS = argparse.Namespace(verify_ms=(6.0, 0.03), acceptance=0.75)


def test_bounds_follow_the_clock() -> None:
    assert split_devices.bound(1, 0, OPTIONS) == pytest.approx(1 / 0.006)
    assert split_devices.bound(8, 0, OPTIONS) == pytest.approx(8 / 0.00621)
    assert split_devices.bound(1, None, OPTIONS) > 3 * split_devices.bound(1, 0, OPTIONS)


@pytest.mark.slow
def test_small_run_ends_in_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--sequences", "2", "--tokens", "6", "--repeats", "1", "--verify-ms", "1", "0", "--draft-ms", "1", "0"]
    monkeypatch.setattr(sys, "argv", ["split_devices", *flags])
    split_devices.main()
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    for kind in ("plain", "default"):
        assert row[kind] > 0
        assert 0 < row[f"{kind}_of_bound"] <= 1
