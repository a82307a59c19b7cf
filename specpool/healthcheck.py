"""Health check for containers and scripts: exit status 0 if the server is serving.

`python -m specpool.healthcheck HOST:PORT [--service NAME] [--timeout SECONDS] [--tls-ca FILE] [--tls-name NAME]
[--tls-cert FILE --tls-key FILE]`
"""

import argparse
import math
import sys

import grpc

from specpool.client.failures import failure
from specpool.environment.extras import require_extra
from specpool.errors import NotFoundError
from specpool.rpc.security.channel import COORDINATOR_PORT, Connector, check_address

PROGRAM = "specpool.healthcheck"


def problem(connector: Connector, service: str, timeout: float) -> str | None:
    """Return why the server is not serving, or None if it is."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # `main` names the missing extra

    with connector.open_blocking() as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            reason = failure(error, connector)
            return f"the server has no service {service!r}" if isinstance(reason, NotFoundError) else str(reason)
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def utf8_text(text: str) -> str:
    """Parse text that can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8") from None
    return text


def server_address(text: str) -> str:
    """Parse HOST:PORT."""
    try:
        return check_address(utf8_text(text), COORDINATOR_PORT)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: list[str] | None = None) -> int:
    """Check a server, print any problem to stderr and return the exit status."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="check a server with grpc.health.v1")
    parser.add_argument("address", type=server_address, metavar="HOST:PORT")
    service = "full name of a service; default: the whole process"
    parser.add_argument("--service", type=utf8_text, default="", help=service)
    parser.add_argument("--timeout", type=seconds, default=3.0, help="seconds to wait for a response")
    parser.add_argument("--tls-ca", metavar="FILE", help="use TLS and trust certificates signed by this CA")
    parser.add_argument("--tls-cert", metavar="FILE", help="client certificate (mutual TLS)")
    parser.add_argument("--tls-key", metavar="FILE", help="key of the client certificate")
    parser.add_argument("--tls-name", metavar="NAME", help="name in the server's certificate; default: HOST")
    options = parser.parse_args(arguments)
    tls = {name: getattr(options, name) for name in ("tls_ca", "tls_cert", "tls_key", "tls_name")}
    try:
        connector = Connector(options.address, **tls)
    except ValueError as error:
        parser.error(str(error))
    require_extra(PROGRAM, "vllm", "cli")  # the smallest extra with grpc_health
    reason = problem(connector, options.service, options.timeout)
    if reason is not None:
        print(f"{options.address}: {' '.join(reason.split())}", file=sys.stderr)
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
