"""Reads an untrusted tokenizer in a limited process first, because a malformed file can abort the process.

The draft worker starts this module as `python -m draft_worker.translation.vetting`.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

from draft_worker.translation.sample import SAMPLE
from draft_worker.translation.vocabulary import UnsupportedTokenizerError, Vocabulary
from specpool.protocol.tokenizer import TokenizerFiles

COMMAND = [sys.executable, "-P", "-m", "draft_worker.translation.vetting"]
INHERITED = {"LD_LIBRARY_PATH", "PYTHONHOME", "TZ"}
"""Inherited environment variables. All others, which may hold settings and secrets, are dropped."""
SECONDS, PATIENCE = 30, 10
"""CPU time limit in seconds, and wall-clock seconds allowed per CPU second."""
MEMORY, MEMORY_PER_BYTE = 512 * 2**20, 32
"""Memory limit in bytes, and its growth per byte of the tokenizer."""
REFUSED = 3
MAX_REASON_CHARACTERS = 500


def vet(files: TokenizerFiles, vocab_size: int) -> None:
    """Read a tokenizer and encode the sample text in another process. Raises UnsupportedTokenizerError."""
    memory = MEMORY + MEMORY_PER_BYTE * len(files.tokenizer_json)
    environment = {name: value for name, value in os.environ.items() if name in INHERITED}
    try:
        done = subprocess.run(
            [*COMMAND, str(vocab_size), str(memory)],
            input=files.tokenizer_json,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=PATIENCE * SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnsupportedTokenizerError("reading it takes too long") from None
    if done.returncode == REFUSED:
        raise UnsupportedTokenizerError(done.stdout.decode(errors="replace")[:MAX_REASON_CHARACTERS])
    if done.returncode:
        limits = f"{SECONDS} s or {memory >> 20} MiB"
        raise UnsupportedTokenizerError(f"reading it takes more than {limits}, or crashes (status {done.returncode})")


def main() -> None:
    vocab_size, memory = map(int, sys.argv[1:])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        Vocabulary.read(TokenizerFiles(sys.stdin.buffer.read(), "", {}, ()), vocab_size).encode(SAMPLE.encode())
    except UnsupportedTokenizerError as error:
        sys.stdout.buffer.write(str(error).encode(errors="replace"))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
