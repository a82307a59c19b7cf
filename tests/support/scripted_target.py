"""A target that answers chats with a given text."""

from collections.abc import Sequence
from typing import Any

from serving import RecordingTarget

from specpool.testing import EOS_TOKEN_ID, byte_tokenizer

# Reads tools and options as templates of the Hermes family do.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call: <tool_call>{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if enable_thinking is defined %}enable_thinking={{ enable_thinking }}\n{% endif %}"
    "{% if reasoning_effort is defined %}reasoning_effort={{ reasoning_effort }}\n{% endif %}"
    "ANSWER:"
)
_BYTES = byte_tokenizer()
_MARK = _BYTES.encode("ANSWER:").ids


class ScriptedTarget(RecordingTarget):
    """A target that generates `answer` and stops. Grammars take precedence."""

    def __init__(self, answer: str = "Hello", **options: Any) -> None:
        super().__init__(**options)
        self.script(answer)

    def script(self, answer: str) -> None:
        """Answer with this text from now on."""
        self._answer = [*_BYTES.encode(answer).ids, EOS_TOKEN_ID]

    def choose(self, context: Sequence[int]) -> int:
        tokens, size = list(context), len(_MARK)
        ends = (start + size for start in range(len(tokens) - size, -1, -1) if tokens[start : start + size] == _MARK)
        if (end := next(ends, None)) is None:
            return super().choose(context)
        return self._answer[min(len(tokens) - end, len(self._answer) - 1)]

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        items = [item for request in self.requests for item in request.items if item.HasField("sampling")]
        return str(_BYTES.decode(items[-1].token_ids))

    @property
    def sampling(self) -> Any:
        """The sampling parameters of the last request."""
        items = [item for request in self.requests for item in request.items if item.HasField("sampling")]
        return items[-1].sampling

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        response = await super().GetTokenizer(request, context)
        response.chat_template = TEMPLATE
        return response
