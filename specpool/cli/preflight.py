"""Checks before `specpool up` starts its processes: ports, settings and the coordinator's certificate."""

import contextlib
import ssl
from itertools import combinations
from pathlib import Path
from typing import Any

from specpool.cli.processes import WRONG_SETTINGS, ProcessFailedError, Service
from specpool.engine.config.device_names import CPU, exact_name
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.target_options import TargetOptions
from specpool.engine.models.preflight import InvalidOptionError, check_options, check_pair, check_target
from specpool.rpc.config.settings import ListeningSettings
from specpool.rpc.ports import ListenError, check_port
from specpool.rpc.security.channel import SecurityOptions
from specpool.rpc.security.settings import ServerSecurity

# A handshake has three messages in TLS 1.3, and four in TLS 1.2.
MAX_MESSAGES = 4

WORKER = " worker"
MODEL_FLAGS = {"draft": "draft", "canary": "draft_canary"}
"""Flags that set the models of draft workers, by role."""
DEFAULT_HOST = ListeningSettings.model_fields["host"].default


def health_check_security(security: ServerSecurity) -> SecurityOptions:
    """Return connection options for a coordinator with this security: trust only its certificate, and present it.

    ProcessFailedError if the certificate has expired, or is invalid for clients although the coordinator requires that.
    """
    cert, key = security.tls_cert, security.tls_key
    if cert is None or key is None:
        return SecurityOptions()
    try:
        name = _name(_handshake(cert, key, security.tls_ca))
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error.reason
        role = " as a client certificate" if security.tls_ca is not None else ""
        raise ProcessFailedError(f"tls-cert: the coordinator cannot use {cert}{role}: {reason}") from None
    return SecurityOptions(tls_ca=cert, tls_cert=cert, tls_key=key, tls_name=name)


def _handshake(cert: Path, key: Path, ca: Path | None) -> dict[str, Any]:
    """Return the server's certificate as seen in an in-memory handshake. Raises ssl.SSLError if it fails."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.load_cert_chain(cert, key)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust the certificate without its CA
    client.load_verify_locations(cert)
    if ca is not None:
        server.verify_mode = ssl.CERT_REQUIRED
        server.load_verify_locations(ca)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(MAX_MESSAGES):
        for side in (client_side, server_side):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return client_side.getpeercert() or {}


def _name(certificate: dict[str, Any]) -> str | None:
    """Return a name for which the certificate is valid."""
    names = dict(reversed(certificate.get("subjectAltName", ())))
    common = dict(pair for group in certificate.get("subject", ()) for pair in group).get("commonName")
    name: str | None = names.get("DNS", names.get("IP Address", common))
    return name.replace("*", "any") if name is not None else None


def own_names(model: str) -> dict[str, str]:
    """Return the names in `up` of the settings that target and draft have separately. `model`: one of these two."""
    return {name: f"{model}_{name}" for name in ("revision", "weights", "activations", "kv_memory", "memory_limit")}


def check_services(services: list[Service]) -> None:
    """Check ports, devices, models and tokenizers. Raises ProcessFailedError, which names the flag."""
    try:
        for service in reversed(services):  # the coordinator's port first, which users choose
            for setting in ("port", "health_port", "metrics_port"):
                if (port := service.settings.get(setting)) is not None:
                    check_port(setting, service.settings.get("host", DEFAULT_HOST), port)
        options: dict[str, list[TargetOptions]] = {}
        for service in services:
            if WORKER in service.name:
                role = service.name.partition(WORKER)[0]
                options.setdefault(role, []).append(_check_options(role, service))
        for role in [role for role in MODEL_FLAGS if role in options]:
            check_pair(options["target"][0], options[role][0], {"draft": MODEL_FLAGS[role]}, translates=True)
        workers = [(role, each) for role, of_role in options.items() for each in of_role]
        for one, other in combinations(workers, 2):
            _check_shared_gpu(one, other)
    except (ListenError, InvalidOptionError) as error:
        raise ProcessFailedError(str(error), WRONG_SETTINGS) from None


def _check_options(role: str, worker: Service) -> TargetOptions:
    given = {name: value for name, value in worker.settings.items() if name in TargetOptions.model_fields}
    options = TargetOptions(**{name: value for name, value in given.items() if value is not None})
    devices = f"{role}_devices" if options.tensor_parallel > 1 or role == "standby" else f"{role}_device"
    is_draft = role in MODEL_FLAGS
    devices = "draft_device" if is_draft else devices
    names = {"model": MODEL_FLAGS.get(role, role), "device": devices, **own_names("draft" if is_draft else "target")}
    if is_draft:
        check_options(options, names)
    else:
        check_target(options, names)
    return options


def _check_shared_gpu(*workers: tuple[str, EngineOptions]) -> None:
    """Refuse two workers on one GPU, unless both KV caches have explicit limits.

    By default, a cache takes a share of the memory that is free at startup, so its size depends on the other worker.
    """
    (role, one), (other_role, other) = workers
    shared = _gpus(one) & _gpus(other)
    unbounded = [name for name, options in workers if not options.memory_limits]
    if not shared or not unbounded:
        return
    names = f"{role}s" if role == other_role else f"{role} and {other_role}"
    remedies = {"target": "each a --target-device", "standby": "--standby-devices"}
    reason = f"must be given, since {names} share {', '.join(sorted(shared))} and each needs a KV cache"
    setting = "draft_kv_memory" if unbounded[0] in MODEL_FLAGS else "target_kv_memory"
    raise InvalidOptionError(setting, f"{reason}; or give {remedies.get(other_role, '--draft-device')}")


def _gpus(options: EngineOptions) -> set[str]:
    """Return the GPUs of a worker."""
    return {exact_name(name) for name in options.device.split(",")} - {CPU}
