"""Forward of a module of experts that are spread over the ranks: its own code runs on the rows that arrive here.

Exchange of tokens between the ranks that hold a layer's experts: out to the experts, and back.

A **pair** is one token with one of its selected experts. Pairs are sent ordered by expert, so each rank receives blocks
by sender, and within a block rows by expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from tp_styles._shared.consensus import named_collective
from tp_styles._torch_compat import without_compiler
from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.forwards import ModuleForward
from tp_styles.runtime.redistribute import Redistribute, TPGroup, moved_back
from tp_styles.values import Redistribution, Split, Step, StyleSpec


@dataclass(frozen=True)
class RoutedTokens:
    """Rows that arrived at this rank for its experts.

    Attributes:
        hidden: The rows, `[R, width]`.
        experts: Index of each row's expert, `[R]`, counted from 0 among this rank's experts.
        weights: Routing weight of each row, `[R]`, with a gradient that returns to the sender; None without weights.
        state: What `combine` needs; only the dispatcher reads it.
    """

    hidden: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor | None
    state: Any


class TokenDispatcher(Protocol):
    """Brings tokens to experts and back, with gradients: the place for kernels such as DeepEP.

    Every rank of the group calls both methods once in each forward, a rank without tokens too. Both are differentiable,
    and their backward runs on every rank: results are connected to the arguments even if they have no rows.
    """

    def dispatch(
        self,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor | None,
        *,
        num_experts: int,
        group: dist.ProcessGroup,
    ) -> RoutedTokens:
        """Send each token to the ranks of its experts.

        Rank r of n holds the experts `r * step` to `(r + 1) * step`, where `step` is `num_experts / n` rounded up.

        Args:
            hidden: This rank's tokens, `[T, width]`; T differs between ranks and may be 0.
            experts: Global indices of each token's experts, `[T, k]`; `num_experts` stands for none.
            weights: Routing weights, `[T, k]`; None where the module takes none.
            num_experts: Number of all experts.
            group: The ranks.
        """
        ...

    def combine(self, outputs: torch.Tensor, state: Any) -> torch.Tensor:
        """Return the sum of each token's expert outputs, `[T, width]`, on the rank of the token.

        Args:
            outputs: One row for each of `RoutedTokens.hidden`, `[R, width]`.
            state: That of `dispatch`.
        """
        ...


class Splits(NamedTuple):
    """Pairs of one exchange: how many go to and come from each rank, and where they belong on this rank.

    Attributes:
        sent: Pairs to each rank.
        received: Pairs from each rank.
        order: Index of each sent pair among this rank's `T * k` pairs.
        shape: T and k.
        group: The ranks.
    """

    sent: list[int]
    received: list[int]
    order: torch.Tensor
    shape: tuple[int, int]
    group: dist.ProcessGroup


# Name of these exchanges in the error of a rank whose peer died, or raised before it came here.
SUBJECT = "the exchange of tokens with their experts"

# Flags that go to every rank with the counts of pairs.
BAD_INDEX, RAISED = 1, 2


class AllToAllDispatcher:
    """One all-to-all to the experts and one back. The counts of pairs go ahead in a small one.

    The counts are read on the host, once a layer and pass: on CUDA the host waits there for the device.
    """

    def dispatch(
        self,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor | None,
        *,
        num_experts: int,
        group: dist.ProcessGroup,
    ) -> RoutedTokens:
        """See `TokenDispatcher.dispatch`.

        Raises:
            StyleInputError: An index is outside of 0..num_experts; on every rank.
        """
        num_tokens, k = experts.shape
        flat = experts.reshape(-1)
        with torch.no_grad():
            order = flat.argsort(stable=True)  # by expert, so by rank; pairs without an expert come last
            here, theirs, sent, received = exchange_counts(flat, num_experts, group)
            splits = Splits(sent, received, order[: sum(sent)], (num_tokens, k), group)
        parts = [_Rows.apply(hidden, splits.order, k)]  # type: ignore[no-untyped-call]  # torch's Function
        if weights is not None:
            parts.append(weights.reshape(-1)[splits.order])
        arrived = _Exchange.apply(group, tuple(sent), tuple(received), *parts)  # type: ignore[no-untyped-call]
        local = here.repeat(theirs.shape[0]).repeat_interleave(theirs.reshape(-1), output_size=sum(received))
        return RoutedTokens(arrived[0], local, arrived[1] if weights is not None else None, splits)

    def combine(self, outputs: torch.Tensor, state: Splits) -> torch.Tensor:
        """See `TokenDispatcher.combine`."""
        (back,) = _Exchange.apply(  # type: ignore[no-untyped-call]  # torch's Function
            state.group, tuple(state.received), tuple(state.sent), outputs
        )
        return sum_of_pairs(back, state.order, *state.shape)

    def __repr__(self) -> str:
        return "AllToAllDispatcher()"


def exchange_counts(
    experts: torch.Tensor, num_experts: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Tell each rank how many pairs it gets for each of its experts. One host synchronisation.

    Args:
        experts: Global expert of each pair, `[P]`.
        num_experts: Number of all experts.
        group: The ranks.

    Returns:
        Indices of a rank's experts; counts by sender and expert, `[n, step]`; pairs to and from each rank.

    Raises:
        StyleInputError: An index on some rank is outside of 0..num_experts, or a rank raised before its exchange; on
            every rank.
    """
    size = dist.get_world_size(group)
    step = -(-num_experts // size)  # as torch.chunk: the last ranks may hold fewer experts, or none
    counts = experts.new_zeros(size * step + 1, dtype=torch.int64)
    none = torch.where(experts < num_experts, experts, size * step).clamp(0, size * step)
    counts.scatter_add_(0, none.to(torch.int64), torch.ones_like(experts, dtype=torch.int64))
    flag = BAD_INDEX * ((experts < 0) | (experts > num_experts)).any()
    ours = torch.cat([counts[:-1].view(size, step), flag.expand(size, 1).to(torch.int64)], dim=1)
    theirs = torch.empty_like(ours)
    with named_collective(SUBJECT):
        dist.all_to_all_single(theirs, ours, group=group)  # equal splits: the only exchange of known size
    sums = torch.stack([ours[:, :-1].sum(1), theirs[:, :-1].sum(1), theirs[:, -1]]).tolist()
    sent, received, flags = sums
    if RAISED in flags:
        raise StyleInputError(
            Problem(
                "rank-failed",
                "experts",
                found=f"an error on rank {flags.index(RAISED)}",
                hint="see the traceback of that rank: it has not sent its tokens",
            )
        )
    if any(flags):  # every rank has every rank's flag
        ranks = ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
        raise StyleInputError(
            Problem(
                "invalid-argument",
                "experts",
                found=f"an index on rank {ranks}",
                hint=f"a router selects experts 0 to {num_experts - 1}; {num_experts} stands for none",
            )
        )
    return torch.arange(step, device=experts.device), theirs[:, :-1], sent, received


def announce_error(num_experts: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Take the place of `exchange_counts` on a rank that raises: its peers, which wait there, raise too."""
    size = dist.get_world_size(group)
    ours = torch.zeros(size, -(-num_experts // size) + 1, dtype=torch.int64, device=device)
    ours[:, -1] = RAISED
    dist.all_to_all_single(torch.empty_like(ours), ours, group=group)


def sum_of_pairs(rows: torch.Tensor, order: torch.Tensor, num_tokens: int, k: int) -> torch.Tensor:
    """Return the sum over each token's pairs, `[T, width]`; a pair without a row adds nothing.

    The index is saved for backward on every rank: a recomputation under activation checkpointing, which ends with the
    last saved tensor, ends behind both exchanges everywhere.

    Args:
        rows: Rows of pairs, `[P, width]`.
        order: Index of each among the `T * k` pairs.
        num_tokens: T.
        k: Pairs of a token.
    """
    pairs = rows.new_zeros(num_tokens * k, rows.shape[-1]).index_copy(0, order, rows)
    return pairs.view(num_tokens, k, rows.shape[-1]).sum(1)


class _Rows(torch.autograd.Function):
    """A row for each pair. The gradient is summed in the order of the pairs, so it is the same in every run."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.shape = hidden.shape[0], k
        return hidden.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return sum_of_pairs(gradient, order, *ctx.shape), None, None


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, in one all-to-all for all parts; gradients take the way back in one."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, sent: tuple[int, ...], received: tuple[int, ...], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.splits = group, received, sent
        packed = parts[0].contiguous() if len(parts) == 1 else _packed(parts)
        arrived = packed.new_empty(sum(received), *packed.shape[1:])
        with named_collective(SUBJECT):
            dist.all_to_all_single(arrived, packed, list(received), list(sent), group=group)
        return (arrived,) if len(parts) == 1 else _unpacked(arrived, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        returned = _Exchange.apply(*ctx.splits, *gradients)  # type: ignore[no-untyped-call]  # torch's Function
        return None, None, None, *returned


def _packed(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return one row for each pair, with the columns of all parts; bytes if their types differ."""
    columns = [part.reshape(part.shape[0], part.shape[1:].numel()) for part in parts]
    if len({part.dtype for part in parts}) > 1:
        columns = [column.contiguous().view(torch.uint8) for column in columns]
    return torch.cat(columns, dim=1)


def _unpacked(rows: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    width = [part.shape[1:].numel() for part in parts]
    if len({part.dtype for part in parts}) > 1:
        width = [count * part.itemsize for count, part in zip(width, parts, strict=True)]
    # Clones, not `contiguous()`: one row counts as contiguous with any stride, which a view of another type refuses.
    columns = [column.clone(memory_format=torch.contiguous_format) for column in rows.split(width, dim=1)]
    shapes = [(rows.shape[0], *part.shape[1:]) for part in parts]
    return tuple(c.view(p.dtype).view(s) for c, p, s in zip(columns, parts, shapes, strict=True))


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


# Remedies of differences that the check finds in a module of experts, by kind.
HINTS = {
    "output": "the module runs on the rows that arrive for this rank's experts, each with one of a token's experts:"
    " what depends on the number of rows, or on a token's other experts, goes outside of it (a capacity, a mean over"
    " tokens, weights divided by their sum, a shared expert); parameters=, inputs= and num_experts= name what"
    " ExpertParallel takes for experts",
    "gradient": "a gradient is lost or counted twice on its way: dispatch and combine of a dispatcher are"
    " differentiable, and parameters= names all parameters that have a block of rows for each expert",
    "raises": "the module is given rows [R, width] with one index and one weight each, [R, 1], of this rank's experts"
    " alone: num_experts= and parameters= name the parameters with a block of rows for each expert, others have none;"
    " inputs= and form= are for arguments in another order or form; it returns one tensor",
}
HINTS["input-gradient"] = HINTS["gradient"]


class ExpertForward(ModuleForward):
    """Sends this rank's tokens to their experts, runs the module on the rows that arrive, and sends those back."""

    spec: ExpertSpec
    hints = HINTS  # of the check

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
