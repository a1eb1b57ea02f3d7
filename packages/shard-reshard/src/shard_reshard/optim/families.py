"""Optimizers on owners: what `make` makes of matrices, and its parameter groups on ranks that own none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from shard_reshard._shared.problems import PlanError, Problem, raise_problems
from shard_reshard.layout.shard_map import torch_dtype
from shard_reshard.optim.plan import Matrix

Make = Callable[[list[Any]], Optimizer]


class Group(NamedTuple):
    """A parameter group as the caller writes it: options, and named parameters."""

    options: dict[str, Any]
    parameters: dict[str, nn.Parameter]


def groups_of(given: Any) -> tuple[list[Group], bool]:
    """Return the groups in ``given``, and True if the caller wrote groups.

    ``given`` are pairs of name and parameter, a mapping of them, or dicts with such ``"params"`` and options. A
    parameter under several names is in its first group alone.
    """
    items: list[Any] = list(given.items()) if isinstance(given, Mapping) else list(given)
    grouped = bool(items) and all(isinstance(item, Mapping) for item in items)
    groups, seen = list[Group](), set[int]()
    entries: list[Any] = items if grouped else [{"params": items}]
    for entry in entries:
        options: dict[str, Any] = {key: value for key, value in entry.items() if key != "params"}
        pairs: Any = entry["params"].items() if isinstance(entry["params"], Mapping) else entry["params"]
        named: dict[str, nn.Parameter] = {}
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise PlanError(
                    Problem(
                        "wrong-type",
                        "named_parameters",
                        found=f"{type(pair).__name__}",
                        hint="pass model.named_parameters(), or groups {'params': [(name, parameter), ...], 'lr': ...}",
                    )
                )
            name: str = pair[0]
            parameter: Any = pair[1]
            if not isinstance(parameter, torch.Tensor) or not parameter.is_leaf:
                reason = f"a {type(parameter).__name__}" if not isinstance(parameter, torch.Tensor) else "no leaf"
                raise PlanError(Problem("wrong-type", name, found=reason, hint="pass parameters"))
            if id(parameter) not in seen:
                if name in named or any(name in group.parameters for group in groups):
                    raise PlanError(
                        Problem(
                            "duplicate-name", name, found="two parameters", hint="give each parameter a name of its own"
                        )
                    )
                seen.add(id(parameter))
                named[name] = pair[1]
        groups.append(Group(options, named))
    if not any(group.parameters for group in groups):
        raise PlanError(Problem("missing-argument", "named_parameters", found="no parameters", hint="pass some"))
    return groups, grouped


def routed(names: Iterable[str], patterns: Sequence[str], has_rest: bool, whole: bool = True) -> dict[str, int]:
    """Return for each name the number of the first glob that matches it; -1 for parameters that stay in shards."""
    numbers = {name: next((n for n, glob in enumerate(patterns) if fnmatchcase(name, glob)), -1) for name in names}
    problems = [
        Problem("missing-argument", name, found="no pattern of make= matches it", hint="add '*', or pass in_shards=")
        for name, number in numbers.items()
        if number < 0 and not has_rest
    ]
    if whole:  # a group that is added later may well have parameters of some patterns only
        problems += [
            Problem(
                "unmatched-pattern",
                f"make[{glob!r}]",
                found="it is the first match of no parameter",
                hint="leave it out",
            )
            for number, glob in enumerate(patterns)
            if number not in numbers.values()
        ]
        if has_rest and -1 not in numbers.values():
            problems.append(
                Problem(
                    "conflicting-arguments",
                    "in_shards",
                    found="every parameter matches a pattern of make=",
                    hint="leave it out",
                )
            )
    raise_problems(problems)
    return numbers


@dataclass
class Family:
    """Matrices for one call of ``make``, with its parameter groups as they are on every rank.

    Each chunk of matrices has an optimizer of its own on each owner. All of them take their hyperparameters from
    ``outer``, which schedulers and callers write to.

    Attributes:
        make: The caller's function.
        groups: Options, and positions of matrices, of each group that the caller wrote.
        grouped: False if the caller wrote parameters without groups.
        members: Positions of matrices in each group of the optimizer that ``make`` returns.
        outer: Those groups, with the model's parameters in place of matrices.
        defaults: The optimizer's.
        optimizers: This rank's optimizers by chunk.
    """

    make: Make
    groups: list[tuple[dict[str, Any], list[int]]]
    grouped: bool
    members: list[list[int]] = field(default_factory=list)
    outer: list[dict[str, Any]] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[int, Optimizer] = field(default_factory=dict)

    def made(self, tensors: Mapping[int, nn.Parameter]) -> Optimizer:
        """Call ``make`` with tensors by position; it gets groups if the caller wrote groups."""
        if self.grouped:
            params: list[Any] = [
                {"params": [tensors[at] for at in positions if at in tensors], **options}
                for options, positions in self.groups
            ]
        else:
            params = [tensors[at] for _, positions in self.groups for at in positions if at in tensors]
        optimizer: Any = self.make(params)
        if not isinstance(optimizer, Optimizer):
            raise PlanError(
                Problem(
                    "wrong-type",
                    "make",
                    found=f"a {type(optimizer).__name__}",
                    hint="return an optimizer: lambda params: torch.optim.Muon(params, lr=0.02)",
                )
            )
        if self.members:
            self._compare(optimizer, tensors)
        return optimizer

    def lay_out(self, matrices: Sequence[Matrix], parameters: Mapping[str, nn.Parameter], per_matrix: bool) -> None:
        """Call ``make`` with tensors without memory, for the groups that every rank has."""
        places = {
            at: nn.Parameter(torch.empty(matrix.shape, dtype=torch_dtype(matrix.dtype), device="meta"))
            for _, positions in self.groups
            for at, matrix in ((at, matrices[at]) for at in positions)
        }
        optimizer = self.made(places)
        if not per_matrix:
            check_per_matrix(self, optimizer, places)
        position = {id(tensor): at for at, tensor in places.items()}
        taken: set[str] = set()
        for group in optimizer.param_groups:
            own = [position[id(tensor)] for tensor in group["params"]]
            names = [n for n in dict.fromkeys(matrices[at].parameter for at in own) if n not in taken]
            taken.update(names)
            values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            self.members.append(own)
            self.outer.append({"params": [parameters[name] for name in names], **values})
        self.defaults = dict(optimizer.defaults)

    def _compare(self, optimizer: Optimizer, tensors: Mapping[int, nn.Parameter]) -> None:
        """Refuse a ``make`` that groups a part of its matrices otherwise than all of them."""
        position = {id(tensor): at for at, tensor in tensors.items()}
        groups = [[position.get(id(tensor)) for tensor in group["params"]] for group in optimizer.param_groups]
        expected = [[at for at in own if at in tensors] for own in self.members]
        if groups != expected:
            hint = "make the same groups, in one order, for any of the matrices; groups may be empty"
            reason = f"{len(groups)} groups for some matrices, {len(expected)} for all"
            if len(groups) == len(expected):
                reason = "other groups for some matrices than for all"
            raise PlanError(Problem("invalid-argument", "make", found=reason, hint=hint))

    def write_hyperparameters(self, optimizer: Optimizer) -> None:
        """Copy the groups' present values to an owner's optimizer, before its step."""
        for group, outer in zip(optimizer.param_groups, self.outer, strict=True):
            for key, value in outer.items():
                if key != "params":  # a tensor is an owner's own: its step may write to it
                    group[key] = value.clone() if torch.is_tensor(value) else value


# Torch's own optimizers but these update each parameter from its own gradient and state.
_COUPLED = ("LBFGS",)


def check_per_matrix(family: Family, optimizer: Optimizer, tensors: Mapping[int, torch.Tensor]) -> None:
    """Refuse an optimizer whose update of a matrix depends on other matrices: owners would compute something else.

    Torch's classes are known. Another one is run on up to three small tensors, together and apart, for some steps
    with small and large gradients: the results have to be bit-equal.
    """
    kind = type(optimizer)
    where = f"make: {kind.__name__}"
    hint = "use an optimizer with state for each parameter alone; if this one has, pass per_matrix=True"
    if f"{kind.__module__}.".startswith("torch.optim."):
        if kind.__name__ in _COUPLED:
            raise PlanError(Problem("not-per-matrix", where, found="one state for all parameters", hint=hint))
        for number, group in enumerate(optimizer.param_groups):
            dtypes = {tensor.dtype for tensor in group["params"]}
            if kind is torch.optim.Adafactor and group["eps"][0] is None and len(dtypes) > 1:
                reason = (
                    f"group {number} has {', '.join(sorted(map(str, dtypes)))}; torch takes the first one's eps for all"
                )
                hint = "give eps=(1e-7, 1e-3), or a group for each dtype"
                raise PlanError(Problem("not-per-matrix", where, found=reason, hint=hint))
        return
    chosen = sorted(tensors)[:: max(1, len(tensors) // 3)][:3]
    shapes = [tuple(min(size, 8 - number) for size in tensors[at].shape) for number, at in enumerate(chosen)]
    try:
        joint = _trial(family, chosen, shapes, chosen)
        alone = [_trial(family, chosen, shapes, [at])[0] for at in chosen]
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise PlanError(
            Problem(
                "not-per-matrix",
                where,
                found=f"it cannot be tried on tensors of {shapes}: {type(error).__name__}: {text}",
                hint=hint,
            )
        ) from error
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(joint, alone, strict=True)):
        raise PlanError(
            Problem("not-per-matrix", where, found="its update of a tensor depends on the other tensors", hint=hint)
        )


def _trial(
    family: Family, chosen: Sequence[int], shapes: Sequence[tuple[int, ...]], stepped: Sequence[int]
) -> list[torch.Tensor]:
    """Return the values of the ``stepped`` tensors after some steps with gradients of several sizes."""
    trial = Family(family.make, family.groups, family.grouped)
    draws = {at: torch.Generator().manual_seed(number) for number, at in enumerate(chosen) if at in stepped}
    sizes = dict(zip(chosen, shapes, strict=True))
    tensors = {at: nn.Parameter(torch.randn(sizes[at], generator=draw)) for at, draw in draws.items()}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        optimizer = trial.made(tensors)
        for scale in (1.0, 1000.0, 0.001, 1.0):
            for at, tensor in tensors.items():
                tensor.grad = scale * torch.randn(sizes[at], generator=draws[at])
            optimizer.step()
    return [tensors[at].detach() for at in stepped]
