"""Checks of `specpool up` and `specpool demo` before any process starts, and before torch is imported."""

from itertools import combinations

from specpool.cli.processes import WRONG_SETTINGS, ProcessFailedError, Service
from specpool.engine.config.device_names import may_be_gpu
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
        options: dict[str, list[EngineOptions]] = {}
        for service in services:
            if WORKER in service.name:
                role = service.name.partition(WORKER)[0]
                options.setdefault(role, []).append(_check_options(role, service))
        if "draft" in options:
            check_same_tokenizer(options["target"][0], options["draft"][0])
        for target, other in combinations(options["target"], 2):
            _check_shared_gpu(target, other, "targets", "give each a target_device")
        for standby in options.get("standby", []):
            _check_shared_gpu(options["target"][0], standby, "target and standby", "give standby_devices")
    except (ListenError, InvalidOptionError) as error:
        raise ProcessFailedError(str(error), WRONG_SETTINGS) from None


def _check_options(role: str, worker: Service) -> EngineOptions:
    given = {name: value for name, value in worker.settings.items() if name in EngineOptions.model_fields}
    options = EngineOptions(**{name: value for name, value in given.items() if value is not None})
    devices = f"{role}_devices" if options.tensor_parallel > 1 or role == "standby" else f"{role}_device"
    check_options(options, {"model": role, "device": devices})
    return options


def _check_shared_gpu(target: EngineOptions, other: EngineOptions, names: str, remedy: str) -> None:
    """Refuse a shared GPU without a cache size: the first worker to start would leave too little for the other."""
    shared = set(target.device.split(",")) & set(other.device.split(","))
    if not target.memory_limits and any(map(may_be_gpu, shared)):
        reason = f"must be given, since {names} share {', '.join(sorted(shared))} and each needs a KV cache"
        raise InvalidOptionError("target_kv_memory", f"{reason}; or {remedy}")
