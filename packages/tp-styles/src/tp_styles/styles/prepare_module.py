"""Styles for a module's inputs and outputs; they leave its parameters alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch.distributed.tensor import Placement

from tp_styles.problems import Problem, StyleTypeError
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.linear import flow_problems
from tp_styles.values import ModuleInfo, Redistribution, StyleSpec

Layouts = Placement | tuple[Placement | None, ...]


class PrepareModuleInput(ParallelStyle):
    """Redistribute a module's inputs, passed by position or by name.

    A plain tensor is assumed to have the layout of `input_layouts`; a DTensor is redistributed from its own layout.

    Args:
        input_layouts: Layout of each positional argument of `forward`, None for one to leave alone.
        desired_input_layouts: Target layout of each one.
        input_kwarg_layouts: The same by argument name.
        desired_input_kwarg_layouts: The same by argument name.
        use_local_output: Pass plain tensors to the module; by default DTensors.

    Raises:
        StyleTypeError: Layouts without desired layouts, of another number, or under other names.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _several(input_layouts, "input_layouts")
        self.desired_input_layouts = _several(desired_input_layouts, "desired_input_layouts")
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.with_kwargs = input_kwarg_layouts is not None  # as in torch
        self.use_local_output = use_local_output
        _check_lengths("input", self.input_layouts, self.desired_input_layouts)
        names, desired = sorted(self.input_kwarg_layouts), sorted(self.desired_input_kwarg_layouts)
        if names != desired:
            raise _unpaired("input_kwarg_layouts", names, desired, "both name the same arguments")

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return flows of inputs by name; see `ParallelStyle.spec`."""
        inputs: list[tuple[str, Redistribution]] = []
        problems: list[Problem] = []
        names = info.arguments
        for index, source in enumerate(self.input_layouts or ()):
            if source is None:
                continue
            if index >= len(names) and not info.open_positional:  # `*args` takes any index
                problems.append(
                    Problem(
                        "unknown-name",
                        info.where("input_layouts"),
                        found=f"a layout for argument {index}",
                        hint=f"forward takes {', '.join(names) or 'no arguments'}",
                    )
                )
                continue
            name = names[index] if index < len(names) else f"args[{index}]"
            wanted = cast("tuple[Placement | None, ...]", self.desired_input_layouts)[index]
            inputs.append((name, Redistribution(source, source if wanted is None else wanted)))  # None: unchanged
        for name, source in self.input_kwarg_layouts.items():
            if name not in (*names, *info.keyword_only) and not info.open_keyword:
                problems.append(
                    Problem(
                        "unknown-name",
                        info.where("input_kwarg_layouts"),
                        found=repr(name),
                        hint=f"forward takes {', '.join((*names, *info.keyword_only)) or 'no arguments'}",
                    )
                )
            elif name in dict(inputs):
                problems.append(Problem("duplicate-name", info.where(name), hint="give it one layout"))
            inputs.append((name, Redistribution(source, self.desired_input_kwarg_layouts[name])))
        if not inputs and not problems:
            problems.append(
                Problem("invalid-argument", info.where(), found=repr(self), hint="name a layout for at least one input")
            )
        problems += flow_problems(info, inputs)
        return StyleSpec(
            compute="hooks",
            inputs=tuple(inputs),
            num_positional=None if self.input_layouts is None else len(self.input_layouts),  # further inputs raise
            local_input=self.use_local_output,
            problems=tuple(problems),
        )


class PrepareModuleOutput(ParallelStyle):
    """Redistribute a module's outputs: a tensor, tuple, list or dict. The structure is kept.

    Args:
        output_layouts: Layout of each output if it is a plain tensor, None for one to leave alone.
        desired_output_layouts: Target layout of each one.
        use_local_output: Return plain tensors.

    Raises:
        StyleTypeError: Different numbers of layouts.
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _several(output_layouts, "output_layouts") or ()
        self.desired_output_layouts = _several(desired_output_layouts, "desired_output_layouts") or ()
        self.use_local_output = use_local_output
        _check_lengths("output", self.output_layouts, self.desired_output_layouts)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return flows of outputs by position (a dict's in its order); see `ParallelStyle.spec`."""
        outputs = tuple(
            None if source is None else Redistribution(source, source if wanted is None else wanted)
            for source, wanted in zip(self.output_layouts, self.desired_output_layouts, strict=True)
        )
        problems = flow_problems(info, [(f"-> {i}", flow) for i, flow in enumerate(outputs) if flow is not None])
        return StyleSpec(compute="hooks", outputs=outputs, local_output=self.use_local_output, problems=tuple(problems))


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one, with the arguments of both.

    Args:
        use_local_input: Pass plain tensors to the module; by default DTensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Combine both; see `ParallelStyle.spec`."""
        before = self.prepare_module_input.spec(info, tp_size)
        after = self.prepare_module_output.spec(info, tp_size)
        return StyleSpec(
            compute="hooks",
            inputs=before.inputs,
            num_positional=before.num_positional,
            outputs=after.outputs,
            local_input=before.local_input,
            local_output=after.local_output,
            problems=(*before.problems, *after.problems),
        )

    def _arguments(self) -> dict[str, object]:
        before, after = self.prepare_module_input._arguments(), self.prepare_module_output._arguments()
        before["use_local_input"] = before.pop("use_local_output")  # its name in the combined style
        return {**before, **after}


def _several(layouts: Layouts | None, argument: str) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None  # no layouts: inputs are left alone
    listed = (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
    for placement in listed:
        if placement is not None and not isinstance(placement, Placement):
            raise StyleTypeError(
                Problem("wrong-type", argument, found=repr(placement), hint="a placement or None for each")
            )
    return listed


def _check_lengths(
    what: str, layouts: tuple[Placement | None, ...] | None, desired: tuple[Placement | None, ...] | None
) -> None:
    if layouts is not desired and (layouts is None or desired is None or len(layouts) != len(desired)):
        raise _unpaired(f"{what}_layouts", layouts, desired, "give one desired layout for each")


def _unpaired(name: str, layouts: object, desired: object, hint: str) -> StyleTypeError:
    text = f"{name} and desired_{name} should have same length!"  # torch's message
    return StyleTypeError(Problem("argument-count", name, found=f"{layouts} and {desired}", hint=hint), text)
