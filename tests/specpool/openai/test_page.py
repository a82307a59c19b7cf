"""The examples in docs/openai.md run unchanged."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from openai_service import openai_server
from secure_service import until
from serving import serving

PAGE = (Path(__file__).parents[3] / "docs" / "openai.md").read_text()


async def test_the_calls_of_the_page_run() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    calls = [["bash", "-ec", command] for command in re.findall(r"^    (curl (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)]
    async with (
        serving(served_model_name="SmolLM2-135M-Instruct") as coordinator,
        openai_server(coordinator.address) as (server, url),
    ):
        await until(lambda: server.coordinators.is_serving)
        for *program, text in (*calls, [sys.executable, "-c", example]):
            typed = [*program, text.replace("http://127.0.0.1:8000", url)]
            done = await asyncio.to_thread(subprocess.run, typed, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert done.stdout
            assert '"error"' not in done.stdout
