"""What `make generate` writes out of the code, besides CRDs and manifests: pages, the chart's README, the dashboard."""
