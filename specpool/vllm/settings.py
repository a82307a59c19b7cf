"""Settings of `RemoteDraft`: `SPECPOOL_*` variables of the vLLM process."""

from typing import Self

from pydantic import Field

from rpc.security import ClientSecurity
from rpc.settings import UINT32_MAX, Seconds, Settings


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
        """The settings of this process. ValueError: some are wrong, as has been said on standard error."""
        try:
            return cls.load("RemoteDraft", [])
        except SystemExit:
            raise ValueError("the settings of RemoteDraft are wrong: see the line above") from None
