"""Settings shared by both workers."""

from pydantic import Field

from specpool.rpc.config.settings import Seconds, ServerSettings


class WorkerSettings(ServerSettings):
    """Settings of a worker's server."""

    lease_seconds: Seconds = Field(
        60.0, gt=0, description="free a coordinator's sequences once it has been silent for this long"
    )
    watchdog_seconds: Seconds = Field(
        60.0,
        ge=0,
        description="the model counts as hung if its work finishes no forward pass for this long: health checks fail, "
        "liveness included, until it goes on; after twice this long the process ends; loading is exempt; 0: never",
    )
    startup_cache: bool = Field(
        True,
        description="on a CPU, keep what the self-test proved and the step times in the user's cache folder, and reuse "
        "them at the next start with the same weights, options, processor and versions",
    )
