"""Shapes of the kinds that come from other projects' APIs: the fields that the chart uses, and no others.

Kubernetes' own kinds have complete schemas in the package kubernetes-validate; for these there is none, so the fields
are taken from the documentation of prometheus-operator, KEDA 2, cert-manager 1 and LeaderWorkerSet 0.9, and from
the Go types of the last one.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"type": "array", "items": TEXT, "minItems": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
STRINGS: Schema = {"type": "object", "additionalProperties": TEXT}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+(h|m|s|ms))+$"}


def record(required: Schema, optional: Schema | None = None) -> Schema:
    """An object with these fields alone."""
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def many(items: Schema) -> Schema:
    """A list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1}


def custom(api: str, kind: str, spec: Schema) -> Schema:
    """A manifest of another project's API."""
    metadata = record({"name": TEXT, "labels": STRINGS})
    return record({"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": metadata, "spec": spec})


EXPRESSION = record({"key": TEXT, "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]}}, {"values": TEXTS})
SELECTOR = record({}, {"matchLabels": STRINGS, "matchExpressions": many(EXPRESSION)})
RELABELING = record({"targetLabel": TEXT, "replacement": TEXT})
ENDPOINT = record({"port": TEXT}, {"interval": DURATION, "relabelings": many(RELABELING)})
RULE = record({"expr": {}}, {"alert": TEXT, "record": TEXT, "for": TEXT, "keep_firing_for": TEXT, "labels": STRINGS,
                             "annotations": STRINGS})  # fmt: skip
MONITORING = "monitoring.coreos.com/v1"
QUERY = record({"serverAddress": TEXT, "query": TEXT, "threshold": {"type": "string", "pattern": r"^\d+(\.\d+)?$"}})
FOLLOWED = record({"podSelector": TEXT, "value": {"type": "string", "pattern": r"^\d+(\.\d+)?$"}})
PERCENT: Schema = {"anyOf": [COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
ROLLOUT = record({"type": {"const": "RollingUpdate"}, "rollingUpdateConfiguration": record(
    {"maxSurge": PERCENT, "maxUnavailable": PERCENT}, {"partition": COUNT})})  # fmt: skip
CLAIM = record(
    {
        "metadata": record({"name": TEXT}),
        "spec": record(
            {"accessModes": TEXTS, "resources": record({"requests": record({"storage": TEXT})})},
            {"storageClassName": TEXT},
        ),
    }
)
RETENTION: Schema = {"enum": ["Retain", "Delete"]}
GROUP = record({"size": {"const": 1}, "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart"]},
                "workerTemplate": {"type": "object"}})  # fmt: skip

CUSTOM: dict[str, Schema] = {
    "PodMonitor": custom(
        MONITORING, "PodMonitor",
        record({"selector": SELECTOR, "podMetricsEndpoints": many(ENDPOINT)}, {"podTargetLabels": TEXTS}),
    ),
    "ServiceMonitor": custom(
        MONITORING, "ServiceMonitor",
        record({"selector": SELECTOR, "endpoints": many(ENDPOINT)}, {"podTargetLabels": TEXTS}),
    ),
    "PrometheusRule": custom(
        MONITORING, "PrometheusRule",
        record({"groups": many(record({"name": TEXT, "rules": many(RULE)}, {"interval": DURATION}))}),
    ),
    "ScaledObject": custom("keda.sh/v1alpha1", "ScaledObject", record({
        "scaleTargetRef": record({"name": TEXT}, {"apiVersion": TEXT, "kind": TEXT}),
        "minReplicaCount": COUNT,
        "maxReplicaCount": COUNT,
        "pollingInterval": COUNT,
        "advanced": record({"horizontalPodAutoscalerConfig": record({"behavior": record({
            "scaleDown": record({"stabilizationWindowSeconds": COUNT}),
        })})}),
        "triggers": many({"oneOf": [
            record({"type": {"const": "prometheus"}, "metadata": QUERY}, {"authenticationRef": record({"name": TEXT})}),
            record({"type": {"const": "kubernetes-workload"}, "metadata": FOLLOWED}),
        ]}),
    })),
    "Certificate": custom("cert-manager.io/v1", "Certificate", record({
        "secretName": TEXT,
        "dnsNames": TEXTS,
        "usages": many({"enum": ["digital signature", "key encipherment", "server auth", "client auth"]}),
        "privateKey": record({"algorithm": {"enum": ["RSA", "ECDSA", "Ed25519"]}, "size": COUNT,
                              "rotationPolicy": {"enum": ["Always", "Never"]}}),
        "duration": DURATION,
        "renewBefore": DURATION,
        "issuerRef": record({"name": TEXT}, {"kind": {"enum": ["Issuer", "ClusterIssuer"]}, "group": TEXT}),
    })),
    "LeaderWorkerSet": custom("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", record({
        "leaderWorkerTemplate": record({
            "size": {"type": "integer", "minimum": 2},
            "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]},
            "leaderTemplate": {"type": "object"},
            "workerTemplate": {"type": "object"},
        }, {
            "volumeClaimTemplates": many(CLAIM),
            "persistentVolumeClaimRetentionPolicy": record({"whenDeleted": RETENTION, "whenScaled": RETENTION}),
        }),
        "rolloutStrategy": ROLLOUT,
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "networkConfig": record({"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}),
    }, {"replicas": COUNT})),
    "DisaggregatedSet": custom("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet", record({
        "roles": {"minItems": 2, "maxItems": 10} | many(record({
            "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
            "spec": record({"replicas": COUNT, "rolloutStrategy": ROLLOUT, "leaderWorkerTemplate": GROUP}),
        })),
    })),
}  # fmt: skip
