"""VLLMSnapshot: starts vLLM replicas from a process snapshot. See docs/architecture.md."""

__version__ = "0.1.0"
