"""A gRPC server that only serves health."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


@contextmanager
def health_server(is_serving: bool = True, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """Run a server with this status, with TLS if there are credentials; yield its address."""
    servicer, server = health.HealthServicer(), grpc.server(ThreadPoolExecutor(max_workers=1))
    status = health_pb2.HealthCheckResponse
    servicer.set("", status.SERVING if is_serving else status.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    where = "127.0.0.1:0"
    port = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()
