"""tools/prometheus: deploy/prometheus and deploy/grafana with a Prometheus on this machine."""
