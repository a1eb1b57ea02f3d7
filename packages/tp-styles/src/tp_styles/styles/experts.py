"""Styles that only Hugging Face's plans need: experts in three-dimensional weights, bare parameters, latent keys."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Partial, Replicate

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.values.spec import ModuleInfo, ParameterInfo, ParameterSpec, Redistribution, StyleSpec
from tp_styles.values.split import Section, Split


class ParametersParallel(ParallelStyle):
    """A module whose own parameters are divided, by the names that Hugging Face's plans use for parameters.

    Args:
        parameters: Name of a parameter of the module -> `"colwise"`, `"rowwise"`, `"packed_colwise"`,
            `"packed_rowwise"` or `"replicate"`. Rows are the last dim but one, columns the last.
        role: `"experts"`: every rank runs its part of every expert, and the parts are summed; gradients of the tokens
            and of the routing weights are summed too. `"sum"`: the output is a partial sum. `"local"`: neither.
    """

    def __init__(self, parameters: Mapping[str, str], *, role: str = "local") -> None:
        super().__init__(None, None)
        self.parameters = dict(parameters)
        self.role = role

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        problems = []
        parameters = []
        for name, kind in self.parameters.items():
            parameter = info.parameter(name)
            if parameter is None:
                problems.append(Problem("unknown-name", info.where(name), hint="the plan is for another model"))
                continue
            split, problem = _split(info, parameter, kind, tp_size)
            problems += [problem] if problem is not None else []
            summed = split.is_replicated and self.role != "local"
            # A whole bias of the projection down would be added by every rank.
            divide_by_tp = summed and kind == "rowwise" and name.endswith("bias")
            parameters.append((name, ParameterSpec(split, sum_gradient=summed, divide_by_tp=divide_by_tp)))
        if self.role == "local":
            return StyleSpec(compute="module", parameters=tuple(parameters), problems=tuple(problems))
        copied = info.arguments[:1] + (info.arguments[2:3] if self.role == "experts" else ())
        flow = Redistribution(Replicate(), Replicate(), gradient=Partial())
        return StyleSpec(
            compute="module",
            parameters=tuple(parameters),
            inputs=tuple((name, flow) for name in copied),
            outputs=(Redistribution(Partial(), Replicate()),),
            problems=tuple(problems),
        )

    def _arguments(self) -> dict[str, object]:
        return {"parameters": self.parameters, "role": self.role}


class IdentityExpert(ParallelStyle):
    """A module that gives the same on every rank inside of experts whose outputs are summed: its input is divided."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        return StyleSpec(compute="divided-input")

    def _arguments(self) -> dict[str, object]:
        return {}


class LatentKVParallel(ParallelStyle):
    """The projection to latent keys and values: its last features go to every head directly, and their gradient is
    summed; the others go through a column-wise layer, which does that itself.

    Args:
        rope_features: How many features at the end bypass the second projection.
    """

    def __init__(self, rope_features: int) -> None:
        super().__init__(None, None)
        self.rope_features = rope_features

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        features = info.size("out_features")
        problems = []
        if not isinstance(features, int) or not 0 < self.rope_features < features:
            hint = "the latent projection has more output features than those that bypass"
            problems.append(
                Problem("shape-mismatch", info.where(), found=f"{self.rope_features} of {features}", hint=hint)
            )
        flow = Redistribution(Replicate(), Replicate(), gradient=Partial(), width=self.rope_features)
        return StyleSpec(compute="latent-kv", outputs=(flow,), problems=tuple(problems))

    def _arguments(self) -> dict[str, object]:
        return {"rope_features": self.rope_features}


def _split(info: ModuleInfo, parameter: ParameterInfo, kind: str, tp_size: int) -> tuple[Split, Problem | None]:
    shape = parameter.shape
    last = len(shape) - 1
    if kind == "replicate" or (kind.endswith("rowwise") and (len(shape) == 1 or parameter.name.endswith("bias"))):
        return Split.replicated(), None
    dim = last if kind.endswith("rowwise") or len(shape) == 1 else last - 1
    if kind.endswith("colwise") and parameter.name.endswith("bias"):
        dim = last
    if not kind.startswith("packed"):
        return Split.along(dim, shape[dim]), None
    if shape[dim] % 2:
        hint = "a packed weight holds two sections of the same size"
        return Split.replicated(), Problem(
            "invalid-sections", info.where(parameter.name), dim=dim, found=str(shape), hint=hint
        )
    return Split(dim, (Section(shape[dim] // 2),) * 2), None
