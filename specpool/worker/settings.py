"""Settings shared by both workers, whatever they run."""

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
        description="work on the model counts as hung if no forward pass ends for this long: health checks fail, "
        "that of liveness too, until the work goes on, and after twice the time the process ends; loading the model is "
        "exempt; 0: never",
    )
