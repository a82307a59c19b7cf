{{/* Names, labels and addresses. A role is a path in the values (coordinator, draft, draft.canary, target, http), or standby. */}}

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
{{- get (dict "coordinator" "coordinator" "draft" "draft-worker" "draft.canary" "draft-canary" "target" "target-worker" "standby" "standby" "http" "http") . -}}
{{- end }}

{{/* Name of a role's command, without "specpool-". */}}
{{- define "specpool.program" -}}
{{- default (include "specpool.component" .) (get (dict "standby" "target-worker" "draft.canary" "draft-worker") .) -}}
{{- end }}

{{/* Name of a role's objects: StatefulSet, headless Service and so on. Takes root and role. */}}
{{- define "specpool.roleName" -}}
{{- printf "%s-%s" (include "specpool.fullname" .root) (include "specpool.component" .role) -}}
{{- end }}

{{/*
Enabled roles, separated by spaces. A standby has the target's values, and prefers another node. A canary has the draft's
values, except for its own. Call this before other templates use the role.
*/}}
{{- define "specpool.roles" -}}
{{- if .Values.target.standby.enabled -}}
{{- $standby := deepCopy .Values.target -}}
{{- if not $standby.affinity -}}
{{- $_ := set $standby "affinity" (include "specpool.besideTarget" . | fromYaml) -}}
{{- end -}}
{{- $_ := set .Values "standby" $standby -}}
{{- end -}}
{{- $hasCanary := include "specpool.hasCanary" . -}}
{{- if $hasCanary -}}
{{- $_ := set .Values "draft.canary" (mergeOverwrite (deepCopy .Values.draft) (deepCopy .Values.draft.canary) (dict "maxReplicas" 0)) -}}
{{- end -}}
coordinator {{ if include "specpool.hasDraftWorkers" . }}draft {{ end }}{{ if $hasCanary }}draft.canary {{ end }}target{{ if .Values.target.standby.enabled }} standby{{ end }}
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

{{/* Non-empty if a canary of the draft may run. Fails if draft.canary contradicts other values. */}}
{{- define "specpool.hasCanary" -}}
{{- $canary := .Values.draft.canary -}}
{{- if not $canary.enabled -}}
{{- if not (kindIs "invalid" $canary.share) }}{{ fail "draft.canary.share: needs draft.canary.enabled" }}{{ end -}}
{{- else if not (include "specpool.hasDraftWorkers" .) -}}
{{- fail "draft.canary.enabled: needs draft workers (draft.enabled without draft.colocated)" -}}
{{- else if .Values.disaggregatedSet.enabled -}}
{{- fail "draft.canary.enabled: must not be set with disaggregatedSet.enabled" -}}
{{- else if and (eq .Values.draft.modelCache.type "image") (not $canary.modelCache) -}}
{{- fail "draft.canary.modelCache: required, because the image of draft.modelCache has the other model" -}}
{{- else if and (gt (int $canary.replicas) 1) (include "specpool.scaled" .) -}}
{{- fail "draft.canary.replicas: must be 0 or 1 with several cells, because each cell has its own canary" -}}
{{- else -}}
{{- $_ := required "draft.canary.model: required with draft.canary.enabled" $canary.model -}}
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
{{- get (dict "coordinator" 50050 "draft" 50052 "draft.canary" 50052 "target" 50051 "standby" 50051) . -}}
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
pods of the headless Service. A canary's pod may not exist, so the coordinator follows its name. The name includes the namespace because gRPC accepts a wildcard certificate only before several
parts. Takes root and role.
*/}}
{{- define "specpool.workerAddress" -}}
{{- $service := include "specpool.roleName" . -}}
{{- $host := printf "%s.%s.svc" $service .root.Release.Namespace -}}
{{- $replicated := include "specpool.replicated" . -}}
{{- if not (or $replicated .root.Values.disaggregatedSet.enabled) -}}
{{- $host = printf "%s-$(CELL).%s" $service $host -}}
{{- end -}}
{{- if or $replicated (eq .role "draft.canary") }}dns:///{{ end -}}
{{- printf "%s:%s" $host (include "specpool.port" .role) -}}
{{- end }}

{{/* Addresses of the drafts; with a canary, by name. Takes the root. */}}
{{- define "specpool.draftAddress" -}}
{{- $draft := include "specpool.workerAddress" (dict "root" . "role" "draft") -}}
{{- if include "specpool.hasCanary" . -}}
current={{ $draft }},canary={{ include "specpool.workerAddress" (dict "root" . "role" "draft.canary") }}
{{- else -}}
{{- $draft -}}
{{- end -}}
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
{{- $name := get .root.Values.tls.secrets (last (splitList "." .role)) -}}
{{- default (printf "%s-tls" (ternary (printf "%s-client" (include "specpool.fullname" .root)) (include "specpool.roleName" .) (eq .role "client"))) $name -}}
{{- end }}

{{/* Non-empty if clients use TLS. */}}
{{- define "specpool.clientTls" -}}
{{- if and .Values.tls.enabled (ne .Values.tls.clients "none") -}}true{{- end -}}
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
