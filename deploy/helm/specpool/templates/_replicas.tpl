{{/* Numbers of cells and workers. */}}

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

{{/*
Non-empty if a coordinator has several workers of this role, or may have. A canary's number changes without a restart of the
coordinator. Takes root and role.
*/}}
{{- define "specpool.replicated" -}}
{{- $role := get .root.Values .role -}}
{{- if eq .role "draft.canary" -}}
{{- if not (include "specpool.scaled" .root) }}true{{ end -}}
{{- else if or (gt (int $role.replicas) 1) (gt (int $role.maxReplicas) 0) -}}true{{- end -}}
{{- end }}

{{/* Fixed number of pods or groups of a role; empty if an autoscaler sets it. Takes root and role. */}}
{{- define "specpool.replicas" -}}
{{- if include "specpool.replicated" . -}}
{{- $role := get .root.Values .role -}}
{{- if not $role.maxReplicas }}{{ $role.replicas }}{{ end -}}
{{- else if include "specpool.withdrawn" . -}}
0
{{- else if not (include "specpool.scalesCells" .root) -}}
{{- .root.Values.cells -}}
{{- end -}}
{{- end }}

{{/* Non-empty if a canary has no workers. Takes root and role. */}}
{{- define "specpool.withdrawn" -}}
{{- if and (eq .role "draft.canary") (not .root.Values.draft.canary.replicas) }}true{{ end -}}
{{- end }}

{{- define "specpool.maxReplicas" -}}
{{- $role := get .root.Values .role -}}
{{- ternary (max (int $role.replicas) (int $role.maxReplicas)) (include "specpool.maxCells" .root) (not (not (include "specpool.replicated" .))) -}}
{{- end }}

{{/* Fails if replicas contradict other values. Takes the root. */}}
{{- define "specpool.checkReplicas" -}}
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
