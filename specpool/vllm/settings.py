"""Settings of `RemoteDraft`: `SPECPOOL_*` variables of the vLLM process."""

import io
from contextlib import redirect_stderr
from typing import Self

from pydantic import Field

from specpool.rpc.config.settings import UINT32_MAX, Seconds, Settings
from specpool.rpc.security.settings import ClientSecurity


class RemoteDraftSettings(Settings, ClientSecurity):
    """How vLLM's drafts are made: where the draft worker is, how to connect to it, and how long to wait for it."""

    draft_address: str = Field(min_length=1, description="host:port of the draft worker")
    draft_start_seconds: Seconds = Field(
        60.0, ge=0, description="time for the draft worker to answer when vLLM starts; afterwards vLLM is refused"
    )
    draft_timeout_seconds: Seconds = Field(
        1.0, gt=0, description="most time of one step's drafts; a slower draft worker is left out for a while"
    )
    draft_max_length: int | None = Field(
        None,
        ge=2,
        le=UINT32_MAX,
        description="positions that the draft worker reserves for a sequence, which has no drafts beyond; default: "
        "as many as the models have",
    )
    prefill_tokens: int = Field(
        512, ge=1, le=UINT32_MAX, description="prompt tokens that the draft worker is sent in one step"
    )

    @classmethod
    def of_environment(cls) -> Self:
        """The settings of this process. ValueError, in one line: some are wrong."""
        # vLLM prints a hundred lines after those that `load` writes for a command of its own.
        with redirect_stderr(io.StringIO()) as written:
            try:
                return cls.load("SPECPOOL_* variables", [])
            except SystemExit:
                raise ValueError("; ".join(written.getvalue().splitlines())) from None
