"""Serves only health checks, under the name that `specpool up` checks: `python -m health_process PORT`."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specpool.rpc.server.health import process_name

if __name__ == "__main__":
    servicer, server = health.HealthServicer(), grpc.server(ThreadPoolExecutor(max_workers=1))
    for name in ("", process_name(os.getpid())):
        servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    Event().wait()
