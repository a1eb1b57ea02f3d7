"""Inference engines as destinations. `record` sees where a loader copies. `vllm` is a weight-transfer backend."""
