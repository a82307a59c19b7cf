"""Settings that every worker has, whatever it runs."""

from pydantic import Field

from rpc.settings import Seconds, ServerSettings


class WorkerSettings(ServerSettings):
    """Settings of a worker's server."""

    lease_seconds: Seconds = Field(
        60.0, gt=0, description="free a coordinator's sequences when it was silent for this long"
    )
