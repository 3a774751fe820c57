{{/* The configuration that all processes of a release read; a container adds flags for its own ones. */}}
{{- define "moebius.config" -}}
{{- $values := .Values -}}
{{- $tree := dict -}}
{{- $_ := set $tree "model" (dict "model" (include "moebius.modelPath" .)) -}}
{{- /* As long as the Pod: a container that is started again finds files that have changed. */ -}}
{{- $_ := set $tree.model "identity_file" "/run/moebius/identity.json" -}}
{{- $_ := set $tree.model "sleep_file" "/run/moebius/asleep.json" -}}
{{- if .Values.model.name -}}
{{- $_ := set $tree.model "served_model_name" .Values.model.name -}}
{{- end -}}
{{- $gateway := dict "host" "0.0.0.0" "port" 8000 "engine_address" "127.0.0.1:50051" -}}
{{- if not .Values.gateway.inPod -}}
{{- /* Its argument --engines names them. */ -}}
{{- $gateway = dict "host" "0.0.0.0" "port" 8000 -}}
{{- end -}}
{{- if .Values.gateway.apiKeySecret -}}
{{- $_ := set $gateway "api_key_file" "/etc/moebius-keys/keys" -}}
{{- end -}}
{{- if ne .Values.gateway.batches.type "none" -}}
{{- $_ := set $gateway "batch_dir" "/batches" -}}
{{- end -}}
{{- if ne (include "moebius.gatewayMetrics" .) "http" -}}
{{- $_ := set $gateway "gateway_metrics_port" 9400 -}}
{{- end -}}
{{- $_ := set $tree "gateway" $gateway -}}
{{- with include "moebius.security" . | fromYaml -}}
{{- $_ := set $tree "security" . -}}
{{- end -}}
{{- $gpu := dict "gpu_address" "0.0.0.0:50051" "gpu_metrics_port" 9401 "jit_cache_dir" "/cache" -}}
{{- $_ := set $gpu "device" (ternary "cuda" "cpu" (gt (int .Values.engine.gpus) 0)) -}}
{{- $_ := set $tree "gpu" $gpu -}}
{{- $shares := include "moebius.shares" . | int -}}
{{- $experts := dict "expert_transport" (include "moebius.transport" .) "expert_split" .Values.experts.split -}}
{{- if eq .Values.experts.mode "none" -}}
{{- $_ := set $tree "placement" (dict "gpu_experts_ratio" 1.0) -}}
{{- else -}}
{{- $_ := set $experts "expert_servers" $shares -}}
{{- $_ := set $experts "split_count" $shares -}}
{{- $_ := set $experts "numa_node" (ternary "cpuset" "auto" (eq .Values.experts.numa "kubelet")) -}}
{{- with .Values.experts.shares -}}
{{- $_ := set $experts "split_shares" . -}}
{{- end -}}
{{- if ne .Values.experts.weights.volume "none" -}}
{{- $_ := set $experts "expert_weights_dir" "/weights" -}}
{{- end -}}
{{- if eq (include "moebius.transport" .) "mailbox" -}}
{{- $_ := set $experts "mailbox" "moebius" -}}
{{- end -}}
{{- end -}}
{{- $_ := set $tree "experts" $experts -}}
{{- $parallel := dict "tensor_parallel_size" (include "moebius.tensorParallel" . | int) -}}
{{- $_ := set $parallel "pipeline_parallel_size" (int .Values.engine.pipelineParallel) -}}
{{- $_ := set $parallel "rank_hosts" (int .Values.engine.nodes) -}}
{{- $_ := set $tree "parallel" $parallel -}}
{{- $supervisor := dict "state_dir" "/run/moebius" "ready_timeout_s" (float64 .Values.startupSeconds) -}}
{{- $_ := set $supervisor "stop_timeout_s" (float64 .Values.drainSeconds) -}}
{{- $_ := set $tree "supervisor" $supervisor -}}
{{- $telemetry := dict "log_format" "json" "metrics_host" "0.0.0.0" "otlp_endpoint" .Values.monitoring.otlpEndpoint -}}
{{- $_ := set $tree "telemetry" $telemetry -}}
{{- range $section, $settings := .Values.config -}}
{{- range $key, $value := $settings -}}
{{- $isArgument := has (printf "%s.%s" $section $key) (list "gateway.engines" "experts.expert_addresses") -}}
{{- if or $isArgument (hasKey (get $tree $section | default dict) $key) -}}
{{- if not (has $key (list "log_format" "otlp_endpoint" "jit_cache_dir")) -}}
{{- fail (printf "config.%s.%s is decided by the chart from its other values; leave it out" $section $key) -}}
{{- end -}}
{{- end -}}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) -}}
{{- $value = int64 $value -}}
{{- end -}}
{{- $_ := set $tree $section (mergeOverwrite (get $tree $section | default dict) (dict $key $value)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $tree -}}
{{- end -}}
