"""Hugging Face's tensor-parallel plans as styles (extra `[transformers]`; nothing here imports it at load time)."""
