{{/* Values that no cluster takes, or that do nothing, each refused with a sentence that names it. */}}
{{- define "moebius.checkValues" -}}
{{- include "moebius.checkNames" . -}}
{{- include "moebius.checkAddresses" . -}}
{{- include "moebius.checkUnused" . -}}
{{- include "moebius.checkExtras" . -}}
{{- end -}}

{{/* The value at a path such as `model.source.type`, as JSON; null where there is none. */}}
{{- define "moebius.valueAt" -}}
{{- $found := .root.Values -}}
{{- range splitList "." .path -}}
{{- $found = kindIs "map" $found | ternary (get (kindIs "map" $found | ternary $found dict) .) "" -}}
{{- end -}}
{{- toJson (dict "value" $found) -}}
{{- end -}}

{{- define "moebius.checkNames" -}}
{{- $root := . -}}
{{- $label := "[a-z0-9]([-a-z0-9]*[a-z0-9])?" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "moebius.fullname" .)) -}}
{{- fail (printf "the release's full name is %q, but Services need one of lower-case letters, digits and -, that begins with a letter; allowed: another release name, or fullnameOverride" (include "moebius.fullname" .)) -}}
{{- end -}}
{{- range $path := list "model.source.pvc.claimName" "model.source.download.claimName" "model.source.download.tokenSecret" "engine.jitCache.claimName" "engine.jitCache.storageClassName" "engine.runtimeClassName" "engine.priorityClassName" "experts.priorityClassName" "gateway.priorityClassName" "gateway.apiKeySecret" "gateway.batches.claimName" "priorityClassName" "schedulerName" "serviceAccount.name" "ingress.className" "ingress.tlsSecretName" "helmTest.clientSecretName" "route.inferencePool.endpointPicker.name" "dra.gpuDeviceClass" "dra.cpuDeviceClass" "tls.certManager.issuer.name" "tls.grpc.serverName" -}}
{{- $name := (include "moebius.valueAt" (dict "root" $root "path" $path) | fromJson).value -}}
{{- if and $name (not (regexMatch (printf "^%s(\\.%s)*$" $label $label) $name)) -}}
{{- fail (printf "%s is %q, which is no name of an object; allowed: lower-case letters, digits, - and ., with a letter or digit at both ends" $path $name) -}}
{{- end -}}
{{- end -}}
{{- range $path := list "route.hostnames" "ingress.hosts" "tls.certManager.hosts" -}}
{{- range $host := (include "moebius.valueAt" (dict "root" $root "path" $path) | fromJson).value -}}
{{- if not (regexMatch (printf "^(\\*\\.)?%s(\\.%s)*$" $label $label) $host) -}}
{{- fail (printf "%s has %q, which is no host name; allowed: names as m.example.com or *.example.com, without a scheme, port or path" $path $host) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $pull := .Values.image.pullSecrets -}}
{{- if not $pull.name -}}
{{- fail "image.pullSecrets has an entry whose name is empty; allowed: names of Secrets" -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[a-z0-9.-]+/[A-Za-z0-9._-]+$" .Values.engine.gpuResource) -}}
{{- fail (printf "engine.gpuResource is %q, which is no resource of a device plugin; allowed: DOMAIN/NAME, as nvidia.com/gpu" .Values.engine.gpuResource) -}}
{{- end -}}
{{- if or (has ".." (splitList "/" .Values.model.path)) (ne .Values.model.path (trim .Values.model.path)) -}}
{{- fail (printf "model.path is %q, which leaves its source or has spaces around it; allowed: a path below the source" .Values.model.path) -}}
{{- end -}}
{{- end -}}

{{- define "moebius.checkAddresses" -}}
{{- with .Values.autoscaling.prometheusAddress -}}
{{- if not (regexMatch "^https?://[^/ ]+(/[^ ]*)?$" .) -}}
{{- fail (printf "autoscaling.prometheusAddress is %q; allowed: a URL, as http://prometheus.monitoring.svc:9090" .) -}}
{{- end -}}
{{- end -}}
{{- with .Values.monitoring.otlpEndpoint -}}
{{- if not (regexMatch "^(https?://)?[^/: ]+(:[0-9]+)?/?$" .) -}}
{{- fail (printf "monitoring.otlpEndpoint is %q; allowed: HOST:PORT or a URL without a path, as http://collector:4317" .) -}}
{{- end -}}
{{- end -}}
{{- with .Values.model.source.download.baseUrl -}}
{{- if regexMatch "\\s|[?#]" . -}}
{{- fail (printf "model.source.download.baseUrl is %q; allowed: https://HOST/DIRECTORY, without spaces, ? and #" .) -}}
{{- end -}}
{{- end -}}
{{- with .Values.model.source.download.repository -}}
{{- if not (regexMatch "^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?$" .) -}}
{{- fail (printf "model.source.download.repository is %q; allowed: ORG/MODEL, of GGUF files ORG/MODEL:Q4_K_M" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What is set, but belongs to something that is off or of another kind. */}}
{{- define "moebius.checkUnused" -}}
{{- $root := . -}}
{{- range $path, $owner := dict
  "model.source.pvc.claimName" "model.source.type=pvc"
  "model.source.hostPath.path" "model.source.type=hostPath"
  "model.source.image.reference" "model.source.type=image"
  "model.source.download.repository" "model.source.type=download"
  "model.source.download.baseUrl" "model.source.type=download"
  "model.source.download.files" "model.source.type=download"
  "model.source.download.claimName" "model.source.type=download"
  "model.source.download.hostPath" "model.source.type=download"
  "model.source.download.tokenSecret" "model.source.type=download"
  "engine.jitCache.claimName" "engine.jitCache.type=pvc"
  "engine.jitCache.hostPath" "engine.jitCache.type=hostPath"
  "engine.jitCache.storageClassName" "engine.jitCache.type=perPod"
  "experts.weights.hostPath" "experts.weights.volume=hostPath"
  "gateway.batches.claimName" "gateway.batches.type=pvc"
  "route.parentRefs" "route.enabled=true"
  "route.hostnames" "route.enabled=true"
  "route.others" "route.enabled=true"
  "ingress.hosts" "ingress.enabled=true"
  "ingress.tlsSecretName" "ingress.enabled=true"
  "ingress.className" "ingress.enabled=true"
  "networkPolicy.from" "networkPolicy.enabled=true"
  "networkPolicy.metricsFrom" "networkPolicy.enabled=true"
  "networkPolicy.egress.enabled" "networkPolicy.enabled=true"
  "networkPolicy.egress.rules" "networkPolicy.egress.enabled=true"
  "networkPolicy.egress.dns" "networkPolicy.egress.enabled=true"
  "networkPolicy.egress.collector" "networkPolicy.egress.enabled=true"
  "networkPolicy.egress.download" "networkPolicy.egress.enabled=true"
  "tls.certManager.hosts" "tls.certManager.enabled=true" -}}
{{- $value := (include "moebius.valueAt" (dict "root" $root "path" $path) | fromJson).value -}}
{{- $switch := splitList "=" $owner -}}
{{- $state := (include "moebius.valueAt" (dict "root" $root "path" (first $switch)) | fromJson).value | toString -}}
{{- if and $value (ne $state (last $switch)) -}}
{{- fail (printf "%s is set, but %s is %s: it would do nothing; allowed: %s %s, or leave it out" $path (first $switch) $state (first $switch) (last $switch)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.experts.mode "none") .Values.experts.shares -}}
{{- fail "experts.shares is set, but experts.mode is none: there are no expert servers that could have shares" -}}
{{- end -}}
{{- if and .Values.gateway.inPod (ne (int .Values.gateway.replicas) 1) -}}
{{- fail (printf "gateway.replicas is %d, but with gateway.inPod there are as many gateways as engine Pods; scale replicas" (int .Values.gateway.replicas)) -}}
{{- end -}}
{{- end -}}

{{/* What users add to Pods must not meet what the chart has there. */}}
{{- define "moebius.checkExtras" -}}
{{- $volumes := list "config" "run" "tmp" "cache" "models" "shm" "weights" "grpc-tls" "http-tls" "http-clients" "api-keys" "batches" "hub-token" -}}
{{- $names := list -}}
{{- range .Values.extraVolumes -}}
{{- if has .name $volumes -}}
{{- fail (printf "extraVolumes has %q, which is a volume of the chart; allowed: another name" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range .Values.extraVolumeMounts -}}
{{- if not (has .name (concat $names $volumes)) -}}
{{- fail (printf "extraVolumeMounts has %q, which no volume is called; allowed: a name of extraVolumes" .name) -}}
{{- end -}}
{{- if has .mountPath (list "/" "/etc/moebius" "/models" "/run/moebius" "/tmp" "/cache" "/dev/shm" "/weights" "/batches") -}}
{{- fail (printf "extraVolumeMounts has mountPath %s, where the chart mounts a volume; allowed: another path" .mountPath) -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if has .name (list "HOME" "POD_NAME" "POD_NAMESPACE" "POD_INDEX" "GROUP_INDEX") -}}
{{- fail (printf "extraEnv has %s, which the chart sets; allowed: other variables" .name) -}}
{{- end -}}
{{- end -}}
{{- range $label, $_ := .Values.podLabels -}}
{{- if has $label (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") -}}
{{- fail (printf "podLabels has %s, by which the chart's Services find their Pods; allowed: other labels" $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
