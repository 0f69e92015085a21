"""A real Kubernetes cluster on one machine, without Docker, for tests and development.

Everything is built from public packages into a cache once and then started inside private network, mount and
PID namespaces. ``python -m tests.cluster --help`` shows the commands; ``docs/local-cluster.md`` explains the parts.
"""

from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError

__all__ = ["Cluster", "ClusterError"]
