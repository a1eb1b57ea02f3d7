"""Linear layers under one view, for either orientation of the weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_q_heads")
HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_head", "d_kv", "head_size")
VOCAB_SIZE = ("vocab_size", "n_vocab", "vocabulary_size", "num_embeddings")


def words(text: str) -> frozenset[str]:
    """Return the words of ``text``: names of submodules."""
    return frozenset(text.split())


@dataclass(frozen=True, eq=False)
class LinearView:
    """A linear layer ``y = x W + b``, with the orientation of its weight."""

    name: str  # FQN of the module
    module: nn.Module
    out_features: int  # size of the last dimension of its output
    in_features: int  # size of the last dimension of its input
    out_dim: int  # weight dimension of the outputs: 0 in ``nn.Linear``, 1 in the ``Conv1D`` of GPT-2
    in_dim: int  # weight dimension of the inputs

    @property
    def weight_name(self) -> str:
        """FQN of the weight."""
        return f"{self.name}.weight" if self.name else "weight"

    @property
    def biases(self) -> tuple[str, ...]:
        """FQN of the bias of ``[out_features]``, if there is one."""
        return () if self.module._parameters.get("bias") is None else (f"{self.name}.bias" if self.name else "bias",)

    @property
    def parameters(self) -> tuple[str, ...]:
        """FQNs of weight and bias."""
        return self.weight_name, *self.biases


def as_linear(name: str, module: nn.Module) -> LinearView | None:
    """Return the view of `module`, or ``None`` if it is not a plain linear layer.

    Not plain: further parameters or submodules (LoRA, quantisation, parametrisations), a lazy weight, or a custom
    ``forward``, which may use the weight in any way.
    """
    weight = module._parameters.get("weight")
    if weight is None or getattr(weight, "shape", None) is None or isinstance(weight, nn.UninitializedParameter):
        return None
    if weight.dim() != 2 or set(module._parameters) - {"weight", "bias"} or module._modules:
        return None
    if not weight.is_floating_point():  # quantised weights come with scales of their own
        return None
    if isinstance(module, nn.Linear) and (type(module).forward is nn.Linear.forward or from_library(module)):
        return LinearView(name, module, weight.shape[0], weight.shape[1], out_dim=0, in_dim=1)
    if type(module).__name__ == "Conv1D" and from_library(module):
        return LinearView(name, module, weight.shape[1], weight.shape[0], out_dim=1, in_dim=0)
    return None


def linear_children(name: str, module: nn.Module) -> dict[str, LinearView]:
    """Return the direct children that are plain linear layers, by child name, in order."""
    views = ((child_name, as_linear(join(name, child_name), child)) for child_name, child in module.named_children())
    return {child_name: view for child_name, view in views if view is not None}


def join(*parts: str) -> str:
    """Join nested names to an FQN; empty ones are left out."""
    return ".".join(part for part in parts if part)


def from_library(module: nn.Module) -> bool:
    """Return True for classes of torch or transformers, of known and tested arrangement."""
    return type(module).__module__.split(".")[0] in ("torch", "transformers")


@dataclass(frozen=True)
class Heads:
    """Head counts of an attention that match its shapes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def declared_vocab_sizes(modules: Iterable[nn.Module]) -> set[int]:
    """Return every vocabulary size declared by a config or attribute of `modules`."""
    places = (place for place in places_of(modules) if not isinstance(place, nn.Embedding))
    return {size for place in places if (size := first_declared([place], VOCAB_SIZE)) is not None}


def places_of(modules: Iterable[nn.Module]) -> list[object]:
    """Return each module and its config, the places of declared attributes."""
    both = (place for module in modules for place in (module, getattr(module, "config", None)))
    return [place for place in both if place is not None]


def first_declared(places: Iterable[object], attributes: Sequence[str]) -> int | None:
    """Return the first positive integer among the attributes, place by place."""
    for place in places:
        for attribute in attributes:
            try:
                value = getattr(place, attribute, None)
            except Exception:  # configs of transformers raise their own errors if layers differ in a value
                continue
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
