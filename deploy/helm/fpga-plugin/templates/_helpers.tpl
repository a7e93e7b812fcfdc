{{- /* What the application is called, in labels: the same in each release. */ -}}
{{- define "fpga-plugin.application" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* What this release's objects are called. */ -}}
{{- define "fpga-plugin.name" -}}
{{- $application := include "fpga-plugin.application" . }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $application .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $application | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "fpga-plugin.serviceAccount" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create }}{{ include "fpga-plugin.name" . }}
{{- else }}{{ fail "serviceAccount.create is false and serviceAccount.name is empty: the plugin's rights would go to every pod of the namespace that names no account; name one, or let the chart make it" }}{{ end }}
{{- end }}

{{- /* All pods of this release, whatever their configuration. */ -}}
{{- define "fpga-plugin.pods" -}}
app.kubernetes.io/name: {{ include "fpga-plugin.application" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "fpga-plugin.labels" -}}
{{ include "fpga-plugin.pods" . }}
app.kubernetes.io/part-of: fpga-plugin
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

{{- /* Whether any node of this release is a DRA driver. */ -}}
{{- define "fpga-plugin.dra" -}}
{{- $any := eq .Values.mode "dra" }}
{{- range .Values.nodeConfigurations.named }}{{ if eq (.mode | default "") "dra" }}{{ $any = true }}{{ end }}{{ end }}
{{- if $any }}true{{ end }}
{{- end }}

{{- /* Whether the plugin reads its Node object: to know whether the container runtime has CDI. */ -}}
{{- define "fpga-plugin.readsNode" -}}
{{- $adds := .Values.settings.FPGA_PLUGIN_CDI_DEVICES }}
{{- range .Values.nodeConfigurations.named }}{{ $adds = or $adds (get (.settings | default dict) "FPGA_PLUGIN_CDI_DEVICES") }}{{ end }}
{{- if or $adds (include "fpga-plugin.dra" .) }}true{{ end }}
{{- end }}

{{- /* Whether anything in the pod speaks to the API server. */ -}}
{{- define "fpga-plugin.api" -}}
{{- if or .Values.readPods .Values.events (include "fpga-plugin.readsNode" .) }}true{{ end }}
{{- end }}

{{- /* The port of FPGA_PLUGIN_HTTP_ADDRESS in the given settings; empty: nothing is served. */ -}}
{{- define "fpga-plugin.port" -}}
{{- if hasKey . "FPGA_PLUGIN_HTTP_ADDRESS" }}{{ regexFind "[0-9]+$" (toString .FPGA_PLUGIN_HTTP_ADDRESS) }}{{ else }}9102{{ end }}
{{- end }}

{{- define "fpga-plugin.needsPort" -}}
{{- if not (include "fpga-plugin.port" .Values.settings) }}
{{- fail "settings.FPGA_PLUGIN_HTTP_ADDRESS is empty: nothing is served that service or podMonitor could lead to" }}
{{- end }}
{{- if and .Values.networkPolicy.create (not .Values.networkPolicy.from) }}
{{- fail "networkPolicy.from is empty, so nobody reaches what service or podMonitor lead to: name who scrapes, or set networkPolicy.create=false" }}
{{- end }}
{{- end }}

{{- /* The store: the volume that bitstreams.volume names, else the node's own directory. */ -}}
{{- define "fpga-plugin.store" -}}
{{- $volume := .Values.bitstreams.volume }}
{{- if not $volume }}
hostPath: {path: {{ .Values.paths.bitstreams }}, type: DirectoryOrCreate}
{{- else if $volume.configMap }}
{{- /* Projected, for the reason that the policy's volume has. */}}
projected: {sources: [{configMap: {{ toJson $volume.configMap }}}]}
{{- else }}
{{- toYaml $volume }}
{{- end }}
{{- end }}
