{{/* Where the checkpoint, batches and compiled kernels lie. */}}
{{- define "moebius.checkModel" -}}
{{- $source := .Values.model.source -}}
{{- if and (eq $source.type "pvc") (not $source.pvc.claimName) -}}
{{- fail "model.source.type is pvc, but model.source.pvc.claimName is empty" -}}
{{- end -}}
{{- if and (eq $source.type "hostPath") (not $source.hostPath.path) -}}
{{- fail "model.source.type is hostPath, but model.source.hostPath.path is empty" -}}
{{- end -}}
{{- if and (eq $source.type "image") (not $source.image.reference) -}}
{{- fail "model.source.type is image, but model.source.image.reference is empty" -}}
{{- end -}}
{{- if eq $source.type "download" -}}
{{- include "moebius.checkDownload" . -}}
{{- end -}}
{{- end -}}

{{- define "moebius.checkDownload" -}}
{{- $download := .Values.model.source.download -}}
{{- if and (not $download.baseUrl) (not $download.repository) -}}
{{- fail "model.source.type is download, but model.source.download.repository and baseUrl are empty; one of them says where from" -}}
{{- end -}}
{{- if and $download.baseUrl $download.repository -}}
{{- fail "model.source.download.repository and baseUrl are both set; the files come from one place" -}}
{{- end -}}
{{- if and $download.revision (not $download.repository) -}}
{{- fail "model.source.download.revision is set, but model.source.download.repository is empty; revisions are the hub's" -}}
{{- end -}}
{{- if and $download.baseUrl (not $download.files) -}}
{{- fail "model.source.download.baseUrl is set, but model.source.download.files names no file; each needs its SHA-256" -}}
{{- end -}}
{{- if and $download.repository $download.files -}}
{{- fail "model.source.download.files is set, but the hub says which files model.source.download.repository has; leave it out" -}}
{{- end -}}
{{- if and $download.claimName $download.hostPath -}}
{{- fail "model.source.download.claimName and hostPath are both set; the files are kept in one place" -}}
{{- end -}}
{{- end -}}

{{/* A ReadWriteOnce claim is mounted by Pods of one node: of one engine, and of what goes where that is. */}}
{{- define "moebius.checkClaims" -}}
{{- $engines := eq .Values.autoscaling.type "none" | ternary (int .Values.replicas) (int .Values.autoscaling.maxReplicas) -}}
{{- $hosts := mul $engines (int .Values.engine.nodes) | int -}}
{{- $source := .Values.model.source.type -}}
{{- if include "moebius.modelOnOneNode" . -}}
{{- if or (gt $hosts 1) (eq .Values.experts.mode "remote") -}}
{{- $what := eq .Values.experts.mode "remote" | ternary "expert servers of experts.mode remote are on other nodes" (printf "engines may be on %d nodes" $hosts) -}}
{{- fail (printf "model.source.%s.accessMode is ReadWriteOnce, which one node mounts, but %s; allowed: a claim that many nodes mount (ReadOnlyMany, ReadWriteMany), or one engine" $source $what) -}}
{{- end -}}
{{- if and .Values.gateway.affinity (hasKey .Values.gateway.affinity "podAffinity") -}}
{{- fail (printf "gateway.affinity.podAffinity is set, but with model.source.%s.accessMode ReadWriteOnce the gateway has to be on the engine's node, which the chart asks for by it" $source) -}}
{{- end -}}
{{- end -}}
{{- $cache := .Values.engine.jitCache -}}
{{- if and (eq $cache.type "pvc") (eq $cache.accessMode "ReadWriteOnce") (gt $hosts 1) -}}
{{- fail (printf "engine.jitCache.accessMode is ReadWriteOnce, which one node mounts, but engines may be on %d nodes; allowed: ReadWriteMany, or type perPod, a claim for each" $hosts) -}}
{{- end -}}
{{- end -}}

{{- define "moebius.checkBatches" -}}
{{- $batches := .Values.gateway.batches -}}
{{- if and (eq $batches.type "pvc") (not $batches.claimName) -}}
{{- fail "gateway.batches.type is pvc, but gateway.batches.claimName is empty" -}}
{{- end -}}
{{- $inPod := .Values.gateway.inPod -}}
{{- $scaling := ternary .Values.autoscaling .Values.gateway.autoscaling $inPod -}}
{{- $replicas := int (ternary .Values.replicas .Values.gateway.replicas $inPod) -}}
{{- if ne $scaling.type "none" -}}
{{- $replicas = int $scaling.maxReplicas -}}
{{- end -}}
{{- $isShared := and (eq $batches.type "pvc") (eq $batches.accessMode "ReadWriteMany") -}}
{{- if and (ne $batches.type "none") (not $isShared) (gt $replicas 1) -}}
{{- fail (printf "gateway.batches.type is %s, which one gateway has for itself, but there may be %d: a client would not find its files at the others; use a claim with gateway.batches.accessMode ReadWriteMany" $batches.type $replicas) -}}
{{- end -}}
{{- end -}}
