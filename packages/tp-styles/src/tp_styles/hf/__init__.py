"""Hugging Face's tensor-parallel plans as styles. Extra `[transformers]`. Nothing here imports it at load time."""
