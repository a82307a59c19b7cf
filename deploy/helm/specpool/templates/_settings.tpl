{{/* Settings of a role's process as SPECPOOL_* variables. A process does not start with an unknown one. */}}

{{/* Ranks that share a worker's model, over all nodes. Takes root and role. */}}
{{- define "specpool.tensorParallel" -}}
{{- $role := get .root.Values .role -}}
{{- $gpus := int $role.gpus -}}
{{- $nodes := int (default 1 $role.nodes) -}}
{{- $ranks := int $role.tensorParallel -}}
{{- if and $gpus (ne $ranks (int (mul $gpus $nodes))) -}}
{{- $given := printf "%s.gpus is %d" .role $gpus -}}
{{- if hasKey $role "nodes" }}{{ $given = printf "%s x %s.nodes is %d x %d" (print .role ".gpus") .role $gpus $nodes }}{{ end -}}
{{- fail (printf "%s.tensorParallel: must be the number of GPUs, one for each rank: it is %d, but %s" .role $ranks $given) -}}
{{- else if mod $ranks $nodes -}}
{{- fail (printf "%s.tensorParallel: must be a multiple of %s.nodes: it is %d, but %s.nodes is %d" .role .role $ranks .role $nodes) -}}
{{- end -}}
{{- $ranks -}}
{{- end }}

{{/* Settings that the chart derives, by name. Takes root, role and follower. */}}
{{- define "specpool.chartSettings" -}}
{{- if eq .role "http" }}
{{- include "specpool.httpSettings" .root }}
{{- else if not .follower }}
{{- include "specpool.serverSettings" . }}
{{- include "specpool.carriedDraft" . }}
{{- end }}
{{- include "specpool.modelSettings" . }}
{{- with .root.Values.logLevel }}
log_level: {{ . }}
{{- end }}
{{- with .root.Values.logFormat }}
log_format: {{ . }}
{{- end }}
{{- end }}

{{/* Settings of the draft that targets and standbys carry. */}}
{{- define "specpool.carriedDraft" }}
{{- with .root.Values.draft }}
{{- if and .enabled .colocated (has $.role (list "target" "standby")) }}
draft: {{ .model }}
{{- with include "specpool.revision" (dict "root" $.root "role" "draft") }}
draft_revision: {{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Revision of a role's model. Fails if the default model's revision was kept for another model. The commits here are those in
values.yaml; a template cannot tell a default from the same value given. Takes root and role.
*/}}
{{- define "specpool.revision" -}}
{{- $role := get .root.Values .role -}}
{{- $models := dict "b968826d9c46dd6066d109eabc6255188de91218" "Qwen/Qwen3-8B" "c1899de289a04d12100db370d81485cdf75e47ca" "Qwen/Qwen3-0.6B" -}}
{{- $owner := get $models (default "" $role.revision) -}}
{{- if and $owner (ne $owner $role.model) -}}
{{- fail (printf "%s.revision: %s is a commit of %s, but %s.model is %s; set the commit of that model, or \"\" for a folder" .role $role.revision $owner .role $role.model) -}}
{{- end -}}
{{- default "" $role.revision -}}
{{- end }}

{{- define "specpool.modelSettings" -}}
{{- $role := get .root.Values .role -}}
{{- if not (has .role (list "coordinator" "http")) }}
{{- if eq $role.modelCache.type "image" }}
model: {{ clean (printf "/model/%s" $role.modelCache.image.path) }}
{{- else }}
model: {{ $role.model }}
{{- with include "specpool.revision" . }}
revision: {{ . }}
{{- end }}
{{- end }}
{{- if not (or (int $role.gpus) $role.device) }}
{{- fail (printf "%s.device: must be cpu if %s.gpus is 0, so that no worker runs on a CPU by mistake" .role .role) }}
{{- end }}
device: {{ default "cuda" $role.device }}
{{- $ranks := include "specpool.tensorParallel" . | int }}
{{- if gt $ranks 1 }}
tensor_parallel: {{ $ranks }}
{{- end }}
{{- end }}
{{- end }}

{{- define "specpool.serverSettings" }}
{{- $values := .root.Values }}
{{- $role := get $values .role }}
port: {{ include "specpool.listeningPort" . }}
# A separate port for probes: the kubelet's gRPC probes have no TLS, and clients may exhaust the connections of the main
# port. No Service exposes this one.
health_port: 50060
drain_seconds: {{ $role.drainSeconds }}
{{- include "specpool.tlsSettings" . }}
{{- if eq .role "coordinator" }}
{{- if $values.edge.enabled }}
# Only the edge may call the coordinator, which has no TLS then.
host: 127.0.0.1
{{- /* An IPv6-only cluster needs `::` for metrics. */}}
{{- if not (hasKey $role.settings "monitoring_host") }}
monitoring_host: 0.0.0.0
{{- end }}
# The edge opens a connection for each call.
max_connections: 8192
{{- end }}
{{- if $values.auth.apiTokens.existingSecret }}
api_tokens: /api-tokens/{{ $values.auth.apiTokens.key }}
{{- end }}
{{- if $values.auth.workerToken.existingSecret }}
worker_token: /worker-token/token
{{- end }}
{{- with $values.servedModelName }}
served_model_name: {{ . | quote }}
{{- end }}
{{- if not (kindIs "invalid" $values.draft.canary.share) }}
draft_share: canary={{ $values.draft.canary.share }}
{{- end }}
{{- if $values.record.enabled }}
# The process creates this folder, which nobody else may read.
record: /record/answers
record_share: {{ $values.record.share }}
record_max_bytes: {{ $values.record.sizeGiB }}GiB
{{- end }}
{{- if $values.smg.enabled }}
smg: true
{{- end }}
{{- with $values.metrics.compat }}
metrics_compat: {{ . }}
{{- end }}
{{- if $values.tracing.prompts }}
trace_prompts: true
{{- end }}
{{- else if $values.auth.workerToken.existingSecret }}
api_tokens: /worker-token/tokens
{{- end }}
{{- if $values.metrics.enabled }}
metrics_port: {{ $values.metrics.port }}
{{- end }}
{{- with $values.tracing.endpoint }}
otlp_traces_endpoint: {{ . }}
{{- if not (kindIs "invalid" $values.tracing.sampleRate) }}
trace_sample_rate: {{ $values.tracing.sampleRate }}
{{- end }}
{{- end }}
{{- end }}

{{/* A coordinator uses one certificate for clients and workers. Behind an edge, it has no TLS to clients. Takes root and role. */}}
{{- define "specpool.tlsSettings" -}}
{{- if .root.Values.tls.enabled }}
{{- if eq .role "coordinator" }}
{{- $clients := ternary "none" .root.Values.tls.clients .root.Values.edge.enabled }}
{{- if ne $clients "none" }}
tls_cert: /tls/tls.crt
tls_key: /tls/tls.key
{{- else }}
worker_tls_cert: /tls/tls.crt
worker_tls_key: /tls/tls.key
{{- end }}
{{ ternary "tls_ca" "worker_tls_ca" (eq $clients "mutual") }}: /tls/ca.crt
{{- else }}
tls_cert: /tls/tls.crt
tls_key: /tls/tls.key
tls_ca: /tls/ca.crt
allowed_names: {{ include "specpool.roleName" (dict "root" .root "role" "coordinator") }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Variables of a role's process. They are part of the pod template, not of a ConfigMap: pods that an update has not reached keep
their settings when they restart. Escapes $(NAME), which Kubernetes would replace. Takes root, role and follower.
*/}}
{{- define "specpool.settings" -}}
{{- $settings := include "specpool.chartSettings" . | fromYaml -}}
{{- $elsewhere := list "target_address" "target_standby_address" "draft_address" "draft_share" "record" "draft" "draft_revision" "tensor_parallel" "nnodes" "node_rank" "master_addr" -}}
{{- range $name, $value := (get .root.Values .role).settings -}}
{{- if or (hasKey $settings $name) (has $name $elsewhere) -}}
{{- fail (printf "%s.settings.%s: the chart sets it from other values" $.role $name) -}}
{{- end -}}
{{- $_ := set $settings $name $value -}}
{{- end -}}
{{- range $name, $value := $settings }}
- name: SPECPOOL_{{ upper $name }}
  value: {{ ternary (toJson $value) (toString $value) (kindIs "float64" $value) | replace "$" "$$" | quote }}
{{- end }}
{{- end }}
