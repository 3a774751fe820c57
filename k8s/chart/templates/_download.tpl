{{/*
Where files of a checkpoint come from HTTPS: with a claim one Job fetches them, and Pods wait for it; else each Pod fetches
them, where the node or the Pod keeps them.
*/}}
{{- define "moebius.hasDownloadJob" -}}
{{- if and (eq .Values.model.source.type "download") .Values.model.source.download.claimName -}}true{{- end -}}
{{- end -}}

{{/* The directory of the files; model.path may name a GGUF file in it. */}}
{{- define "moebius.downloadDirectory" -}}
{{- $path := include "moebius.modelPath" . -}}
{{- if hasSuffix ".gguf" $path }}{{ dir $path }}{{ else }}{{ $path }}{{ end -}}
{{- end -}}

{{/* What is downloaded, as arguments of `moebius models download`. */}}
{{- define "moebius.downloadArguments" -}}
{{- $download := .Values.model.source.download -}}
- models
- download
- {{ include "moebius.downloadDirectory" . }}
{{- if $download.repository }}
- --hub
- {{ $download.repository | quote }}
{{- with $download.revision }}
- --revision
- {{ . | quote }}
{{- end }}
{{- else }}
- --base-url
- {{ $download.baseUrl | quote }}
- --checksums
- /etc/moebius/checksums.txt
{{- end }}
{{- end -}}

{{/* The container that fetches: of the Job, or an init container of every Pod. Small: no core of its own. */}}
{{- define "moebius.fetchContainer" -}}
{{- $token := .Values.model.source.download.tokenSecret -}}
- name: download
  {{- include "moebius.commonContainer" . | nindent 2 }}
  args:
    {{- include "moebius.downloadArguments" . | nindent 4 }}
    {{- if $token }}
    - --token-file
    - /etc/moebius-hub/token
    {{- end }}
  env:
    {{- include "moebius.env" . | nindent 4 }}
  {{- include "moebius.resources" (dict "cpus" "500m" "memoryMiB" 512) | nindent 2 }}
  volumeMounts:
    - name: config
      mountPath: /etc/moebius
      readOnly: true
    - name: models
      mountPath: /models
    - name: tmp
      mountPath: /tmp
    {{- if $token }}
    - name: hub-token
      mountPath: /etc/moebius-hub
      readOnly: true
    {{- end }}
{{- end -}}

{{/* An init container of every Pod, which ends when the checkpoint is there. */}}
{{- define "moebius.download" -}}
{{- if include "moebius.hasDownloadJob" . -}}
- name: download
  {{- include "moebius.commonContainer" . | nindent 2 }}
  args:
    {{- include "moebius.downloadArguments" . | nindent 4 }}
    - --wait
  env:
    {{- include "moebius.env" . | nindent 4 }}
  {{- include "moebius.resources" (dict "cpus" "500m" "memoryMiB" 512) | nindent 2 }}
  volumeMounts:
    - name: config
      mountPath: /etc/moebius
      readOnly: true
    - name: models
      mountPath: /models
      readOnly: true
    - name: tmp
      mountPath: /tmp
{{- else if eq .Values.model.source.type "download" -}}
{{- include "moebius.fetchContainer" . -}}
{{- end -}}
{{- end -}}

{{- define "moebius.tokenVolume" -}}
{{- with .Values.model.source.download.tokenSecret -}}
- name: hub-token
  secret:
    secretName: {{ . }}
{{- end -}}
{{- end -}}

{{/* Of Pods that fetch by themselves. */}}
{{- define "moebius.downloadVolumes" -}}
{{- if and (eq .Values.model.source.type "download") (not (include "moebius.hasDownloadJob" .)) -}}
{{- include "moebius.tokenVolume" . -}}
{{- end -}}
{{- end -}}

{{/* "true": the model's claim is mounted by Pods of one node only. */}}
{{- define "moebius.modelOnOneNode" -}}
{{- $source := .Values.model.source -}}
{{- $claim := dict "pvc" $source.pvc "download" $source.download -}}
{{- with get $claim $source.type -}}
{{- if and .claimName (eq .accessMode "ReadWriteOnce") -}}true{{- end -}}
{{- end -}}
{{- end -}}
