"""Call statuses as clients show them. Kept apart from `specpool.rpc.errors` so that a health check imports less."""

import grpc


def status_line(error: grpc.RpcError) -> str:
    """The status in which a call ended: the name of its code, and its message as the server sent it."""
    return f"{error.code().name}: {error.details()}"
