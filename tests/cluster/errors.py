"""The one exception that the harness raises for anything a person can act on."""


class ClusterError(RuntimeError):
    """A step of the local cluster failed; the message says which one and what to do."""
