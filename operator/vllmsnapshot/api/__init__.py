"""The Kubernetes API of VLLMSnapshot: models, constants and the generation of the CRDs."""
