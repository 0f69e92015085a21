module vllmsnapshot.local/cluster/prometheus-operator

go 1.26.0

require github.com/prometheus-operator/prometheus-operator v0.86.1
