"""Decoders of the tokenizers library, rebuilt from an untrusted description.

The coordinator decodes every generated token, so it accepts only decoders that cannot make a text much longer, and no
regular expressions, which can take any time.
"""

import math
from collections.abc import Callable
from typing import Any

from tokenizers import decoders

MAX_DEPTH = 8
MAX_DECODERS = 32
# Maximum bytes of text per token byte.
MAX_GROWTH = 8.0
# A byte may become a replacement character of three bytes.
LOSSY_GROWTH = 3.0

Decode = Callable[[list[str]], str]
"""Returns the text of a list of tokens."""


def read_decoder(description: Any) -> Decode:
    """Rebuild a decoder from its JSON value. Raises ValueError for unsupported decoders."""
    if description is None:
        return " ".join
    steps = _steps(description, MAX_DEPTH)
    if len(steps) > MAX_DECODERS:
        raise ValueError(f"its decoder has more than {MAX_DECODERS} steps")
    made = [_make(step) for step in steps]
    if math.prod(growth for _, growth in made) > MAX_GROWTH:
        raise ValueError(f"its decoder can make text more than {MAX_GROWTH:g} times longer")
    decode: Decode = decoders.Sequence([decoder for decoder, _ in made]).decode
    return decode


def _steps(description: Any, levels: int) -> list[dict[str, Any]]:
    """Return the decoders of nested sequences in order."""
    if not isinstance(description, dict) or not levels:
        raise ValueError("its decoder is malformed")
    if description.get("type") != "Sequence":
        return [description]
    members = description.get("decoders")
    if not isinstance(members, list):
        raise ValueError("its decoder is malformed")
    return [step for member in members for step in _steps(member, levels - 1)]


def _make(step: dict[str, Any]) -> tuple[Any, float]:
    """Return a decoder and its growth."""
    kind = step.get("type")
    options = {name: value for name, value in step.items() if name != "type"}
    try:
        if kind == "Replace":
            pattern, content = options["pattern"]["String"], options["content"]
            return decoders.Replace(pattern, content), max(1.0, len(content.encode()) / _size(pattern))
        if kind == "Strip":
            return decoders.Strip(options["content"], options["start"], options["stop"]), 1.0
        if kind == "ByteLevel":
            return decoders.ByteLevel(), LOSSY_GROWTH
        if kind in ("ByteFallback", "Fuse"):
            return getattr(decoders, kind)(), 1.0
        if kind == "Metaspace":
            return decoders.Metaspace(**options), 1.0
        if kind == "WordPiece":
            return decoders.WordPiece(**options), 2.0  # a space before a token
        if kind == "BPEDecoder":
            return decoders.BPEDecoder(**options), max(1.0, 1 / _size(options["suffix"]))
        if kind == "CTC":
            return decoders.CTC(**options), max(1.0, 1 / _size(options["word_delimiter_token"]))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise ValueError(f"its decoder {kind} is not supported with these options") from None
    raise ValueError(f"its decoder {str(kind)[:64]!r} is not supported")


def _size(text: Any) -> int:
    """Return the bytes of a text. An empty pattern matches everywhere."""
    if not isinstance(text, str) or not text:
        raise ValueError("not a text")
    return len(text.encode())
