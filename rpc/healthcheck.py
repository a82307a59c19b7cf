"""A health check for containers, with nothing more to install: exit status 0 if a server says that it serves.

`python -m rpc.healthcheck HOST:PORT [--service NAME] [--timeout SECONDS]`
"""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# A proxy that is set for downloads must not stand between a process and its own check.
OPTIONS = [("grpc.enable_http_proxy", 0)]


def problem(address: str, service: str, timeout: float) -> str | None:
    """Why the server at `address` does not serve; None if it does."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(arguments: list[str] | None = None) -> int:
    """Checks a server; returns the exit status, and says on stderr what is wrong."""
    parser = argparse.ArgumentParser(prog="rpc.healthcheck", description="asks a server by grpc.health.v1")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--service", default="", help="full name of a service; default: the process as a whole")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds to wait for the answer")
    options = parser.parse_args(arguments)
    reason = problem(options.address, options.service, options.timeout)
    if reason is not None:
        print(f"{options.address}: {' '.join(reason.split())}", file=sys.stderr)
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
