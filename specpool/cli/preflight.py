"""Checks of `specpool up` and `specpool demo` before any process starts, and before torch is imported."""

from specpool.cli.processes import WRONG_SETTINGS, ProcessFailedError, Service
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.preflight import InvalidOptionError, check_options, check_same_tokenizer
from specpool.rpc.config.settings import ListeningSettings
from specpool.rpc.ports import ListenError, check_port

WORKER = " worker"
DEFAULT_HOST = ListeningSettings.model_fields["host"].default


def check_services(services: list[Service]) -> None:
    """Check ports, devices, models and tokenizers. Raises ProcessFailedError, which names the flag."""
    try:
        for service in reversed(services):  # the coordinator's port first, which users choose
            for setting in ("port", "metrics_port"):
                if (port := service.settings.get(setting)) is not None:
                    check_port(setting, service.settings.get("host", DEFAULT_HOST), port)
        workers = {service.name.removesuffix(WORKER): service for service in services if WORKER in service.name}
        options = {role: _check_options(role, worker) for role, worker in workers.items()}
        if "draft" in options:
            check_same_tokenizer(options["target"], options["draft"])
    except (ListenError, InvalidOptionError) as error:
        raise ProcessFailedError(str(error), WRONG_SETTINGS) from None


def _check_options(role: str, worker: Service) -> EngineOptions:
    given = {name: value for name, value in worker.settings.items() if name in EngineOptions.model_fields}
    options = EngineOptions(**{name: value for name, value in given.items() if value is not None})
    devices = "target_devices" if options.tensor_parallel > 1 else f"{role}_device"
    check_options(options, {"model": role, "device": devices})
    return options
