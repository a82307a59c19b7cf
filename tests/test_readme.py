"""What the README tells to type works as it is written, but for the port."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import serving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent

BUF_COMMANDS = re.findall(r"^    (\.venv/bin/buf curl (?:.*\n)+?.*GenerationService/\w+)$", README, flags=re.MULTILINE)
# How many samples end in the output of each.
ANSWERS = {"Generate": 1, "GenerateStream": 2, "GetModelInfo": 0}
(PYTHON_EXAMPLE,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def as_typed(command: str, address: str) -> str:
    return command.replace("127.0.0.1:50050", address).replace(".venv/bin", str(BIN))


async def output_of(*command: str) -> str:
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def method_of(command: str) -> str:
    return command.rpartition("/")[2]


def test_there_are_examples_of_the_main_calls() -> None:
    assert set(map(method_of, BUF_COMMANDS)) == set(ANSWERS)


@pytest.mark.parametrize("command", BUF_COMMANDS, ids=method_of)
async def test_buf_curl(command: str) -> None:
    async with serving() as served:
        output = await output_of("bash", "-c", as_typed(command, served.address))
    assert output.count('"finishReason": "length"') == ANSWERS[method_of(command)]


async def test_the_python_example() -> None:
    async with serving() as served:
        output = await output_of(sys.executable, "-c", as_typed(PYTHON_EXAMPLE, served.address))
        assert output
        info = await served.info()
        assert (info.counters.requests, sum(info.counters.finished.values())) == (2, 2)
