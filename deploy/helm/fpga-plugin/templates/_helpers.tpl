{{- define "fpga-plugin.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "fpga-plugin.selector" -}}
app.kubernetes.io/name: {{ include "fpga-plugin.name" . }}
{{- end }}

{{- define "fpga-plugin.labels" -}}
{{ include "fpga-plugin.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "fpga-plugin.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion }}
{{- if not .Values.image.repository }}
{{- fail (printf `

image.repository is not set, and there is no public image. In a clone of fpga-plugin, build one and
push it to a registry that your nodes can pull from:

    make image BASE=debian:bookworm-slim@sha256:... IMAGE=REGISTRY/fpga-plugin:%s
    docker push REGISTRY/fpga-plugin:%s

(docs/install.md has each step; podman push and buildah push do the same), then install with

    --set image.repository=REGISTRY/fpga-plugin
` $tag $tag) }}
{{- end }}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}{{ else }}{{ .Values.image.repository }}:{{ $tag }}{{ end }}
{{- end }}

{{- /* Whether anything in the pod speaks to the API server. */ -}}
{{- define "fpga-plugin.api" -}}
{{- if or .Values.readPods .Values.events }}true{{ end }}
{{- end }}
