{{/* Names, labels and addresses. A role is a key of the values (coordinator, draft, target, http), or standby. */}}

{{/* Pods of a LeaderWorkerSet have longer names, with a group and a node number. */}}
{{- define "specpool.fullname" -}}
{{- $maximum := ternary 35 38 (gt (int .Values.target.nodes) 1) -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc $maximum | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | replace "." "-" | trunc $maximum | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "specpool.component" -}}
{{- get (dict "coordinator" "coordinator" "draft" "draft-worker" "target" "target-worker" "standby" "standby" "http" "http") . -}}
{{- end }}

{{/* Name of a role's objects: StatefulSet, headless Service and so on. Takes root and role. */}}
{{- define "specpool.roleName" -}}
{{- printf "%s-%s" (include "specpool.fullname" .root) (include "specpool.component" .role) -}}
{{- end }}

{{/*
Enabled roles, separated by spaces. A standby has the target's values, and prefers another node. Call this before other
templates use the role.
*/}}
{{- define "specpool.roles" -}}
{{- if .Values.target.standby.enabled -}}
{{- $standby := deepCopy .Values.target -}}
{{- if not $standby.affinity -}}
{{- $_ := set $standby "affinity" (include "specpool.besideTarget" . | fromYaml) -}}
{{- end -}}
{{- $_ := set .Values "standby" $standby -}}
{{- end -}}
coordinator {{ if include "specpool.hasDraftWorkers" . }}draft {{ end }}target{{ if .Values.target.standby.enabled }} standby{{ end }}
{{- end }}

{{/* Non-empty if draft workers run in their own pods. Fails if draft.colocated contradicts other values. */}}
{{- define "specpool.hasDraftWorkers" -}}
{{- $draft := .Values.draft -}}
{{- if and $draft.enabled $draft.colocated -}}
{{- if .Values.disaggregatedSet.enabled -}}
{{- fail "draft.colocated: must not be set with disaggregatedSet.enabled, which needs two roles" -}}
{{- else if or (gt (int $draft.replicas) 1) $draft.maxReplicas -}}
{{- fail "draft.replicas: must be 1 with draft.colocated, and draft.maxReplicas must be 0; each target carries one draft" -}}
{{- else if $draft.settings -}}
{{- fail "draft.settings: must be empty with draft.colocated; use target.settings instead, such as draft_kv_memory" -}}
{{- else if eq $draft.modelCache.type "image" -}}
{{- fail "draft.modelCache.type: must not be image with draft.colocated" -}}
{{- end -}}
{{- else if $draft.enabled -}}
true
{{- end -}}
{{- end }}

{{- define "specpool.besideTarget" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "specpool.selector" (dict "root" . "component" "target-worker") | nindent 12 }}
{{- end }}

{{- define "specpool.serviceAccount" -}}
{{- default (ternary (include "specpool.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end }}

{{- define "specpool.instanceLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of an object; `component` is optional. Takes root and component. */}}
{{- define "specpool.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{ include "specpool.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "specpool.selector" -}}
{{ include "specpool.instanceLabels" .root }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "specpool.port" -}}
{{- get (dict "coordinator" 50050 "draft" 50052 "target" 50051 "standby" 50051) . -}}
{{- end }}

{{/* Port on which a process listens. An edge listens on the coordinator's port. Takes root and role. */}}
{{- define "specpool.listeningPort" -}}
{{- if and (eq .role "coordinator") .root.Values.edge.enabled -}}50055{{- else }}{{ include "specpool.port" .role }}{{ end -}}
{{- end }}

{{/* `targetPort` of a role's Services. Before Kubernetes 1.32, names of a sidecar's ports are not found. Takes root and role. */}}
{{- define "specpool.targetPort" -}}
{{- if and (eq .role "coordinator") .root.Values.edge.enabled -}}50050{{- else -}}grpc{{- end -}}
{{- end }}

{{/*
Address of a coordinator's worker: the pod with the same ordinal, which Kubernetes substitutes for $(CELL). Replicas are all
pods of the headless Service. The name includes the namespace because gRPC accepts a wildcard certificate only before several
parts. Takes root and role.
*/}}
{{- define "specpool.workerAddress" -}}
{{- $service := include "specpool.roleName" . -}}
{{- $host := printf "%s.%s.svc" $service .root.Release.Namespace -}}
{{- if include "specpool.replicated" . -}}
{{- $host = printf "dns:///%s" $host -}}
{{- else if not .root.Values.disaggregatedSet.enabled -}}
{{- $host = printf "%s-$(CELL).%s" $service $host -}}
{{- end -}}
{{- printf "%s:%s" $host (include "specpool.port" .role) -}}
{{- end }}

{{/* Image reference. Takes root and image. */}}
{{- define "specpool.image" -}}
{{- $repository := required "smg.image.repository: no public image is known, so name one" .image.repository -}}
{{- with .root.Values.image.registry }}{{ $repository = printf "%s/%s" (trimSuffix "/" .) $repository }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (coalesce .image.tag .defaultTag .root.Values.image.tag .root.Chart.AppVersion) -}}
{{- end -}}
{{- end }}

{{- define "specpool.tlsSecret" -}}
{{- $name := get .root.Values.tls.secrets .role -}}
{{- default (printf "%s-tls" (ternary (printf "%s-client" (include "specpool.fullname" .root)) (include "specpool.roleName" .) (eq .role "client"))) $name -}}
{{- end }}

{{/* Non-empty if clients use TLS. */}}
{{- define "specpool.clientTls" -}}
{{- if and .Values.tls.enabled (ne .Values.tls.clients "none") -}}true{{- end -}}
{{- end }}

{{/* Non-empty if there are several cells, or may be. */}}
{{- define "specpool.scaled" -}}
{{- if or (gt (int .Values.cells) 1) (include "specpool.scalesCells" .) -}}true{{- end -}}
{{- end }}

{{/* Non-empty if the autoscaler adds cells rather than workers. */}}
{{- define "specpool.scalesCells" -}}
{{- if and .Values.autoscaling.kind (not .Values.target.maxReplicas) (not .Values.draft.maxReplicas) -}}true{{- end -}}
{{- end }}

{{- define "specpool.maxCells" -}}
{{- ternary .Values.autoscaling.maxCells .Values.cells (not (not (include "specpool.scalesCells" .))) -}}
{{- end }}

{{/* Non-empty if a coordinator has several workers of this role, or may have. Takes root and role. */}}
{{- define "specpool.replicated" -}}
{{- $role := get .root.Values .role -}}
{{- if or (gt (int $role.replicas) 1) (gt (int $role.maxReplicas) 0) -}}true{{- end -}}
{{- end }}

{{/* Fixed number of pods or groups of a role; empty if an autoscaler sets it. Takes root and role. */}}
{{- define "specpool.replicas" -}}
{{- if include "specpool.replicated" . -}}
{{- $role := get .root.Values .role -}}
{{- if not $role.maxReplicas }}{{ $role.replicas }}{{ end -}}
{{- else if not (include "specpool.scalesCells" .root) -}}
{{- .root.Values.cells -}}
{{- end -}}
{{- end }}

{{- define "specpool.maxReplicas" -}}
{{- $role := get .root.Values .role -}}
{{- ternary (max (int $role.replicas) (int $role.maxReplicas)) (include "specpool.maxCells" .root) (not (not (include "specpool.replicated" .))) -}}
{{- end }}

{{/* Fails if replicas contradict other values. Takes the root. */}}
{{- define "specpool.checkReplicas" -}}
{{- with int .Values.draft.partition -}}
{{- $replicas := include "specpool.replicas" (dict "root" $ "role" "draft") -}}
{{- if or (not (include "specpool.hasDraftWorkers" $)) $.Values.disaggregatedSet.enabled -}}
{{- fail "draft.partition: needs a StatefulSet of draft workers" -}}
{{- else if ne $.Values.updateStrategy.type "RollingUpdate" -}}
{{- fail (printf "draft.partition: needs updateStrategy.type RollingUpdate, not %s" $.Values.updateStrategy.type) -}}
{{- else if and $replicas (ge . (int $replicas)) -}}
{{- fail (printf "draft.partition: must be less than the number of draft workers, %s, or an update would change none" $replicas) -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range $name := list "target" "draft" -}}
{{- $role := get $.Values $name -}}
{{- if include "specpool.replicated" (dict "root" $ "role" $name) -}}
{{- $names = append $names (printf "%s.%s" $name (ternary "maxReplicas" "replicas" (gt (int $role.maxReplicas) 0))) -}}
{{- end -}}
{{- if and $role.maxReplicas (lt (int $role.maxReplicas) (int $role.replicas)) -}}
{{- fail (printf "%s.maxReplicas: must not be less than %s.replicas" $name $name) -}}
{{- end -}}
{{- if and $role.maxReplicas (not $.Values.autoscaling.kind) -}}
{{- fail (printf "%s.maxReplicas: needs autoscaling.kind" $name) -}}
{{- end -}}
{{- end -}}
{{- with $names -}}
{{- if not (or $.Values.draft.enabled (hasPrefix "target" (last .))) -}}
{{- fail (printf "%s: needs draft.enabled" (last .)) -}}
{{- end -}}
{{- if gt (int $.Values.cells) 1 -}}
{{- fail (printf "%s: needs cells: 1, because workers of several cells are not shared; install one release for each coordinator" (first .)) -}}
{{- end -}}
{{- if $.Values.disaggregatedSet.enabled -}}
{{- fail (printf "%s: must not be set with disaggregatedSet.enabled" (first .)) -}}
{{- end -}}
{{- if include "specpool.scalesCells" $ -}}
{{- fail (printf "autoscaling.kind: would add cells, but %s needs a single one; set target.maxReplicas or draft.maxReplicas to add workers" (first .)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.target.standby.enabled (include "specpool.replicated" (dict "root" . "role" "target")) -}}
{{- fail "target.standby.enabled: must not be set with several target.replicas, which take over from each other" -}}
{{- end -}}
{{- end }}

{{/*
Non-empty if a worker is a group of pods, one per node: a LeaderWorkerSet. It has the StatefulSet's name, so its leaders have
the names and addresses of a StatefulSet's pods. Takes root and role.
*/}}
{{- define "specpool.grouped" -}}
{{- if and (eq .role "target") (gt (int .root.Values.target.nodes) 1) -}}true{{- end -}}
{{- end }}

{{/* Labels of the serving pods. Takes root and role. */}}
{{- define "specpool.serving" -}}
{{ include "specpool.selector" (dict "root" .root "component" (include "specpool.component" .role)) }}
{{- if include "specpool.grouped" . }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}
