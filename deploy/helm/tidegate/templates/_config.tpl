{{/* The configuration file: what `config` says over what the chart knows. */}}
{{- define "tidegate.config" -}}
{{- if not (dig "proxy" "upstream" "" .Values.config) -}}
{{- fail "config.proxy.upstream: say what tidegate stands before, such as http://echo or http://127.0.0.1:3000" -}}
{{- end -}}
{{- $group := include "tidegate.group" . -}}
{{- $replication := dict "listen" "[::]:9401" "group" $group -}}
{{- if .Values.endpointSlices -}}
{{- $_ := set $replication "peers" (dict "endpoint_slices" (dict "namespace" .Release.Namespace "service" (include "tidegate.peersName" .))) -}}
{{- else -}}
{{- $_ := set $replication "peers" (dict "dns" (include "tidegate.peersName" .)) -}}
{{- end -}}
{{- if include "tidegate.secret" . -}}
{{- $names := .Values.tls.names -}}
{{- if .Values.tls.certManager -}}
{{- $names = list (printf "%s.tidegate.internal" $group) -}}
{{- else if not $names -}}
{{- fail "tls.names: say which names the certificates of peers have" -}}
{{- end -}}
{{- $_ := set $replication "tls" (dict "cert" "/etc/tidegate-tls/tls.crt" "key" "/etc/tidegate-tls/tls.key" "ca" "/etc/tidegate-tls/ca.crt" "names" $names) -}}
{{- else -}}
{{- $_ := set $replication "insecure" true -}}
{{- end -}}
{{- $known := dict
  "proxy" (dict "listen" "[::]:8080")
  "replication" $replication
  "admin" (dict "listen" "127.0.0.1:9402")
  "telemetry" (dict "listen" "[::]:9403") -}}
{{- toYaml (mergeOverwrite $known (deepCopy .Values.config)) -}}
{{- end }}

{{/* The number of a listener's port: (list . "proxy"). */}}
{{- define "tidegate.port" -}}
{{- $config := include "tidegate.config" (index . 0) | fromYaml -}}
{{- get (get $config (index . 1)) "listen" | splitList ":" | last -}}
{{- end }}
