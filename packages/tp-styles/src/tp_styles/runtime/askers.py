"""Functions of torch that take a part for a whole weight: told by name when they ask the part.

A part has a gradient and a shape like any parameter, so each of these would go through and give a wrong number: a norm
of one rank's part, bounds of a weight of its size. They ask for something that others seldom ask for, so a part looks
at who asks: one look at a frame, in no forward or backward.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tp_styles.problems import PlanError, Problem

NORMS = {
    ("torch.nn.utils.clip_grad", "clip_grad_norm_"): "use tp_styles.clip_grad_norm_, which is the norm of the whole",
    **dict.fromkeys(
        (("torch.optim._muon", ""), ("torch.optim._adafactor", ""), ("torch.optim.lbfgs", "")),
        'it works on whole matrices: apply the plan with params="dtensor", or optimize element by element (AdamW)',
    ),
}
NORMS["transformers.optimization", ""] = NORMS["torch.optim._muon", ""]
"""Module and function (any, where empty) that reads gradients -> what to do instead."""

INIT = "torch.nn.init"
COMPREHENSIONS = "<listcomp>", "<genexpr>", "<dictcomp>"


def refuse_norm(parameter: Any) -> None:
    """See who reads a part's gradient.

    Raises:
        PlanError: Somebody who would take its norm for the whole's.
    """
    module, function, _ = _asker()
    hint = NORMS.get((module, function)) or NORMS.get((module, ""))
    if hint is not None and _is_divided(parameter):
        raise PlanError(Problem("part-for-whole", found=f"{module}.{function} on a part of a parameter", hint=hint))


def refuse_init(parameter: Any) -> None:
    """See who asks for the number of dims: `nn.init` does where it goes on with the whole matrix.

    Raises:
        PlanError: It does.
    """
    module, function, _ = _asker()
    if module == INIT and _is_divided(parameter):
        raise _no_init(function)


def refuse_truncated(parameter: Any) -> None:
    """See whether numbers are drawn again until they fit: ranks would draw differently often, and part for good.

    Raises:
        PlanError: They are.
    """
    module, function, variables = _asker()
    if module == INIT and "trunc" in function and "result" in variables and _is_divided(parameter):
        raise _no_init("trunc_normal_")


def wants_fans(parameter: Any) -> bool:
    """True if `nn.init` asks for a size, to work out bounds: those of the whole."""
    module, function, _ = _asker()
    return module == INIT and function == "_calculate_fan_in_and_fan_out" and not parameter.is_meta


def _no_init(function: str) -> PlanError:
    hint = "initialise before the plan is applied; reset_parameters() of the module, normal_, uniform_, xavier_ and"
    hint += " kaiming_ draw for the whole; load_state_dict() takes whole tensors"
    return PlanError(Problem("part-for-whole", found=f"nn.init.{function} on a part of a parameter", hint=hint))


def _is_divided(parameter: Any) -> bool:
    info = vars(parameter).get("_sharding_info")
    return info is not None and info[0].size() > 1 and info[1][0].is_shard()


def _asker() -> tuple[str, str, tuple[str, ...]]:
    """Module, function and variables of who called the parameter's method."""
    if torch.compiler.is_compiling():
        return "", "", ()
    frame = sys._getframe(3)
    while frame.f_code.co_name in COMPREHENSIONS and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name, frame.f_code.co_varnames
