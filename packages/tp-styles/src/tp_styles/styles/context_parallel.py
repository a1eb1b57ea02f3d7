"""`ContextParallel`: a model whose ranks each have some of a sequence's tokens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tp_styles._shared.consensus import ranks_of
from tp_styles._torch_compat import active_ddp, dispatch_modes, is_compiling, tree_map
from tp_styles.check.inputs import ConstantRandomness, tensors_in
from tp_styles.losses import first_of_next_rank
from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.dropout import draws, rates_of, tp_rng
from tp_styles.runtime.forwards import Forward
from tp_styles.runtime.gradient_sum import GradientSum
from tp_styles.runtime.redistribute import Redistribute, TPGroup
from tp_styles.runtime.sequence import GradientScale, Kind, Order, SequenceAttention, SequenceMoves
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.context_attention import (
    AttentionMode,
    Call,
    Change,
    ContextState,
    is_of_transformers,
    make_repeatable,
    use_registry,
)
from tp_styles.values import ModuleInfo, Redistribution, StyleSpec, describe

# Names of inputs that are sharded without a word, and their dim of tokens.
SEQUENCE_DIMS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "token_type_ids": 1, "labels": 1}

# Outputs of transformers with tokens in dim 1.
SEQUENCE_OUTPUTS = ("logits", "last_hidden_state", "hidden_states")

# Names of key-value caches in transformers. One that leaves holds this rank's tokens, and none is taken.
CACHES = ("past_key_values", "cache")

# Names of inputs with the cumulative lengths of packed documents.
CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")

# Names of modules that mix tokens other than by attention: state spaces, convolutions, token shifts.
MIXERS = re.compile(
    "Mamba|Rwkv|RWKV|ShortConv|GatedDelta|RecurrentBlock|RgLru|LinearAttention|LightningAttention|KimiDelta|[ms]LSTM"
    "|Hyena|Retention"
)

FULL = Replicate()

# Tokens of a chunk for which `explain` counts the pairs of a query and a key.
BALANCE_TOKENS = 4096
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class ContextParallel(ParallelStyle):
    """Shard the sequence over an axis: each rank runs the model on its tokens, and attention exchanges the rest.

    It goes on the root of a model, after every other style. Parameters stay as they are, and the inputs come in full,
    or already sharded; outputs leave in full, or stay sharded (`sharded_cross_entropy` takes these). A model of
    transformers needs nothing else; a model of your own calls `scaled_dot_product_attention`, and takes its positions
    as an input.

    Args:
        kind: `"ulysses"` exchanges tokens for heads, which divide over the ranks. `"gather"` brings the keys and values
            of all tokens to each rank, for any number of heads.
        inputs: Input name -> its dim of tokens, None for one that stays full, in addition to `input_ids`,
            `inputs_embeds`, `position_ids`, `token_type_ids`, `labels` and `attention_mask`.
        input_layouts: `Replicate()`: every rank passes the full sequence. `Shard(1)`: its own tokens, of which each
            rank has equally many.
        output_layouts: `Replicate()`: outputs are gathered. `Shard(1)`: they stay on their ranks.
        output_dim: Dim of tokens in each output of a model of your own; None for outputs without tokens.
        gradients: `"sum"`: gradients of all parameters are summed over the axis. `"mean"`: FSDP2 or DDP averages them,
            over ranks that include the axis (`mesh["dp", "cp"]`); gradients are scaled for that.
        pad: Token that is added at the end of sequences whose length does not divide; gathered outputs are cut again.
            None: such a length is refused.
        order: `"contiguous"`, or `"zigzag"` with `kind="gather"`: a rank has an early and a late part, and all ranks
            attend to equally many tokens under a causal mask.

    Raises:
        StyleInputError: A value of an argument has no meaning, or another argument takes its effect away.
    """

    def __init__(
        self,
        kind: Kind = "ulysses",
        *,
        inputs: Mapping[str, int | None] | None = None,
        input_layouts: Placement = FULL,
        output_layouts: Placement = FULL,
        output_dim: int | None = 1,
        gradients: Literal["sum", "mean"] = "sum",
        pad: int | None = None,
        order: Literal["contiguous", "zigzag"] = "contiguous",
    ) -> None:
        self.kind, self.gradients, self.order, self.pad = kind, gradients, order, pad
        self.inputs = dict(inputs or {})
        self.input_layouts, self.output_layouts, self.output_dim = input_layouts, output_layouts, output_dim
        options = {"kind": ("ulysses", "gather"), "gradients": ("sum", "mean"), "order": ("contiguous", "zigzag")}
        problems = [
            Problem("invalid-argument", name, found=repr(getattr(self, name)), hint=" or ".join(map(repr, values)))
            for name, values in options.items()
            if getattr(self, name) not in values
        ]
        problems += [
            Problem("invalid-argument", name, found=repr(getattr(self, name)), hint="Replicate() or Shard(1)")
            for name in ("input_layouts", "output_layouts")
            if getattr(self, name) not in (Replicate(), Shard(1))
        ]
        if order == "zigzag" and (kind != "gather" or input_layouts != Replicate()):
            problems.append(
                Problem(
                    "conflicting-arguments",
                    "order",
                    found="zigzag",
                    hint="zigzag balances kind='gather' with full inputs; under Ulysses all ranks have equal work"
                    " already",
                )
            )
        if output_layouts != Replicate() and (order == "zigzag" or pad is not None):
            problems.append(
                Problem(
                    "conflicting-arguments",
                    "output_layouts",
                    found=str(output_layouts),
                    hint="Replicate(): gathered outputs have the order and the length of the inputs",
                )
            )
        if pad is not None and input_layouts != Replicate():
            problems.append(
                Problem(
                    "conflicting-arguments",
                    "pad",
                    found=str(pad),
                    hint="pad before the sequence is sharded: this rank does not see its end",
                )
            )
        if problems:
            raise StyleInputError(problems)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return the flows of inputs and outputs; see `ParallelStyle.spec`."""
        names = {*info.arguments, *info.keyword_only}
        problems = list(self._problems(info, names))
        dims = {name: dim for name, dim in SEQUENCE_DIMS.items() if name in names} | self.inputs
        cut = {name: Shard(dim) for name, dim in dims.items() if dim is not None}
        is_sharded = isinstance(self.input_layouts, Shard)
        flows = [(name, Redistribution(to if is_sharded else Replicate(), to)) for name, to in cut.items()]
        if is_sharded and "attention_mask" in names:
            flows.append(("attention_mask", Redistribution(Shard(1), Replicate())))
        output = None if self.output_dim is None else Redistribution(Shard(self.output_dim), self.output_layouts)
        outputs = () if output is None else (output,)
        return ContextSpec(ContextForward, inputs=tuple(flows), outputs=outputs, problems=tuple(problems), style=self)

    def _problems(self, info: ModuleInfo, names: set[str]) -> Iterator[Problem]:
        for name in self.inputs:
            if name not in names and not info.open_keyword:
                yield Problem(
                    "unknown-name",
                    info.where("inputs"),
                    found=repr(name),
                    hint=f"forward takes {', '.join(sorted(names))}",
                )
        if info.name:
            yield Problem(
                "module-kind",
                info.name,
                found="a module inside of a model",
                hint="apply_plan(model, mesh, ContextParallel()): it shards the inputs of the model",
            )
        mixers = ((name, k) for name, k in info.children if MIXERS.search(k.__name__) or issubclass(k, RECURRENT))
        if (mixer := next(mixers, None)) is not None:
            name, kind = mixer
            hint = (
                "it mixes tokens along the sequence, and the tokens before this rank's are elsewhere: shard the batch"
                " (FSDP2, DDP) or the heads (tensor parallelism)"
            )
            yield Problem("module-kind", info.where(name), found=kind.__name__, hint=hint)
        elif is_of_transformers(info.kind):
            if not getattr(info.kind, "_supports_attention_backend", False):
                yield Problem(
                    "module-kind",
                    info.kind.__name__,
                    found="no AttentionInterface",
                    hint="its attention is code of its own (ALiBi, or older than the interface): no way over ranks yet",
                )
            if "position_ids" not in names:
                yield Problem(
                    "module-kind",
                    info.kind.__name__,
                    found="no position_ids in forward",
                    hint="positions start at 0 on every rank: a model that takes position_ids is right",
                )


@dataclass(frozen=True)
class ContextSpec(StyleSpec):
    """The decision of `ContextParallel`, with the style itself."""

    style: Any = field(default=None, compare=False)

    def notes(self, tp_size: int) -> Iterator[str]:
        """Yield the balance of the ranks' work."""
        if self.style.kind == "ulysses":
            yield "work of attention: equal on all ranks, each has a share of the heads"
            return
        order = Order(tp_size, self.style.order == "zigzag")
        work = order.work(order.multiple * BALANCE_TOKENS)
        shares = ", ".join(f"{pairs / sum(work):.1%}" for pairs in work)
        slowest = max(work) * tp_size / sum(work)
        way_on = "" if order.is_zigzag else '; order="zigzag" makes it equal'
        yield f"work of causal attention by rank: {shares}; the slowest has {slowest:.2f}x of the mean{way_on}"


HINTS = {
    "output": "tokens are mixed along the sequence other than by attention (a convolution, a scan, a shift, positions"
    " of the local length): pass positions as an input, labels to sharded_cross_entropy, and shard the batch or the"
    " heads of what is left",
    "gradient": "this parameter's gradient is another one than the sum over all tokens: a mean over this rank's tokens"
    " inside of the model (sharded_cross_entropy has the count of all), or a gradient that code of yours scales",
    "raises": "code that takes the local length for the full one, or a mask of other tokens: inputs={name: dim} shards"
    " an input along its tokens, None leaves it full",
}
HINTS["input-gradient"] = HINTS["gradient"]
HINTS |= dict.fromkeys(("cache", "buffer", "attribute", "shard-leaves"), HINTS["output"])


class ContextForward(Forward):
    """The model's own forward on this rank's tokens."""

    hints = HINTS  # of the check

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        assert isinstance(spec, ContextSpec)
        self.style: ContextParallel = spec.style
        self.kind, self.names = type(module), describe(module).arguments
        self.dims = {key: flow.dst.dim for key, flow in spec.inputs if isinstance(flow.dst, Shard)}
        self.is_hf = is_of_transformers(type(module))
        self.moves_tokens = SequenceMoves(axis, Order(axis.size, self.style.order == "zigzag"))
        self.sum = GradientSum(axis)
        attention = SequenceAttention(self.moves_tokens, self.style.kind)
        self.state = ContextState(attention, self.sum if self.style.gradients == "sum" else None)
        self.__signature__ = inspect.signature(module.forward)  # a trainer reads the names of its inputs
        self.total = Redistribute(Redistribution(Partial(), Replicate()), axis, "loss")
        self.even = Redistribute(Redistribution(Shard(1), Replicate()), axis, f"{name}(inputs)")

    def install_below(self) -> list[Change]:
        """Change modules of the model for their attention."""
        name = self.name or type(self.module).__name__
        return use_registry(self.module, self.state, name) if self.is_hf else make_repeatable(self.module, self.state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's tokens."""
        if self.axis.size == 1:
            return self.kind.forward(self.module, *args, **kwargs)
        bound = dict(zip(self.names, args, strict=False)) | kwargs
        if len(args) > len(self.names):
            self._refuse("argument-count", "forward", f"{len(args)} positional inputs", "pass the others by name")
        call, loss_count = self._prepare(bound)
        args = tuple(bound.pop(name) for name in self.names[: len(args)])
        with ExitStack() as stack:
            stack.enter_context(self.state.entered(call))
            if call.scale == 1:
                stack.enter_context(self.sum.installed(self.module))
            if not self.is_hf:
                stack.enter_context(AttentionMode(self.state))
            if draws(rates_of(self.module.modules())):
                stack.enter_context(tp_rng(self.axis.mesh))
            output = self.kind.forward(self.module, *args, **bound)
        return self._finish(output, call, has_loss=loss_count)

    def take_tokens(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of an output of the original, for the check."""
        sharded = full.dim() > 1 and full.shape[1] % self.moves_tokens.order.multiple == 0
        return self.moves_tokens.order.take(full, 1, self.axis.rank) if sharded else full

    def _refuse(self, code: str, name: str, reason: str, hint: str) -> NoReturn:
        raise StyleInputError(Problem(code, name, found=reason, hint=hint))

    def _scale(self) -> int:
        """Return the factor of all gradients: 1 if they are summed here.

        Raises:
            StyleInputError: Nothing averages gradients over the axis, or FSDP2 reduces them and they would be summed
                here.
        """
        is_checked = not is_compiling() and any(type(mode) is ConstantRandomness for mode in dispatch_modes())
        if self.style.gradients == "sum" and any(isinstance(m, FSDPModule) for m in self.module.modules()):
            self._refuse(
                "conflicting-arguments",
                "gradients",
                "FSDP2 shards modules of the model",
                'ContextParallel(gradients="mean") and fully_shard(mesh=mesh["dp", "cp"]._flatten())',
            )
        if self.style.gradients == "sum" or is_checked or not torch.is_grad_enabled():
            return 1 if self.style.gradients == "sum" or is_checked else self.axis.size
        mine, reducer = set(ranks_of(self.axis.mesh)), active_ddp()
        meshes = [p.device_mesh for m in self.module.modules() if isinstance(m, FSDPModule) for p in _dtensors(m)]
        groups = [set(ranks_of(mesh)) for mesh in dict.fromkeys(meshes)]
        groups += [set(ranks_of(reducer.process_group))] if reducer is not None else []
        has_fsdp = any(isinstance(m, FSDPModule) for m in self.module.modules())
        if (not groups and not has_fsdp) or not all(mine <= group for group in groups):
            self._refuse(
                "mesh-mismatch",
                "gradients",
                "nothing averages them over the ranks of the sequence",
                'fully_shard(mesh=mesh["dp", "cp"]._flatten()) or DDP over these ranks; or gradients="sum"',
            )
        return self.axis.size

    # ------------------------------------------------------------------ inputs

    def _prepare(self, bound: dict[str, Any]) -> tuple[Call, bool]:
        """Shard the inputs in place; return the call, and True if the model computes its loss."""
        is_sharded, n = isinstance(self.style.input_layouts, Shard), self.axis.size
        lengths = {
            name: bound[name].shape[dim]
            for name, dim in self.dims.items()
            if isinstance(bound.get(name), torch.Tensor) and bound[name].dim()
        }
        if len(set(lengths.values())) != 1:
            self._refuse(
                "shape-mismatch",
                self.name or type(self.module).__name__,
                ", ".join(f"{name} {size}" for name, size in lengths.items()) or "no input with tokens",
                "inputs={name: dim of tokens} names those to shard, and all have one length",
            )
        (size,) = set(lengths.values())
        self._refuse_inputs(bound, size)
        if is_sharded:
            self.even.check_even(size, 1)
        full = size * n if is_sharded else size
        added = -full % self.moves_tokens.order.multiple
        if added and self.style.pad is None:
            self._refuse(
                "uneven-shards",
                self.name or type(self.module).__name__,
                f"{full} tokens over {self.moves_tokens.order.multiple} shards",
                f"ContextParallel(pad=token) adds {added} tokens at the end; or pad to a multiple yourself",
            )
        call = Call(full + added, added, self._scale())
        has_loss = self._shift_labels(bound, call, is_sharded=is_sharded) if self.is_hf else False
        if self.is_hf:
            self._positions_and_masks(bound, call, is_sharded=is_sharded)
        for name, dim in self.dims.items():
            value = bound.get(name)
            if isinstance(value, torch.Tensor) and not (has_loss and name == "labels"):
                bound[name] = self._shard(value, dim, name, call, is_sharded=is_sharded)
        return call, has_loss

    def _shard(self, x: torch.Tensor, dim: int, name: str, call: Call, *, is_sharded: bool) -> torch.Tensor:
        """Return this rank's tokens of an input."""
        dim %= x.dim()
        if isinstance(x, DTensor):
            self._refuse("wrong-type", name, "a DTensor", "pass the plain tensor, full on every rank: x.full_tensor()")
        if not is_sharded:
            if call.added and x.shape[dim] != call.length:
                x = torch.cat([x, self._added(x, dim, name, call.added)], dim)
            x = self.moves_tokens("cut", x, dim)
        # A reducer averages what already is the full gradient of an input: the factor of the outputs is taken back.
        return self._scaled(x, 1 / call.scale)

    def _added(self, x: torch.Tensor, dim: int, name: str, count: int) -> torch.Tensor:
        """Return the values of added tokens: pad tokens, positions that go on, zeros of embeddings."""
        shape = list(x.shape)
        shape[dim] = count
        if name == "position_ids":
            steps = torch.arange(1, count + 1, device=x.device, dtype=x.dtype)
            return x.narrow(dim, x.shape[dim] - 1, 1) + steps.view([-1 if d == dim else 1 for d in range(x.dim())])
        value = {"labels": -100, "token_type_ids": 0}.get(name, self.style.pad or 0)
        return x.new_zeros(shape) if x.is_floating_point() else x.new_full(shape, value)

    def _refuse_inputs(self, bound: dict[str, Any], size: int) -> None:
        """Refuse inputs without a meaning for shards, by name."""
        passed = {name: value for name, value in bound.items() if value is not None and value is not False}
        if self.is_hf:
            config: Any = self.module.config
            for name in CACHES:
                if name in passed:
                    self._refuse(
                        "unsupported-option",
                        name,
                        "a key-value cache (generate() passes one)",
                        "a cache holds this rank's tokens: generate with the model before the plan, or after undo()",
                    )
            for name in ("output_attentions", "output_router_logits"):
                if passed.get(name) or (bound.get(name) is None and getattr(config, name, False)):
                    self._refuse(
                        "unsupported-option", name, "asked for", f"{name}=False: they would be this rank's alone"
                    )
            for name in CUMULATIVE:
                if name in passed and self._separates_like(bound, passed[name]):
                    del bound[name], passed[name]  # transformers' eager and sdpa attention read the positions alone
            for name in ("logits_to_keep", *CUMULATIVE):
                if name in passed and not (name == "logits_to_keep" and passed[name] == 0):
                    hint = (
                        "select from the logits afterwards; generate() is right before the plan, and after undo()"
                        if name == "logits_to_keep"
                        else "position_ids that start again at 0 separate packed documents"
                    )
                    self._refuse("unsupported-option", name, "counts tokens of the full sequence", hint)
            if self.module.training and any(_is_reentrant(module) for module in self.module.modules()):
                hint = (
                    'gradient_checkpointing_enable({"use_reentrant": False}): the gradients of a re-entrant one are no'
                    " part of the model's graph"
                )
                self._refuse("unsupported-option", "gradient_checkpointing", "use_reentrant=True", hint)
            slides = getattr(config.get_text_config(), "sliding_window", None) is not None
            if (self.moves_tokens.order.is_zigzag or slides) and self._uses_cache(bound):
                self._refuse(
                    "unsupported-option",
                    "use_cache",
                    "a cache beside zigzag or a sliding window",
                    "use_cache=False: a rank would keep the last of its own tokens, or tokens out of order",
                )
            if bound.get("return_dict") is False:
                self._refuse("unsupported-option", "return_dict", "False", "outputs are found by name: leave it out")
        names = {*self.dims, *self.style.inputs, "attention_mask"}
        for name, value in passed.items():
            if name not in names and any(size > 1 and size in x.shape for _, x in tensors_in(value)):
                self._refuse(
                    "unknown-name",
                    name,
                    f"an input with {size} in its shape, like the tokens",
                    f"inputs={{{name!r}: dim}} names its dim of tokens, None for an input that stays full",
                )

    def _separates_like(self, bound: dict[str, Any], cumulative: torch.Tensor) -> bool:
        """True if `position_ids` of one row start again at each document that cumulative lengths name."""
        positions = bound.get("position_ids")
        if positions is None or positions.shape[0] != 1 or isinstance(self.style.input_layouts, Shard):
            return False
        starts = (positions[0] == 0).nonzero().flatten()
        return torch.equal(starts, cumulative.flatten()[:-1].to(starts))

    def _shift_labels(self, bound: dict[str, Any], call: Call, *, is_sharded: bool) -> bool:
        """Replace labels of transformers by shifted ones of this rank, with the count of all; True if there are some.

        A label at a shard's first token is predicted by the rank before.
        """
        labels = bound.get("labels")
        if labels is None:
            return False
        if not describe(self.module).open_keyword or getattr(self.module, "loss_type", "") != "ForCausalLM":
            self._refuse(
                "unsupported-option",
                "labels",
                f"the loss of {type(self.module).__name__}",
                "leave labels out, and pass the logits to tp_styles.sharded_cross_entropy",
            )
        if is_sharded:
            shifted = torch.cat([labels[:, 1:], first_of_next_rank(labels, self.axis, -100)], 1)
            count = self.axis.all_reduce((shifted != -100).sum())
        else:
            full = torch.full((labels.shape[0], call.length), -100, dtype=labels.dtype, device=labels.device)
            full[:, : labels.shape[1] - 1] = labels[:, 1:]
            count = (full != -100).sum()
            shifted = self.moves_tokens("cut", full, 1)
        bound["labels"] = bound["shift_labels"] = shifted
        if bound.get("num_items_in_batch") is None:
            bound["num_items_in_batch"] = count
        return True

    def _positions_and_masks(self, bound: dict[str, Any], call: Call, *, is_sharded: bool) -> None:
        """Add positions of this rank's tokens; complete the mask; find documents as transformers does."""
        source: torch.Tensor = bound["inputs_embeds"] if bound.get("input_ids") is None else bound["input_ids"]
        position, mask = bound.get("position_ids"), bound.get("attention_mask")
        rows, size = source.shape[0], call.length - call.added
        if mask is not None and not isinstance(mask, torch.Tensor):
            self._refuse("wrong-type", "attention_mask", str(type(mask)), "pass a tensor [batch, tokens], or none")
        if mask is not None and mask.dim() == 2:
            mask = self.axis.all_gather(mask, 1) if is_sharded else mask
            if mask.shape[1] != size:
                self._refuse(
                    "shape-mismatch",
                    "attention_mask",
                    f"{mask.shape[1]} tokens of {size}",
                    "it has all tokens of the batch",
                )
            zeros = mask.new_zeros((mask.shape[0], call.added))
            bound["attention_mask"] = torch.cat([mask, zeros], 1) if call.added else mask
        elif mask is not None and call.added:
            self._refuse(
                "uneven-shards",
                "attention_mask",
                f"a mask {list(mask.shape)}",
                "pad the mask, the ids and the positions to a multiple yourself",
            )
        if position is None:
            bound["position_ids"] = torch.arange(call.length, device=source.device)[None]
            if is_sharded:  # cut as the caller cuts
                bound["position_ids"] = self.moves_tokens("cut", bound["position_ids"], 1)
        elif mask is None and position.dim() == 2:
            full = self.axis.all_gather(position, 1) if is_sharded else position
            if call.added:
                full = torch.cat([full, self._added(full, 1, "position_ids", call.added)], 1)
            self._find_documents(full.expand(rows, -1), call, bound)
        if bound.get("attention_mask") is None and (call.documents is not None or self.moves_tokens.order.is_zigzag):
            call.hides_mask = True
            bound["attention_mask"] = torch.ones((rows, call.length), dtype=torch.bool, device=source.device)

    def _uses_cache(self, bound: dict[str, Any]) -> bool:
        """True if the model makes a cache in this call."""
        asked = bound.get("use_cache")
        asked = getattr(self.module.config, "use_cache", False) if asked is None else asked
        return bool(asked) and not (self.module.training and getattr(self.module, "is_gradient_checkpointing", False))

    def _find_documents(self, positions: torch.Tensor, call: Call, bound: dict[str, Any]) -> None:
        from transformers.masking_utils import find_packed_sequence_indices  # noqa: PLC0415  # an extra

        documents = find_packed_sequence_indices(positions)
        if documents is None:
            return
        if self._uses_cache(bound):
            self._refuse(
                "unsupported-option",
                "position_ids",
                "documents beside a cache",
                "use_cache=False: with a cache transformers does not separate them, in one process neither",
            )
        call.documents, call.positions = documents, positions

    # ------------------------------------------------------------------ outputs

    def _finish(self, output: Any, call: Call, *, has_loss: bool) -> Any:
        if self.is_hf:
            return self._finish_by_name(output, call, has_loss=has_loss)
        dim = self.style.output_dim

        def leave(x: torch.Tensor) -> torch.Tensor:
            if dim is not None and x.dim() > dim:
                return self._leave(x, dim, call)
            return self._scaled(x, call.scale)

        return _mapped(output, leave)

    def _finish_by_name(self, output: Any, call: Call, *, has_loss: bool) -> Any:
        for name in [*output]:
            value = output[name]
            if name == "loss" and has_loss and value is not None:
                output[name] = self._scaled(self.total(value), call.scale)
            elif name in SEQUENCE_OUTPUTS:
                output[name] = _mapped(value, lambda x: self._leave(x, 1, call))
            elif name not in CACHES and [*tensors_in(value)]:
                self._refuse(
                    "unsupported-option",
                    f"-> {name}",
                    "an output without a declared layout",
                    "tokens of all ranks would have to be joined: switch it off",
                )
        return output

    def _leave(self, x: torch.Tensor, dim: int, call: Call) -> torch.Tensor:
        shard = call.length // self.axis.size
        if x.shape[dim] != shard:
            self._refuse(
                "shape-mismatch",
                f"{self.name} ->",
                f"{list(x.shape)} for {shard} tokens",
                "output_dim= names the dim of tokens of every output, None where they have none",
            )
        x = self._scaled(x, call.scale)
        if isinstance(self.style.output_layouts, Shard):
            return x
        full = self.moves_tokens("join", x, dim)
        return full.narrow(dim, 0, call.length - call.added) if call.added else full

    def _scaled(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        if scale == 1 or not x.requires_grad:
            return x
        scaled: torch.Tensor = GradientScale.apply(x, scale)  # type: ignore[no-untyped-call]  # torch's
        return scaled


def _is_reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    return bool(
        getattr(module, "gradient_checkpointing", False) and getattr(function, "keywords", {}).get("use_reentrant")
    )


def _dtensors(module: nn.Module) -> Iterator[DTensor]:
    return (parameter for parameter in module.parameters() if isinstance(parameter, DTensor))


def _mapped(value: Any, change: Any) -> Any:
    """Apply a function to the tensors of a tensor, sequence or mapping; the structure is kept."""
    return tree_map(lambda x: change(x) if isinstance(x, torch.Tensor) else x, value)
