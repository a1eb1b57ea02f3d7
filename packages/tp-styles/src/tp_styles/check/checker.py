"""When what is checked: a root, and the regions between shards inside it, at the first call of each mode."""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles._torch_compat import dispatch_modes, is_compiling, is_fake, is_transformed, outside_of_tracing
from tp_styles.check import IN_FLOAT64, IN_ORIGINAL
from tp_styles.check.compare import Comparison, Difference, cotangents
from tp_styles.check.inputs import Inputs, Layouts, NotReady, is_close
from tp_styles.check.randomness import ConstantRandomness, Precision, generators_restored
from tp_styles.check.runs import GradientsAside, Original, Run, full_numel, has_fsdp_below
from tp_styles.plan.planned import TPPlan
from tp_styles.problems import CheckError, PlanError, Problem, StyleInputError
from tp_styles.runtime.collectives import TPGroup
from tp_styles.runtime.forwards import Forward
from tp_styles.runtime.parameters import agreed_values
from tp_styles.values.spec import is_below

Check = Literal["first", "always", "never"]
Mode = tuple[bool, bool]
"""True if a module trains, and whether gradients are recorded."""

OFTEN = 8
"""Changes at one place of a model that are checked one by one; later ones at powers of two: a loop may make them."""

FLOAT64_LIMIT = 2**26
"""Elements of full parameters up to which both runs are made in float64, where no rounding hides a mistake."""


class Stage(IntEnum):
    """Last step of a comparison that could be made."""

    NOTHING = 0
    SHARDED = 1
    OUTPUTS = 2
    SHARDED_BACKWARD = 3
    ALL = 4


@dataclass
class Verdict:
    """One comparison of both runs; the same on every rank.

    Attributes:
        stage: The last step that could be made.
        differences: Values that are not equal.
        is_closed: Full outputs, which a region around this one may take for the original's.
        failure: The error that ended it before all was compared.
    """

    stage: Stage = Stage.NOTHING
    differences: list[Difference] = field(default_factory=list)
    is_closed: bool = False
    failure: str = ""

    def failed(self, failure: str) -> Verdict:
        """Return the verdict with the error that ended it."""
        step = ("the sharded run", "the original", "the sharded backward", "the original's backward")[self.stage]
        self.failure = f"{step} raised {failure}"
        return self


@dataclass(eq=False)
class Scope:
    """A module that is checked as a whole.

    Attributes:
        name: Its FQN, `""` for the root.
        module: The module.
        is_root: It is what the plan was applied to.
        inside: Scopes within it.
        declared: Argument name -> layout that a style on the module itself declares.
        names: Names of the module's positional arguments.
        input_dims: Dims that styles inside declare incoming activations to be sharded on.
        has_partial_output: A style inside leaves a partial sum.
        unstyled: FQNs of parameters that no style speaks of.
        verified: Modes in which the sharded module was found equal to the original, from full inputs to full outputs.
        done: Modes in which it was checked, or could not be.
        not_in_float64: Modes that cannot be compared within a run in float64: they wait for one in their own type.
    """

    name: str
    module: nn.Module
    is_root: bool = False
    inside: list[Scope] = field(default_factory=list)
    declared: dict[str, Placement] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    input_dims: tuple[int, ...] = ()
    has_partial_output: bool = False
    unstyled: frozenset[str] = frozenset()
    verified: set[Mode] = field(default_factory=set)
    done: set[Mode] = field(default_factory=set)
    not_in_float64: set[Mode] = field(default_factory=set)

    def __str__(self) -> str:
        return self.name or type(self.module).__name__


class Checker:
    """Checks the scopes of one applied plan.

    Args:
        model: The root, parallel already.
        axis: Over which ranks.
        originals: Modules as they were before.
        always: Check every call.
        is_staged: The root may be a part of a model: its inputs may be shards.
        may_leave: A shard may leave the root as a plain tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: TPGroup,
        originals: list[Original],
        *,
        always: bool,
        is_staged: bool,
        may_leave: bool,
    ) -> None:
        self.axis = axis
        self.originals = originals
        self.always = always
        self.is_staged = is_staged
        self.may_leave = may_leave
        self.names = {module: name for name, module in model.named_modules()}
        self.planned = frozenset(name for name, _ in model.named_parameters())
        self.results: dict[tuple[str, Mode], str] = {}
        self.failure = ""
        self.failed_by_plan = False
        self.entered: list[nn.Module] = []
        self.has_compared_replicas = False
        self.scopes: list[Scope] = []
        self.standing = dict(self.names)  # as of the last check: the model may have changed since the plan
        self.changes: Counter[tuple[int, str]] = Counter()
        # Text: the compiler guards it, and would make a number that changes a symbol.
        self.structure = "0 changes"
        _watch(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy watches its own model."""
        vars(self).update(state)
        _watch(self)

    def forget(self, module: nn.Module, name: str) -> None:
        """Something else stands in the model under this name: check it again, on every rank."""
        if not any(scope.done for scope in self.scopes):
            return
        self.changes[id(module), name] += 1
        count = self.changes[id(module), name]
        if count > OFTEN and count & (count - 1):
            return
        self.structure = f"{int(self.structure.split()[0]) + 1} changes"
        self.has_compared_replicas = False
        for scope in self.scopes:
            for modes in (scope.done, scope.verified, scope.not_in_float64):
                modes.clear()

    def report(self) -> list[str]:
        """Lines on what was found equal, and on what was not compared."""
        lines = []
        for (name, (training, with_gradients)), reason in self.results.items():
            mode = f"{'training' if training else 'evaluation'}, {'with' if with_gradients else 'without'} gradients"
            lines.append(
                f"check of {name} ({mode}): " + (f"unchecked: {reason}" if reason else "equal to the original")
            )
        return lines

    def __call__(self, hook: CheckHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check one call of a scope, before it happens.

        Raises:
            StyleInputError: The root's inputs differ between the ranks.
            CheckError: The sharded module is not equal to the original; on every rank.
        """
        if is_compiling() or IN_ORIGINAL.get() or is_transformed() or self.axis.size == 1:
            return
        if dist.get_backend(self.axis.group) == "fake" or any(is_fake(p) for p in hook.scope.module.parameters()):
            return
        scope, mode = hook.scope, (hook.scope.module.training, torch.is_grad_enabled())
        self.standing = {module: name for name, module in self.scopes[0].module.named_modules()}
        if IN_FLOAT64.get() and mode in scope.not_in_float64:
            return
        try:
            inputs = Inputs(args, kwargs, self.axis, scope.declared, scope.names, scope.input_dims)
        except NotReady as error:  # the next call may have an empty cache
            self.results[str(scope), mode] = str(error)
            return
        if scope.is_root and not self.is_staged and not self.has_compared_replicas:
            self._compare_replicas(scope)
            self.has_compared_replicas = True
        hypotheses = inputs.hypotheses()
        if scope.is_root and inputs.differ and not hypotheses and not self.is_staged:
            raise StyleInputError(_different(scope, inputs))
        if has_fsdp_below(scope.module):
            # FSDP2's hooks would gather and reduce within both runs. Regions inside its units are checked in the call.
            self.results[str(scope), mode] = "FSDP2 shards modules inside; regions within them are checked"
            is_final = True
        else:
            is_final = self._check(hook, inputs, hypotheses, mode) or not IN_FLOAT64.get()
        # What raised is checked again by the next call.
        (scope.done if is_final else scope.not_in_float64).add(mode)

    def _compare_replicas(self, scope: Scope) -> None:
        """Compare parameters that no style speaks of: nothing has made them equal on all ranks.

        Raises:
            CheckError: Some are not; on every rank.
        """
        different = []
        styled = self.planned - scope.unstyled
        for name, parameter in scope.module.named_parameters():
            owner = scope.module.get_submodule(name.rpartition(".")[0])
            if name in styled or isinstance(vars(owner).get("forward"), Forward):
                continue
            if type(parameter) is nn.Parameter and not hasattr(parameter, "_sharding_info"):
                value = parameter.detach()
                if not is_close(value, agreed_values(value, self.axis, 0)):
                    different.append(Difference("replica", name, 0.0))
        if found := self.union(different):
            hint = (
                "seed every rank alike before the model is made, load one checkpoint on all, or broadcast from one rank"
            )
            raise CheckError(
                Problem("replicas-differ", one.name, found="other values on each rank, and no style", hint=hint)
                for one in found
            )

    def _check(self, hook: CheckHook, inputs: Inputs, hypotheses: list[Layouts], mode: Mode) -> bool:
        """Compare under one layout after the other; False if neither run could be compared with the other."""
        scope = hook.scope
        key = (str(scope), mode)
        # Reasons stay visible in the report. A region that is unchecked by itself is still a part of the root's runs.
        self.results[key] = "inputs differ between the ranks, and no style declares how" if not hypotheses else ""
        differences: list[Difference] = []
        failed: Verdict | None = None
        for layouts in hypotheses:
            verdict = self._verdict(hook, inputs, layouts, mode)
            if verdict.differences:
                differences = differences or verdict.differences
            elif verdict.stage >= Stage.OUTPUTS:
                self.results[key] = verdict.failure
                if verdict.stage == Stage.ALL:
                    if verdict.is_closed and not any(isinstance(layout, Shard) for layout in layouts):
                        scope.verified.add(mode)
                elif scope.is_root and verdict.stage == Stage.SHARDED_BACKWARD:
                    _warn(scope, verdict, "gradients of the sharded model are")
                return True
            else:
                failed = failed or verdict
        if scope.is_root and inputs.differ and not self.is_staged:  # the likely cause stands first
            raise StyleInputError([*_different(scope, inputs), *_problems(scope, differences)])
        if differences:
            raise CheckError(_problems(scope, differences))
        if failed is not None:
            self.results[key] = failed.failure
            if (
                scope.is_root and not self.is_staged and failed.stage == Stage.SHARDED
            ):  # else the call itself will raise
                self._refuse_late_modules(scope, failed)
                _warn(scope, failed, "the sharded model is")
        return failed is None

    def _refuse_late_modules(self, scope: Scope, verdict: Verdict) -> None:
        """Refuse a model that cannot be compared and has layers that the plan never saw: adapters, mostly.

        Raises:
            CheckError: There are such layers; on every rank, since modules are replicas.
        """
        late = [
            name for name, module in scope.module.named_modules() if module not in self.names and module._parameters
        ]
        if late:
            found = f"{', '.join(late[:5])} came after apply_plan, sized for one shard; the original: {verdict.failure}"
            hint = "add layers first, then call apply_plan with a style for them: for LoRA, LoRAParallel on the pair"
            raise CheckError([Problem("model-changed", str(scope), found=found, hint=hint)])

    # ------------------------------------------------------------------ both runs

    def _verdict(self, hook: CheckHook, inputs: Inputs, layouts: Layouts, mode: Mode) -> Verdict:
        """Compare both runs in the first way in which they can be made; the same verdict on every rank."""
        small = sum(full_numel(p) for p in hook.scope.module.parameters()) <= FLOAT64_LIMIT
        best = Verdict()
        # Code may take one type only. Within a run in float64 that is left to the run around it in its own type.
        inside = IN_FLOAT64.get()
        for dtype in (torch.float64,) if inside else (torch.float64, None) if small else (None,):
            verdict = self._compared(hook, inputs, layouts, mode, dtype, everywhere=False)
            if Stage.OUTPUTS <= verdict.stage < Stage.ALL:
                # A re-entrant checkpoint refuses to be asked for the gradients of chosen leaves.
                verdict = self._compared(hook, inputs, layouts, mode, dtype, everywhere=True)
            if verdict.stage == Stage.ALL:
                return verdict
            best = verdict if verdict.stage >= best.stage else best
        return best

    def _compared(
        self,
        hook: CheckHook,
        inputs: Inputs,
        layouts: Layouts,
        mode: Mode,
        dtype: torch.dtype | None,
        *,
        everywhere: bool,
    ) -> Verdict:
        scope = hook.scope
        comparison = Comparison(
            self.axis,
            scope.has_partial_output,
            self.may_leave or not scope.is_root,
            only_first=not scope.is_root,
        )
        verdict = Verdict()
        with ExitStack() as stack:
            mode_of_runs = stack.enter_context(self._isolated())
            # Of the whole root: parameters outside of a region may be reached from within it.
            leaves = (p for module in self.standing for p in module._parameters.values() if p is not None and p.is_leaf)
            others = stack.enter_context(GradientsAside(p for p in leaves if p.requires_grad)) if everywhere else None
            ours = self.agreed(lambda: inputs.copies(layouts, dtype, full=False))
            wanted = self.agreed(lambda: inputs.copies(layouts, dtype, full=True))
            sharded = self.agreed(lambda: self._run(scope, ours, dtype, hook, original=False, mode=mode))
            failure, place = self.failure, self._place()
            if wanted is None or (sharded is None and (dtype is not None or self.failed_by_plan)):
                return verdict.failed(failure)
            reference = self.agreed(lambda: self._run(scope, wanted, dtype, hook, original=True, mode=mode))
            if sharded is None:
                if reference is not None:
                    verdict.differences = self.union([Difference("raises", place, math.inf, failure)])
                return verdict.failed(failure)
            verdict.stage = Stage.SHARDED
            if reference is None:
                return verdict.failed(self.failure)
            verdict.stage = Stage.OUTPUTS
            comparison.tolerance = self.tolerance(mode_of_runs)
            found, outputs = comparison.outputs(sharded, reference)
            verdict.differences = self.union(found)
            verdict.is_closed = len(outputs) > 0 and all(output.layout == "full" for output in outputs)
            if not verdict.differences and mode[1]:
                (ones, starts), (its, its_starts) = cotangents(outputs, self.axis)
                if ones:
                    with self._original():  # a checkpoint runs forwards again
                        if not self.agreed(lambda: (sharded.backward(ones, starts, ours.leaves, others), True)):
                            return verdict.failed(self.failure)
                        verdict.stage = Stage.SHARDED_BACKWARD
                        if not self.agreed(lambda: (reference.backward(its, its_starts, wanted.leaves, others), True)):
                            return verdict.failed(self.failure)
                    comparison.tolerance = 10 * self.tolerance(mode_of_runs)  # gradients are sums over the batch
                    verdict.differences = self.union(comparison.gradients(sharded, reference, ours, wanted))
            verdict.stage = Stage.ALL
            verdict.differences = verdict.differences or self.union(comparison.buffers(sharded, reference))
        return verdict

    def _run(self, scope: Scope, copies: Any, dtype: Any, hook: CheckHook, *, original: bool, mode: Mode) -> Run:
        others = self._checkers_below(scope.module)
        originals = [one for checker in (*others, self) for one in (*checker.originals, *checker.successors())]
        reverted = {one.module for one in originals}
        # Modules that were made parallel over another mesh, or without the check, stay as they are.
        opaque = {
            child
            for child in scope.module.modules()
            if child not in reverted and isinstance(vars(child).get("forward"), Forward)
        }
        for inner in scope.inside:
            # What shares a parameter with modules outside of it is run as the original, too: its gradient is one sum.
            if mode in inner.verified and not _shares(inner.module, scope.module):
                opaque.add(inner.module)
        run = Run(
            scope.module,
            self.standing,
            self.axis,
            dtype,
            originals=originals if original else None,
            opaque=frozenset(opaque if original else ()),
            skipped=hook,
        )
        token = IN_FLOAT64.set(IN_FLOAT64.get() or (dtype is not None and not original))
        try:
            # Both runs draw alike: Python's and NumPy's numbers are no operations of torch, which give constants.
            with generators_restored(self.axis.mesh.device_type), self._original() if original else self._following():
                run.forward(copies.args, copies.kwargs)
        finally:
            IN_FLOAT64.reset(token)
        return run

    def successors(self) -> list[Original]:
        """Modules in the places of those that the plan changed, of their kinds: copies of these, forwards and all."""
        changed = {self.names[one.module]: one for one in self.originals if one.module in self.names}
        late = {module: changed.get(name) for module, name in self.standing.items() if module not in self.names}
        return [replace(one, module=new) for new, one in late.items() if one is not None and type(new) is one.kind]

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Afterwards `entered` lists the modules whose forwards an error has left, the innermost last."""
        entered: list[nn.Module] = []

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            while entered and entered.pop() is not module:
                pass  # a check inside has caught an error

        before = register_module_forward_pre_hook(lambda module, args: entered.append(module))
        after = register_module_forward_hook(leave)
        try:
            yield
        finally:
            self.entered = entered
            before.remove()
            after.remove()

    def _place(self) -> str:
        """The module in which the sharded run has raised, with the global shapes of its parameters."""
        if not self.entered:
            return ""
        module = self.entered[-1]
        shapes = []
        for key, parameter in module._parameters.items():
            if parameter is not None:
                shapes.append(f"{key} {list((sharding_info_of(parameter) or parameter).shape)}")
        return " ".join([self.standing.get(module, ""), f"({', '.join([type(module).__name__, *shapes])})"]).strip()

    def _checkers_below(self, module: nn.Module) -> list[Checker]:
        """Checkers of other calls that have made modules below parallel over the same mesh."""
        hooks = (hook for child in module.modules() for hook in child._forward_pre_hooks.values())
        checkers = {hook.checker: None for hook in hooks if isinstance(hook, CheckHook) and hook.scope.is_root}
        return [one for one in checkers if one is not self and one.axis.mesh == self.axis.mesh]

    @contextmanager
    def _original(self) -> Iterator[None]:
        """Within, scopes are not checked."""
        token = IN_ORIGINAL.set(True)
        try:
            yield
        finally:
            IN_ORIGINAL.reset(token)

    @contextmanager
    def _isolated(self) -> Iterator[ConstantRandomness]:
        """Nothing of the runs is left behind in generators, in autograd's hooks, or in autocast's cache."""
        kind, grad, modes = self.axis.mesh.device_type, torch.is_grad_enabled(), dispatch_modes()
        with ExitStack() as stack:
            stack.enter_context(generators_restored(kind))
            if "torch._dynamo" in sys.modules:  # else nothing is compiled; blocks that are cannot run under a mode
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast(kind, enabled=False))
            # The innermost hooks count: a checkpoint around the call would take what the runs save for its own.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
            yield stack.enter_context(ConstantRandomness())
        # Modes end in the order in which they began, whoever ends them: one that stayed would keep the constants.
        if dispatch_modes() != modes:
            raise RuntimeError(f"the check left dispatch modes behind: {dispatch_modes()}, before it {modes}")

    def tolerance(self, runs: Precision) -> float:
        """Of the largest value: what rounding leaves in the coarsest type that the runs compute in, on any rank."""
        epsilons = self.axis.all_gather_objects(runs.epsilon, "the check")
        epsilon = float(max(epsilons))
        return max(1e-9, epsilon * (8 if epsilon > 1e-4 else 1000))

    def agreed(self, act: Callable[[], Any]) -> Any:
        """Return the result of an action, or None on every rank if it raised on one."""
        result, failure = None, ("", False)
        try:
            result = act()
        except CheckError:
            raise  # of a region inside; on every rank
        except Exception as error:
            line, *more = str(error).splitlines() or [""]
            text = " ".join([f"{type(error).__name__}: {line}", *(more[:1] if line.endswith(":") else ())])
            failure = text, isinstance(error, PlanError)
        failures = self.axis.all_gather_objects(failure, "the check")
        first = next((one for one in failures if one[0]), None)
        if first is not None:
            self.failure, self.failed_by_plan = first
            return None
        return result

    def union(self, found: list[Difference]) -> list[Difference]:
        """The differences of all ranks, the largest of each; the same list on every rank."""
        everyone = self.axis.all_gather_objects(found, "the check")
        worst: dict[tuple[str, str], Difference] = {}
        for difference in (one for rank in everyone for one in rank):
            key = (difference.kind, difference.name)
            if key not in worst or worst[key].error < difference.error:
                worst[key] = difference
        return list(worst.values())


_CHECKERS: WeakSet[Checker] = WeakSet()


def _watch(checker: Checker) -> None:
    """Late modules and parameters (adapters, mostly) are met by no module's hook; to look in each call costs more."""
    _watch_registrations()
    _CHECKERS.add(checker)


@cache
def _watch_registrations() -> None:
    register_module_module_registration_hook(_on_module)
    register_module_parameter_registration_hook(_on_parameter)


def _on_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    for checker in [*_CHECKERS]:
        if module in checker.standing and submodule is not module._modules.get(name):
            checker.forget(module, name)


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    for checker in [*_CHECKERS]:
        if module in checker.standing:
            old = module._parameters.get(name)
            # One of the same shape is new values, as `load_state_dict(assign=True)` brings them.
            if old is None or old.shape != parameter.shape:
                checker.forget(module, name)


class CheckHook:
    """Pre-hook with keywords of a scope; a region's is there only until its call is checked.

    Attributes:
        regions: Hooks of the regions within, if the scope is the root.
    """

    def __init__(self, checker: Checker, scope: Scope) -> None:
        self.checker = checker
        self.scope = scope
        self.regions: list[CheckHook] = []
        self.key = -1
        self.before: list[int] = []
        self.error: PlanError | None = None
        self.outside_of_graphs: Callable[[tuple[Any, ...], dict[str, Any]], None] = self.check_again

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the call, if its mode is new."""
        if is_compiling():
            # Read here, so that the compiler guards them: a hook is a graph of its own where the compiler begins at
            # the module, or breaks before a module that changes; what guards nothing would hold for every mode.
            guarded = module.training, self.checker.structure
            if all(isinstance(value, Traceable) for value in (*args, *kwargs.values())) and (
                _check_while_tracing(self, guarded, len(args), ",".join(kwargs), *args, *kwargs.values())
            ):
                self.outside_of_graphs(args, kwargs)
            return
        self.install_regions()
        if (module.training, torch.is_grad_enabled()) not in self.scope.done or self.checker.always:
            self.checker(self, args, kwargs)
        elif not self.scope.is_root and not IN_ORIGINAL.get():
            self.remove()  # a steady step pays for the root's hook alone, which installs this one for a new mode

    def install_regions(self) -> None:
        """Put hooks back on regions that are not yet checked in their mode; the check around this one removes them."""
        with_gradients = torch.is_grad_enabled()
        for region in self.regions:
            if (region.scope.module.training, with_gradients) not in region.scope.done:
                region.install()

    def install(self) -> None:
        """Stand before every other hook, but for those that were before it: FSDP2's gather the parameters."""
        hooks: Any = self.scope.module._forward_pre_hooks
        if self.key < 0:
            self.key = self.scope.module.register_forward_pre_hook(self, prepend=True, with_kwargs=True).id
        elif self.key not in hooks:
            hooks[self.key] = self
            for key in (self.key, *reversed(self.before)):
                if key in hooks:
                    hooks.move_to_end(key, last=False)

    def remove(self) -> None:
        """Go, and keep which hooks were before."""
        keys = list(self.scope.module._forward_pre_hooks)
        if self.key in keys:
            self.before = keys[: keys.index(self.key)]
            del self.scope.module._forward_pre_hooks[self.key]

    def take_back(self) -> None:
        """Leave the module as if it had never been there."""
        self.remove()
        self.scope.module._forward_pre_hooks_with_kwargs.pop(self.key, None)

    def check_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise what was found while a call was traced; check later calls of the compiled code until one is right."""
        error, self.error = self.error, None
        if error is not None:
            raise error
        if (self.scope.module.training, torch.is_grad_enabled()) not in self.scope.done:
            self.checker(self, args, kwargs)


Traceable = torch.Tensor | bool | int | float | str | None
"""Arguments that the compiler hands to a function that it runs while it traces."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def _check_while_tracing(hook: CheckHook, guarded: tuple[bool, str], num_args: int, names: str, *values: Any) -> bool:
    """Check the traced call with the values that it has; return True if an error waits to be raised.

    The compiler runs this while it traces: eagerly, with real tensors, once for each graph.
    """
    if (guarded[0], torch.is_grad_enabled()) in hook.scope.done or IN_ORIGINAL.get():
        return False
    if any(isinstance(value, torch.Tensor) and is_fake(value) for value in values):  # export without a tracer of frames
        return False
    with outside_of_tracing():
        try:
            hook.install_regions()
            hook.checker(hook, values[:num_args], dict(zip(names.split(","), values[num_args:], strict=bool(names))))
        except PlanError as error:
            # With `fullgraph=True` torch raises, and shows the reason; otherwise the graph breaks, and this is called.
            hook.error = error
            hook.outside_of_graphs = torch.compiler.disable(hook.check_again, reason=str(error))
            return True
    return False


def install_check(checker: Checker, scopes: list[Scope]) -> list[Callable[[], None]]:
    """Hooks of all scopes, the root's first, before every other hook: they see what the caller passes.

    Returns:
        Functions that take them back.
    """
    root, *regions = (CheckHook(checker, scope) for scope in scopes)
    root.regions = regions
    checker.scopes = scopes
    for hook in (root, *regions):
        hook.install()
    return [hook.take_back for hook in (root, *regions)]


def scopes_of(model: nn.Module, plan: TPPlan, regions: list[str]) -> list[Scope]:
    """The root and the regions inside it, the root first.

    Args:
        model: The root.
        plan: What was done to it.
        regions: FQNs of regions, and of styled modules with forwards of their own outside of all regions.
    """
    unstyled = frozenset(left.name for left in plan.unstyled)
    scopes = [Scope("", model, is_root=True)]
    scopes += [Scope(name, model.get_submodule(name)) for name in sorted(set(regions) - {""})]
    for scope in scopes:
        below = [found for found in plan.modules if is_below(found.name, scope.name)]
        flows = [flow for found in below for _, flow in found.spec.inputs]
        dims = {flow.src.dim for flow in flows if isinstance(flow.src, Shard)}
        own = next((found for found in below if found.name == scope.name), None)
        if own is not None:
            scope.declared = {name: flow.src for name, flow in own.spec.inputs}
            scope.names = own.info.arguments
        scope.input_dims = tuple(sorted(dims, reverse=True))
        outputs = [flow for found in below for flow in found.spec.outputs if flow is not None]
        scope.has_partial_output = any(flow.dst.is_partial() for flow in outputs)
        scope.unstyled = unstyled
        scope.inside = [other for other in scopes if other.name != scope.name and is_below(other.name, scope.name)]
    return scopes


def _shares(inner: nn.Module, outer: nn.Module) -> bool:
    """True if a parameter within a module stands in the module around it, too."""
    inside = {id(p) for p in inner.parameters()}
    below = set(inner.modules())
    outside = (m for m in outer.modules() if m not in below)
    return any(id(p) in inside for m in outside for p in m._parameters.values())


# ---------------------------------------------------------------------------------------------- words


def _warn(scope: Scope, verdict: Verdict, subject: str) -> None:
    warnings.warn(f"{scope}: {subject} not checked against the original: {verdict.failure}", stacklevel=6)


def _different(scope: Scope, inputs: Inputs) -> list[Problem]:
    hint = "tensor-parallel ranks take the same batch: give each data-parallel group one sampler; where inputs are"
    hint += " shards, declare it: PrepareModuleInput(input_layouts=Shard(dim)) on the model"
    return [
        Problem("ranks-disagree", f"{scope}({leaf.name})", found="other values on each rank", hint=hint)
        for leaf in inputs.differ
    ]


HINTS = {
    "output": "FusedColwiseParallel where a weight holds several things one after the other; local head counts"
    " (GQAParallel, or view(..., -1, head_size)) where heads are divided; ColwiseParallel(output_layouts=Replicate())"
    " for what needs all features",
    "gradient": "each rank computes a part of this gradient: NoParallel(sum_gradient=True) for its module (norms= of"
    " GQAParallel), or a style that shards it",
    "input-gradient": "the ranks' gradients of the input are not summed: a module takes a shard's part of it unstyled",
    "raises": "a layer after a column-wise one takes its shard: RowwiseParallel() for it, or"
    " ColwiseParallel(output_layouts=Replicate()) for the one before; RowwiseParallel(input_layouts=Replicate())"
    " for a full input; local sizes where code has numbers of its own",
    "buffer": "each rank updates it from its own shard",
    "shard-leaves": "every rank would go on with its own features: output_layouts=Replicate() gives full outputs;"
    " output_layouts=Shard(-1) declares that shards are meant (vocab_parallel_cross_entropy takes them)",
}


def _problems(scope: Scope, differences: list[Difference]) -> list[Problem]:
    shown = sorted(differences, key=lambda difference: -difference.error)[:8]
    return [_problem(scope, difference) for difference in shown]


def _problem(scope: Scope, difference: Difference) -> Problem:
    name = (
        f"{scope} {difference.name}" if "output" in difference.name or "input" in difference.name else difference.name
    )
    code = {"shard-leaves": "shard-leaves", "raises": "check-raises"}.get(difference.kind, "check-mismatch")
    found = f"{difference.kind} off by {difference.error:.2g} of the original module, run on full weights"
    if difference.detail:
        found = f"{difference.kind}: {difference.detail}, run on full weights"
    if difference.kind == "shard-leaves":
        found = f"a shard leaves the model as a plain tensor: {difference.detail}"
    if difference.kind == "raises":
        name, found = difference.name or name, f"{difference.detail}; the original, on full weights, runs"
    hint = HINTS[difference.kind]
    if difference.kind == "gradient" and difference.name not in scope.unstyled:
        hint = "the forward uses this parameter other than its style expects: as a bare weight, or on other inputs"
    return Problem(
        code, name, found=f"in region {str(scope)!r}: {found}", hint=hint + '; check="never" skips the check'
    )
