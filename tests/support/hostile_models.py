"""Targets with hostile files, whose tokens are bytes."""

from typing import Any

from serving import RecordingTarget
from tokenizers import Tokenizer, normalizers

from specpool.testing import byte_tokenizer


class FilesTarget(RecordingTarget):
    """A target with the given chat template and tokenizer.json."""

    def __init__(self, chat_template: str = "", tokenizer_json: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._chat_template, self._tokenizer_json = chat_template, tokenizer_json.encode()

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        response = await super().GetTokenizer(request, context)
        response.chat_template = self._chat_template or response.chat_template
        response.tokenizer_json = self._tokenizer_json or response.tokenizer_json
        return response


def growing_tokenizer(times: int = 3) -> Tokenizer:
    """Return a tokenizer that makes each `x` of a prompt 200 times longer, several times."""
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("x", "x" * 200)] * times)
    return tokenizer


def prepending_tokenizer(times: int = 28) -> Tokenizer:
    """Return a tokenizer that doubles a prompt many times."""
    tokenizer = byte_tokenizer()
    steps = [normalizers.Replace("x", "xx"), normalizers.Prepend("x")] * times
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer
