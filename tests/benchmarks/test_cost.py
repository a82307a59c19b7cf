"""The cost benchmark: the part that needs no models runs to its end on a small load."""

import json

import pytest

from benchmarks.cost import __main__ as cost


@pytest.mark.slow
def test_coordinator_part_ends_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    cost.main(["--of", "coordinator", "--sequences", "2", "--tokens", "6", "--repeats", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["round_ms"]
    assert result["choose_group_of_10000_ms"]
