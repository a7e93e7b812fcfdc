// Whose CRDs the PodMonitor and the NodeFeatureRule of deploy/ have to satisfy. Nothing of them is
// built: `build` takes the schemas out of the modules, 5 MB to download.
module fpga-plugin.test/crds

go 1.26.0

require (
	github.com/prometheus-operator/prometheus-operator v0.85.0
	sigs.k8s.io/node-feature-discovery v0.18.3
)
