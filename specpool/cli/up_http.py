"""The HTTP server of `specpool up`, which serves OpenAI's API in front of the coordinator."""

import logging

from specpool.cli.probes import HttpProbe
from specpool.cli.processes import WRONG_SETTINGS, ProcessFailedError, Service, arguments_of
from specpool.cli.up_security import SecureUpSettings
from specpool.cli.up_settings import UpSettings
from specpool.environment.extras import explain_missing
from specpool.openai.settings import HTTP_PORT
from specpool.rpc.ports import ListenError, check_port
from specpool.rpc.security.channel import join_address, split_address

SHARED = ("host", "tls_cert", "tls_key", "tls_ca", "drain_seconds", "log_level", "log_format")
"""Settings of `up` to pass on under the same names."""
CLIENT_TLS = ("tls_ca", "tls_cert", "tls_key", "tls_name")
"""TLS options of the connection to the coordinator."""

log = logging.getLogger(__name__)


def http_services(settings: UpSettings, coordinator: Service) -> list[Service]:
    """Return the HTTP server, or an empty list if the settings turn it off.

    If its packages are missing, logs a warning, or raises ProcessFailedError if the port was given explicitly. Also
    raises ProcessFailedError if the port cannot be used.
    """
    if not isinstance(settings, SecureUpSettings):
        return []
    if settings.api_port is None:
        if settings.http_port is None and not settings.allowed_names:
            reason = f"--host {settings.host} is beyond the loopback interface; --http-port {HTTP_PORT} starts it"
            log.warning("OpenAI's API over HTTP is off, because %s", reason)
        return []
    if (problem := explain_missing("http")) is not None:
        if settings.http_port is not None:
            raise ProcessFailedError(f"http-port: {problem}", WRONG_SETTINGS)
        log.warning("HTTP server disabled: it %s", problem)
        return []
    try:
        check_port("http_port", settings.host, settings.api_port)
    except ListenError as error:
        raise ProcessFailedError(str(error), WRONG_SETTINGS) from None
    flags = {name: getattr(settings, name) for name in SHARED}
    flags |= {"port": settings.api_port, "coordinator_address": coordinator.address}
    flags |= {f"coordinator_{name}": coordinator.security.get(name) for name in CLIENT_TLS}
    address = _address(settings.api_port, coordinator.address)
    arguments = arguments_of(flags)
    return [Service("HTTP server", "specpool.openai", arguments, address, coordinator.security, probe=HttpProbe)]


def api_url(settings: SecureUpSettings, coordinator: str) -> str | None:
    """Return the base URL of OpenAI's API, given the coordinator's address. None if there is no HTTP server."""
    if settings.api_port is None or explain_missing("http") is not None:
        return None
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{_address(settings.api_port, coordinator)}/v1"


def _address(port: int, coordinator: str) -> str:
    """Return the address of the HTTP server, which listens on the coordinator's host."""
    target = split_address(coordinator)
    assert target is not None
    return join_address(target[0], port)
