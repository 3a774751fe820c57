{{/* Certificates. The files of gRPC have the same paths in every Pod, whichever Secret they are of. */}}
{{- define "moebius.security" -}}
{{- $tls := .Values.tls -}}
{{- $security := dict -}}
{{- if ne $tls.grpc.mode "none" -}}
{{- $_ := set $security "grpc_tls" $tls.grpc.mode -}}
{{- $_ := set $security "grpc_cert_file" "/etc/moebius-tls/grpc/tls.crt" -}}
{{- $_ := set $security "grpc_key_file" "/etc/moebius-tls/grpc/tls.key" -}}
{{- $_ := set $security "grpc_ca_file" "/etc/moebius-tls/grpc/ca.crt" -}}
{{- with $tls.grpc.serverName -}}
{{- $_ := set $security "grpc_server_name" . -}}
{{- end -}}
{{- end -}}
{{- if $tls.http.secretName -}}
{{- $_ := set $security "http_cert_file" "/etc/moebius-tls/http/tls.crt" -}}
{{- $_ := set $security "http_key_file" "/etc/moebius-tls/http/tls.key" -}}
{{- if $tls.http.clientCaSecretName -}}
{{- $_ := set $security "http_client_ca_file" "/etc/moebius-tls/clients/ca.crt" -}}
{{- end -}}
{{- end -}}
{{- if $security -}}
{{- toYaml $security -}}
{{- end -}}
{{- end -}}

{{/* .root, .component: gateway, engine or experts; the Secret of its gRPC. */}}
{{- define "moebius.grpcSecret" -}}
{{- $grpc := .root.Values.tls.grpc -}}
{{- $own := dict "gateway" $grpc.gatewaySecretName "experts" $grpc.expertsSecretName -}}
{{- get $own .component | default $grpc.secretName -}}
{{- end -}}

{{- define "moebius.grpcMount" -}}
{{- if ne .Values.tls.grpc.mode "none" -}}
- name: grpc-tls
  mountPath: /etc/moebius-tls/grpc
  readOnly: true
{{- end -}}
{{- end -}}

{{/* As moebius.grpcSecret. Readable only by the group that fsGroup names. */}}
{{- define "moebius.grpcVolume" -}}
{{- if ne .root.Values.tls.grpc.mode "none" -}}
- name: grpc-tls
  secret:
    secretName: {{ include "moebius.grpcSecret" . }}
    defaultMode: 0440
{{- end -}}
{{- end -}}

{{- define "moebius.httpMounts" -}}
{{- if .Values.tls.http.secretName -}}
- name: http-tls
  mountPath: /etc/moebius-tls/http
  readOnly: true
{{- if .Values.tls.http.clientCaSecretName }}
- name: http-clients
  mountPath: /etc/moebius-tls/clients
  readOnly: true
{{- end }}
{{- end -}}
{{- end -}}

{{- define "moebius.httpVolumes" -}}
{{- if .Values.tls.http.secretName -}}
- name: http-tls
  secret:
    secretName: {{ .Values.tls.http.secretName }}
    defaultMode: 0440
{{- if .Values.tls.http.clientCaSecretName }}
- name: http-clients
  secret:
    secretName: {{ .Values.tls.http.clientCaSecretName }}
    defaultMode: 0440
    # The key of clients' CA, if the Secret has one, is not needed here.
    items:
      - {key: ca.crt, path: ca.crt}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Names that a component is reached by, as a YAML list. */}}
{{- define "moebius.tlsNames" -}}
{{- $name := include "moebius.fullname" .root -}}
{{- $at := .root.Release.Namespace -}}
{{- $names := list "localhost" -}}
{{- with .root.Values.tls.grpc.serverName -}}
{{- $names = append $names . -}}
{{- end -}}
{{- if eq .component "gateway" -}}
{{- $names = append $names (printf "%s-gateway" $name) -}}
{{- else if eq .component "http" -}}
{{- $names = concat (list $name (printf "%s.%s" $name $at) (printf "%s.%s.svc" $name $at) "localhost") .root.Values.tls.certManager.hosts -}}
{{- else if eq .component "experts" -}}
{{- $names = append $names (printf "*.%s-experts.%s.svc" $name $at) -}}
{{- else -}}
{{- $names = concat $names (list (printf "%s-engine.%s.svc" $name $at)) -}}
{{- if gt (int .root.Values.engine.nodes) 1 -}}
{{- $names = concat $names (list (printf "*.%s.%s" (include "moebius.engines" .root) $at) (printf "*.%s.%s.svc" (include "moebius.engines" .root) $at)) -}}
{{- end -}}
{{- end -}}
{{- $names | uniq | toYaml -}}
{{- end -}}
