{{/* Volumes and mounts of a role's pods. Every template takes root, role and follower. */}}

{{- define "specpool.mounts" -}}
{{- $values := .root.Values -}}
{{- $role := get $values .role -}}
- name: tmp
  mountPath: /tmp
{{- if include "specpool.records" . }}
- name: record
  mountPath: /record
{{- end }}
{{- if ne .role "coordinator" }}
- name: models
  mountPath: /models
{{- if eq $role.modelCache.type "image" }}
- name: model
  mountPath: /model
  readOnly: true
{{- end }}
{{- end }}
{{- if gt (int $role.tensorParallel) 1 }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if not .follower }}
{{- include "specpool.secretMounts" . }}
{{- end }}
{{- with $role.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Mount folders: single files (subPath) would not change when a certificate or token is renewed. */}}
{{- define "specpool.secretMounts" }}
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /tls
  readOnly: true
{{- end }}
{{- if and (eq .role "coordinator") .root.Values.auth.apiTokens.existingSecret }}
- name: api-tokens
  mountPath: /api-tokens
  readOnly: true
{{- end }}
{{- if .root.Values.auth.workerToken.existingSecret }}
- name: worker-token
  mountPath: /worker-token
  readOnly: true
{{- end }}
{{- end }}

{{/* Non-empty if the role records answers. Takes root and role. */}}
{{- define "specpool.records" -}}
{{- if and (eq .role "coordinator") .root.Values.record.enabled }}true{{ end -}}
{{- end }}

{{- define "specpool.volumes" -}}
{{- include "specpool.tmpVolume" . }}
{{- if include "specpool.records" . }}
- name: record
  {{- with .root.Values.record.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ . }}
  {{- else }}
  emptyDir:
    # Exceeding this would evict the pod.
    sizeLimit: {{ add .root.Values.record.sizeGiB 1 }}Gi
  {{- end }}
{{- end }}
{{- if ne .role "coordinator" }}
{{- include "specpool.modelVolumes" . }}
{{- end }}
{{- if gt (int (get .root.Values .role).tensorParallel) 1 }}
- name: shm
  # For NCCL between the GPUs of a node; a container's own /dev/shm has 64 MiB.
  emptyDir:
    medium: Memory
    sizeLimit: 2Gi
{{- end }}
{{- if not .follower }}
{{- include "specpool.secretVolumes" . }}
{{- end }}
{{- if and (eq .role "coordinator") .root.Values.edge.enabled }}
- name: edge
  configMap:
    name: {{ include "specpool.fullname" .root }}-edge
{{- end }}
{{- with (get .root.Values .role).extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "specpool.tmpVolume" -}}
- name: tmp
  # In memory, because a tmpfs is sticky (mode 1777). On the node's disk the folder would have mode 0777, and a worker loads
  # no compiled code from a folder in which others can replace it.
  emptyDir:
    medium: Memory
    sizeLimit: 256Mi
{{- end }}

{{/* With persistentVolumeClaim, volumeClaimTemplates add a claim per pod. */}}
{{- define "specpool.modelVolumes" }}
{{- $cache := (get .root.Values .role).modelCache }}
{{- if eq $cache.type "existingClaim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ required (printf "%s.modelCache.existingClaim: needed by type existingClaim" .role) $cache.existingClaim }}
{{- else if ne $cache.type "persistentVolumeClaim" }}
- name: models
  emptyDir: {}
{{- end }}
{{- if eq $cache.type "image" }}
{{- if semverCompare "<1.33.0-0" .root.Capabilities.KubeVersion.Version }}
{{- fail (printf "%s.modelCache.type image: needs Kubernetes 1.33, this is %s" .role .root.Capabilities.KubeVersion.Version) }}
{{- end }}
- name: model
  image:
    reference: {{ required (printf "%s.modelCache.image.reference: needed by type image" .role) $cache.image.reference }}
    pullPolicy: {{ $cache.image.pullPolicy }}
{{- end }}
{{- end }}

{{/* Claim templates of a worker whose pods each have a claim. */}}
{{- define "specpool.claims" -}}
{{- with (get .root.Values .role).modelCache }}
{{- if eq .type "persistentVolumeClaim" }}
persistentVolumeClaimRetentionPolicy:
  whenDeleted: Retain
  whenScaled: Retain
volumeClaimTemplates:
  - metadata:
      name: models
    spec:
      accessModes:
        {{- toYaml .accessModes | nindent 8 }}
      {{- with .storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .size }}
{{- end }}
{{- end }}
{{- end }}

{{/* The process reads these files through the pod's group. */}}
{{- define "specpool.secretVolumes" }}
{{- $auth := .root.Values.auth }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "specpool.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- if and (eq .role "coordinator") $auth.apiTokens.existingSecret }}
- name: api-tokens
  secret:
    secretName: {{ $auth.apiTokens.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- with $auth.workerToken.existingSecret }}
- name: worker-token
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    # Coordinators get the bare token, workers the line with its name.
    items:
      - key: {{ ternary "token" "tokens" (eq $.role "coordinator") }}
        path: {{ ternary "token" "tokens" (eq $.role "coordinator") }}
{{- end }}
{{- end }}
