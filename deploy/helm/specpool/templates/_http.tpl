{{/* OpenAI's API over HTTP. Every template takes the root. */}}

{{/* TLS to HTTP clients: mutual, server or none. */}}
{{- define "specpool.httpTls" -}}
{{- if include "specpool.clientTls" . }}{{ default .Values.tls.clients .Values.http.tls }}{{ else }}none{{ end -}}
{{- end }}

{{- define "specpool.checkHttp" -}}
{{- if and .Values.http.tls (not (include "specpool.clientTls" .)) -}}
{{- fail "http.tls: needs tls.enabled, and tls.clients other than none" -}}
{{- else if and .Values.tls.enabled (eq .Values.tls.clients "mutual") .Values.http.tls (not .Values.auth.apiTokens.existingSecret) -}}
{{- fail (printf "http.tls: %s needs auth.apiTokens, or everyone who reaches the HTTP server could use its certificate" .Values.http.tls) -}}
{{- else if and .Values.http.maxReplicas (lt (int .Values.http.maxReplicas) (int .Values.http.replicas)) -}}
{{- fail "http.maxReplicas: must not be less than http.replicas" -}}
{{- else if and .Values.networkPolicy.httpFrom (not .Values.networkPolicy.metricsFrom) .Values.metrics.enabled -}}
{{- fail "networkPolicy.httpFrom: needs networkPolicy.metricsFrom with metrics.enabled, or everyone who may read metrics could call the HTTP server, which has a single port" -}}
{{- end -}}
{{- end }}

{{/* Settings that the chart derives, by name. */}}
{{- define "specpool.httpSettings" -}}
{{- $tls := include "specpool.httpTls" . }}
{{- $coordinator := include "specpool.roleName" (dict "root" . "role" "coordinator") }}
port: {{ .Values.http.port }}
drain_seconds: {{ .Values.http.drainSeconds }}
# All ready coordinators, rather than the Service that selects one of them.
coordinator_address: dns:///{{ $coordinator }}.{{ .Release.Namespace }}.svc:50050
{{- if ne $tls "none" }}
tls_cert: /tls/tls.crt
tls_key: /tls/tls.key
{{- end }}
{{- if eq $tls "mutual" }}
tls_ca: /tls/ca.crt
{{- end }}
{{- if include "specpool.clientTls" . }}
coordinator_tls_ca: /tls/ca.crt
coordinator_tls_name: {{ $coordinator }}
{{- if eq .Values.tls.clients "mutual" }}
coordinator_tls_cert: /tls/tls.crt
coordinator_tls_key: /tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{/* A request of the kubelet, which has no client certificate. Takes root and path. */}}
{{- define "specpool.httpProbe" -}}
{{- $tls := include "specpool.httpTls" .root -}}
{{- if eq $tls "mutual" -}}
exec:
  command:
    - python
    - -c
    - |
      import ssl, urllib.request
      tls = ssl.create_default_context(cafile="/tls/ca.crt")
      tls.check_hostname = False
      tls.load_cert_chain("/tls/tls.crt", "/tls/tls.key")
      urllib.request.urlopen("https://127.0.0.1:{{ .root.Values.http.port }}{{ .path }}", context=tls, timeout=3)
{{- else -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ ternary "HTTP" "HTTPS" (eq $tls "none") }}
{{- end -}}
{{- end }}

{{/* Metrics endpoint of a monitor. Takes root and interval. */}}
{{- define "specpool.httpEndpoint" -}}
{{- $tls := include "specpool.httpTls" .root -}}
- port: http
  interval: {{ .interval }}
  {{- if ne $tls "none" }}
  scheme: https
  tlsConfig:
    {{- $client := include "specpool.tlsSecret" (dict "root" .root "role" "client") }}
    serverName: {{ include "specpool.roleName" (dict "root" .root "role" "http") }}
    ca:
      secret: {name: {{ include "specpool.tlsSecret" (dict "root" .root "role" "http") }}, key: ca.crt}
    {{- if eq $tls "mutual" }}
    cert:
      secret: {name: {{ $client }}, key: tls.crt}
    keySecret: {name: {{ $client }}, key: tls.key}
    {{- end }}
  {{- end }}
  {{- include "specpool.job" .root | nindent 2 }}
{{- end }}
