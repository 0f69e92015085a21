"""The operator: observes, plans, executes and writes status. Touches the Kubernetes API only."""
