{{/* One expert server: .root, .index in its Pod, .share (an argument), .sidecar. */}}
{{- define "moebius.expertContainer" -}}
{{- $root := .root -}}
{{- $own := include "moebius.server" (dict "root" $root "index" .index) | fromJson -}}
{{- $port := add 50061 .index -}}
- name: expert-{{ .index }}
  {{- include "moebius.commonContainer" $root | nindent 2 }}
  {{- if .sidecar }}
  restartPolicy: Always
  {{- end }}
  {{- if kindIs "string" .share }}
  command: ["/bin/sh", "-c"]
  args:
    - >-
      exec moebius expert --config /etc/moebius/moebius.yaml --split-index {{ .share }}
      --expert-address 0.0.0.0:{{ $port }} --expert-metrics-port {{ add 9411 .index }}
  {{- else }}
  args:
    - expert
    - --config
    - /etc/moebius/moebius.yaml
    - --split-index
    - {{ .share | quote }}
    - --expert-address
    - 0.0.0.0:{{ $port }}
    - --expert-metrics-port
    - {{ add 9411 .index | quote }}
  {{- end }}
  env:
    {{- include "moebius.env" $root | nindent 4 }}
    {{- with .env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: expert-{{ .index }}
      containerPort: {{ $port }}
    - name: metrics-e{{ .index }}
      containerPort: {{ add 9411 .index }}
  # It answers at once; readiness shows that its weights are loaded, so that no server waits for another one's load.
  # Probes ask the operators' port: a kubelet's gRPC probe speaks no TLS.
  startupProbe:
    httpGet:
      path: /health
      port: metrics-e{{ .index }}
    periodSeconds: 2
    timeoutSeconds: 2
    failureThreshold: 60
  readinessProbe:
    httpGet:
      path: /ready
      port: metrics-e{{ .index }}
    periodSeconds: 5
    timeoutSeconds: 5
  # 200 while it loads; 503 only when its serve loop stands still.
  livenessProbe:
    httpGet:
      path: /health
      port: metrics-e{{ .index }}
    periodSeconds: 20
    timeoutSeconds: 10
    failureThreshold: 6
  {{- $extra := dict }}
  {{- if eq $root.Values.experts.weights.volume "hugepages-2Mi" }}
  {{- $_ := set $extra "hugepages-2Mi" (printf "%dMi" (int $own.weightsMiB)) }}
  {{- end }}
  {{- $claims := list }}
  {{- if and $root.Values.dra.enabled .sidecar }}
  {{- $claims = list (printf "cpus-%d" .index) }}
  {{- end }}
  {{- include "moebius.resources" (dict "cpus" $own.cpus "memoryMiB" $own.memoryMiB "extra" $extra "claims" $claims) | nindent 2 }}
  volumeMounts:
    {{- include "moebius.mounts" $root | nindent 4 }}
    {{- include "moebius.grpcMount" $root | nindent 4 }}
    {{- include "moebius.memoryMounts" $root | nindent 4 }}
{{- end -}}

{{/* The port of a gateway's metrics and probes. Endpoint pickers of an InferencePool read metrics where Pods serve. */}}
{{- define "moebius.gatewayMetrics" -}}
{{- ternary "http" "metrics-gw" .Values.route.inferencePool.enabled -}}
{{- end -}}

{{- define "moebius.gatewayContainer" -}}
{{- $metrics := include "moebius.gatewayMetrics" . -}}
- name: gateway
  {{- include "moebius.commonContainer" . | nindent 2 }}
  args:
    - gateway
    - --config
    - /etc/moebius/moebius.yaml
    {{- if not .Values.gateway.inPod }}
    # The name of all ready engines; the gateway chooses among them.
    - --engines
    - {{ include "moebius.fullname" . }}-engine.$(POD_NAMESPACE).svc:50051
    {{- end }}
  env:
    {{- include "moebius.env" . | nindent 4 }}
  ports:
    - name: http
      containerPort: 8000
    {{- if ne $metrics "http" }}
    - name: {{ $metrics }}
      containerPort: 9400
    {{- end }}
  readinessProbe:
    httpGet:
      path: /ready
      port: {{ $metrics }}
    periodSeconds: 5
    timeoutSeconds: 5
  livenessProbe:
    httpGet:
      path: /health
      port: {{ $metrics }}
    initialDelaySeconds: 30
    periodSeconds: 20
    timeoutSeconds: 10
    failureThreshold: 6
  # Waits until load balancers have removed it; then it drains.
  lifecycle:
    preStop:
      sleep:
        seconds: 5
  {{- include "moebius.resources" (dict "cpus" .Values.gateway.cpus "memoryMiB" .Values.gateway.memoryMiB) | nindent 2 }}
  volumeMounts:
    {{- include "moebius.mounts" . | nindent 4 }}
    {{- include "moebius.grpcMount" . | nindent 4 }}
    {{- include "moebius.httpMounts" . | nindent 4 }}
    {{- if .Values.gateway.apiKeySecret }}
    - name: api-keys
      mountPath: /etc/moebius-keys
      readOnly: true
    {{- end }}
    {{- if ne .Values.gateway.batches.type "none" }}
    - name: batches
      mountPath: /batches
    {{- end }}
{{- end -}}

{{- define "moebius.gatewayVolumes" -}}
{{ include "moebius.httpVolumes" . }}
{{- if .Values.gateway.apiKeySecret }}
- name: api-keys
  secret:
    secretName: {{ .Values.gateway.apiKeySecret }}
{{- end }}
{{- with .Values.gateway.batches }}
{{- if eq .type "pvc" }}
- name: batches
  persistentVolumeClaim:
    claimName: {{ .claimName }}
{{- else if eq .type "emptyDir" }}
- name: batches
  emptyDir: {}
{{- end }}
{{- end }}
{{- end -}}

{{/* The engine: .root, .role: single, leader (of several nodes) or worker. */}}
{{- define "moebius.engineContainer" -}}
{{- $root := .root -}}
{{- $perPod := div (include "moebius.ranks" $root | int) (int $root.Values.engine.nodes) -}}
- name: engine
  {{- include "moebius.commonContainer" $root | nindent 2 }}
  args:
    - {{ ternary "gpu" "ranks" (and (eq .role "single") (eq (int $perPod) 1)) }}
    - --config
    - /etc/moebius/moebius.yaml
    {{- if ne .role "single" }}
    - --host-index
    - $(LWS_WORKER_INDEX)
    - --rank-address
    - $(LWS_LEADER_ADDRESS):29500
    {{- end }}
    {{- with include "moebius.expertAddresses" $root }}
    - --expert-addresses
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "moebius.env" $root | nindent 4 }}
    {{- if ne .role "single" }}
    - name: GROUP_INDEX
      valueFrom:
        fieldRef:
          fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/group-index']
    {{- end }}
  ports:
    {{- if ne .role "worker" }}
    - name: engine
      containerPort: 50051
    {{- end }}
    - name: metrics
      containerPort: 9401
  # Serving means: the model is loaded, expert servers are ready and agree with the checkpoint, and a step has run; of a
  # worker, whose first rank answers, that its part is loaded and takes steps.
  startupProbe:
    httpGet:
      path: /ready
      port: metrics
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: {{ div (add (int $root.Values.startupSeconds) 9) 10 }}
  readinessProbe:
    httpGet:
      path: /ready
      port: metrics
    periodSeconds: 5
    timeoutSeconds: 5
  # 200 also while it loads, drains or waits for an expert server; 503 when it has ended or does not answer itself.
  livenessProbe:
    httpGet:
      path: /health
      port: metrics
    periodSeconds: 20
    timeoutSeconds: 10
    failureThreshold: 6
  {{- $extra := dict }}
  {{- $claims := list }}
  {{- if gt (int $root.Values.engine.gpus) 0 }}
  {{- if $root.Values.dra.enabled }}
  {{- $claims = list "gpus" }}
  {{- else }}
  {{- $_ := set $extra $root.Values.engine.gpuResource (toString $root.Values.engine.gpus) }}
  {{- end }}
  {{- end }}
  {{- include "moebius.resources" (dict "cpus" $root.Values.engine.cpus "memoryMiB" $root.Values.engine.memoryMiB "extra" $extra "claims" $claims) | nindent 2 }}
  volumeMounts:
    {{- include "moebius.mounts" $root | nindent 4 }}
    {{- include "moebius.grpcMount" $root | nindent 4 }}
    {{- include "moebius.memoryMounts" $root | nindent 4 }}
{{- end -}}

{{/* Metadata and spec of an engine's Pod; the rest as `moebius.engineContainer`. */}}
{{- define "moebius.enginePod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
metadata:
  labels:
    {{- include "moebius.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ ternary "engine-worker" "engine" (eq $role "worker") }}
    {{- with $root.Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "moebius.config" $root | sha256sum }}
    {{- with $root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "moebius.podBase" $root | nindent 2 }}
  {{- include "moebius.scheduling" (dict "root" $root "own" $root.Values.engine "component" (ternary "engine-worker" "engine" (eq $role "worker"))) | nindent 2 }}
  {{- include "moebius.affinity" (dict "own" $root.Values.engine "root" $root "component" (ternary "engine-worker" "engine" (eq $role "worker")) "apart" true) | nindent 2 }}
  {{- with $root.Values.engine.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add (int $root.Values.drainSeconds) 30 }}
  initContainers:
    {{- include "moebius.download" $root | nindent 4 }}
    {{- include "moebius.preflight" (dict "root" $root "role" "engine") | nindent 4 }}
    {{- if eq $root.Values.experts.mode "pod" }}
    {{- range $index := until (int $root.Values.experts.servers) }}
    {{- $share := $index }}
    {{- if ne $role "single" }}
    {{- $share = printf "$((LWS_WORKER_INDEX * %d + %d))" (int $root.Values.experts.servers) $index }}
    {{- end }}
    {{- include "moebius.expertContainer" (dict "root" $root "index" $index "share" $share "sidecar" true) | nindent 4 }}
    {{- end }}
    {{- end }}
  containers:
    {{- include "moebius.engineContainer" (dict "root" $root "role" $role) | nindent 4 }}
    {{- if and $root.Values.gateway.inPod (ne $role "worker") }}
    {{- include "moebius.gatewayContainer" $root | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "moebius.volumes" $root | nindent 4 }}
    {{- include "moebius.grpcVolume" (dict "root" $root "component" "engine") | nindent 4 }}
    {{- include "moebius.memoryVolumes" $root | nindent 4 }}
    {{- include "moebius.downloadVolumes" $root | nindent 4 }}
    {{- if and $root.Values.gateway.inPod (ne $role "worker") }}
    {{- include "moebius.gatewayVolumes" $root | nindent 4 }}
    {{- end }}
  {{- if $root.Values.dra.enabled }}
  resourceClaims:
    {{- if gt (int $root.Values.engine.gpus) 0 }}
    - name: gpus
      resourceClaimTemplateName: {{ include "moebius.fullname" $root }}-gpus
    {{- end }}
    {{- if eq $root.Values.experts.mode "pod" }}
    {{- range $index := until (int $root.Values.experts.servers) }}
    - name: cpus-{{ $index }}
      resourceClaimTemplateName: {{ include "moebius.fullname" $root }}-cpus-{{ $index }}
    {{- end }}
    {{- end }}
  {{- end }}
{{- end -}}
