{{- define "tidegate.group" -}}
{{- default .Release.Name .Values.group -}}
{{- end }}

{{/* The name of every object but the headless Service. */}}
{{- define "tidegate.name" -}}
{{- printf "tidegate-%s" (include "tidegate.group" .) | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "tidegate.peersName" -}}
{{- printf "tidegate-peers-%s" (include "tidegate.group" .) | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "tidegate.labels" -}}
app.kubernetes.io/name: tidegate
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The label by which the pods of the group are found. For your pod template. */}}
{{- define "tidegate.podLabels" -}}
tidegate.dev/mesh: {{ include "tidegate.group" . }}
{{- end }}

{{/* The name of the Secret for peers; empty if they speak plain text. */}}
{{- define "tidegate.secret" -}}
{{- $tls := .Values.tls -}}
{{- $said := len (compact (list $tls.existingSecret (ternary "x" "" $tls.certManager) (ternary "x" "" $tls.insecure))) -}}
{{- if ne $said 1 -}}
{{- fail "tls: say exactly one of existingSecret, certManager: true, insecure: true" -}}
{{- end -}}
{{- if $tls.certManager -}}
{{- printf "%s-tls" (include "tidegate.name" .) -}}
{{- else -}}
{{- $tls.existingSecret -}}
{{- end -}}
{{- end }}
