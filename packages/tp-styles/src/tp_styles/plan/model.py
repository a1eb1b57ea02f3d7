"""A plan as a value: its modules, regions and collectives, as text and as plain values."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.distributed.tensor import Partial, Shard

from tp_styles._torch_compat import TorchParallelStyle
from tp_styles.problems import PlanError, Problem, StyleModuleError
from tp_styles.values import ModuleInfo, NoTransfer, ParameterSpec, Redistribution, Split, Step, StyleSpec, is_below

# Number of the JSON form that `to_json` writes.
FORMAT = 1


@dataclass(frozen=True)
class PlannedModule:
    """One module with its style and the style's decision."""

    info: ModuleInfo
    pattern: str
    style: TorchParallelStyle
    spec: StyleSpec

    @property
    def name(self) -> str:
        """FQN of the module."""
        return self.info.name


@dataclass(frozen=True)
class UnstyledParameter:
    """A parameter without a style: replicated on every rank."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class TPPlan:
    """Tensor parallelism of a model over `tp_size` ranks.

    Attributes:
        tp_size: Number of ranks.
        modules: Modules with a style, in the model's order.
        unstyled: Parameters that stay replicated.
        problems: Reasons against the plan; `apply_plan` raises them all.
    """

    tp_size: int
    modules: tuple[PlannedModule, ...] = ()
    unstyled: tuple[UnstyledParameter, ...] = ()
    problems: tuple[Problem, ...] = field(default=())

    def explain(self, name: str | None = None, *, num_tokens: int | None = None) -> str:
        """Return the plan as text: styles, global and local shapes, collectives, unstyled parameters, problems.

        Args:
            name: Only the modules at or below this FQN.
            num_tokens: Tokens of one step, for bytes per step; by default bytes are per token.
        """
        chosen = [m for m in self.modules if name is None or m.name == name or m.name.startswith(name + ".")]
        lines = [f"tensor parallel over {self.tp_size} ranks: {len(chosen)} modules"]
        planned = [*collectives(self)]
        for module in chosen:
            lines.append(f"{module.name or '(the model)'}  {module.info.kind.__name__}  {module.style!r}")
            lines += [f"    {line}" for line in _parameter_lines(module, self.tp_size)]
            lines += [
                f"    {each.when:<8}  {each.where}: {each.step}  {_amount(each, module, num_tokens)}"
                for each in planned
                if each.module == module.name
            ]
            lines += [f"    {note}" for note in module.spec.notes(self.tp_size)]
        if name is None and self.unstyled:
            total = sum(left.num_bytes for left in self.unstyled)
            lines.append(f"replicated: {len(self.unstyled)} parameters, {_bytes(total)}")
            lines += [f"    {left.name}  {_shape(left.shape)}" for left in self.unstyled]
        if self.problems:
            lines.append(f"problems: {len(self.problems)}")
            lines += [f"    {problem}" for problem in self.problems]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the plan as JSON, byte-stable."""
        return json.dumps({"format": FORMAT, **self.as_dict}, indent=1, sort_keys=True)

    @cached_property
    def as_dict(self) -> dict[str, Any]:
        """The plan in plain values."""
        return {
            "tp_size": self.tp_size,
            "modules": [_module_as_dict(module) for module in self.modules],
            "unstyled": [
                {"name": left.name, "shape": list(left.shape), "bytes": left.num_bytes} for left in self.unstyled
            ],
            "problems": [vars(problem) for problem in self.problems],
        }

    @cached_property
    def parameters(self) -> dict[str, ParameterSpec]:
        """The decision for each styled parameter, by FQN."""
        return {module.info.where(name): spec for module in self.modules for name, spec in module.spec.parameters}

    @cached_property
    def regions(self) -> Regions:
        """The regions between column-wise and row-wise layers."""
        rows = [planned.name for planned in self.modules if _is_row(planned)]
        regions: Regions = {}
        for planned in self.modules:
            block = planned.name if _is_column(planned) else ""
            while block:
                block = block.rpartition(".")[0]
                if inside := [row for row in rows if is_below(row, block)]:
                    regions.setdefault(block, ([], inside))[0].append(planned.name)
                    break
        return regions

    @cached_property
    def digest(self) -> str:
        """A hash of all decisions; it has to be equal on all ranks."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def raise_problems(self) -> None:
        """Raise all problems at once.

        Raises:
            PlanError: There are some. It is also a `StyleModuleError` (`NotImplementedError`) if all of them are
                about kinds of modules.
        """
        if not self.problems:
            return
        kind = StyleModuleError if all(p.code == "module-kind" for p in self.problems) else PlanError
        count = len(self.problems)
        raise kind(self.problems, f"{count} problem{'' if count == 1 else 's'} in the plan for tp_size={self.tp_size}:")


# FQN of the innermost module around column-wise and row-wise layers -> their FQNs.
Regions = dict[str, tuple[list[str], list[str]]]


def _is_column(planned: PlannedModule) -> bool:
    """Whole input, a shard out."""
    spec = planned.spec
    leaves_shard = len(spec.outputs) == 1 and spec.outputs[0] is not None and isinstance(spec.outputs[0].dst, Shard)
    comes_whole = bool(spec.inputs) and not isinstance(spec.inputs[0][1].dst, Shard)
    return leaves_shard and comes_whole and bool(spec.parameters)


def _is_row(planned: PlannedModule) -> bool:
    """A shard in, a sum out."""
    spec = planned.spec
    sums = len(spec.outputs) == 1 and spec.outputs[0] is not None and isinstance(spec.outputs[0].src, Partial)
    return sums and bool(spec.inputs) and isinstance(spec.inputs[0][1].src, Shard)


def shared_inputs(plan: TPPlan) -> Iterator[tuple[str, dict[Redistribution, list[str]], list[str]]]:
    """Yield each block, its column-wise layers by shared layout, its row-wise layers.

    Row-wise layers of a block within are not the block's own.
    """
    regions, specs = plan.regions, {planned.name: planned.spec for planned in plan.modules}
    for block, (columns, rows) in regions.items():
        inner = [other for other in regions if other != block and is_below(other, block)]
        own = [row for row in rows if not any(is_below(row, other) for other in inner)]
        flows: dict[Redistribution, list[str]] = {}
        for name in columns:
            flows.setdefault(specs[name].inputs[0][1], []).append(name)
        if own:
            yield block, flows, own


# Dims of an activation that a plan assumes where it has to: batch, sequence, features.
ACTIVATION_DIMS = 3

# Stands in the repr of styles that define none, another one on each rank.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Collective:
    """One communication of a module.

    Attributes:
        module: FQN.
        where: Argument, `->` for the output, or the parameter with a summed gradient.
        when: `"forward"` or `"backward"`.
        step: Operation.
        elements_per_token: Elements sent by a rank for each token of the full batch (by the meaning of the operation,
            not of an algorithm; an all-reduce counts once); 0 if independent of tokens.
        elements: Elements sent independently of tokens.
    """

    module: str
    where: str
    when: str
    step: Step
    elements_per_token: float = 0.0
    elements: int = 0


def collectives(plan: TPPlan) -> Iterator[Collective]:
    """Yield every communication of one forward and backward, in the order of the modules.

    Backward ones take place where a gradient is asked for: the input of the first layer usually needs none. Layers of
    one block that may read one tensor together are taken to do so, and bring it in once. Two blocks that turn out to
    read one tensor (Cohere) count twice.
    """
    together = {name for _, groups, _ in shared_inputs(plan) for _, *others in groups.values() for name in others}
    for module in plan.modules:
        # Ids have one dim less than activations.
        for where, flow in module.spec.flows():
            if module.name in together and not where.startswith("->"):
                continue
            dims = ACTIVATION_DIMS if flow.width or where.startswith("->") else ACTIVATION_DIMS - 1
            try:
                steps = flow.transfer(dims)
            except NoTransfer:
                continue  # reported in plan.problems
            for when, step in (("forward", steps.forward), ("backward", steps.backward)):
                if step.communicates:
                    width = flow.width if flow.width else 1  # of one feature if the width is unknown
                    yield Collective(
                        module.name, where, when, step, elements_per_token=_sent(step, width, plan.tp_size)
                    )
        for where, when, step, width in module.spec.exchanges():
            yield Collective(module.name, where, when, step, elements_per_token=_sent(step, width, plan.tp_size))
        for name, parameter in module.spec.parameters:
            if parameter.sum_gradient:
                info = module.info.parameter(name)  # None: reported in plan.problems
                count = math.prod(info.shape if info is not None else ())
                yield Collective(module.name, name, "backward", Step("all_reduce"), elements=count)


def _sent(step: Step, elements: int, tp_size: int) -> float:
    """Return elements sent by a rank for an activation with `elements` elements over all ranks."""
    if step.op == "all_reduce":
        return elements if tp_size > 1 else 0
    others = (tp_size - 1) / tp_size
    return elements * others / tp_size if step.op == "all_to_all" else elements * others


# ---------------------------------------------------------------------------------------------- values


def _module_as_dict(module: PlannedModule) -> dict[str, Any]:
    spec = module.spec
    return {
        "name": module.name,
        "type": module.info.kind.__qualname__,
        "pattern": module.pattern,
        "style": _ADDRESS.sub("", repr(module.style)),  # equal on all ranks
        "compute": spec.compute if isinstance(spec.compute, str) else spec.compute.__qualname__,
        "parameters": [
            {
                "name": name,
                "shape": list(info.shape) if (info := module.info.parameter(name)) is not None else None,
                "dtype": str(info.dtype) if info is not None else None,
                "requires_grad": info.requires_grad if info is not None else None,
                "split": str(parameter.split),
                "sum_gradient": parameter.sum_gradient,
            }
            for name, parameter in spec.parameters
        ],
        "flows": [
            {"where": where, "source": str(flow.src), "wanted": str(flow.dst), "width": flow.width}
            for where, flow in spec.flows()
        ],
        "local_output": spec.local_output,
        "attributes": {name: str(value) for name, value in spec.attributes},
    }


# ---------------------------------------------------------------------------------------------- text


def _parameter_lines(module: PlannedModule, tp_size: int) -> Iterator[str]:
    for name, parameter in module.spec.parameters:
        info = module.info.parameter(name)
        if info is None:
            continue
        text = f"{name}: {_shape(info.shape)} -> {_local(info.shape, parameter.split, tp_size)}  {parameter.split}"
        if parameter.sum_gradient:
            text += ", gradient summed"
        if not info.requires_grad:
            text += ", frozen"
        yield text


def _local(shape: tuple[int, ...], split: Split, tp_size: int) -> str:
    try:
        shapes = {rank: tuple(split.local_shape(shape, rank, tp_size)) for rank in range(tp_size)}
    except ValueError:  # the split does not fit the shape
        return "?"
    first, last = shapes[0], shapes[tp_size - 1]  # chunks shrink towards the last rank
    return _shape(first) if len(set(shapes.values())) == 1 else f"{_shape(first)} .. {_shape(last)}"


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _amount(collective: Collective, module: PlannedModule, num_tokens: int | None) -> str:
    itemsize = max((info.dtype.itemsize for info in module.info.parameters if info.dtype.is_floating_point), default=4)
    if collective.elements:
        return _bytes(collective.elements * itemsize)
    if num_tokens is None:
        return f"{_bytes(collective.elements_per_token * itemsize)} a token"
    return _bytes(collective.elements_per_token * itemsize * num_tokens)


def _bytes(count: float) -> str:
    """Return a number of bytes in the unit that fits, with one decimal above bytes."""
    unit = next((index for index in range(4) if count < 1024 ** (index + 1)), 4)
    return f"{count:,.0f} bytes" if unit == 0 else f"{count / 1024**unit:,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[unit - 1]}"
