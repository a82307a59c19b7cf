"""The TypeScript example, built and run against a server as the README documents."""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest
from serving import free_address, serving

pytestmark = pytest.mark.slow  # installs npm packages

EXAMPLE = Path(__file__).parents[3] / "examples/typescript"


async def run(*command: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command in the example's folder. Prefers the Node.js installed beside Python."""
    program = shutil.which(command[0], path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program is not None, f"{command[0]} is not installed"
    path = f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        program, *command[1:], cwd=EXAMPLE, env={**os.environ, "PATH": path}, stdout=-1, stderr=-1
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


@pytest.fixture(scope="module")
def built() -> None:
    for command in (["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], ["npm", "run", "build"]):
        status, output, errors = asyncio.run(run(*command))
        assert status == 0, output + errors


@pytest.mark.usefixtures("built")
async def test_streams_from_a_real_server() -> None:
    async with serving() as served:
        status, output, errors = await run("npm", "start", "--silent", "--", served.address, "Name three fruits.")
        assert status == 0, errors
        text, summary = output.rsplit("\n[length", 1)
        assert text
        assert summary.startswith(", 40 tokens, seed 7]\n[")
        assert "draft tokens accepted]" in summary
        assert summary.strip().endswith((" answer short]", " answer long]"))
        assert dict((await served.info()).counters.finished) == {"length": 1, "stop": 1}


@pytest.mark.usefixtures("built")
async def test_reports_an_unreachable_server() -> None:
    status, output, errors = await run("node", "dist/generate.js", free_address())
    assert (status, output) == (1, "")
    assert errors.startswith("UNAVAILABLE: ")
