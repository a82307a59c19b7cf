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


def pod_environment(manifests: list[Manifest], component: str, cell: int = 0) -> dict[str, str]:
    """The variables of a component's container in one of the cells."""
    server = container_of(manifests, component)
    environment = image_environment("coordinator" if component in ("coordinator", "test") else "worker")
    for item in server["env"]:
        if item.get("valueFrom", {}).get("fieldRef"):
            assert item["valueFrom"]["fieldRef"] == {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}
            environment[item["name"]] = str(cell)
        elif "value" in item:
            environment[item["name"]] = EXPANDED.sub(
                lambda found: environment[found[1]] if found[1] else "$", item["value"]
            )
    return {name: _on_this_machine(manifests, component, value) for name, value in environment.items()}


def pod_settings(manifests: list[Manifest], component: str, cell: int = 0) -> Any:
    """The settings of a component's process in one of the cells."""
    server = container_of(manifests, component)
    [command] = server["command"]
    return settings_of(command, server.get("args", []), pod_environment(manifests, component, cell))


def mounted(manifests: list[Manifest], component: str) -> dict[str, Manifest]:
    """The volumes of a component's pods by the folders where its process finds them."""
    volumes = {volume["name"]: volume for volume in pod_template(manifests, component)["spec"]["volumes"]}
    claims: dict[str, Manifest] = {}
    for item in of_kind(manifests, "StatefulSet").values():
        if item["metadata"]["labels"]["app.kubernetes.io/component"] == component:
            claims = {claim["metadata"]["name"]: claim for claim in item["spec"].get("volumeClaimTemplates", [])}
    mounts = container_of(manifests, component)["volumeMounts"]
    return {item["mountPath"]: {**volumes, **claims}[item["name"]] for item in mounts}


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
