"""Recording of answers in the Helm chart: a bounded volume for the coordinators."""

import re
from pathlib import Path

from helm_chart import COMPONENT, DEFAULTS, container_of, of_kind, pod_templates, render, template
from pod_settings import mounted, pod_settings


def test_coordinators_record_into_a_bounded_volume() -> None:
    manifests = template("--set-json", 'record={"enabled": true, "share": 0.5, "sizeGiB": 3}')
    settings = pod_settings(manifests, "coordinator")
    assert (settings.record, settings.record_share) == (Path("/record/answers"), 0.5)
    assert settings.record_max_bytes == 3 * 2**30
    # Kubernetes evicts a pod that exceeds the limit, so recordings must stay below it.
    assert mounted(manifests, "coordinator")["/record"]["emptyDir"] == {"sizeLimit": "4Gi"}
    assert container_of(manifests, "coordinator")["securityContext"]["readOnlyRootFilesystem"]
    others = {name for name, pod in pod_templates(manifests) if "/record" in str(pod)}
    assert others == {"coordinator"}


def test_all_coordinators_may_share_a_claim() -> None:
    manifests = template("--set", "record.enabled=true,record.existingClaim=answers,cells=2")
    assert mounted(manifests, "coordinator")["/record"]["persistentVolumeClaim"] == {"claimName": "answers"}


def test_nothing_is_recorded_by_default() -> None:
    [coordinator] = [item for item in of_kind(render(DEFAULTS), "StatefulSet").values()
                     if item["metadata"]["labels"][COMPONENT] == "coordinator"]  # fmt: skip
    assert not re.search("record", str(coordinator), re.IGNORECASE)
