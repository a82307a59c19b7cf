"""The settings of a process in its pod, with real files in place of mounted secrets."""

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from certificates import TOKEN, Authority
from deployment import image_environment, settings_of
from helm_chart import COMPONENT, Manifest, container_of, of_kind, pod_template

SUBSTITUTED = re.compile(r"\$(?:\$|\((\w+)\))")
"""Kubernetes replaces $(NAME) by a variable and $$ by a dollar."""
SECRET_PATH = re.compile(r"^/(tls|api-tokens|worker-token|token)/")
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def pod_environment(manifests: list[Manifest], component: str, cell: int = 0, node: int = 0) -> dict[str, str]:
    """Return a container's variables in one cell, and on one node if the worker spans several."""
    environment = image_environment("coordinator" if component in ("coordinator", "http", "test") else "worker")
    environment |= _group_variables(manifests, component, cell, node)
    for item in container_of(manifests, component, node)["env"]:
        if item.get("valueFrom", {}).get("fieldRef"):
            assert item["valueFrom"]["fieldRef"] == {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}
            environment[item["name"]] = str(cell)
        elif "value" in item:
            environment[item["name"]] = _substitute(item["value"], environment)
    return {name: _local_path(manifests, component, value) for name, value in environment.items()}


def pod_settings(manifests: list[Manifest], component: str, cell: int = 0, node: int = 0) -> Any:
    """Return the settings of a process in one cell, and on one node if the worker spans several."""
    server = container_of(manifests, component, node)
    [command] = server["command"]
    environment = pod_environment(manifests, component, cell, node)
    arguments = [_substitute(word, environment) for word in server.get("args", [])]
    return settings_of(command, arguments, environment)


def mounted(manifests: list[Manifest], component: str, node: int = 0) -> dict[str, Manifest]:
    """Return the volumes and volume claims of a component's pods by mount path."""
    volumes = {volume["name"]: volume for volume in pod_template(manifests, component, node)["spec"]["volumes"]}
    for item in (of_kind(manifests, "StatefulSet") | of_kind(manifests, "LeaderWorkerSet")).values():
        if item["metadata"]["labels"][COMPONENT] == component:
            spec = item["spec"].get("leaderWorkerTemplate", item["spec"])
            volumes |= {claim["metadata"]["name"]: claim for claim in spec.get("volumeClaimTemplates", [])}
    mounts = container_of(manifests, component, node)["volumeMounts"]
    return {item["mountPath"]: volumes[item["name"]] for item in mounts}


def _substitute(value: str, environment: dict[str, str]) -> str:
    return SUBSTITUTED.sub(lambda match: environment[match[1]] if match[1] else "$", value)


def _group_variables(manifests: list[Manifest], component: str, cell: int, node: int) -> dict[str, str]:
    """Return the variables that LeaderWorkerSet adds to a container."""
    for name, item in of_kind(manifests, "LeaderWorkerSet").items():
        if item["metadata"]["labels"][COMPONENT] == component:
            size = item["spec"]["leaderWorkerTemplate"]["size"]
            leader = f"{name}-{cell}.{name}.default"
            return {"LWS_LEADER_ADDRESS": leader, "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(node)}
    return {}


def _local_path(manifests: list[Manifest], component: str, value: str) -> str:
    """Map a path inside a mounted secret to a file with matching content on this machine."""
    match = SECRET_PATH.match(value)
    if match is None:
        return value
    secret = mounted(manifests, component)[f"/{match[1]}"]["secret"]
    assert secret["defaultMode"] == 0o440  # the process reads keys through the pod's group
    names = {item["key"]: item["path"] for item in secret.get("items", [])}
    file = value.rpartition("/")[2]
    assert not names or file in names.values()
    return str((certificates(secret["secretName"]) if match[1] == "tls" else tokens()) / file)


@cache
def certificates(secret: str) -> Path:
    """Return a folder with the files of a secret made by cert-manager."""
    folder = _folder()
    authority = Authority(folder)
    issued = authority.issue("server", alternative=[f"DNS:{secret.removesuffix('-tls')}"])
    for file, name in ((issued.cert, "tls.crt"), (issued.key, "tls.key"), (authority.path, "ca.crt")):
        file.rename(folder / name)
    return folder


@cache
def tokens() -> Path:
    """Return a folder with a bare token, a file of client names and tokens, and the secret of ranks."""
    folder = _folder()
    (folder / "secret").write_text(TOKEN)
    (folder / "token").write_text(TOKEN)
    (folder / "tokens").write_text(f"somebody {TOKEN}\n")
    return folder


def _folder() -> Path:
    _FOLDERS.append(tempfile.TemporaryDirectory())
    return Path(_FOLDERS[-1].name)
