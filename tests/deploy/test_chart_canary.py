"""The draft canary in the Helm chart: a second draft with its own workers and Service."""

from typing import Any

import pytest
from helm_chart import COMPONENT, DEFAULTS, Manifest, container_of, of_kind, pod_template, render, template, values_of
from pod_settings import mounted, pod_environment, pod_settings

CANARY, DRAFT = "draft-canary", "draft-worker"
VALUES = "draft.canary.enabled=true,draft.canary.model=org/new"


def with_canary(values: str = "", *arguments: str) -> list[Manifest]:
    return template(*arguments, "--set", f"{VALUES},{values}")


def test_a_canary_inherits_the_settings_of_the_draft() -> None:
    given = "draft.priorityClassName=low,draft.settings.max_sequences=8,draft.settings.log_level=debug,draft.gpus=1"
    own = "draft.canary.settings.max_sequences=4,draft.canary.gpus=0,draft.canary.device=cpu"
    manifests = with_canary(f"{given},{own},draft.canary.resources.limits.memory=1Gi")
    draft, canary = (pod_settings(manifests, each) for each in (DRAFT, CANARY))
    different = {name: value for name, value in canary.model_dump().items() if value != getattr(draft, name)}
    assert different == {"model": "org/new", "revision": None, "device": "cpu", "max_sequences": 4}
    assert container_of(manifests, CANARY)["command"] == ["specpool-draft-worker"]
    assert container_of(manifests, CANARY)["resources"]["limits"] == {"memory": "1Gi"}
    assert pod_template(manifests, CANARY)["spec"]["priorityClassName"] == "low"


def test_coordinators_know_both_drafts_by_name() -> None:
    environment = pod_environment(with_canary("draft.canary.replicas=3"), "coordinator")
    assert environment["SPECPOOL_DRAFT_ADDRESS"].split(",") == [
        "current=specpool-draft-worker-0.specpool-draft-worker.default.svc:50052",
        "canary=dns:///specpool-draft-canary.default.svc:50052",
    ]
    assert pod_settings(with_canary(), "coordinator").draft_shares == {}  # the coordinator chooses
    assert pod_settings(render("draft-canary"), "coordinator").draft_shares == {"canary": 0.1}


def test_every_cell_has_its_own_canary() -> None:
    manifests = with_canary("cells=3")
    assert of_kind(manifests, "StatefulSet")["specpool-draft-canary"]["spec"]["replicas"] == 3
    addresses = pod_environment(manifests, "coordinator", cell=2)["SPECPOOL_DRAFT_ADDRESS"]
    assert addresses.endswith(",canary=dns:///specpool-draft-canary-2.specpool-draft-canary.default.svc:50052")


@pytest.mark.parametrize("cells", [1, 3])
def test_rollout_and_withdrawal_restart_no_other_pod(cells: int) -> None:
    """Starting, replacing or removing canary workers changes only their own pods."""
    states = [
        with_canary(f"cells={cells},{changes}")
        for changes in ("draft.canary.replicas=0", "draft.canary.replicas=1", "draft.canary.model=org/newer")
    ]
    replicas = [of_kind(state, "StatefulSet")["specpool-draft-canary"]["spec"]["replicas"] for state in states]
    assert replicas == [0, cells, cells]
    for component in ("coordinator", DRAFT, "target-worker"):
        assert (
            pod_template(states[0], component)
            == pod_template(states[1], component)
            == pod_template(states[2], component)
        )
    # The coordinator follows the DNS records of the Service.
    service = of_kind(states[0], "Service")["specpool-draft-canary"]["spec"]
    assert service["selector"][COMPONENT] == CANARY
    assert service.get("publishNotReadyAddresses", False) == (cells > 1)


def test_promotion_restarts_only_drafts() -> None:
    before = with_canary()
    promoted = with_canary("draft.model=org/new,draft.revision=,draft.canary.replicas=0")
    changed = [
        name
        for name in ("coordinator", DRAFT, "target-worker")
        if pod_template(before, name) != pod_template(promoted, name)
    ]
    assert changed == [DRAFT]
    assert pod_settings(promoted, DRAFT).model == pod_settings(before, CANARY).model


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_canaries_follow_scaled_cells_until_withdrawn(kind: str) -> None:
    kinds = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
    scaling = f"autoscaling.kind={kind},metrics.enabled=true"
    assert "specpool-draft-canary" in of_kind(with_canary(scaling), kinds[kind])
    withdrawn = with_canary(f"{scaling},draft.canary.replicas=0")
    assert "specpool-draft-canary" not in of_kind(withdrawn, kinds[kind])
    assert of_kind(withdrawn, "StatefulSet")["specpool-draft-canary"]["spec"]["replicas"] == 0


def test_a_canary_is_secured_and_monitored_like_a_draft() -> None:
    manifests = with_canary("tests.tokenSecret=x", *values_of("production"))
    assert mounted(manifests, CANARY)["/tls"]["secret"]["secretName"] == "specpool-draft-canary-tls"
    certificate = of_kind(manifests, "Certificate")["specpool-draft-canary"]["spec"]
    assert certificate["secretName"] == "specpool-draft-canary-tls"
    assert "*.specpool-draft-canary.default.svc" in certificate["dnsNames"]
    own = mounted(with_canary("tls.enabled=true,tls.secrets.canary=mine"), CANARY)
    assert own["/tls"]["secret"]["secretName"] == "mine"
    policies = of_kind(manifests, "NetworkPolicy")
    for name in ("specpool-workers", "specpool-workers-egress"):
        assert CANARY in selected(policies[name]["spec"]["podSelector"])
    assert CANARY in selected(of_kind(manifests, "PodMonitor")["specpool"]["spec"]["selector"])
    assert CANARY not in selected(of_kind(render("production"), "PodMonitor")["specpool"]["spec"]["selector"])
    assert "specpool-draft-canary" in of_kind(manifests, "PodDisruptionBudget")


@pytest.mark.parametrize(("replicas", "budgets"), [(1, set()), (2, {"specpool-draft-canary"})])
def test_only_several_canaries_have_a_budget(replicas: int, budgets: set[str]) -> None:
    manifests = with_canary(f"draft.canary.replicas={replicas}")
    assert of_kind(manifests, "PodDisruptionBudget").keys() == budgets


def selected(selector: dict[str, Any]) -> list[str]:
    """Return the components that a selector lists."""
    [expression] = selector["matchExpressions"]
    assert expression["key"] == COMPONENT
    return list(expression["values"])


def test_without_a_canary_nothing_changes() -> None:
    assert not [item for item in render(DEFAULTS) if "canary" in str(item)]
