{{- /*
The DaemonSet of one configuration: `name`, `observe`, `mode`, `settings`, and `configuration`, its name in
nodeConfigurations.named; without that it is the one of all other nodes. A node whose label changes has its
pod deleted by one DaemonSet and gets it from the other: the plugin restarts into its configuration, and the
lock in the state directory keeps the two apart meanwhile.
*/ -}}
{{- define "fpga-plugin.daemonset" -}}
{{- $root := .root }}
{{- $values := .root.Values }}
{{- $settings := .settings }}
{{- $port := include "fpga-plugin.port" .settings }}
{{- $driver := .settings.FPGA_PLUGIN_RESOURCE_PREFIX | default "fpga.intel.com" }}
{{- $component := empty .configuration | ternary "plugin" (printf "plugin-%s" .configuration) }}
{{- $label := $values.nodeConfigurations.label }}
{{- $affinity := deepCopy ($values.affinity | default dict) }}
{{- if $values.nodeConfigurations.named }}
{{- $which := dict "key" $label "operator" "NotIn" "values" (keys $values.nodeConfigurations.named | sortAlpha) }}
{{- if .configuration }}
{{- $which = dict "key" $label "operator" "In" "values" (list .configuration) }}
{{- end }}
{{- $node := $affinity.nodeAffinity | default dict }}
{{- $required := $node.requiredDuringSchedulingIgnoredDuringExecution | default dict }}
{{- $terms := list }}
{{- range $term := $required.nodeSelectorTerms | default (list dict) }}
{{- $terms = append $terms (mergeOverwrite (deepCopy $term) (dict "matchExpressions" (append ($term.matchExpressions | default list) $which))) }}
{{- end }}
{{- $affinity = mergeOverwrite $affinity (dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms))) }}
{{- end }}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ .name }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "fpga-plugin.labels" $root | nindent 4 }}
  {{- with $values.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  selector:
    matchLabels:         # immutable
      {{- include "fpga-plugin.pods" $root | nindent 6 }}
      app.kubernetes.io/component: {{ $component }}
  updateStrategy:
    type: {{ $values.updateStrategy.type }}
    {{- if eq $values.updateStrategy.type "RollingUpdate" }}
    rollingUpdate:
      maxSurge: 0          # two plugins never share a node
      maxUnavailable: {{ $values.updateStrategy.maxUnavailable }}
    {{- end }}
  template:
    metadata:
      labels:
        {{- include "fpga-plugin.pods" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $component }}
        app.kubernetes.io/part-of: fpga-plugin
        {{- with $values.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      annotations:
        kubectl.kubernetes.io/default-container: fpga-plugin
        {{- with $values.podAnnotations }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      {{- with $values.podSecurityContext }}
      securityContext: {{- toYaml . | nindent 8 }}
      {{- end }}
      serviceAccountName: {{ include "fpga-plugin.serviceAccount" $root }}
      automountServiceAccountToken: {{ include "fpga-plugin.api" $root | eq "true" }}
      enableServiceLinks: false
      priorityClassName: {{ $values.priorityClassName }}
      # A PR cannot be interrupted, and its slowest end takes about 40 s: longer than that, so that the
      # plugin sees it through. It ends at once when there is none.
      terminationGracePeriodSeconds: 90
      {{- with $values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      nodeSelector: {{- toYaml $values.nodeSelector | nindent 8 }}
      affinity: {{- toYaml $affinity | nindent 8 }}
      tolerations: {{- toYaml $values.tolerations | nindent 8 }}
      containers:
      - name: fpga-plugin
        image: {{ include "fpga-plugin.image" $root | quote }}
        imagePullPolicy: {{ $values.image.pullPolicy }}
        env:
        - name: NODE_NAME
          valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
        - {name: FPGA_PLUGIN_CGROUP_ROOT, value: /host/cgroup}
        - {name: FPGA_PLUGIN_DEV_ROOT, value: /host/dev}
        - {name: FPGA_PLUGIN_SYSFS_ROOT, value: /host/sys}
        {{- if .observe }}
        - {name: FPGA_PLUGIN_OBSERVE, value: "true"}
        {{- end }}
        {{- if eq .mode "dra" }}
        - {name: FPGA_PLUGIN_MODE, value: dra}
        - {name: FPGA_PLUGIN_KUBELET_ROOT, value: {{ $values.paths.kubelet }}}
        {{- end }}
        {{- if $values.events }}
        - {name: FPGA_PLUGIN_EVENTS, value: "true"}
        {{- end }}
        {{- if $values.policy }}
        - {name: FPGA_PLUGIN_POLICY_FILE, value: /etc/fpga-plugin/policy/policy.yaml}
        {{- end }}
        {{- if $values.keysConfigMap }}
        - {name: FPGA_PLUGIN_KEYS_DIR, value: /etc/fpga-plugin/keys}
        {{- end }}
        {{- range $name, $value := .settings }}
        - {name: {{ $name }}, value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ $value | toJson | quote }}{{ end }}}
        {{- end }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if $port }}
        ports:
        - {name: http, containerPort: {{ $port }}, protocol: TCP}
        {{- end }}
        {{- if not .observe }}
        # Over the status socket, which is root's alone: whoever reaches the pod's address could hold
        # up probes of the port, and kubelet would restart a plugin that is well.
        startupProbe:
          exec: {command: [/usr/local/bin/fpga-plugin-probe, healthz]}
          {{- toYaml $values.probes.startup | nindent 10 }}
        livenessProbe:
          exec: {command: [/usr/local/bin/fpga-plugin-probe, healthz]}
          {{- toYaml $values.probes.liveness | nindent 10 }}
        readinessProbe:
          exec: {command: [/usr/local/bin/fpga-plugin-probe, readyz]}
          {{- toYaml $values.probes.readiness | nindent 10 }}
        {{- end }}
        resources: {{- toYaml $values.resources | nindent 10 }}
        terminationMessagePolicy: FallbackToLogsOnError
        {{- $context := include "fpga-plugin.securityContext" . | fromYaml }}
        securityContext: {{- mergeOverwrite $context $values.securityContext | toYaml | nindent 10 }}
        volumeMounts:
        - {name: device-plugins, mountPath: /var/lib/kubelet/device-plugins{{ if .observe }}, readOnly: true{{ end }}}
        - {name: pod-resources, mountPath: /var/lib/kubelet/pod-resources, readOnly: true}
        - {name: pods-api, mountPath: /var/lib/kubelet/pods-api, readOnly: true}
        - {name: state, mountPath: /var/lib/fpga-plugin{{ if .observe }}, readOnly: true{{ end }}}
        - {name: bitstreams, mountPath: /srv/intel.com/fpga, readOnly: true}
        - {name: dev, mountPath: /host/dev, readOnly: true}
        - {name: sys, mountPath: /host/sys{{ if .observe }}, readOnly: true{{ end }}}
        - {name: cgroup, mountPath: /host/cgroup, readOnly: true}
        {{- if eq .mode "dra" }}
        # At its own path: kubelet finds the sockets by the paths that the plugin tells it. Its record of
        # claims is in the root directory itself, and kubelet replaces it by a rename. What pods, other
        # drivers and kubelet's credentials have there is hidden. HostToContainer: what kubelet unmounts
        # must not stay mounted here.
        - {name: kubelet, mountPath: {{ $values.paths.kubelet }}, readOnly: true, mountPropagation: HostToContainer}
        {{- range $values.paths.hidden }}
        - {name: nothing, mountPath: {{ $values.paths.kubelet }}/{{ . }}, readOnly: true}
        {{- end }}
        - {name: plugins, mountPath: {{ $values.paths.kubelet }}/plugins{{ if .observe }}, readOnly: true{{ end }}}
        {{- if not .observe }}
        - {name: driver, mountPath: {{ $values.paths.kubelet }}/plugins/{{ $driver }}}
        {{- end }}
        - {name: plugins-registry, mountPath: {{ $values.paths.kubelet }}/plugins_registry{{ if .observe }}, readOnly: true{{ end }}}
        - {name: cdi, mountPath: /var/run/cdi{{ if .observe }}, readOnly: true{{ end }}}
        {{- end }}
        {{- if $values.policy }}
        - {name: policy, mountPath: /etc/fpga-plugin/policy, readOnly: true}
        {{- end }}
        {{- if $values.keysConfigMap }}
        - {name: keys, mountPath: /etc/fpga-plugin/keys, readOnly: true}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumes:
      # Directories, not sockets: kubelet makes new sockets when it restarts. The first one is where it
      # is whatever kubelet's --root-dir says.
      - name: device-plugins
        hostPath: {path: /var/lib/kubelet/device-plugins, type: DirectoryOrCreate}
      - name: pod-resources
        hostPath: {path: {{ $values.paths.kubelet }}/pod-resources, type: DirectoryOrCreate}
      - name: pods-api     # older kubelets do not make it
        hostPath: {path: {{ $values.paths.kubelet }}/pods-api, type: DirectoryOrCreate}
      - name: state
        hostPath: {path: {{ $values.paths.state }}, type: DirectoryOrCreate}
      - name: bitstreams
        {{- include "fpga-plugin.store" $root | trim | nindent 8 }}
      - name: dev
        hostPath: {path: /dev, type: Directory}
      - name: sys          # the container's own may be read-only, privileged or not
        hostPath: {path: /sys, type: Directory}
      - name: cgroup
        hostPath: {path: /sys/fs/cgroup, type: Directory}
      {{- if eq .mode "dra" }}
      - name: kubelet
        hostPath: {path: {{ $values.paths.kubelet }}, type: Directory}
      - name: nothing
        emptyDir: {}
      - name: plugins      # nothing but the place of the next one
        emptyDir: {}
      - name: driver
        hostPath: {path: {{ $values.paths.kubelet }}/plugins/{{ $driver }}, type: DirectoryOrCreate}
      - name: plugins-registry
        hostPath: {path: {{ $values.paths.kubelet }}/plugins_registry, type: DirectoryOrCreate}
      - name: cdi
        hostPath: {path: {{ $values.paths.cdi }}, type: DirectoryOrCreate}
      {{- end }}
      {{- if $values.policy }}
      # Projected: the directory of a configMap volume is one that anybody may write (0777), and the
      # plugin uses nothing that others could replace.
      - name: policy
        projected: {sources: [{configMap: {name: {{ include "fpga-plugin.name" $root }}-policy}}]}
      {{- end }}
      {{- with $values.keysConfigMap }}
      - name: keys
        projected: {sources: [{configMap: {name: {{ . }}}}]}
      {{- end }}
      {{- with $values.extraVolumes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end }}

{{- /* Of the plugin's container. Each privilege and its reason: docs/security.md. */ -}}
{{- define "fpga-plugin.securityContext" -}}
runAsUser: 0
runAsGroup: 0
readOnlyRootFilesystem: true
{{- if .observe }}
privileged: false
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- else }}
privileged: true # the device cgroup: nothing less lets it open /dev/dfl-fme.N
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.seLinuxOptions }}
seLinuxOptions: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
