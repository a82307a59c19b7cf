"""Write `specpool/client/sync.py`, the blocking client, from `aio.py`: `python .ci/generate_client.py [FILE]`."""

import sys
from pathlib import Path

from unasync import Rule, unasync_files

CLIENT = Path(__file__).parents[1] / "specpool/client"
# Names that start with "Async" become "Sync" by default. unasync sees a docstring with two of its three quotes.
REPLACEMENTS = {
    '""The client for asyncio. Cancelling a task aborts its request.""': (
        '""The blocking client. It is thread-safe. `make client` writes this file from `aio.py`.""'
    ),
    "AsyncClient": "Client",
    "async_failure": "failure",
    "asyncio": "time",
}

if __name__ == "__main__":
    source, output = CLIENT / "aio.py", Path(sys.argv[1]) if len(sys.argv) > 1 else CLIENT / "sync.py"
    unasync_files([str(source)], [Rule(str(source), str(output), REPLACEMENTS)])
