"""`make attacks` runs, and its well-behaved client gets its answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from edge import haproxy

ROOT = Path(__file__).parents[2]


def run_attacks(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("", "tests/system", "tests/support")),
    }
    command = [sys.executable, "-m", "attacks", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["64 samples", "300 silent connections", "paths that are not UTF-8"])
def test_a_well_behaved_client_gets_its_answers_under_an_attack(name: str) -> None:
    if name != "64 samples":
        haproxy()
    done = run_attacks("--seconds", "1", "--only", name)
    assert done.returncode == 0, done.stderr
    quiet, attacked = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert (quiet["attack"], attacked["attack"]) == ("none", name)
    assert attacked["requests"] > 0
    assert attacked["wrong"] == attacked["failed"] == 0
