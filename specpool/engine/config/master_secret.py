"""The secret by which the nodes of a sharded model recognize each other."""

from pathlib import Path

MIN_BYTES, MAX_BYTES = 16, 1024


def read_secret(path: Path | None) -> bytes | None:
    """Return the secret in a file, without surrounding space. OSError: unreadable. ValueError: too short or long."""
    if path is None:
        return None
    with path.open("rb") as file:
        secret = file.read(2 * MAX_BYTES).strip()
    if not MIN_BYTES <= len(secret) <= MAX_BYTES:
        raise ValueError(f"{path}: a secret must have {MIN_BYTES} to {MAX_BYTES} bytes, not {len(secret)}")
    return secret
