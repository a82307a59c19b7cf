"""The split-device benchmark completes a small load, and its bounds follow the emulated pass times."""

import argparse
import json
import sys

import pytest

from benchmarks import split_devices

TWO = argparse.Namespace(one_device=False, verify_ms=(6.0, 0.03), acceptance=0.75)
ONE = argparse.Namespace(one_device=True, verify_ms=(6.0, 0.03), acceptance=0.75)
STEP = (0.8, 0.01)


def test_bounds_follow_the_clock() -> None:
    assert split_devices.bound(1, 0, STEP, TWO) == pytest.approx(1 / 0.006)
    assert split_devices.bound(8, 0, STEP, TWO) == pytest.approx(8 / 0.00621)
    assert split_devices.bound(1, None, STEP, TWO) > 3 * split_devices.bound(1, 0, STEP, TWO)


def test_drafts_take_time_on_one_device() -> None:
    assert split_devices.bound(8, 0, STEP, ONE) == split_devices.bound(8, 0, STEP, TWO)
    assert split_devices.bound(1, 1, STEP, ONE) == pytest.approx(1.75 / (0.006 + 0.00003 + 0.0008))
    assert split_devices.bound(8, 2, STEP, ONE) == pytest.approx(8 * 2.3125 / (0.006 + 23 * 0.00003 + 2 * 0.00087))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--one-device"]])
def test_small_run_ends_in_json(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--sequences", "2", "--tokens", "6", "--repeats", "1", "--verify-ms", "1", "0", "--draft-ms", "1", "0"]
    monkeypatch.setattr(sys, "argv", ["split_devices", *size, *flags])
    split_devices.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["kind"] for row in rows] == ["plain", *(["k4"] if flags else []), "default"]
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert 0 < row["of_bound"] <= 1
        if flags:
            assert row["passes_ms"] + row["outside_ms"] == pytest.approx(row["round_ms"], abs=0.02)
