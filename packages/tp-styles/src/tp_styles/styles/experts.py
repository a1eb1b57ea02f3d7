"""Styles that only Hugging Face's plans need: experts in three-dimensional weights, bare parameters, latent keys."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Partial, Replicate

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.values.spec import ModuleInfo, ParameterInfo, ParameterSpec, Redistribution, StyleSpec
from tp_styles.values.split import Section, Split


class ParametersParallel(ParallelStyle):
    """Shard a module's own parameters by the style names of Hugging Face's plans.

    Args:
        parameters: Name of a parameter of the module -> `"colwise"`, `"rowwise"`, `"packed_colwise"`,
            `"packed_rowwise"`, `"grouped_gemm"` (full experts, the first dim) or `"replicate"`. Rows are the last
            dim but one, columns the last.
        role: `"experts"`: every rank runs its shard of every expert, and the outputs are summed; gradients of the
            tokens and of the routing weights are summed too. `"dispatch"`: the same, with full experts on every rank.
            `"sum"`: the output is a partial sum. `"local"`: neither.
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
            summed = split.is_replicated and self.role != "local"  # each rank uses it on its own shard
            # Every rank would add the full bias of the down projection before the sum.
            divide_by_tp = summed and kind == "rowwise" and name.endswith("bias")
            parameters.append((name, ParameterSpec(split, sum_gradient=summed, divide_by_tp=divide_by_tp)))
        if self.role == "local":
            return StyleSpec(compute="module", parameters=tuple(parameters), problems=tuple(problems))
        copied = info.arguments[:1] + (info.arguments[2:3] if self.role != "sum" else ())  # tokens, routing weights
        flow = Redistribution(Replicate(), Replicate(), gradient=Partial())
        attributes: tuple[tuple[str, object], ...] = ()
        if self.role == "dispatch":
            count = int(info.size("num_experts") or 0)
            if not count or count % tp_size or len(info.arguments) != 3:
                hint = "every rank holds as many experts; forward(tokens, indices, weights), an attribute num_experts"
                problems.append(
                    Problem("does-not-divide", info.where(), found=f"{count} experts, tp={tp_size}", hint=hint)
                )
            attributes = ("num_experts", Split.along(0, count)), ("_is_expert_parallel", True)
        return StyleSpec(
            compute="module" if self.role != "dispatch" else "expert-dispatch",
            parameters=tuple(parameters),
            inputs=tuple((name, flow) for name in copied),
            outputs=(Redistribution(Partial(), Replicate()),),
            attributes=attributes,
            problems=tuple(problems),
        )


class IdentityExpert(ParallelStyle):
    """Identity inside summed experts: every rank divides its input by the number of ranks."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        return StyleSpec(compute="divided-input")


class LatentKVParallel(ParallelStyle):
    """Latent key-value projection: sums the gradient of its last features, used directly by every head.

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
        # The other features go through a column-wise layer, which sums their gradient itself.
        flow = Redistribution(Replicate(), Replicate(), gradient=Partial(), width=self.rope_features)
        return StyleSpec(compute="latent-kv", outputs=(flow,), problems=tuple(problems))


def _split(info: ModuleInfo, parameter: ParameterInfo, kind: str, tp_size: int) -> tuple[Split, Problem | None]:
    shape = parameter.shape
    last = len(shape) - 1
    if kind == "grouped_gemm":
        return Split.along(0, shape[0]), None
    if kind.startswith("replicate") or (
        kind.endswith("rowwise") and (len(shape) == 1 or parameter.name.endswith("bias"))  # no input dim
    ):
        return Split.replicated(), None
    dim = last if kind.endswith("rowwise") or len(shape) == 1 else last - 1
    if kind.endswith("colwise") and parameter.name.endswith("bias"):
        dim = last  # biases of experts: [experts, features]
    if not kind.startswith("packed"):
        return Split.along(dim, shape[dim]), None
    if shape[dim] % 2:
        hint = "a packed weight holds two sections of the same size"
        return Split.replicated(), Problem(
            "invalid-sections", info.where(parameter.name), dim=dim, found=str(shape), hint=hint
        )
    return Split(dim, (Section(shape[dim] // 2),) * 2), None
