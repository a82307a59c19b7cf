"""Reads an untrusted tokenizer in a limited process first, because a malformed file can abort the process.

The draft worker starts this module as `python -m draft_worker.translation.vetting`.
"""

import asyncio
import os
import resource
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import suppress
from pathlib import Path

from draft_worker.translation.sample import SAMPLE
from draft_worker.translation.vocabulary import UnsupportedTokenizerError, Vocabulary
from specpool.protocol.errors import UnavailableError
from specpool.protocol.tokenizer import TokenizerFiles

COMMAND = [sys.executable, "-P", "-m", "draft_worker.translation.vetting"]
INHERITED = {"LD_LIBRARY_PATH", "PYTHONHOME", "TZ"}
"""Inherited environment variables. All others, which may hold settings and secrets, are dropped."""
SECONDS, PATIENCE = 30, 2
"""CPU time limit in seconds, and wall-clock seconds allowed per CPU second."""
ENCODE_SECONDS = 0.5
"""CPU time limit for encoding the texts. Rounds wait for such encodings."""
TEXTS = [SAMPLE.encode(), *(character * 512 for character in (b"a", b" ", b"0", b"\n", b"-"))]
MEMORY, MEMORY_PER_BYTE = 512 * 2**20, 32
"""Memory limit in bytes, and its growth per byte of the tokenizer."""
REFUSED = 3
MAX_REASON_CHARACTERS = 500


async def vet(files: TokenizerFiles, vocab_size: int) -> None:
    """Read a tokenizer and encode some texts in another process.

    Raises UnsupportedTokenizerError, and UnavailableError if the machine is too busy.
    """
    memory = MEMORY + MEMORY_PER_BYTE * len(files.tokenizer_json)
    environment = {name: value for name, value in os.environ.items() if name in INHERITED}
    process = await asyncio.create_subprocess_exec(
        *COMMAND, str(vocab_size), str(memory), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
    )
    try:
        async with asyncio.timeout(PATIENCE * SECONDS):
            output, _ = await process.communicate(files.tokenizer_json)
    except TimeoutError:
        raise UnavailableError("too little processor time to read the tokenizer") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == REFUSED:
        raise UnsupportedTokenizerError(output.decode(errors="replace")[:MAX_REASON_CHARACTERS])
    if status := process.returncode:
        limits = f"{SECONDS} s or {memory >> 20} MiB"
        raise UnsupportedTokenizerError(f"reading it takes more than {limits}, or crashes (status {status})")


def main() -> None:
    vocab_size, memory = map(int, sys.argv[1:])
    with suppress(OSError, ValueError):  # macOS has no such limit
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        vocabulary = Vocabulary.read(TokenizerFiles(sys.stdin.buffer.read(), "", {}, ()), vocab_size)
        began = time.process_time()
        for text in TEXTS:
            vocabulary.encode(text)
        if (seconds := time.process_time() - began) > ENCODE_SECONDS:
            size = sum(map(len, TEXTS))
            raise UnsupportedTokenizerError(
                f"encoding {size} bytes takes {seconds:.1f} s, more than {ENCODE_SECONDS} s"
            )
    except UnsupportedTokenizerError as error:
        sys.stdout.buffer.write(str(error).encode(errors="replace"))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
