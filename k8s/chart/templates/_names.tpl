{{- define "moebius.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "moebius.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "moebius.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "moebius.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "moebius.selector" -}}
app.kubernetes.io/name: {{ include "moebius.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "moebius.labels" -}}
{{ include "moebius.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "moebius.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "moebius.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "moebius.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- $kind := ternary "cuda" "cpu" (gt (int .Values.engine.gpus) 0) -}}
{{- printf "%s:%s" .Values.image.repository (default (printf "%s-%s" .Chart.AppVersion $kind) .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Where containers find the checkpoint. */}}
{{- define "moebius.modelPath" -}}
{{- if .Values.model.path -}}
{{- printf "/models/%s" (trimPrefix "/" .Values.model.path) -}}
{{- else -}}
/models
{{- end -}}
{{- end -}}

{{/* Ranks of all nodes of an engine. */}}
{{- define "moebius.ranks" -}}
{{- mul (include "moebius.tensorParallel" . | int) (int .Values.engine.pipelineParallel) -}}
{{- end -}}

{{- define "moebius.tensorParallel" -}}
{{- if .Values.engine.tensorParallel -}}
{{- int .Values.engine.tensorParallel -}}
{{- else -}}
{{- max 1 (div (mul (int .Values.engine.gpus) (int .Values.engine.nodes)) (int .Values.engine.pipelineParallel)) -}}
{{- end -}}
{{- end -}}

{{/* Expert servers that one engine works with. */}}
{{- define "moebius.shares" -}}
{{- if eq .Values.experts.mode "pod" -}}
{{- mul (int .Values.experts.servers) (int .Values.engine.nodes) -}}
{{- else if eq .Values.experts.mode "remote" -}}
{{- int .Values.experts.servers -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{- define "moebius.transport" -}}
{{- if and (eq .Values.experts.mode "pod") (eq (int .Values.engine.nodes) 1) -}}
mailbox
{{- else -}}
grpc
{{- end -}}
{{- end -}}

{{/*
The workload of engines. A LeaderWorkerSet makes a headless Service of its own name for its Pods' names (unless there is one
of that name, which then must not be another Service of ours), so it is called otherwise than all Services here.
*/}}
{{- define "moebius.engines" -}}
{{- include "moebius.fullname" . -}}
{{- if gt (int .Values.engine.nodes) 1 -}}-hosts{{- end -}}
{{- end -}}

{{/* Pods of engines that answer, for Prometheus. */}}
{{- define "moebius.enginePods" -}}
{{- printf "namespace=\"%s\", pod=~\"%s-[0-9]+\"" .Release.Namespace (include "moebius.engines" .) -}}
{{- end -}}

{{/*
host:port of all expert servers, by share; empty where a mailbox connects them. An argument of containers, where kubelets put
the namespace in: rendered once, the chart can be used in any.
*/}}
{{- define "moebius.expertAddresses" -}}
{{- $name := include "moebius.fullname" . -}}
{{- $addresses := list -}}
{{- if eq .Values.experts.mode "remote" -}}
{{- range $index := until (int .Values.experts.servers) -}}
{{- $addresses = append $addresses (printf "%s-experts-%d.%s-experts.$(POD_NAMESPACE).svc:50061" $name $index $name) -}}
{{- end -}}
{{- else if and (eq .Values.experts.mode "pod") (gt (int .Values.engine.nodes) 1) -}}
{{- range $host := until (int .Values.engine.nodes) -}}
{{- range $index := until (int $.Values.experts.servers) -}}
{{- $set := include "moebius.engines" $ -}}
{{- $pod := ternary (printf "%s-$(GROUP_INDEX)" $set) (printf "%s-$(GROUP_INDEX)-%d" $set $host) (eq $host 0) -}}
{{- $addresses = append $addresses (printf "%s.%s.$(POD_NAMESPACE).svc:%d" $pod $set (add 50061 $index)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}

{{/* The numbers of expert server .index: {cpus, memoryMiB, weightsMiB}. */}}
{{- define "moebius.server" -}}
{{- $own := dict -}}
{{- if gt (len .root.Values.experts.overrides) .index -}}
{{- $own = index .root.Values.experts.overrides .index -}}
{{- end -}}
{{- $all := pick .root.Values.experts "cpus" "memoryMiB" "weightsMiB" -}}
{{- mergeOverwrite (deepCopy $all) $own | toJson -}}
{{- end -}}

{{/* Packed experts of all servers of a Pod, MiB. */}}
{{- define "moebius.weightsMiB" -}}
{{- $sum := 0 -}}
{{- range $index := until (ternary 1 (int .Values.experts.servers) (eq .Values.experts.mode "remote")) -}}
{{- $sum = add $sum (int (include "moebius.server" (dict "root" $ "index" $index) | fromJson).weightsMiB) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}
