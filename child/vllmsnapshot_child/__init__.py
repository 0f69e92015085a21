"""The part of VLLMSnapshot that runs inside the workload's container: PID 1 (`init`) and the engine server (`server`)."""

__version__ = "0.1.0"
