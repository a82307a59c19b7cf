{{/*
Pods of the roles. Every template takes root, role and follower. A follower is a pod of a group that is not its leader:
it runs the same command but serves nothing.
*/}}

{{/* Seconds for which a pod keeps serving before SIGTERM. */}}
{{- define "specpool.preStopSeconds" -}}
{{- $role := get .root.Values .role -}}
{{- if .follower -}}
{{- /* Any pod that ends takes the group down, so followers wait until the leader has drained. */ -}}
{{- add (include "specpool.preStopSeconds" (omit . "follower")) (ceil $role.drainSeconds) 15 -}}
{{- else if kindIs "invalid" $role.preStopSeconds -}}
{{- $coordinator := .root.Values.coordinator -}}
{{- /* The 15: the coordinator's pod may be deleted some seconds after its worker's. */ -}}
{{- add $coordinator.preStopSeconds (ceil $coordinator.drainSeconds) 15 -}}
{{- else -}}
{{- $role.preStopSeconds -}}
{{- end -}}
{{- end }}

{{/* Longer than preStop hook plus drain. */}}
{{- define "specpool.graceSeconds" -}}
{{- add (include "specpool.preStopSeconds" .) (ceil (get .root.Values .role).drainSeconds) 10 -}}
{{- end }}

{{/*
Seconds of readiness before an update continues with the next cell. A new coordinator is ready while its old target still
serves in its preStop hook. Waiting for longer replaces the pods of a cell together, one cell at a time. Takes the root.
*/}}
{{- define "specpool.minReadySeconds" -}}
{{- add (include "specpool.preStopSeconds" (dict "root" . "role" "target")) 10 -}}
{{- end }}

{{- define "specpool.preStop" -}}
{{- if include "specpool.grouped" . -}}
# Wait only while the group serves: a group that lost a process is deleted, and its successor waits for that. A command,
# unlike `sleep`, ends with the process, and all processes end once the leader has drained.
exec:
  command:
    - sh
    - -c
    - python -m specpool.healthcheck "{{ ternary "$LWS_LEADER_ADDRESS" "127.0.0.1" (not (not .follower)) }}:50060" && sleep {{ include "specpool.preStopSeconds" . }} || true
{{- else -}}
sleep:
  seconds: {{ include "specpool.preStopSeconds" . }}
{{- end }}
{{- end }}

{{- define "specpool.securityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "specpool.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Fields that all pods share. Takes root, values, selector and graceSeconds. */}}
{{- define "specpool.podHeader" -}}
serviceAccountName: {{ include "specpool.serviceAccount" .root }}
automountServiceAccountToken: false
# Service links would set variables such as SPECPOOL_..._SERVICE_HOST, and a process rejects unknown SPECPOOL_* variables.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .graceSeconds }}
securityContext:
  {{- include "specpool.securityContext" . | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "specpool.scheduling" . | trim }}
{{ . }}
{{- end }}
{{- end }}

{{/* Scheduling of a role or a gateway. Takes values and selector. */}}
{{- define "specpool.scheduling" -}}
{{- $selector := .selector }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" ($selector | fromYaml)))) | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Probes use the port that only serves health. Readiness asks whether the pod can serve now. */}}
{{- define "specpool.probes" -}}
{{- $probes := (get .root.Values .role).probes -}}
startupProbe:
  grpc:
    port: 50060
    {{- if eq .role "coordinator" }}
    # A coordinator without its target worker is NOT_SERVING. It should get no requests, but a restart would lose the
    # waiting ones, so only readiness checks this.
    service: live
    {{- end }}
  {{- toYaml $probes.startup | nindent 2 }}
readinessProbe:
  grpc:
    port: 50060
  {{- if and (include "specpool.grouped" .) (or (include "specpool.scaled" .root) (include "specpool.replicated" .)) }}
  # Replaces minReadySeconds, which a LeaderWorkerSet lacks. Coordinators check health themselves.
  {{- $times := divf (include "specpool.minReadySeconds" .root) (default 10 $probes.readiness.periodSeconds) | ceil | add 1 }}
  {{- toYaml (merge (deepCopy $probes.readiness) (dict "successThreshold" $times)) | nindent 2 }}
  {{- else }}
  {{- toYaml $probes.readiness | nindent 2 }}
  {{- end }}
livenessProbe:
  grpc:
    port: 50060
    service: live
  {{- toYaml $probes.liveness | nindent 2 }}
{{- end }}

{{- define "specpool.resources" -}}
{{- $role := get .root.Values .role -}}
{{- $resources := deepCopy $role.resources -}}
{{- if and (ne .role "coordinator") (gt (int $role.gpus) 0) -}}
{{- $limits := merge (dict $role.gpuResource (int $role.gpus)) (default dict $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{- define "specpool.args" -}}
{{- if include "specpool.grouped" . }}
- --nnodes=$(LWS_GROUP_SIZE)
- --node-rank=$(LWS_WORKER_INDEX)
- --master-addr=$(LWS_LEADER_ADDRESS)
{{- end }}
{{- with (get .root.Values .role).extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "specpool.env" -}}
{{- $role := get .root.Values .role -}}
{{- if ne .role "coordinator" }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.huggingface.existingSecret }}
      key: {{ .root.Values.huggingface.key }}
      optional: true
{{- else }}
{{- if not .root.Values.disaggregatedSet.enabled }}
- name: CELL
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
{{- end }}
- name: SPECPOOL_TARGET_ADDRESS
  value: {{ include "specpool.workerAddress" (dict "root" .root "role" "target") }}
{{- if .root.Values.target.standby.enabled }}
- name: SPECPOOL_TARGET_STANDBY_ADDRESS
  value: {{ include "specpool.workerAddress" (dict "root" .root "role" "standby") }}
{{- end }}
{{- if include "specpool.hasDraftWorkers" .root }}
- name: SPECPOOL_DRAFT_ADDRESS
  value: {{ include "specpool.draftAddress" .root }}
{{- end }}
{{- end }}
{{- include "specpool.settings" . }}
{{- with $role.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "specpool.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $role := get $values .role -}}
{{- $component := include "specpool.component" .role -}}
{{- $selector := include "specpool.selector" (dict "root" $root "component" $component) -}}
metadata:
  labels:
    {{- $selector | nindent 4 }}
    {{- with merge (deepCopy $role.podLabels) $values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $annotations := deepCopy $role.podAnnotations }}
  {{- if and $values.metrics.enabled $values.metrics.annotations (not .follower) }}
  {{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/port" (toString $values.metrics.port)) }}
  {{- end }}
  {{- if and (eq .role "coordinator") $values.edge.enabled }}
  {{- $annotations = merge $annotations (dict "checksum/edge" ($root.Files.Get "edge/haproxy.cfg" | sha256sum)) }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "specpool.podHeader" (dict "root" $root "values" $role "selector" $selector "graceSeconds" (include "specpool.graceSeconds" .)) | nindent 2 }}
  {{- if and (eq .role "coordinator") $values.edge.enabled }}
  initContainers:
    {{- include "specpool.edge" . | nindent 4 }}
  {{- end }}
  containers:
    - name: server
      image: {{ include "specpool.image" (dict "root" $root "image" $role.image) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [specpool-{{ include "specpool.program" .role }}]
      {{- with include "specpool.args" . | trim }}
      args:
        {{- . | nindent 8 }}
      {{- end }}
      env:
        {{- include "specpool.env" . | trim | nindent 8 }}
      {{- if not .follower }}
      ports:
        - name: grpc
          containerPort: {{ include "specpool.listeningPort" . }}
        - name: health
          containerPort: 50060
        {{- if $values.metrics.enabled }}
        - name: metrics
          containerPort: {{ $values.metrics.port }}
        {{- end }}
      {{- include "specpool.probes" . | nindent 6 }}
      {{- end }}
      lifecycle:
        # Kubernetes routes new calls elsewhere before a coordinator refuses them; a worker serves until its coordinator
        # has drained, or has moved its sequences to other replicas.
        preStop:
          {{- include "specpool.preStop" . | nindent 10 }}
      resources:
        {{- include "specpool.resources" . | nindent 8 }}
      securityContext:
        {{- include "specpool.containerSecurityContext" . | nindent 8 }}
      volumeMounts:
        {{- include "specpool.mounts" . | trim | nindent 8 }}
  volumes:
    {{- include "specpool.volumes" . | trim | nindent 4 }}
{{- end }}
