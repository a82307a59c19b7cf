{{/* The optional edge of a coordinator. */}}

{{/* A sidecar: it starts before the coordinator and ends after it. Takes root and role. */}}
{{- define "specpool.edge" -}}
{{- $values := .root.Values -}}
- name: edge
  restartPolicy: Always
  image: {{ include "specpool.image" (dict "root" .root "image" $values.edge.image) }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  command:
    - sh
    - -c
    - |
      # Listen on IPv4 only if the kernel lacks IPv6.
      [ -e /proc/net/if_inet6 ] || export EDGE_BIND=:50050
      {{- if include "specpool.clientTls" .root }}
      haproxy -W -db -f /edge/haproxy.cfg & edge=$!
      trap 'kill -USR1 $edge' USR1
      trap 'kill $edge; wait $edge; exit' TERM
      # Reload renewed certificates. Calls in progress have as long as in a drain.
      was=$(cksum /tls/*)
      while kill -0 $edge; do
        sleep 5 & wait $!
        now=$(cksum /tls/*)
        [ "$now" = "$was" ] || kill -USR2 $edge
        was=$now
      done
      wait $edge
      {{- else }}
      exec haproxy -W -db -f /edge/haproxy.cfg
      {{- end }}
  env:
    - name: EDGE_COORDINATOR
      value: 127.0.0.1:{{ include "specpool.listeningPort" . }}
    - name: EDGE_HEALTH_PORT
      value: "50060"
    - name: EDGE_TLS
      value: {{ ternary $values.tls.clients "off" (not (not (include "specpool.clientTls" .root))) | quote }}
    - name: EDGE_CONNECTIONS
      value: {{ $values.edge.connections | quote }}
    - name: EDGE_CALL_RATE
      value: {{ $values.edge.callsPerSecond | quote }}
    - name: EDGE_DRAIN_SECONDS
      value: {{ add (ceil (get $values .role).drainSeconds) 5 | quote }}
  ports:
    - name: edge
      containerPort: 50050
  readinessProbe:
    tcpSocket:
      port: 50050
    periodSeconds: 5
  lifecycle:
    # Close no connection before the coordinator drains; then let calls finish.
    preStop:
      exec:
        command: [sh, -c, "sleep {{ include "specpool.preStopSeconds" . }}; kill -USR1 1"]
  resources:
    {{- toYaml $values.edge.resources | nindent 4 }}
  securityContext:
    {{- include "specpool.containerSecurityContext" . | nindent 4 }}
  volumeMounts:
    - name: edge
      mountPath: /edge
      readOnly: true
    {{- if $values.tls.enabled }}
    - name: tls
      mountPath: /tls
      readOnly: true
    {{- end }}
{{- end }}
