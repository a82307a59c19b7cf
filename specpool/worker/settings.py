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
        description="time without a finished forward pass after which a busy model counts as hung: health checks fail, "
        "liveness included, until a pass ends; after twice this time the process exits; loading is exempt; 0: never",
    )
    log_name: str | None = Field(
        None, min_length=1, max_length=64, description="name of this process in its log; default: its program's"
    )
    startup_cache: bool = Field(
        True,
        description="on a CPU, store the self-test result and the step times in the user's cache folder, and reuse "
        "them at the next start with the same weights, options, processor and versions",
    )
