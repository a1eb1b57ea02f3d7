"""Attention under `ContextParallel`: by the registry of transformers, or by a mode on `scaled_dot_product_attention`.

Both are there for the modules of one model alone. A module that is called by itself, outside of a forward of the model,
attends as in one process; an activation checkpoint that repeats it in backward attends as in the forward.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tp_styles._torch_compat import in_backward, variable_length_operators
from tp_styles.problems import PlanError, Problem, StyleInputError
from tp_styles.runtime.gradient_sum import GradientSum
from tp_styles.runtime.sequence import SequenceAttention

# Name of a module's attribute that holds its model's `ContextState`.
STATE = "_context_parallel"

# Attention implementations of transformers that can run on all tokens of some heads.
BASES = ("sdpa", "eager")

# Rotary embeddings whose frequencies depend on the largest position, which is another one on each rank.
GROWING = ("dynamic", "longrope")


@dataclass
class Call:
    """One forward of the model.

    Attributes:
        length: Tokens of the sequence, padding included.
        added: Tokens that were added to make the length divide.
        scale: Factor of all gradients: 1 if they are summed over the axis by this style.
        documents: `[batch, length]`: the document of each token; None for one document.
        positions: `[batch, length]`: the position of each token, with documents.
        hides_mask: The model got a mask of ones, so that it does not look for documents in this rank's positions.
    """

    length: int
    added: int = 0
    scale: int = 1
    documents: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    hides_mask: bool = False


class ContextState:
    """Attention of one model, and its present call.

    Args:
        attention: Attention over the ranks.
        sum: Sums the gradients of parameters; None if another library does.
    """

    def __init__(self, attention: SequenceAttention, sum: GradientSum | None) -> None:
        self.attention, self.sum = attention, sum
        self.call: Call | None = None
        self.is_repeating = False

    @property
    def is_inside(self) -> bool:
        """True in a forward of the model, and where a checkpoint repeats a part of it."""
        return self.call is not None or in_backward()

    @contextmanager
    def entered(self, call: Call) -> Iterator[None]:
        """Make a call the present one."""
        token, before = ACTIVE.set(self), self.call
        self.call, self.attention.masks = call, {}
        try:
            yield
        finally:
            self.call, self.attention.masks = before, None
            ACTIVE.reset(token)


# State of the model whose forward runs: masks are made by functions that get no module.
ACTIVE: ContextVar[ContextState | None] = ContextVar("tp_styles_context", default=None)

# A module, its former attributes, and functions that remove what was added.
Change = tuple[nn.Module, dict[str, Any], list[Callable[[], None]]]


# ---------------------------------------------------------------------------------------------- transformers


def is_of_transformers(kind: type[nn.Module]) -> bool:
    """True for a model class of transformers."""
    return hasattr(kind, "_supports_attention_backend") and hasattr(kind, "get_correct_attn_implementation")


def use_registry(model: nn.Module, state: ContextState, name: str) -> list[Change]:
    """Give all modules of a transformers model a configuration that names attention over the ranks.

    Configurations are copied: another model that was made from the same one keeps its attention.

    Raises:
        PlanError: The model attends by a kernel of another interface, or its positions depend on the longest.
    """
    copies: dict[int, Any] = {}
    changes: list[Change] = []
    owners = [(key, module) for key, module in model.named_modules() if _is_config(vars(module).get("config"))]
    problems = [problem for key, module in owners for problem in _problems(module.config, key or name)]
    if problems:
        raise PlanError(dict.fromkeys(problems))
    for _, module in owners:
        before = vars(module)["config"]
        if id(before) not in copies:
            new = copies[id(before)] = copy.deepcopy(before)
            new._attn_implementation = register(before._attn_implementation)
        vars(module)["config"] = copies[id(before)]
        vars(module)[STATE] = state
        changes.append((module, {"config": before}, [partial(vars(module).pop, STATE, None)]))
    return changes


def _is_config(value: Any) -> bool:
    return hasattr(value, "_attn_implementation_internal")


def _problems(config: Any, name: str) -> Iterator[Problem]:
    if config._attn_implementation not in BASES:
        yield Problem(
            "unsupported-option",
            "config",
            found=f"attention {config._attn_implementation!r}",
            hint='model.set_attn_implementation("sdpa") before the plan: on a GPU it runs the same kernels',
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [item for item in (parameters, *parameters.values()) if isinstance(item, dict)]
    kinds = {str(item.get("rope_type", item.get("type"))) for item in nested}
    if growing := sorted(kinds & set(GROWING)):
        yield Problem(
            "unsupported-option",
            "config.rope_parameters",
            found=f"{', '.join(growing)}",
            hint="the frequencies follow the longest position, which is another one on each rank: rope_type='yarn'"
            " or 'linear' have fixed ones",
        )


@cache
def register(base: str) -> str:
    """Register attention and masks over the ranks beside an implementation of transformers; return their name."""
    from transformers import AttentionInterface  # noqa: PLC0415  # an extra
    from transformers.masking_utils import AttentionMaskInterface  # noqa: PLC0415

    name = f"tp_styles_context_{base}"
    AttentionInterface.register(name, partial(attention_of_transformers, base))
    AttentionMaskInterface.register(name, partial(mask_of_transformers, base))
    return name


def base_attention(base: str, module: nn.Module) -> Callable[..., Any]:
    """Return the attention function of one process for a module."""
    if base == "eager":
        function: Callable[..., Any] = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        return function
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    attention: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[base]
    return attention


def attention_of_transformers(
    base: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Attend over the ranks, in the form of transformers' interface."""
    function = base_attention(base, module)
    state: ContextState | None = vars(module).get(STATE)
    if state is None or not state.is_inside:
        result: tuple[torch.Tensor, Any] = function(module, query, key, value, attention_mask, **options)
        return result
    name, axis = type(module).__name__, state.attention.moves.axis
    if options.get("position_bias") is not None:
        raise StyleInputError(
            Problem(
                "unsupported-option",
                name,
                found="position_bias",
                hint="a bias between tokens is made for this rank's alone; rotary positions and masks are right",
            )
        )
    if state.call is not None and query.shape[2] * axis.size != state.call.length:
        raise StyleInputError(
            Problem(
                "shape-mismatch",
                name,
                found=f"{query.shape[2]} tokens, {state.call.length // axis.size} of the sequence",
                hint="attention over other tokens than the model's sequence (a vision tower's): ContextParallel on the"
                " text"
                " model alone",
            )
        )
    heads = query.shape[1]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        local = _HeadsOf(module, q.shape[1] // k.shape[1], heads // q.shape[1], axis.rank)
        if (sinks := options.get("s_aux")) is not None and sinks.shape[0] == heads:
            options["s_aux"] = local.own(sinks)
        out: torch.Tensor = function(local, q, k, v, mask, **options)[0]
        return out

    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    causal = bool(is_causal) and base == "sdpa"  # eager attention without a mask is not causal
    out = state.attention((query, key, value), attention_mask, attend, name, is_causal=causal)
    return out.contiguous(), None


class _HeadsOf:
    """An attention module as one rank's heads see it: attributes are the module's, but for counts of heads."""

    def __init__(self, module: nn.Module, groups: int, shards: int, rank: int) -> None:
        self._module, self._shards, self._rank = module, shards, rank
        if hasattr(module, "num_key_value_groups"):
            self.num_key_value_groups = groups

    def own(self, per_head: torch.Tensor) -> torch.Tensor:
        """Return this rank's heads of a tensor `[heads]`."""
        return per_head.chunk(self._shards)[self._rank] if self._shards > 1 else per_head

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self.own(value) if name == "sinks" and value is not None else value


def mask_of_transformers(
    base: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Make the mask of all tokens, or of this rank's queries and all keys, by transformers' own function."""
    from transformers import masking_utils as masks  # noqa: PLC0415

    function: Any = masks.ALL_MASK_ATTENTION_FUNCTIONS[base]
    state = ACTIVE.get()
    make = partial(function, batch_size=batch_size, kv_offset=kv_offset, **options)
    if state is None or state.call is None:
        alone = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
        result: torch.Tensor | None = make(**alone, mask_function=mask_function, attention_mask=attention_mask)
        return result
    call, axis = state.call, state.attention.moves.axis
    if q_length * axis.size != call.length or kv_offset:
        raise StyleInputError(
            Problem(
                "shape-mismatch",
                "attention_mask",
                found=f"a mask for {q_length} of {call.length // axis.size} tokens",
                hint="a filled cache, or other tokens than the sequence: pass neither",
            )
        )
    if call.hides_mask:
        attention_mask = None
    device = options.get("device", "cpu")
    if call.added and attention_mask is None and "allow_is_bidirectional_skip" in options:
        # Under a causal mask no token attends to those added behind it.
        attention_mask = torch.arange(call.length, device=device).expand(batch_size, -1) < call.length - call.added
    if call.documents is not None:
        mask_function = masks.remap_positions_for_packed_sequence(mask_function, call.positions)
        mask_function = masks.and_masks(mask_function, masks.packed_sequence_mask_function(call.documents))
        make = partial(make, allow_is_causal_skip=False)
    make = partial(make, kv_length=call.length, mask_function=mask_function, attention_mask=attention_mask)
    try:
        return _rows(make, state.attention, call)
    except IndexError as error:
        raise StyleInputError(
            Problem(
                "unsupported-option",
                "attention_mask",
                found=f"a mask function of this rank's tokens: {error}",
                hint="the model makes a mask from its tokens' values (blocks of an image): pass a mask of 4 dims",
            )
        ) from error


def _rows(make: Callable[..., torch.Tensor | None], attention: SequenceAttention, call: Call) -> torch.Tensor | None:
    """Make a mask of all queries, or of this rank's."""
    if attention.kind == "ulysses":
        return make(q_length=call.length, q_offset=0)
    ranges = attention.moves.order.ranges(attention.moves.axis.rank, call.length)
    # Without a mask the first query would be token 0.
    rows = [make(q_length=stop - start, q_offset=start, allow_is_causal_skip=False) for start, stop in ranges]
    return None if any(part is None for part in rows) else torch.cat([part for part in rows if part is not None], -2)


# ---------------------------------------------------------------------------------------------- own models


# Functions that attend by themselves, where the mode cannot see.
REFUSED: dict[Any, str] = {
    F.multi_head_attention_forward: "nn.MultiheadAttention",
    torch._transformer_encoder_layer_fwd: "the fast path of nn.TransformerEncoderLayer",
    torch._native_multi_head_attention: "the fast path of nn.MultiheadAttention",
}
REFUSED |= dict.fromkeys(variable_length_operators(), "varlen_attn")


class AttentionMode(TorchFunctionMode):
    """`scaled_dot_product_attention` over the ranks, while a model's forward runs.

    Args:
        state: The model's.
    """

    def __init__(self, state: ContextState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        if (name := REFUSED.get(func)) is not None:
            raise StyleInputError(
                Problem(
                    "unsupported-option",
                    name,
                    found="attends to this rank's tokens",
                    hint="write attention with F.scaled_dot_product_attention: its tokens are exchanged",
                )
            )
        return func(*args, **(kwargs or {}))

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend over the ranks; the arguments of `scaled_dot_product_attention`."""
        name, call = "scaled_dot_product_attention", self.state.call
        if call is not None and call.added and not is_causal and attn_mask is None:
            raise StyleInputError(
                Problem(
                    "uneven-shards",
                    name,
                    found=f"{call.added} tokens were added",
                    hint="attention that is not causal sees added tokens: pad to a multiple yourself, with a mask",
                )
            )
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise RuntimeError(f"{name}: {query.shape[1]} and {key.shape[1]} heads without enable_gqa=True")

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            causal, groups = is_causal and mask is None, q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, is_causal=causal, scale=scale, enable_gqa=groups
            )
            return out.transpose(1, 2)

        out = self.state.attention((query, key, value), attn_mask, attend, name, is_causal=is_causal)
        return out.transpose(1, 2)


class Repeatable:
    """Forward of a module that an activation checkpoint may repeat in backward, by itself.

    The repetition attends over the ranks again. A re-entrant checkpoint also computes gradients of parameters in it.

    Args:
        module: The module.
        state: Its model's.
    """

    def __init__(self, module: nn.Module, state: ContextState) -> None:
        self.module, self.state = module, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's forward."""
        forward, state = type(self.module).forward, self.state
        if state.call is not None or state.is_repeating or not in_backward():
            return forward(self.module, *args, **kwargs)
        with ExitStack() as stack:
            state.is_repeating = True
            stack.callback(setattr, state, "is_repeating", False)
            stack.enter_context(AttentionMode(state))
            if state.sum is not None:
                stack.enter_context(state.sum.installed(self.module))
            return forward(self.module, *args, **kwargs)


def make_repeatable(model: nn.Module, state: ContextState) -> list[Change]:
    """Give all blocks of a model of one's own a forward that a checkpoint may repeat."""
    changes: list[Change] = []
    for module in model.modules():
        is_layer = type(module).__module__.startswith("torch.nn.") and not [*module.children()]
        if module is not model and not is_layer and "forward" not in vars(module):
            vars(module)["forward"] = Repeatable(module, state)
            changes.append((module, {}, [partial(vars(module).pop, "forward", None)]))
    return changes
