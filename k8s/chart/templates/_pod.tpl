{{/* Common to all Pods: identity, security, where they may run. */}}
{{- define "moebius.podBase" -}}
serviceAccountName: {{ include "moebius.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* .own as of moebius.scheduling. */}}
{{- define "moebius.priority" -}}
{{- with (kindIs "invalid" .own.priorityClassName | ternary .root.Values.priorityClassName .own.priorityClassName) }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* .own as of moebius.scheduling, .component; a constraint without a selector counts the component's Pods. */}}
{{- define "moebius.topologySpread" -}}
{{- $match := include "moebius.selector" .root | fromYaml -}}
{{- $_ := set $match "app.kubernetes.io/component" .component -}}
{{- with (kindIs "invalid" .own.topologySpreadConstraints | ternary .root.Values.topologySpreadConstraints .own.topologySpreadConstraints) }}
topologySpreadConstraints:
  {{- range . }}
  {{- $constraint := deepCopy . }}
  {{- if not (hasKey $constraint "labelSelector") }}
  {{- $_ := set $constraint "labelSelector" (dict "matchLabels" $match) }}
  {{- end }}
  - {{- toYaml $constraint | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* .own: values of the component, which override those for all where they are set; .root, .component. */}}
{{- define "moebius.scheduling" -}}
{{- $all := .root.Values -}}
{{- with $all.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- include "moebius.priority" . }}
{{- include "moebius.topologySpread" . }}
{{- with (kindIs "invalid" .own.nodeSelector | ternary $all.nodeSelector .own.nodeSelector) }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (kindIs "invalid" .own.tolerations | ternary $all.tolerations .own.tolerations) }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
affinity: what the user gave (.own as above), nodes by features, and no two Pods of a component on one node. Features are those
that compute on CPUs: a Pod with GPUs whose expert servers are elsewhere needs none. With .together the Pod goes where the
engine is.
*/}}
{{- define "moebius.affinity" -}}
{{- $root := .root -}}
{{- $affinity := deepCopy (kindIs "invalid" .own.affinity | ternary $root.Values.affinity .own.affinity) -}}
{{- $labels := list -}}
{{- if and (ne .component "gateway") (or (eq .component "experts") (eq $root.Values.experts.mode "pod") (eq (int $root.Values.engine.gpus) 0)) -}}
{{- if $root.Values.node.features.amx -}}
{{- $labels = append $labels "feature.node.kubernetes.io/cpu-cpuid.AMXINT8" -}}
{{- $labels = append $labels "feature.node.kubernetes.io/cpu-cpuid.AMXBF16" -}}
{{- end -}}
{{- if $root.Values.node.features.avx512 -}}
{{- $labels = append $labels "feature.node.kubernetes.io/cpu-cpuid.AVX512F" -}}
{{- $labels = append $labels "feature.node.kubernetes.io/cpu-cpuid.AVX512BW" -}}
{{- end -}}
{{- if $root.Values.node.features.numa -}}
{{- $labels = append $labels "feature.node.kubernetes.io/memory-numa" -}}
{{- end -}}
{{- end -}}
{{- if and $labels (not (hasKey $affinity "nodeAffinity")) -}}
{{- $expressions := list -}}
{{- range $label := $labels -}}
{{- $expressions = append $expressions (dict "key" $label "operator" "In" "values" (list "true")) -}}
{{- end -}}
{{- $terms := dict "nodeSelectorTerms" (list (dict "matchExpressions" $expressions)) -}}
{{- $_ := set $affinity "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $terms) -}}
{{- end -}}
{{- if and .apart $root.Values.spread (not (hasKey $affinity "podAntiAffinity")) -}}
{{- $match := include "moebius.selector" $root | fromYaml -}}
{{- $_ := set $match "app.kubernetes.io/component" .component -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $match) -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- if and .together (not (hasKey $affinity "podAffinity")) -}}
{{- $match := include "moebius.selector" $root | fromYaml -}}
{{- $_ := set $match "app.kubernetes.io/component" "engine" -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $match) -}}
{{- $_ := set $affinity "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- if $affinity -}}
affinity:
  {{- toYaml $affinity | nindent 2 }}
{{- end -}}
{{- end -}}

{{- define "moebius.commonContainer" -}}
image: {{ include "moebius.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
{{- end -}}

{{/* Equal requests and limits, integers of CPUs: the Pod is of class Guaranteed, and gets cores of its own. */}}
{{- define "moebius.resources" -}}
{{- $amounts := dict "cpu" (toString .cpus) "memory" (printf "%dMi" (int .memoryMiB)) -}}
{{- range $name, $amount := .extra -}}
{{- $_ := set $amounts $name $amount -}}
{{- end -}}
resources:
  requests:
    {{- toYaml $amounts | nindent 4 }}
  limits:
    {{- toYaml $amounts | nindent 4 }}
  {{- with .claims }}
  claims:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
{{- end -}}

{{/* HOME is where measured kernel times are kept. */}}
{{- define "moebius.env" -}}
- name: HOME
  value: /cache
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "moebius.mounts" -}}
- name: config
  mountPath: /etc/moebius
  readOnly: true
- name: models
  mountPath: /models
  readOnly: true
- name: run
  mountPath: /run/moebius
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "moebius.memoryMounts" -}}
- name: shm
  mountPath: /dev/shm
{{- if and (ne .Values.experts.mode "none") (ne .Values.experts.weights.volume "none") }}
- name: weights
  mountPath: /weights
  {{- if eq .Values.experts.weights.volume "hostPath" }}
  subPathExpr: $(POD_NAME)
  {{- end }}
{{- end }}
{{- end -}}

{{/* "true": compiled kernels are kept for one engine, so that other Pods have none to read. */}}
{{- define "moebius.cacheOfOnePod" -}}
{{- $cache := .Values.engine.jitCache -}}
{{- if or (eq $cache.type "perPod") (and (eq $cache.type "pvc") (eq $cache.accessMode "ReadWriteOnce")) -}}true{{- end -}}
{{- end -}}

{{- define "moebius.volumeClaimTemplates" -}}
{{- if eq .Values.engine.jitCache.type "perPod" -}}
volumeClaimTemplates:
  - apiVersion: v1
    kind: PersistentVolumeClaim
    metadata:
      name: cache
      labels:
        {{- include "moebius.selector" . | nindent 8 }}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .Values.engine.jitCache.storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .Values.engine.jitCache.sizeMiB }}Mi
{{- end -}}
{{- end -}}

{{/* With .ownCache compiled kernels and measured times go with the Pod. */}}
{{- define "moebius.volumes" -}}
- name: config
  configMap:
    name: {{ include "moebius.fullname" . }}
- name: run
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- if or .ownCache (ne .Values.engine.jitCache.type "perPod") }}
{{- with .Values.engine.jitCache }}
- name: cache
  {{- if $.ownCache }}
  emptyDir: {}
  {{- else if eq .type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .claimName }}
  {{- else if eq .type "hostPath" }}
  hostPath:
    path: {{ .hostPath }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- end }}
{{ include "moebius.modelVolume" . }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "moebius.modelVolume" -}}
{{- $source := .Values.model.source -}}
- name: models
  {{- if eq $source.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $source.pvc.claimName }}
    readOnly: true
  {{- else if eq $source.type "hostPath" }}
  hostPath:
    path: {{ $source.hostPath.path }}
    type: Directory
  {{- else if eq $source.type "image" }}
  image:
    reference: {{ $source.image.reference }}
    pullPolicy: {{ $source.image.pullPolicy }}
  {{- else if $source.download.claimName }}
  persistentVolumeClaim:
    claimName: {{ $source.download.claimName }}
    {{- if not .writes }}
    readOnly: true
    {{- end }}
  {{- else if $source.download.hostPath }}
  hostPath:
    path: {{ $source.download.hostPath }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end -}}

{{- define "moebius.memoryVolumes" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shmMiB }}Mi
{{- if ne .Values.experts.mode "none" }}
{{- if eq .Values.experts.weights.volume "memory" }}
- name: weights
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "moebius.weightsMiB" . }}Mi
{{- else if eq .Values.experts.weights.volume "hugepages-2Mi" }}
- name: weights
  emptyDir:
    medium: HugePages-2Mi
    sizeLimit: {{ include "moebius.weightsMiB" . }}Mi
{{- else if eq .Values.experts.weights.volume "hostPath" }}
- name: weights
  hostPath:
    path: {{ .Values.experts.weights.hostPath }}
    type: Directory
{{- end }}
{{- end }}
{{- end -}}

{{/* .root, .role: engine or expert. */}}
{{- define "moebius.preflight" -}}
{{- if .root.Values.preflight.enabled -}}
- name: preflight
  {{- include "moebius.commonContainer" .root | nindent 2 }}
  args:
    - doctor
    - --kubernetes
    - --role
    - {{ .role }}
    - --config
    - /etc/moebius/moebius.yaml
    {{- if .root.Values.preflight.strict }}
    - --strict
    {{- end }}
    {{- if eq .role "engine" }}
    - --expect-gpus
    - {{ ternary 0 .root.Values.engine.gpus .root.Values.dra.enabled | quote }}
    {{- if eq .root.Values.experts.mode "remote" }}
    - --expert-addresses
    - {{ include "moebius.expertAddresses" .root | quote }}
    {{- end }}
    {{- end }}
    {{- if ne .root.Values.experts.mode "none" }}
    - --expect-weights-mib
    - {{ include "moebius.weightsMiB" .root | quote }}
    {{- end }}
  env:
    {{- include "moebius.env" .root | nindent 4 }}
  {{- $extra := dict }}
  {{- if and (eq .role "engine") (gt (int .root.Values.engine.gpus) 0) (not .root.Values.dra.enabled) }}
  {{- $_ := set $extra .root.Values.engine.gpuResource (toString .root.Values.engine.gpus) }}
  {{- end }}
  {{- include "moebius.resources" (dict "cpus" "500m" "memoryMiB" 512 "extra" $extra) | nindent 2 }}
  volumeMounts:
    {{- include "moebius.mounts" .root | nindent 4 }}
    {{- include "moebius.grpcMount" .root | nindent 4 }}
    {{- include "moebius.memoryMounts" .root | nindent 4 }}
{{- end -}}
{{- end -}}
