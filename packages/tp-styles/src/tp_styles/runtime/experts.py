"""Forward of a module of experts that are spread over the ranks: its own code runs on the rows that arrive here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from tp_styles._torch_compat import without_compiler
from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.forwards import ModuleForward
from tp_styles.runtime.redistribute import Redistribute, TPGroup, moved_back
from tp_styles.runtime.token_exchange import AllToAllDispatcher, RoutedTokens, TokenDispatcher, announce_error
from tp_styles.values import Redistribution, Split, Step, StyleSpec

# How a module of experts takes its tokens; see `Experts.form`.
FORMS = "indices", "one-hot", "batched", "sorted"


@dataclass(frozen=True)
class Experts:
    """A module of experts, as far as its sharding depends on it.

    Attributes:
        count: Number of all experts.
        inputs: Names of the arguments: tokens, then by form the expert indices and the routing weights.
        form: `"indices"`: tokens `[T, width]`, indices `[T, k]`, weights `[T, k]`. `"one-hot"`: indices are masks
            `[T, 1, experts]`. `"batched"`: tokens `[experts * T, width]`, an equal block for each expert. `"sorted"`:
            tokens by expert, and a list of each expert's number.
        counts: Names of the module's attributes that hold the number of experts; during a call they hold this rank's.
            None of a module with numbered experts, which keeps its global indices.
        is_numbered: Each expert is a module of its own, present on every rank; other ranks' parameters are empty.
    """

    count: int
    inputs: tuple[str, ...]
    form: str = "indices"
    counts: tuple[str, ...] = ()
    is_numbered: bool = False


@dataclass(frozen=True)
class ExpertSpec(StyleSpec):
    """The decision of `ExpertParallel`.

    Attributes:
        experts: The module.
        dispatcher: Brings tokens to experts and back.
        width: Features of a token; 0 if not known.
    """

    experts: Experts = field(default_factory=lambda: Experts(0, ()))
    dispatcher: TokenDispatcher = field(default_factory=AllToAllDispatcher)
    width: int = 0

    def exchanges(self) -> Iterator[tuple[str, str, Step, int]]:
        """Yield both exchanges of both passes: place, pass, step, and elements of a token for each selected expert."""
        for where in ("tokens to their experts", "tokens from their experts"):
            for when in ("forward", "backward"):
                yield f"{where}, for each selected", when, Step("all_to_all", 0), self.width or 1


class ExpertForward(ModuleForward):
    """Sends this rank's tokens to their experts, runs the module on the rows that arrive, and sends those back."""

    spec: ExpertSpec

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        assert isinstance(spec, ExpertSpec)
        self.experts, self.dispatcher = spec.experts, spec.dispatcher
        # The full number of tokens is known on every rank, so shards may differ in size.
        self.moves = {key: Redistribute(flow, axis, f"{name}({key})", uneven=True) for key, flow in spec.inputs}
        flow = spec.inputs[0][1]
        self.is_replicated = isinstance(flow.src, Replicate)
        self.leave = Redistribute(Redistribution(flow.dst, flow.src), axis, f"{name} ->")
        owned = Split.along(0, self.experts.count)
        ((self.first, stop),) = owned.ranges(axis.rank, axis.size)
        self.num_local = stop - self.first
        self.results: dict[tuple[torch.dtype, torch.dtype | None], tuple[int, torch.dtype]] = {}
        # During a call: replicated parameters, each behind one node of autograd.
        self.summed: dict[str, torch.Tensor] = {}

    def parameter_of(self, owner: nn.Module, attribute: str, name: str) -> torch.Tensor | None:
        """Return a parameter; see `Forward.parameter_of`. A summed gradient is reduced once a call."""
        return self.summed[name] if name in self.summed else super().parameter_of(owner, attribute, name)

    @without_compiler
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the module's output for the tokens that are given on this rank."""
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        try:
            hidden, indices, weights = self.read(arguments)
            flat = hidden.reshape(-1, hidden.shape[-1])
            sizes = Split.along(0, flat.shape[0]).sizes(self.axis.size)  # of the ranks' shares, if all have all tokens
            tokens, *moved = self.enter((flat, indices, weights))
        except Exception:
            if isinstance(self.dispatcher, AllToAllDispatcher):  # the other ranks may have come to their exchange
                device = torch.device(self.axis.mesh.device_type)
                announce_error(self.experts.count, self.axis.group, device)
            raise
        routed = self.dispatcher.dispatch(
            tokens, moved[0], moved[1], num_experts=self.experts.count, group=self.axis.group
        )
        try:
            for owner, attribute, key in self.places:
                if key in self.sums and (local := super().parameter_of(owner, attribute, key)) is not None:
                    self.summed[key] = local
            rows = self.run_experts(routed, arguments) if routed.hidden.shape[0] else None
            width, dtype = self.result_of(routed.hidden, rows)
            rows = self.no_rows(routed, width, dtype) if rows is None else rows
            # A rank without tokens for an expert may not use a replicated parameter: it joins the sum all the same.
            rows = _connected(rows, self.summed.values())
        finally:
            self.summed = {}
        output = self.dispatcher.combine(rows, routed.state)
        if self.is_replicated:
            output = moved_back(output, self.leave, sizes)
        shape = (*hidden.shape[:-1], output.shape[-1])
        return output if output.shape == shape else output.reshape(shape)  # FSDP2 warns of views

    def read(self, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return tokens, indices `[T, k]` and weights `[T, k]` of a call, whatever form they come in."""
        names, count = self.experts.inputs, self.experts.count
        tokens = arguments[names[0]]
        if self.experts.form == "batched":
            each = tokens.reshape(-1, tokens.shape[-1]).shape[0] // count
            return tokens, torch.arange(count, device=tokens.device).repeat_interleave(each)[:, None], None
        if self.experts.form == "sorted":
            sizes = torch.as_tensor(arguments[names[1]], device=tokens.device)
            order = torch.arange(count, device=tokens.device)
            return tokens, order.repeat_interleave(sizes, output_size=tokens.shape[0])[:, None], None
        indices, weights = arguments[names[1]], arguments[names[2]] if len(names) > 2 else None
        if self.experts.form == "one-hot":  # a token that no expert has room for has no bit
            indices = torch.where(indices.any(-1), indices.to(torch.int64).argmax(-1), count)
        indices = indices.reshape(-1, indices.shape[-1])
        if indices.is_floating_point():
            reason, hint = f"{indices.dtype}", "indices of experts are integers: name the arguments (inputs=)"
            raise StyleInputError(Problem("wrong-type", f"{self.name}({names[1]})", found=reason, hint=hint))
        if weights is not None and weights.numel() != indices.numel():
            raise StyleInputError(
                Problem(
                    "shape-mismatch",
                    f"{self.name}({names[2]})",
                    found=f"{list(weights.shape)} beside indices {list(indices.shape)}",
                    hint="weights are those of the selected experts, in the same order",
                )
            )
        return tokens, indices, weights if weights is None else weights.reshape(indices.shape)

    def enter(self, values: tuple[torch.Tensor | None, ...]) -> list[Any]:
        """Return this rank's share of tokens that all ranks have, or its own tokens as they are."""
        move = self.moves[self.experts.inputs[0]]
        return [None if value is None else move(value) for value in values]

    def run_experts(self, routed: RoutedTokens, arguments: dict[str, Any]) -> torch.Tensor:
        """Run the module's own forward on the rows for this rank's experts, each with one expert."""
        names, values = self.experts.inputs, dict(arguments)
        rows, order = routed.hidden, None
        local, num_local = routed.experts, self.num_local
        if self.experts.is_numbered:
            local, num_local = local + self.first, self.experts.count
        if self.experts.form in ("batched", "sorted"):  # rows come by sender, and by expert within it
            order = local.argsort(stable=True)
            rows = rows.index_select(0, order)
        values[names[0]] = rows
        if self.experts.form == "sorted":
            values[names[1]] = torch.bincount(local, minlength=num_local).tolist()
        elif self.experts.form == "one-hot":
            values[names[1]] = torch.nn.functional.one_hot(local, num_local)[:, None]
        elif self.experts.form == "indices":
            values[names[1]] = local[:, None]
        if len(names) > 2 and routed.weights is not None:
            values[names[2]] = routed.weights[:, None]
        args = tuple(values.pop(name) for name in self.names if name in values)
        with self.counting(num_local):
            produced: torch.Tensor = self.run_inside(args, values)
        produced = produced.reshape(-1, produced.shape[-1])
        return produced if order is None else torch.zeros_like(produced).index_copy(0, order, produced)

    def result_of(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> tuple[int, torch.dtype]:
        """Return width and type of the module's results, which a rank without rows cannot see.

        The ranks exchange it in the first call with tokens of a type; later calls and recomputations use that result.
        """
        device = hidden.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        result = self.results.get((hidden.dtype, autocast))
        if result is None:
            own = None if rows is None else (rows.shape[-1], rows.dtype)
            everyone = [each for each in self.axis.all_gather_objects(own, self.name) if each is not None]
            result = everyone[0] if everyone else (hidden.shape[-1], hidden.dtype)  # no rank has a row
            if everyone:
                self.results[hidden.dtype, autocast] = result
        return result

    def no_rows(self, routed: RoutedTokens, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return no rows, connected to everything that has a gradient on other ranks.

        Backward then runs both exchanges here too, and this rank's parameters get zeros as their gradients, as experts
        without tokens do on one process.
        """
        empty = _connected(routed.hidden.new_empty(0, width, dtype=dtype), (routed.hidden,))
        if routed.weights is not None:
            empty = _connected(empty, (routed.weights,))
        if self.experts.is_numbered:  # an expert without tokens has no gradient, on one process either
            return empty
        locals = (self.parameter_of(owner, attribute, key) for owner, attribute, key in self.places)
        return _connected(empty, (local for local in locals if local is not None))

    @contextmanager
    def counting(self, count: int) -> Iterator[None]:
        """Let the module count this rank's experts; outside of its call it counts all of them."""
        before = {name: vars(self.module)[name] for name in self.experts.counts}
        try:
            vars(self.module).update(dict.fromkeys(before, count))
            yield
        finally:
            vars(self.module).update(before)


def _connected(rows: torch.Tensor, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the rows with tensors in their graph: each gets a gradient, of zeros where nothing else uses it."""
    for tensor in tensors:
        if tensor.requires_grad:
            rows = rows + tensor.as_subclass(torch.Tensor).reshape(-1)[:0].sum().to(rows.dtype)
    return rows
