{{/* Names, labels and addresses. A role is a key of the values: coordinator, draft or target, or standby. */}}

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
{{- get (dict "coordinator" "coordinator" "draft" "draft-worker" "target" "target-worker" "standby" "standby") . -}}
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
coordinator {{ if .Values.draft.enabled }}draft {{ end }}target{{ if .Values.target.standby.enabled }} standby{{ end }}
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

{{/*
Address of a coordinator's worker: the pod with the same ordinal, which Kubernetes substitutes for $(CELL). The name includes
the namespace because gRPC accepts a wildcard certificate only before several parts. Takes root and role.
*/}}
{{- define "specpool.workerAddress" -}}
{{- $service := include "specpool.roleName" . -}}
{{- $host := printf "%s.%s.svc" $service .root.Release.Namespace -}}
{{- if not .root.Values.disaggregatedSet.enabled -}}
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

{{- define "specpool.scaled" -}}
{{- if or (gt (int .Values.cells) 1) .Values.autoscaling.kind -}}true{{- end -}}
{{- end }}

{{- define "specpool.maxCells" -}}
{{- ternary .Values.autoscaling.maxCells .Values.cells (not (not .Values.autoscaling.kind)) -}}
{{- end }}

{{/*
Non-empty if a worker is a group of pods, one per node: a LeaderWorkerSet. It has the StatefulSet's name, so its leaders have
the names and addresses of a StatefulSet's pods. Takes root and role.
*/}}
{{- define "specpool.grouped" -}}
{{- if and (eq .role "target") (gt (int .root.Values.target.nodes) 1) -}}true{{- end -}}
{{- end }}

{{/* Secret that the ranks of a group share; empty for other pods. Takes root and role. */}}
{{- define "specpool.masterSecret" -}}
{{- if include "specpool.grouped" . }}{{ .root.Values.auth.masterSecret.existingSecret }}{{ end -}}
{{- end }}

{{/* Labels of the serving pods. Takes root and role. */}}
{{- define "specpool.serving" -}}
{{ include "specpool.selector" (dict "root" .root "component" (include "specpool.component" .role)) }}
{{- if include "specpool.grouped" . }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}
