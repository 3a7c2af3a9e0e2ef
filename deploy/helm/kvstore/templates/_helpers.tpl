{{- define "kvstore.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvstore.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvstore.labels" -}}
{{ include "kvstore.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvstore.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* Several servers have a headless Service: its name stands for the addresses of all that are ready. */}}
{{- define "kvstore.metadataService" -}}
{{ include "kvstore.fullname" . }}-metadata{{ if .Values.metadata.valkey.servers }}-servers{{ end }}
{{- end }}

{{- define "kvstore.metadataAddress" -}}
{{ include "kvstore.metadataService" . }}.{{ .Release.Namespace }}.svc:{{ .Values.metadata.port }}
{{- end }}

{{/* Settings, by their names in the configuration, as environment variables. */}}
{{- define "kvstore.environment" -}}
{{- range $name, $value := . }}
- {name: KVSTORE_{{ $name | upper | replace "." "__" }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{/* Settings of TLS in one section of the configuration: list of the chart's context and the section. */}}
{{- define "kvstore.tlsSettings" -}}
{{- $tls := (index . 0).Values.tls }}
{{- $section := index . 1 }}
{{- if $tls.secretName }}
{{ $section }}.tls.ca: /etc/kvstore/tls/ca.crt
{{ $section }}.tls.cert: /etc/kvstore/tls/tls.crt
{{ $section }}.tls.key: /etc/kvstore/tls/tls.key
{{ $section }}.tls.server_name: {{ $tls.serverName | quote }}
{{- if ne $section "client" }}
{{ $section }}.tls.require_client_cert: {{ $tls.requireClientCert }}
{{- end }}
{{- end }}
{{- end }}

{{/* Secrets as files, in two places: list of the chart's context and what else is mounted. */}}
{{- define "kvstore.secretMounts" -}}
{{- if (index . 0).Values.tls.secretName }}
- {name: tls, mountPath: /etc/kvstore/tls, readOnly: true}
{{- end }}
{{- range $number, $secret := index . 1 }}
- {name: secret-{{ $number }}, mountPath: {{ $secret.mountPath | quote }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "kvstore.secretVolumes" -}}
{{- with (index . 0).Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- range $number, $secret := index . 1 }}
- name: secret-{{ $number }}
  secret: {secretName: {{ $secret.secretName | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "kvstore.podSecurity" -}}
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsUser }}
runAsNonRoot: {{ ne (int .Values.runAsUser) 0 }}
fsGroup: {{ .Values.runAsUser }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvstore.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/*
Asks a daemon whether it serves: false while it starts and from the moment it is told to stop. The kubelet itself asks where it can;
it speaks no TLS. List of the chart's context, the daemon, and its port.
*/}}
{{- define "kvstore.probe" -}}
{{- if (index . 0).Values.tls.secretName -}}
exec: {command: [kvstore, health, {{ index . 1 }}]}
{{- else -}}
grpc: {port: {{ index . 2 }}}
{{- end }}
{{- end }}

{{- define "kvstore.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kvstore.podLabels" -}}
{{- with .podLabels }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "kvstore.podAnnotations" -}}
{{- with .podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Items that values add to a list: variables, volumes, mounts. */}}
{{- define "kvstore.extra" -}}
{{- with . }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* MiB of a size such as 64GiB. */}}
{{- define "kvstore.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 }}
{{- if hasSuffix "TiB" . }}{{ mul $number 1048576 }}{{ else if hasSuffix "GiB" . }}{{ mul $number 1024 }}{{ else }}{{ $number }}{{ end }}
{{- end }}

{{/*
MiB of memory that a node takes beside its arena: memoryOverhead, or what it is reckoned to take when it is full. 1024 MiB, and 1000 bytes
for each block that arena and volumes have space for (kvstore/process/memory/memory_sizing.py; a test holds both together).
*/}}
{{- define "kvstore.besideArena" -}}
{{- if .memoryOverhead }}{{ include "kvstore.mebibytes" .memoryOverhead }}{{ else -}}
{{- $held := include "kvstore.mebibytes" .dram | int64 }}
{{- range .nvme }}{{ $held = add $held (include "kvstore.mebibytes" .size | int64) }}{{ end }}
{{- $blocks := div $held (include "kvstore.mebibytes" .blockSize | int64) }}
{{- add 1024 (div (add (mul $blocks 1000) 1048575) 1048576) }}
{{- end }}
{{- end }}
