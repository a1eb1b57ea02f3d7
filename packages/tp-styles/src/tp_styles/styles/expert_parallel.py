"""Expert parallelism: whole experts on each rank, and tokens that are sent to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from tp_styles.problems import Problem, StyleTypeError
from tp_styles.runtime.experts import FORMS, AllToAllDispatcher, ExpertForward, Experts, ExpertSpec, TokenDispatcher
from tp_styles.styles.base import ParallelStyle
from tp_styles.values import ModuleInfo, ParameterSpec, Redistribution, Section, Split, StyleSpec, describe, is_below

# Classes of transformers in other forms than most: their form, and names of parameters that hold experts.
KNOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "DbrxExperts": ("indices", ("mlp.w1", "mlp.v1", "mlp.w2")),  # experts beneath each other in two dims
    "JetMoeParallelExperts": ("sorted", ()),
    "Llama4TextExperts": ("batched", ()),
    "SwitchTransformersExperts": ("one-hot", ()),
}

# Name of a parameter below one of several numbered experts: `3.up.weight`, `expert_3.wi.weight`.
NUMBERED = re.compile(r"^(?:(.*?)[._])?(\d+)\.")


class ExpertParallel(ParallelStyle):
    """Hold whole experts on each rank, and send tokens to the ranks of their experts.

    For a module whose forward takes tokens, the indices of their experts, and routing weights: the experts of
    transformers' mixtures, or a module of your own. Its own code runs on the rows that arrive, with one expert each,
    so a routing weight is used where the module uses it. The counts of rows are exchanged first; then two exchanges
    in the forward pass, and two in the backward pass, send tokens and their gradients. Numbers of experts and tokens
    need not divide by the number of ranks.

    Args:
        tokens: `"replicated"`: every rank has all tokens, as beside tensor parallelism; each sends an equal share of
            them, and outputs are gathered. `"sharded"`: each rank has tokens of its own (the data-parallel axis is the
            expert axis). The gradient of an expert is then the sum over all ranks' losses; where those are averaged,
            divide it by the number of ranks.
        parameters: Names of parameters that hold an equal block of rows for each expert; by default those on the
            module itself with as many rows as experts, or the parameters of numbered modules. Others are replicated.
        inputs: Names of the arguments for tokens, indices and weights; by default the first three. Two names if the
            module takes no weights.
        num_experts: Number of experts, if the parameters do not show it.
        form: How the module takes its tokens, see `runtime.experts.Experts`; by default `"indices"`, or that of a known
            class of transformers.
        dispatcher: Sends tokens in place of two all-to-alls, see `TokenDispatcher`.
    """

    def __init__(
        self,
        tokens: Literal["replicated", "sharded"] = "replicated",
        *,
        parameters: Sequence[str] = (),
        inputs: Sequence[str] = (),
        num_experts: int | None = None,
        form: str | None = None,
        dispatcher: TokenDispatcher | None = None,
    ) -> None:
        for name, value, allowed in (("tokens", tokens, ("replicated", "sharded")), ("form", form, (None, *FORMS))):
            if value not in allowed:
                raise StyleTypeError(
                    Problem("invalid-argument", name, found=repr(value), hint=", ".join(repr(item) for item in allowed))
                )
        self.tokens, self.form, self.num_experts, self.dispatcher = tokens, form, num_experts, dispatcher
        self.parameters, self.inputs = tuple(parameters), tuple(inputs)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return the ranks' experts and the moves of tokens; see `ParallelStyle.spec`."""
        known_form, known_parameters = KNOWN.get(info.kind.__name__, ("indices", ()))
        form, named = self.form or known_form, self.parameters or known_parameters
        numbered = {} if named else _numbered(info)
        count = self.num_experts or (len(set(numbered.values())) if numbered else _stacked_count(info, named))
        needed = {"batched": 1, "sorted": 2}.get(form, 3)
        inputs = self.inputs or info.arguments[:needed]
        problems = [*self._problems(info, count, inputs, needed, named)]
        if problems or not count:
            return StyleSpec(problems=tuple(problems))
        parameters = []
        for parameter in info.parameters:
            if parameter.name in numbered and parameter.shape:  # all rows on one rank, none on the others
                first = numbered[parameter.name] // -(-count // tp_size)
                section = Section(parameter.shape[0], max(parameter.shape[0], 1), first=first)
                parameters.append((parameter.name, ParameterSpec(Split(0, (section,)))))
            elif parameter.name in named or (
                not named and "." not in parameter.name and parameter.shape[:1] == (count,)
            ):
                split = Split.along(0, parameter.shape[0], unit=parameter.shape[0] // count)
                parameters.append((parameter.name, ParameterSpec(split)))
            else:  # used by each rank on the rows of its experts
                parameters.append((parameter.name, ParameterSpec(Split.replicated(), sum_gradient=True)))
        source = Replicate() if self.tokens == "replicated" else Shard(0)
        width = next((n for key in ("hidden_dim", "hidden_size") if isinstance(n := info.size(key), int)), 0)
        flow = Redistribution(source, Shard(0), width=width)
        places = inputs[:1] if form in ("batched", "sorted") or self.tokens == "replicated" else inputs
        sizes = [key for key, value in info.sizes if value == count and "expert" in key and "per_tok" not in key]
        return ExpertSpec(
            compute=ExpertForward,
            parameters=tuple(parameters),
            inputs=tuple((name, flow) for name in places),
            outputs=(Redistribution(Shard(0), source, width=width),),
            shards_randomness=True,
            experts=Experts(count, tuple(inputs), form, () if numbered else tuple(sizes), bool(numbered)),
            dispatcher=self.dispatcher or AllToAllDispatcher(),
            width=width,
        )

    def _problems(
        self, info: ModuleInfo, count: int, inputs: Sequence[str], needed: int, named: Sequence[str]
    ) -> Iterator[Problem]:
        kind, where = info.kind.__name__, info.where()
        if not count:
            yield Problem(
                "module-kind",
                where,
                found=f"no experts in {kind}",
                hint="a module of experts has one block of rows for each expert in its parameters, or numbered"
                " modules:"
                " name the parameters (parameters=) and num_experts=",
            )
        if len(inputs) < (min(needed, 2) if self.inputs else needed) or any(
            name not in (*info.arguments, *info.keyword_only) for name in inputs
        ):
            yield Problem(
                "module-kind",
                where,
                found=f"{kind}.forward({', '.join(info.arguments)})",
                hint="its forward takes tokens, the indices of their experts and routing weights: name them (inputs=)",
            )
        if self.tokens == "sharded" and needed < 3:
            yield Problem(
                "module-kind",
                where,
                found=f"{kind} takes its tokens by expert, which the ranks' own tokens together are not",
                hint='tokens="replicated" takes them',
            )
        for name in named:
            parameter = info.parameter(name)
            if parameter is None:
                yield Problem("unknown-name", info.where(name), hint="the style is for another module")
            elif count and (not parameter.shape or parameter.shape[0] % count):
                yield Problem(
                    "shape-mismatch",
                    info.where(name),
                    found=f"{parameter.shape} for {count} experts",
                    hint="its rows are those of the experts, in their order",
                )


class RouterLogits(ParallelStyle):
    """Hand out a router's logits of all ranks' tokens, for losses over all tokens.

    Beside `ExpertParallel("sharded")`, for a router whose logits only such losses read: load balancing is a product of
    two means, so the mean of the ranks' losses is not the loss of all tokens. Every rank then computes the same loss,
    and its gradient is that of one process where gradients are averaged over the ranks (FSDP2, DDP). All ranks have
    the same number of tokens.

    No check of one call covers this: ranks pass tokens of their own, and the gradient is right after the average alone.
    Pass `check="never"` to `apply_plan`, and call `compare(model, make_original, batch, data_mesh=...)`.

    Args:
        outputs: Number of the router's outputs.
        logits: Index of the logits among them.
    """

    def __init__(self, outputs: int = 3, logits: int = 0) -> None:
        self.outputs, self.logits = outputs, logits

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return an all-gather of the logits, whose gradients are summed; see `ParallelStyle.spec`."""
        flow = Redistribution(Shard(0), Replicate(), gradient=Partial())
        return StyleSpec(outputs=tuple(flow if index == self.logits else None for index in range(self.outputs)))


def expert_modules(model: nn.Module) -> list[str]:
    """Return FQNs of the modules that `ExpertParallel()` takes as they are, in the model's order.

    They, or their classes, have "expert" in their names, as all of transformers have.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        is_named = "expert" in f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
        if is_named and not any(is_below(name, other) for other in names) and _takes(describe(module, name)):
            names.append(name)
    return names


def _takes(info: ModuleInfo) -> bool:
    return not ExpertParallel().spec(info, 1).problems


def _numbered(info: ModuleInfo) -> dict[str, int]:
    """Map parameters of numbered experts to their numbers; empty unless the numbers are 0, 1, 2 and so on."""
    matches = {parameter.name: NUMBERED.match(parameter.name) for parameter in info.parameters}
    numbers = {name: int(match[2]) for name, match in matches.items() if match is not None}
    return numbers if sorted(set(numbers.values())) == [*range(len(set(numbers.values())))] else {}


def _stacked_count(info: ModuleInfo, named: Sequence[str]) -> int:
    """Return the number of blocks that all parameters with three dims, or the named ones, hold; 0 if there is none."""
    stacked = {
        parameter.shape[0] for parameter in info.parameters if "." not in parameter.name and len(parameter.shape) == 3
    }
    if not stacked and named:
        stacked = {value for key, value in info.sizes if "num_experts" in key and isinstance(value, int)}
    return int(stacked.pop()) if len(stacked) == 1 else 0
