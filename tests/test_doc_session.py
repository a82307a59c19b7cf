"""Documented commands and examples that need only the embedded pair run against a real `specpool up`."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import COMMANDS, PYTHON_EXAMPLES
from gateway import gateway

BIN = Path(sys.executable).parent


@pytest.mark.slow
@pytest.mark.real_pair
def test_a_session_of_documented_commands_with_the_embedded_pair(tmp_path: Path) -> None:
    texts = {command.text for command in COMMANDS if not command.needs}
    assert "specpool up" in texts
    queries = [text for text in texts if re.match("specpool (generate .|top)", text) and "--address" not in text]
    (tmp_path / "FILE.jsonl").write_text('{"id": "a", "prompt": "The capital of Norway is"}\n')
    (tmp_path / "FILE").write_text('{"type": "boolean"}')
    activated = {**os.environ, "PATH": os.pathsep.join((str(BIN), os.environ["PATH"]))}
    environment = {**activated, "SPECPOOL_PORT": "0", "SPECPOOL_HTTP_PORT": "0", "SPECPOOL_SMG": "true"}
    command = ["specpool", "up"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(found[1] for line in server.stdout if (found := re.search(r"serving at (\S+)", line)))
            calls = [[sys.executable, "-c", text.replace("127.0.0.1:50050", address)] for text in PYTHON_EXAMPLES]
            for query in [*(["bash", "-c", text] for text in queries), *calls]:
                environment = {**activated, "SPECPOOL_ADDRESS": address}
                done = subprocess.run(query, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
                assert done.returncode == 0, (query, done.stderr)
                assert done.stdout or ">" in query[-1], query
            asyncio.run(call_through_gateway(address))
        finally:
            server.terminate()
    (answer,) = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert json.loads(answer)["id"] == "a"


async def call_through_gateway(address: str) -> None:
    """Run the calls of docs/smg.md, which name the model of the embedded pair."""
    async with gateway(address) as client:
        base = str(client.base_url).removesuffix("/v1/")
        for command in COMMANDS:
            if (command.page, command.program) == ("docs/smg.md", "curl"):
                query = ["bash", "-c", command.text.replace("http://127.0.0.1:30000", base)]
                done = await asyncio.to_thread(subprocess.run, query, capture_output=True, text=True, check=True)
                assert '"error"' not in done.stdout, (command.text, done.stdout)
                assert done.stdout
