"""Imports of bodies on ranks, made once where ranks are forked from: else each rank pays for them, then all again."""

import importlib
from contextlib import suppress


def before_ranks() -> None:
    """Import the parts of torch that bodies use, and a model of transformers where it is installed."""
    for name in ("checkpoint", "fsdp", "tensor.parallel"):
        importlib.import_module(f"torch.distributed.{name}")
    with suppress(ImportError):
        importlib.import_module("transformers.models.llama.modeling_llama")
