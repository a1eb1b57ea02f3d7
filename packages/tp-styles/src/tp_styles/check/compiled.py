"""A compiled call against the same call without the compiler, both sharded, on the modules themselves.

No hook does this by itself: one after a compiled root would break its graph, or recompile it when it goes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_styles._torch_compat import tree_flatten
from tp_styles.check.checker import Checker, CheckHook
from tp_styles.check.compare import Difference, cotangent, error, gradient_differences, tensors
from tp_styles.check.inputs import SHARED
from tp_styles.check.randomness import Precision, generators_restored
from tp_styles.check.runs import plain_local, rolled_back
from tp_styles.problems import CheckError, PlanError, Problem
from tp_styles.runtime.dropout import OBSERVES

HINT = 'the backends "eager" and "aot_eager" show if tracing or code generation is at fault'
DRAWS = "draws"
"""Kind of the one difference that is shown where both calls have drawn other numbers: the others follow from it."""

WRAPPED = "_orig_mod"
"""Attribute of the module that `torch.compile` returns for one."""


@dataclass(frozen=True)
class Value:
    """One result of a call, local values only."""

    kind: str
    name: str
    value: torch.Tensor
    form: str

    @classmethod
    def of(cls, kind: str, name: str, x: torch.Tensor) -> Value:
        """A copy: the next call may write to the same memory."""
        local = plain_local(x)
        layout = f" as {x.placements}" if isinstance(x, DTensor) else ""
        return cls(kind, name, local.clone(), f"{local.dtype} of shape {tuple(local.shape)}{layout}")


def compare_compiled(
    model: nn.Module, checker: Checker, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Compare both calls; the same line of a report on every rank.

    Raises:
        PlanError: Nothing is compiled.
        CheckError: They differ; on every rank.
    """
    roots = [root for root in (model, compiled) if isinstance(root, nn.Module)]
    below = list(dict.fromkeys(child for root in roots for child in root.modules()))
    modules = [module for module in below if not hasattr(module, WRAPPED)]  # a wrapper holds the compiler's own things
    is_compiled = any(hasattr(module, WRAPPED) or module._compiled_call_impl is not None for module in below)
    if isinstance(compiled, nn.Module) and not is_compiled:
        hint = "pass what torch.compile returned, or the model after model.compile()"
        raise PlanError(Problem("invalid-argument", "compiled", found="no module in it is compiled", hint=hint))
    precision = Precision()

    def values() -> tuple[list[Value], list[torch.Tensor]]:
        with rolled_back(modules), generators_restored(checker.axis.mesh.device_type) as generators:
            return _values(model, compiled, args, kwargs), [generator.get_state() for generator in generators]

    def eager() -> tuple[list[Value], list[torch.Tensor]]:
        with torch.compiler.set_stance("force_eager"), precision:
            return values()

    wanted = checker.agreed(eager)  # checked against the original before, if this is its mode's first call
    if wanted is None:
        raise CheckError(Problem("check-raises", "the call without the compiler", found=checker.failure))
    # Hooks of regions that are done were put back by the roll-back; a graph that is made now shall not meet them.
    for module in modules:
        for hook in [*module._forward_pre_hooks.values()]:
            if isinstance(hook, CheckHook) and not hook.scope.is_root:
                hook.remove()
    token = OBSERVES.set(False)
    try:
        found = checker.agreed(values)
    finally:
        OBSERVES.reset(token)
    if found is None:
        raise CheckError(Problem("check-raises", "the compiled call", found=checker.failure, hint=HINT))
    different = _differences(found[0], wanted[0], checker.tolerance(precision))
    if different and not all(map(torch.equal, found[1], wanted[1])):
        different.append(Difference(DRAWS, "random numbers", math.inf))
    if differences := sorted(checker.union(different), key=lambda one: (one.kind != DRAWS, -one.error)):
        raise CheckError(_problem(one) for one in differences[: 1 if differences[0].kind == DRAWS else 8])
    counts = [sum(kind in one.kind for one in wanted[0]) for kind in ("output", "gradient", "buffer")]
    mode = "training" if model.training else "evaluation"
    what = "{} outputs, {} gradients, {} buffers".format(*counts)
    return f"check of the compiled call ({mode}, {what}): equal to the one without the compiler"


def _values(model: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
    """Outputs of one call on copies of its arguments, gradients if they need any, and buffers."""
    leaves: list[torch.Tensor] = []
    memo: dict[int, Any] = {}
    for x in tree_flatten((args, kwargs))[0]:
        if isinstance(x, torch.Tensor) and id(x) not in memo:
            leaves.append(x.detach().clone().requires_grad_(x.requires_grad))
            memo[id(x)] = leaves[-1] if x.is_leaf else leaves[-1].clone()  # what is no leaf may be written to
        elif isinstance(x, SHARED):
            memo[id(x)] = x
    args, kwargs = copy.deepcopy((args, kwargs), memo)
    outputs = tensors(call(*args, **kwargs))
    found = [Value.of("output", f"-> output {index}", x) for index, x in enumerate(outputs)]
    starts = [x for x in outputs if x.requires_grad]
    if starts:
        torch.autograd.backward(starts, [cotangent(x) for x in starts])
    for index, x in enumerate(leaves):
        found += [Value.of("input-gradient", f"input {index}", x.grad)] if x.grad is not None else []
    for name, parameter in model.named_parameters():
        found += [Value.of("gradient", name, parameter.grad)] if parameter.grad is not None else []
    return found + [Value.of("buffer", name, buffer) for name, buffer in model.named_buffers()]


def _differences(found: list[Value], wanted: list[Value], tolerance: float) -> list[Difference]:
    ours = {(one.kind, one.name): one for one in found}
    both = {(one.kind, one.name): one for one in wanted}
    differences = []
    for key in dict.fromkeys([*both, *ours]):
        forms = [table[key].form if key in table else "nothing" for table in (ours, both)]
        if forms[0] != forms[1]:
            differences.append(Difference(*key, math.inf, f"{forms[0]}; without the compiler {forms[1]}"))
    pairs = [
        (*key, ours[key].value, both[key].value) for key in both if key in ours and ours[key].form == both[key].form
    ]
    gradients = [pair for pair in pairs if "gradient" in pair[0]]
    rest = [(kind, name, error(one, other)) for kind, name, one, other in pairs if "gradient" not in kind]
    differences += [Difference(*one) for one in rest if one[-1] > tolerance]
    return differences + gradient_differences(gradients, 10 * tolerance)


def _problem(one: Difference) -> Problem:
    if one.kind == DRAWS:
        found = "the compiled call draws others than the one without the compiler: their values cannot be compared"
        hint = 'compile with options={"fallback_random": True} for inductor, or compare in eval()'
        return Problem("check-mismatch", one.name, found=found, hint=hint)
    off = one.detail or f"off by {one.error:.2g} of the call without the compiler"
    return Problem("check-mismatch", one.name, found=f"in the compiled call: {one.kind} {off}", hint=HINT)
