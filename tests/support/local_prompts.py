"""A prompt process's answers without a process: starting two takes most of the time of a coordinator's start."""

import io
import marshal
from contextlib import nullcontext
from functools import partial

from coordinator.prompts.frames import HEADER, Allowance, Kind
from coordinator.prompts.process import PromptProcess
from coordinator.prompts.process_link import ProcessLink
from coordinator.prompts.tokenizer_pool import TokenizerPool


class LocalLink(ProcessLink):
    """Answers in this process, without limits on memory and time, and so not for hostile prompts."""

    is_usable = False
    pid = None

    def __init__(self, asked: list[Kind] | None = None) -> None:
        """`asked` receives the kinds of all requests."""
        super().__init__()
        self._asked = [] if asked is None else asked

    async def start(self) -> None:
        self.loaded, self.has_grammars = None, False
        self._replies = io.BytesIO()
        self._prompts = PromptProcess(self._replies, lambda *_: nullcontext())
        self.is_usable = True

    async def ask(
        self, kind: Kind, body: bytes, stage: Allowance, max_reply: int, seconds: float = 0.0
    ) -> tuple[Kind, bytes]:
        self._asked.append(kind)
        self._replies.seek(0)
        self._replies.truncate()
        self._prompts.answer(kind, marshal.loads(body))
        rest = self._replies.getvalue()
        while True:  # the last reply answers; others announce a stage
            length, reply = HEADER.unpack_from(rest)
            content, rest = rest[HEADER.size : HEADER.size + length], rest[HEADER.size + length :]
            if not rest:
                return Kind(reply), content

    async def close(self) -> None:
        self.is_usable = False


local_pool = partial(TokenizerPool, new_link=LocalLink)
