{{/* Combinations that could not run, each refused with a sentence. Values by themselves are checked by the schema. */}}
{{- define "moebius.checks" -}}
{{- include "moebius.checkValues" . -}}
{{- include "moebius.checkEngine" . -}}
{{- include "moebius.checkExperts" . -}}
{{- include "moebius.checkNode" . -}}
{{- include "moebius.checkModel" . -}}
{{- include "moebius.checkTraffic" . -}}
{{- include "moebius.checkRollout" . -}}
{{- include "moebius.checkClaims" . -}}
{{- include "moebius.checkBatches" . -}}
{{- include "moebius.checkTls" . -}}
{{- end -}}

{{- define "moebius.checkEngine" -}}
{{- $gpus := mul (int .Values.engine.gpus) (int .Values.engine.nodes) -}}
{{- $ranks := include "moebius.ranks" . | int -}}
{{- if and (gt (int .Values.engine.gpus) 0) (ne $ranks (int $gpus)) -}}
{{- fail (printf "engine.tensorParallel %s × engine.pipelineParallel %d are %d ranks, but engine.gpus %d × engine.nodes %d are %d GPUs; every rank needs one" (include "moebius.tensorParallel" .) (int .Values.engine.pipelineParallel) $ranks (int .Values.engine.gpus) (int .Values.engine.nodes) (int $gpus)) -}}
{{- end -}}
{{- if and (eq (int .Values.engine.gpus) 0) (gt $ranks 1) -}}
{{- fail (printf "engine.tensorParallel and engine.pipelineParallel make %d ranks, but engine.gpus is 0; without GPUs an engine is one process" $ranks) -}}
{{- end -}}
{{- if and (eq (int .Values.engine.gpus) 0) (gt (int .Values.engine.nodes) 1) -}}
{{- fail (printf "engine.nodes is %d, but engine.gpus is 0; only GPUs are divided over nodes, expert servers alone with experts.mode remote" (int .Values.engine.nodes)) -}}
{{- end -}}
{{- if and (eq (include "moebius.transport" .) "mailbox") (gt (include "moebius.tensorParallel" . | int) 8) -}}
{{- fail "engine.tensorParallel is above 8, which is the most that a mailbox serves; use experts.mode remote" -}}
{{- end -}}
{{- if and (eq .Values.engine.jitCache.type "pvc") (not .Values.engine.jitCache.claimName) -}}
{{- fail "engine.jitCache.type is pvc, but engine.jitCache.claimName is empty" -}}
{{- end -}}
{{- if and (eq .Values.engine.jitCache.type "hostPath") (not .Values.engine.jitCache.hostPath) -}}
{{- fail "engine.jitCache.type is hostPath, but engine.jitCache.hostPath is empty" -}}
{{- end -}}
{{- end -}}

{{- define "moebius.checkExperts" -}}
{{- $experts := .Values.experts -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" -}}
{{- if and (ne $experts.mode "remote") (not (kindIs "invalid" (index $experts $key))) -}}
{{- fail (printf "experts.%s is for experts.mode remote; with %s expert servers run where engine.%s puts their engine" $key $experts.mode $key) -}}
{{- end -}}
{{- if and $.Values.gateway.inPod (not (kindIs "invalid" (index $.Values.gateway $key))) -}}
{{- fail (printf "gateway.%s is for a gateway that is a Deployment of its own; with gateway.inPod it runs where engine.%s puts its engine" $key $key) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $experts.mode "none") (eq (int .Values.engine.gpus) 0) -}}
{{- fail "experts.mode is none, which puts all experts on GPUs, but engine.gpus is 0" -}}
{{- end -}}
{{- if and (eq $experts.mode "pod") (gt (int $experts.servers) 8) -}}
{{- fail (printf "experts.servers is %d; a Pod has at most 8 expert servers, more of them with experts.mode remote" (int $experts.servers)) -}}
{{- end -}}
{{- if and $experts.shares (ne (len $experts.shares) (include "moebius.shares" . | int)) -}}
{{- fail (printf "experts.shares has %d numbers, but there are %s expert servers" (len $experts.shares) (include "moebius.shares" .)) -}}
{{- end -}}
{{- if and $experts.overrides (ne (len $experts.overrides) (int $experts.servers)) -}}
{{- fail (printf "experts.overrides has %d entries, but experts.servers is %d; one for each, {} where nothing differs" (len $experts.overrides) (int $experts.servers)) -}}
{{- end -}}
{{- if and $experts.overrides (eq $experts.mode "remote") -}}
{{- fail "experts.overrides is for experts.mode pod: remote servers are the replicas of one StatefulSet and alike; use two releases for unequal ones" -}}
{{- end -}}
{{- if and (eq $experts.weights.volume "hostPath") (not $experts.weights.hostPath) -}}
{{- fail "experts.weights.volume is hostPath, but experts.weights.hostPath is empty" -}}
{{- end -}}
{{- if ne $experts.mode "none" -}}
{{- range $index := until (int $experts.servers) -}}
{{- $own := include "moebius.server" (dict "root" $ "index" $index) | fromJson -}}
{{- if and (ne $experts.weights.volume "hugepages-2Mi") (lt (int $own.memoryMiB) (add (int $own.weightsMiB) 256 | int)) -}}
{{- fail (printf "expert server %d has memoryMiB %d for weightsMiB %d of packed experts, which count as its memory; it needs 256 more than these" $index (int $own.memoryMiB) (int $own.weightsMiB)) -}}
{{- end -}}
{{- if and (eq $experts.weights.volume "hugepages-2Mi") (ne (mod (int $own.weightsMiB) 2) 0) -}}
{{- fail (printf "expert server %d has weightsMiB %d, which is no number of 2 MiB pages" $index (int $own.weightsMiB)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $gpu := .Values.config.gpu | default dict -}}
{{- if and (eq ($gpu.prefill_experts | default "auto") "stream") (ne (include "moebius.transport" .) "mailbox") -}}
{{- fail "config.gpu.prefill_experts is stream, but GPUs can only stream experts that lie in memory of their own Pod; allowed with experts.mode pod and engine.nodes 1" -}}
{{- end -}}
{{- $placement := .Values.config.placement | default dict -}}
{{- if and (eq $experts.mode "none") (or $placement.gpu_layers (hasKey $placement "gpu_experts")) -}}
{{- fail "experts.mode is none, which puts all experts on GPUs; config.placement.gpu_layers and gpu_experts do not fit that" -}}
{{- end -}}
{{- end -}}

{{- define "moebius.checkNode" -}}
{{- $node := .Values.node -}}
{{- $experts := .Values.experts -}}
{{- $pinned := and (eq $experts.mode "pod") (eq $experts.numa "kubelet") -}}
{{- if and (eq $experts.mode "pod") (gt (int $node.numaNodes) 0) (gt (int $experts.servers) (int $node.numaNodes)) $pinned -}}
{{- fail (printf "experts.servers is %d, but node.numaNodes is %d; with experts.numa kubelet every server needs a NUMA node of its own, auto lets them share" (int $experts.servers) (int $node.numaNodes)) -}}
{{- end -}}
{{- range $index := until (int $experts.servers) -}}
{{- if ne $experts.mode "none" -}}
{{- $own := include "moebius.server" (dict "root" $ "index" $index) | fromJson -}}
{{- if and (gt (int $node.cpusPerNumaNode) 0) (gt (int $own.cpus) (int $node.cpusPerNumaNode)) -}}
{{- fail (printf "expert server %d wants %d CPUs, but node.cpusPerNumaNode is %d" $index (int $own.cpus) (int $node.cpusPerNumaNode)) -}}
{{- end -}}
{{- if and $pinned (gt (int $experts.servers) 1) (gt (int $node.cpusPerNumaNode) 0) (le (mul 2 (int $own.cpus) | int) (int $node.cpusPerNumaNode)) -}}
{{- fail (printf "expert server %d wants %d of the %d CPUs of a NUMA node, so that two servers would fit on one; with experts.numa kubelet each needs more than half" $index (int $own.cpus) (int $node.cpusPerNumaNode)) -}}
{{- end -}}
{{- if and (gt (int $node.memoryMiBPerNumaNode) 0) (gt (int $own.memoryMiB) (int $node.memoryMiBPerNumaNode)) -}}
{{- fail (printf "expert server %d wants memoryMiB %d, but node.memoryMiBPerNumaNode is %d" $index (int $own.memoryMiB) (int $node.memoryMiBPerNumaNode)) -}}
{{- end -}}
{{- if ne (mod (int $own.cpus) (int $node.threadsPerCore)) 0 -}}
{{- fail (printf "expert server %d wants %d CPUs, which are no whole cores of node.threadsPerCore %d; the CPU Manager's full-pcpus-only refuses that" $index (int $own.cpus) (int $node.threadsPerCore)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if ne (mod (int .Values.engine.cpus) (int $node.threadsPerCore)) 0 -}}
{{- fail (printf "engine.cpus is %d, which are no whole cores of node.threadsPerCore %d; the CPU Manager's full-pcpus-only refuses that" (int .Values.engine.cpus) (int $node.threadsPerCore)) -}}
{{- end -}}
{{- if and (eq $node.topologyPolicy "single-numa-node") (eq $node.topologyScope "pod") (eq $experts.mode "pod") (gt (int $experts.servers) 1) -}}
{{- fail (printf "node.topologyPolicy single-numa-node with scope pod puts a whole Pod on one NUMA node, which cannot hold %d expert servers on nodes of their own; allowed: scope container, or policy restricted" (int $experts.servers)) -}}
{{- end -}}
{{- if and (eq $node.topologyPolicy "single-numa-node") (gt (int $node.gpusPerNumaNode) 0) (gt (int .Values.engine.gpus) (int $node.gpusPerNumaNode)) -}}
{{- fail (printf "engine.gpus is %d, but node.gpusPerNumaNode is %d: topologyPolicy single-numa-node would refuse the engine's container for ever; allowed: restricted" (int .Values.engine.gpus) (int $node.gpusPerNumaNode)) -}}
{{- end -}}
{{- if and $pinned (has $node.topologyPolicy (list "none" "best-effort")) (gt (int $experts.servers) 1) -}}
{{- fail (printf "experts.numa is kubelet, but node.topologyPolicy %s does not promise CPUs of one NUMA node; allowed: restricted, single-numa-node, or experts.numa auto" $node.topologyPolicy) -}}
{{- end -}}
{{- if and .Values.dra.enabled (eq $experts.numa "auto") (eq $experts.mode "pod") -}}
{{- fail "dra.enabled gives each expert server CPUs of one NUMA node, which experts.numa auto does not ask for; allowed: kubelet" -}}
{{- end -}}
{{- end -}}

{{- define "moebius.checkTraffic" -}}
{{- $gateway := .Values.gateway -}}
{{- if and $gateway.inPod (ne $gateway.autoscaling.type "none") -}}
{{- fail (printf "gateway.autoscaling.type is %s, but with gateway.inPod there are as many gateways as engine Pods; scale replicas" $gateway.autoscaling.type) -}}
{{- end -}}
{{- if and (ne .Values.autoscaling.type "none") (lt (int .Values.autoscaling.minReplicas) 1) -}}
{{- fail "autoscaling.minReplicas is 0, but nothing would start the first engine again: without one no gateway is ready, so that no request arrives that could be counted; allowed: 1 or more" -}}
{{- end -}}
{{- range $where, $scaling := dict "gateway.autoscaling" $gateway.autoscaling "autoscaling" .Values.autoscaling -}}
{{- if and (ne $scaling.type "none") (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "%s.minReplicas is %d, above %s.maxReplicas %d" $where (int $scaling.minReplicas) $where (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and (or (eq .Values.autoscaling.type "keda") (eq $gateway.autoscaling.type "keda")) (not .Values.autoscaling.prometheusAddress) -}}
{{- fail "a keda scaler asks Prometheus for the queue's length, but autoscaling.prometheusAddress is empty" -}}
{{- end -}}
{{- if and .Values.route.enabled (not .Values.route.parentRefs) -}}
{{- fail "route.enabled is true, but route.parentRefs names no Gateway" -}}
{{- end -}}
{{- if and .Values.ingress.enabled .Values.ingress.tlsSecretName (not .Values.ingress.hosts) -}}
{{- fail "ingress.tlsSecretName is set, but ingress.hosts is empty: controllers choose a certificate by the name that is called" -}}
{{- end -}}
{{- $pool := .Values.route.inferencePool -}}
{{- if and $pool.enabled (not .Values.route.enabled) -}}
{{- fail "route.inferencePool.enabled is true, but route.enabled is false: nothing would send requests to the pool" -}}
{{- end -}}
{{- if and $pool.enabled (not $gateway.inPod) -}}
{{- fail "route.inferencePool chooses among Pods that answer HTTP, which engine Pods do with gateway.inPod only" -}}
{{- end -}}
{{- if and $pool.enabled (not $pool.endpointPicker.name) -}}
{{- fail "route.inferencePool.enabled is true, but route.inferencePool.endpointPicker.name names no Service of an endpoint picker" -}}
{{- end -}}
{{- end -}}

{{- define "moebius.checkRollout" -}}
{{- $rollout := .Values.rollout -}}
{{- if eq (int .Values.engine.nodes) 1 -}}
{{- range $key, $usual := dict "maxSurge" 0 "maxUnavailable" 1 -}}
{{- if ne (int (index $rollout $key)) $usual -}}
{{- fail (printf "rollout.%s is %d, but the StatefulSet of engine.nodes 1 replaces one engine after the other, in its place; allowed: %d, with a second release and route.others to have both versions at once" $key (int (index $rollout $key)) $usual) -}}
{{- end -}}
{{- end -}}
{{- else if and (eq (int $rollout.maxSurge) 0) (eq (int $rollout.maxUnavailable) 0) -}}
{{- fail "rollout.maxSurge and rollout.maxUnavailable are both 0, so that no engine could be replaced; allowed: one of them above 0" -}}
{{- end -}}
{{- if and (eq .Values.autoscaling.type "none") (gt (int $rollout.partition) (int .Values.replicas)) -}}
{{- fail (printf "rollout.partition is %d, but replicas is %d: no engine would ever be replaced; allowed: 0 to %d" (int $rollout.partition) (int .Values.replicas) (int .Values.replicas)) -}}
{{- end -}}
{{- $total := int .Values.route.weight -}}
{{- range .Values.route.others -}}
{{- $total = add $total (int .weight) | int -}}
{{- if and (eq .name (include "moebius.fullname" $)) (ne .kind "InferencePool") -}}
{{- fail (printf "route.others names %s, which is this release's own Service; its share is route.weight" .name) -}}
{{- end -}}
{{- if and (eq .kind "InferencePool") .port -}}
{{- fail (printf "route.others: %s is an InferencePool, which has ports of its own; leave port out" .name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.route.enabled (eq $total 0) -}}
{{- fail "route.weight and all weights of route.others are 0, so that every request would be refused; allowed: one above 0" -}}
{{- end -}}
{{- end -}}

{{- define "moebius.checkTls" -}}
{{- $tls := .Values.tls -}}
{{- if eq $tls.grpc.mode "none" -}}
{{- range $key := list "secretName" "gatewaySecretName" "expertsSecretName" "serverName" -}}
{{- if get $tls.grpc $key -}}
{{- fail (printf "tls.grpc.%s is set, but tls.grpc.mode is none, which is plain text; allowed: tls, mutual" $key) -}}
{{- end -}}
{{- end -}}
{{- else if not $tls.grpc.secretName -}}
{{- fail (printf "tls.grpc.mode is %s, but tls.grpc.secretName names no Secret with tls.crt, tls.key and ca.crt" $tls.grpc.mode) -}}
{{- end -}}
{{- if and $tls.grpc.gatewaySecretName .Values.gateway.inPod -}}
{{- fail "tls.grpc.gatewaySecretName is for a gateway that is a Deployment of its own; with gateway.inPod it shares its Pod's tls.grpc.secretName" -}}
{{- end -}}
{{- if and $tls.grpc.expertsSecretName (ne .Values.experts.mode "remote") -}}
{{- fail (printf "tls.grpc.expertsSecretName is for experts.mode remote; with %s expert servers share their Pod's tls.grpc.secretName" .Values.experts.mode) -}}
{{- end -}}
{{- if and $tls.http.clientCaSecretName (not $tls.http.secretName) -}}
{{- fail "tls.http.clientCaSecretName asks clients for certificates, but tls.http.secretName is empty, so that the gateway speaks plain HTTP" -}}
{{- end -}}
{{- if $tls.http.secretName -}}
{{- if .Values.route.inferencePool.enabled -}}
{{- fail "route.inferencePool sends plain HTTP to its Pods, which tls.http.secretName lets them refuse; leave TLS to the Gateway" -}}
{{- end -}}
{{- if and .Values.route.enabled (not .Values.route.backendCaConfigMap) -}}
{{- fail "route.enabled is true and tls.http.secretName is set, but route.backendCaConfigMap names no ConfigMap with the CA by which the Gateway checks the Service; or leave TLS to the Gateway" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.route.backendCaConfigMap (not $tls.http.secretName) -}}
{{- fail "route.backendCaConfigMap is for routes to a gateway with HTTPS, but tls.http.secretName is empty" -}}
{{- end -}}
{{- if and .Values.ingress.enabled $tls.http.secretName (not .Values.ingress.annotations) -}}
{{- fail "ingress.enabled is true and tls.http.secretName is set, but ingress.annotations does not tell the controller to speak HTTPS to the Service; or leave TLS to the Ingress" -}}
{{- end -}}
{{- if and .Values.helmTest.clientSecretName (not $tls.http.clientCaSecretName) -}}
{{- fail "helmTest.clientSecretName is for a gateway that asks clients for certificates, but tls.http.clientCaSecretName is empty" -}}
{{- end -}}
{{- if $tls.certManager.enabled -}}
{{- if not $tls.certManager.issuer.name -}}
{{- fail "tls.certManager.enabled is true, but tls.certManager.issuer.name is empty" -}}
{{- end -}}
{{- if not (or $tls.grpc.secretName $tls.http.secretName) -}}
{{- fail "tls.certManager.enabled is true, but neither tls.grpc.secretName nor tls.http.secretName names a Secret for it to write" -}}
{{- end -}}
{{- if le (trimSuffix "h" $tls.certManager.duration | int) (trimSuffix "h" $tls.certManager.renewBefore | int) -}}
{{- fail (printf "tls.certManager.renewBefore is %s, which is not less than tls.certManager.duration %s" $tls.certManager.renewBefore $tls.certManager.duration) -}}
{{- end -}}
{{- end -}}
{{- end -}}
