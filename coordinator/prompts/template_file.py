"""Chat templates from files."""

import marshal
import subprocess
from pathlib import Path

from coordinator.prompts.frames import HEADER, MAX_REASON_CHARACTERS, Kind, frame
from coordinator.prompts.process_link import COMMAND, environment

MAX_FILE_BYTES = 2**20
# Processor time and wall-clock time to compile a template.
COMPILE_SECONDS, PATIENCE_SECONDS = 3.0, 60.0


def read_template(path: Path) -> str:
    """Return the template of a file. Raises ValueError if it cannot be read."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not source.strip():
        raise ValueError(f"{path} is empty")
    return source


def check_template(path: Path) -> None:
    """Raise ValueError if the template of a file cannot be read or does not compile. Takes a fraction of a second."""
    request = frame(Kind.TEMPLATE, marshal.dumps((read_template(path), COMPILE_SECONDS)))
    try:
        done = subprocess.run(
            COMMAND, input=request, stdout=subprocess.PIPE, env=environment(), timeout=PATIENCE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{path}: cannot start a prompt process: {error}") from None
    header, reason = done.stdout[: HEADER.size], done.stdout[HEADER.size :]
    if len(header) < HEADER.size:
        raise ValueError(f"{path}: the chat template takes too much time or memory to compile")
    if HEADER.unpack(header)[1] != Kind.DONE:
        raise ValueError(f"{path}: {reason.decode(errors='replace')[:MAX_REASON_CHARACTERS]}")
