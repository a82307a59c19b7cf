"""Egress policies of the Helm chart, and the routes from outside of the cluster in deploy/gateway."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import DEPLOY, ROOT
from helm_chart import Manifest, of_kind, pod_templates, render
from kubernetes_schemas import SUPPORTED, problems
from pod_settings import pod_settings

ROUTES = [DEPLOY / f"gateway/{name}.yaml" for name in ("ingress", "routes")]


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Return whether a selector of a NetworkPolicy matches labels."""
    named = selector.get("matchLabels", {}).items() <= labels.items()
    return named and all(labels[rule["key"]] in rule["values"] for rule in selector.get("matchExpressions", []))


def egress_of(component: str) -> list[Any]:
    """Return the egress rules that apply to a pod of `production`."""
    labels = dict(pod_templates(render("production")))[component]["metadata"]["labels"]
    policies = [item["spec"] for item in of_kind(render("production"), "NetworkPolicy").values()]
    guards = [spec for spec in policies if "Egress" in spec["policyTypes"] and selects(spec["podSelector"], labels)]
    assert guards, f"{component} may call everyone"
    return [rule for spec in guards for rule in spec["egress"]]


def test_only_workers_reach_the_internet() -> None:
    components = dict(pod_templates(render("production")))
    assert {"coordinator", "draft-worker", "target-worker", "standby", "http", "test"} == components.keys()
    for component in components:
        rules = egress_of(component)
        assert any(rule.get("ports", [{}])[0].get("port") == 53 for rule in rules)
        blocks = [peer["ipBlock"]["cidr"] for rule in rules for peer in rule.get("to", []) if "ipBlock" in peer]
        assert bool(blocks) == (component in ("draft-worker", "target-worker", "standby"))
        unrestricted = [rule for rule in rules if not rule.get("to") and not rule.get("ports")]
        assert unrestricted == []


def test_egress_admits_every_pod_of_the_release_and_the_collector() -> None:
    own, _, traces, *_ = egress_of("coordinator")
    for _, pod in pod_templates(render("production")):
        assert any(selects(peer["podSelector"], pod["metadata"]["labels"]) for peer in own["to"])
    endpoint = pod_settings(render("production"), "coordinator").otlp_traces_endpoint
    assert endpoint.endswith(f":{traces['ports'][0]['port']}")


# --- Routes


@pytest.mark.parametrize("path", ROUTES, ids=lambda path: path.stem)
def test_routes_are_valid_and_lead_to_services_of_the_release(path: Path) -> None:
    routes = list(yaml.safe_load_all(path.read_text()))
    assert problems(routes, SUPPORTED[0]) == problems(routes, SUPPORTED[-1]) == []
    services = of_kind(render("openai"), "Service")
    backends = [backend for route in routes for backend in backends_of(route)]
    assert backends
    for name, port in backends:
        assert port in {value for each in services[name]["spec"]["ports"] for value in (each["port"], each["name"])}


def backends_of(route: Manifest) -> list[tuple[str, object]]:
    """Return the name and port of every Service that a route names."""
    rules = route["spec"].get("rules", [])
    if route["kind"] == "Ingress":
        services = [path["backend"]["service"] for rule in rules for path in rule["http"]["paths"]]
        return [(service["name"], service["port"]["name"]) for service in services]
    return [(backend["name"], backend["port"]) for rule in rules for backend in rule["backendRefs"]]


def test_gateways_verify_names_in_the_certificates() -> None:
    policies = of_kind(list(yaml.safe_load_all(ROUTES[1].read_text())), "BackendTLSPolicy")
    certificates = of_kind(render("openai"), "Certificate")
    for name, certificate in (("specpool", "specpool-coordinator"), ("specpool-http", "specpool-http")):
        [target], validation = (policies[name]["spec"][key] for key in ("targetRefs", "validation"))
        assert target["name"] == name
        assert validation["hostname"] in certificates[certificate]["spec"]["dnsNames"]


def test_routes_name_the_service_of_the_proto() -> None:
    [route] = of_kind(list(yaml.safe_load_all(ROUTES[1].read_text())), "GRPCRoute").values()
    package, service = route["spec"]["rules"][0]["matches"][0]["method"]["service"].rsplit(".", 1)
    proto = (ROOT / "protos/specpool/v1/generation.proto").read_text()
    assert f"package {package};" in proto
    assert f"service {service} {{" in proto
