"""The settings that a process has in its pod, with files in place of the secrets that the pod would mount."""

import atexit
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from certificates import TOKEN, Authority
from deployment import image_environment, settings_of
from helm_chart import Manifest, container_of, of_kind, pod_template

EXPANDED = re.compile(r"\$(?:\$|\((\w+)\))")
"""What Kubernetes replaces in a value: $(NAME), and $$ by a dollar."""
MOUNTED = re.compile(r"^/(tls|api-tokens|worker-token|token)/")


def pod_environment(manifests: list[Manifest], component: str, cell: int = 0, node: int = 0) -> dict[str, str]:
    """The variables of a component's container in one of the cells; on one of its nodes, if it has several."""
    server = container_of(manifests, component, node)
    environment = image_environment("coordinator" if component in ("coordinator", "test") else "worker")
    environment |= _group_environment(manifests, component, cell, node)
    for item in server["env"]:
        if item.get("valueFrom", {}).get("fieldRef"):
            assert item["valueFrom"]["fieldRef"] == {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}
            environment[item["name"]] = str(cell)
        elif "value" in item:
            environment[item["name"]] = _expanded(item["value"], environment)
    return {name: _on_this_machine(manifests, component, value) for name, value in environment.items()}


def pod_settings(manifests: list[Manifest], component: str, cell: int = 0, node: int = 0) -> Any:
    """The settings of a component's process in one of the cells; on one of its nodes, if it has several."""
    server = container_of(manifests, component, node)
    [command] = server["command"]
    environment = pod_environment(manifests, component, cell, node)
    arguments = [_expanded(word, environment) for word in server.get("args", [])]
    return settings_of(command, arguments, environment)


def mounted(manifests: list[Manifest], component: str, node: int = 0) -> dict[str, Manifest]:
    """The volumes of a component's pods by the folders where its process finds them."""
    volumes = {volume["name"]: volume for volume in pod_template(manifests, component, node)["spec"]["volumes"]}
    claims: dict[str, Manifest] = {}
    for item in (of_kind(manifests, "StatefulSet") | of_kind(manifests, "LeaderWorkerSet")).values():
        if item["metadata"]["labels"]["app.kubernetes.io/component"] == component:
            spec = item["spec"].get("leaderWorkerTemplate", item["spec"])
            claims = {claim["metadata"]["name"]: claim for claim in spec.get("volumeClaimTemplates", [])}
    mounts = container_of(manifests, component, node)["volumeMounts"]
    return {item["mountPath"]: {**volumes, **claims}[item["name"]] for item in mounts}


def _expanded(value: str, environment: dict[str, str]) -> str:
    return EXPANDED.sub(lambda found: environment[found[1]] if found[1] else "$", value)


def _group_environment(manifests: list[Manifest], component: str, cell: int, node: int) -> dict[str, str]:
    """What LeaderWorkerSet puts before a container's own variables."""
    for name, item in of_kind(manifests, "LeaderWorkerSet").items():
        if item["metadata"]["labels"]["app.kubernetes.io/component"] == component:
            size = item["spec"]["leaderWorkerTemplate"]["size"]
            leader = f"{name}-{cell}.{name}.default"
            return {"LWS_LEADER_ADDRESS": leader, "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(node)}
    return {}


def _on_this_machine(manifests: list[Manifest], component: str, value: str) -> str:
    """A path below a mounted secret becomes one of files that such a secret would hold."""
    found = MOUNTED.match(value)
    if found is None:
        return value
    secret = mounted(manifests, component)[f"/{found[1]}"]["secret"]
    assert secret["defaultMode"] == 0o440  # the pod's group may read the keys
    folder = certificates(secret["secretName"]) if found[1] == "tls" else tokens()
    names = {item["key"]: item["path"] for item in secret.get("items", [])}
    file = value.rpartition("/")[2]
    assert not names or file in names.values()
    return str(folder / file)


@cache
def certificates(secret: str) -> Path:
    """A folder with the files of a secret that cert-manager made."""
    folder = _folder()
    authority = Authority(folder)
    issued = authority.issue("server", alternative=[f"DNS:{secret.removesuffix('-tls')}"])
    for file, name in ((issued.cert, "tls.crt"), (issued.key, "tls.key"), (authority.path, "ca.crt")):
        file.rename(folder / name)
    return folder


@cache
def tokens() -> Path:
    """A folder with a token alone, and with a file of names and tokens."""
    folder = _folder()
    (folder / "token").write_text(TOKEN)
    (folder / "tokens").write_text(f"somebody {TOKEN}\n")
    return folder


def _folder() -> Path:
    made = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, made)
    return made
