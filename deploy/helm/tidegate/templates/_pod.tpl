{{/*
The container. Your chart includes one of these two with the context of this one:

  initContainers: {{- include "tidegate.sidecar" .Subcharts.tidegate | nindent 8 }}
  containers: {{- include "tidegate.container" .Subcharts.tidegate | nindent 8 }}
*/}}
{{- define "tidegate.sidecar" -}}
{{ include "tidegate.container" . }}
  # Native: it starts before the app and stops after it.
  restartPolicy: Always
{{- end }}

{{- define "tidegate.container" -}}
- name: tidegate
  image: {{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [run, -c, /etc/tidegate/tidegate.yaml, --log-format, json]
  env:
    - name: POD_NAME
      valueFrom: { fieldRef: { fieldPath: metadata.name } }
    - name: POD_NAMESPACE
      valueFrom: { fieldRef: { fieldPath: metadata.namespace } }
    - name: POD_IP
      valueFrom: { fieldRef: { fieldPath: status.podIP } }
    - name: TIDEGATE_LOG
      value: {{ .Values.logFilter | quote }}
  ports:
    - { name: proxy, containerPort: {{ include "tidegate.port" (list . "proxy") }} }
    - { name: peer, containerPort: {{ include "tidegate.port" (list . "replication") }} }
    - { name: admin, containerPort: {{ include "tidegate.port" (list . "admin") }} }
    - { name: telemetry, containerPort: {{ include "tidegate.port" (list . "telemetry") }} }
  startupProbe:
    httpGet: { path: /readyz, port: telemetry }
    periodSeconds: 1
    timeoutSeconds: 1
    failureThreshold: 60
  readinessProbe:
    httpGet: { path: /readyz, port: telemetry }
    periodSeconds: 2
    timeoutSeconds: 1
    failureThreshold: 2
  livenessProbe:
    httpGet: { path: /livez, port: telemetry }
    periodSeconds: 10
    timeoutSeconds: 2
    failureThreshold: 3
  resources: {{- toYaml .Values.resources | nindent 4 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: { drop: [ALL] }
    seccompProfile: { type: RuntimeDefault }
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
    - { name: tidegate-config, mountPath: /etc/tidegate, readOnly: true }
    {{- if include "tidegate.secret" . }}
    - { name: tidegate-tls, mountPath: /etc/tidegate-tls, readOnly: true }
    {{- end }}
    {{- if .Values.endpointSlices }}
    - { name: tidegate-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true }
    {{- end }}
{{- end }}

{{/* The volumes of that container. */}}
{{- define "tidegate.volumes" -}}
- name: tidegate-config
  configMap: { name: {{ include "tidegate.name" . }} }
{{- with include "tidegate.secret" . }}
- name: tidegate-tls
  secret: { secretName: {{ . }}, defaultMode: 0444 }
{{- end }}
{{- if .Values.endpointSlices }}
- name: tidegate-token
  projected:
    defaultMode: 0444
    sources:
      - serviceAccountToken: { path: token, expirationSeconds: 3607 }
      - configMap: { name: kube-root-ca.crt, items: [{ key: ca.crt, path: ca.crt }] }
      - downwardAPI: { items: [{ path: namespace, fieldRef: { fieldPath: metadata.namespace } }] }
{{- end }}
{{- end }}
