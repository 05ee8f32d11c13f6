{{/* Each of these takes (dict "root" $ "component" "gateway"). */}}

{{- define "warmroute.selector" -}}
app.kubernetes.io/name: warmroute
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "warmroute.labels" -}}
{{ include "warmroute.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "warmroute.config" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .root.Release.Name }}-{{ .component }}
  labels: {{- include "warmroute.labels" . | nindent 4 }}
data:
  {{ .component }}.yaml: |
    {{- toYaml (index .root.Values .component).config | nindent 4 }}
{{- end }}

{{/* What the pods of both have in common. */}}
{{- define "warmroute.pod" -}}
{{- $values := index .root.Values .component -}}
enableServiceLinks: false
securityContext: {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: config
    configMap: {name: {{ .root.Release.Name }}-{{ .component }}}
  - name: learned
    emptyDir: {sizeLimit: 64Mi}
{{- end }}

{{/* ... and their containers. */}}
{{- define "warmroute.container" -}}
{{- $values := index .root.Values .component -}}
name: {{ .component }}
image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- $processes := list }}
{{- if gt (int $values.processes) 1 }}
{{- $processes = list "--processes" (toString (int $values.processes)) }}
{{- end }}
args: {{ concat (list .component "--config" (printf "/etc/warmroute/%s.yaml" .component)) $processes | toJson }}
{{- $tracing := list }}
{{- with .root.Values.tracing.endpoint }}
{{- $tracing = list (dict "name" "WARMROUTE_TRACING__ENABLED" "value" "true") (dict "name" "OTEL_EXPORTER_OTLP_ENDPOINT" "value" .) }}
{{- end }}
{{- with concat $tracing $values.env }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
resources: {{- toYaml $values.resources | nindent 2 }}
securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
volumeMounts:
  - {name: config, mountPath: /etc/warmroute, readOnly: true}
  - {name: learned, mountPath: /var/lib/warmroute}
{{- end }}
