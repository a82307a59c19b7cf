"""Health checks of a server that is starting."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROBE_SECONDS = 0.2
"""The pause between two health checks."""
# A process that is busy starting may be slow to answer.
ANSWER_SECONDS = 1.0

# Nobody listens, or nobody answers in time.
_UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


async def is_serving(channel: grpc.aio.Channel, service: str = "") -> bool:
    """Whether the server is reached and says that it serves; `service` is a name it has for health checks ("": all).

    Raises the AioRpcError of a server that answers something else: it does not know the name, or no health checks.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=ANSWER_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() in _UNREACHABLE:
            return False
        raise
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
