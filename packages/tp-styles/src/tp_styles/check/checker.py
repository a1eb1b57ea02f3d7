"""Checks of a root and its regions at the first call of each mode."""

from __future__ import annotations

import hashlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from tp_styles._shared.execution_check import Compared, Precision, random_state_restored
from tp_styles._shared.norms import BRIDGED
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles._torch_compat import dispatch_modes, is_compiling, is_fake, is_transformed
from tp_styles.check import IN_FLOAT64, IN_ORIGINAL
from tp_styles.check.compare import Comparison, Difference, cotangents
from tp_styles.check.inputs import ConstantRandomness, Copies, Inputs, Mode, NotReady, is_close
from tp_styles.check.runs import Original, Run, full_numel, has_fsdp_below
from tp_styles.check.weights import Weights
from tp_styles.plan.model import TPPlan
from tp_styles.problems import CheckError, PlanError, Problem, StyleInputError
from tp_styles.runtime.dropout import default_generator
from tp_styles.runtime.forwards import Forward
from tp_styles.runtime.install import KeyRemover, ModuleChange
from tp_styles.runtime.parameters import ShardParameter, agreed_values
from tp_styles.runtime.redistribute import TPGroup
from tp_styles.values import is_below

Check = Literal["first", "always", "never"]

ALIKE = "all of its input values are equal, which may hide a mistake; the next call with other values is checked"

FLOAT64_LIMIT = 2**26
"""Elements of full parameters up to which both runs use float64. No rounding hides a mistake there."""


class Stage(IntEnum):
    """Last completed step of a comparison."""

    NOTHING = 0
    SHARDED = 1
    OUTPUTS = 2
    SHARDED_BACKWARD = 3
    ALL = 4


@dataclass
class Verdict:
    """One comparison of both runs; the same on every rank.

    Attributes:
        stage: The last completed step.
        differences: Unequal values.
        is_closed: Outputs are full, so a region around this one may use them as the original's.
        failure: The error that ended it early.
        place: First module with another output.
        compared: Counts of compared values.
        blank: Names of values that are zero in both runs, or parameters without a gradient: nothing was compared.
    """

    stage: Stage = Stage.NOTHING
    differences: list[Difference] = field(default_factory=list)
    is_closed: bool = False
    failure: str = ""
    place: str = ""
    compared: Compared = field(default_factory=Compared)
    blank: list[str] = field(default_factory=list)

    def failed(self, failure: str) -> Verdict:
        """Return the verdict, ended by an error."""
        step = ("the sharded run", "the original", "the sharded backward", "the original's backward")[self.stage]
        self.failure = f"{step} raised {failure}"
        return self


@dataclass(eq=False)
class Scope:
    """A module checked as a unit, and its pre-hook. A region's is removed once its call is checked.

    Attributes:
        checker: Checker of the plan.
        name: Its FQN, `""` for the root.
        module: The module.
        is_root: The plan was applied to it.
        inside: Scopes within it.
        declared: Argument name -> layout declared by a style on the module itself.
        names: Names of the module's positional arguments.
        inner_dims: Dims of incoming activations, sharded by declaration of styles inside, but of none on the module.
        has_partial_output: A style inside outputs a partial sum.
        unstyled: FQNs of parameters without a style.
        verified: Modes with results equal to the original's, from full inputs to full outputs.
        done: Modes already checked, or impossible to check -> elements of the largest input.
        options: Checked modes, each with the keyword arguments that were True.
        not_in_float64: Modes not comparable within a run in float64: they wait for one in their own type.
    """

    checker: Checker
    name: str
    module: nn.Module
    is_root: bool = False
    inside: list[Scope] = field(default_factory=list)
    declared: dict[str, Placement] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    inner_dims: tuple[int, ...] = ()
    has_partial_output: bool = False
    unstyled: frozenset[str] = frozenset()
    verified: set[Mode] = field(default_factory=set)
    done: dict[Mode, int] = field(default_factory=dict)
    options: set[tuple[Mode, tuple[str, ...]]] = field(default_factory=set)
    not_in_float64: set[Mode] = field(default_factory=set)
    _key: int = -1
    _before: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return self.name or type(self.module).__name__

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the call, if its mode is new."""
        if is_compiling():
            if self.is_root:
                _note_compiled(self, module.training)
            return
        mode = module.training, torch.is_grad_enabled()
        checked = self.done.get(mode)
        largest, options = size_and_options(args, kwargs) if self.is_root else (1, ())
        # A first batch of one token hides what depends on length, and `output_attentions=True` gives more outputs.
        # Shards of a batch differ in size from rank to rank: by them the ranks would decide apart.
        grows = not any(isinstance(layout, Shard) for layout in self.declared.values())
        is_new = checked and ((grows and 2 * checked <= largest) or (mode, options) not in self.options)
        if self.is_root and is_new and not self.checker.is_staged:
            for scope in self.checker.scopes:  # the regions too
                scope.done.pop(mode, None)
                scope.verified.discard(mode)
            checked = None
        if self.is_root:  # regions not yet checked in their mode; the check around this one removes them
            for region in self.checker.scopes[1:]:
                if (region.module.training, mode[1]) not in region.done:
                    region.install()
        if checked is None or self.checker.always:
            self.checker(self, args, kwargs)
            self.options.add((mode, options))
        elif not self.is_root and self.checker.scopes[0].done and not IN_ORIGINAL.get():
            # A steady step pays only for the root's hook, which installs this one for a new mode. If the root's
            # forward is not called (`encode()`), this one stays.
            self.remove()

    def install(self) -> None:
        """Install before every other hook, except for those already before it: FSDP2's gather the parameters."""
        hooks: Any = self.module._forward_pre_hooks
        if self._key < 0:
            self._key = self.module.register_forward_pre_hook(self, prepend=True, with_kwargs=True).id
        elif self._key not in hooks:
            hooks[self._key] = self
            for key in (self._key, *reversed(self._before)):
                if key in hooks:
                    hooks.move_to_end(key, last=False)

    @property
    def is_installed(self) -> bool:
        """True if the hook is on the module."""
        return self._key in self.module._forward_pre_hooks

    def remove(self) -> None:
        """Remove the hook, and store the keys of hooks before it."""
        keys = list(self.module._forward_pre_hooks)
        if self.is_installed:
            self._before = keys[: keys.index(self._key)]
            del self.module._forward_pre_hooks[self._key]

    def take_back(self) -> None:
        """Remove all traces of the hook from the module."""
        self.remove()
        self.module._forward_pre_hooks_with_kwargs.pop(self._key, None)


@dataclass(frozen=True)
class Result:
    """Outcome of one scope's check in one mode, for the report.

    Attributes:
        reason: Reason against a comparison; `""` if there was one.
        compared: Counts of compared values.
        blank: Names of values without a comparison: zero in both runs, or without a gradient.
    """

    reason: str
    compared: Compared = field(default_factory=Compared)
    blank: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.reason:
            return f"unchecked: {self.reason}"
        text = f"equal to the original ({self.compared})"
        if self.blank:
            more = f" and {len(self.blank) - 8} more" if len(self.blank) > 8 else ""
            text += f"; unchecked, zero or without a gradient in both runs: {', '.join(self.blank[:8])}{more}"
        return text


@dataclass(frozen=True)
class Way:
    """Settings of a comparison's two runs.

    Attributes:
        mode: Mode of the scope's module.
        dtype: Type of floats in both; None for the model's own.
        lively: Constant inputs and weights give way to other numbers, and every floating parameter takes a gradient.
        small: The full weights of the scope are few.
    """

    mode: Mode
    dtype: torch.dtype | None
    lively: bool
    small: bool


class Checker:
    """Checks the scopes of one applied plan.

    Args:
        model: The root, with the plan applied.
        axis: Its ranks.
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
        self.results: dict[tuple[str, Mode], Result] = {}
        self.failure = ""
        self.failures: list[tuple[str, bool]] = []
        self.failed_by_plan = False
        self.entered: list[nn.Module] = []
        self.has_compared_replicas = False
        self.scopes: list[Scope] = []
        self.standing = dict(self.names)  # as of the last check: the model may have changed since the plan
        _watch(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Watch the copy's own model."""
        vars(self).update(state)
        _watch(self)

    def forget(self) -> None:
        """Check again, on every rank: the model has another module or parameter now."""
        if not any(scope.done for scope in self.scopes):
            return  # nothing checked so far
        self.has_compared_replicas = False
        for scope in self.scopes:
            for modes in (scope.done, scope.verified, scope.not_in_float64):
                modes.clear()

    def report(self) -> list[str]:
        """Return lines on equal results, with counts, and on everything not compared."""
        lines = []
        for (name, (training, with_gradients)), result in self.results.items():
            mode = f"{'training' if training else 'evaluation'}, {'with' if with_gradients else 'without'} gradients"
            lines.append(f"check of {name} ({mode}): {result}")
        seen = {name for name, _ in self.results}
        return lines + [
            f"check of {scope}: unchecked: never entered" for scope in self.scopes if seen and str(scope) not in seen
        ]

    def __call__(self, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check one call of a scope, before it happens.

        Raises:
            StyleInputError: The root's inputs, modes or generators differ between the ranks.
            CheckError: The sharded module is not equal to the original; on every rank.
        """
        if is_compiling() or IN_ORIGINAL.get() or is_transformed() or self.axis.size == 1:
            return
        if dist.get_backend(self.axis.group) == "fake" or any(is_fake(p) for p in scope.module.parameters()):
            return  # no values
        mode = scope.module.training, torch.is_grad_enabled()
        self.standing = {module: name for name, module in self.scopes[0].module.named_modules()}
        if IN_FLOAT64.get() and mode in scope.not_in_float64:
            return  # for a run in its own type
        try:
            inputs = Inputs(args, kwargs, self.axis, mode, scope.declared, scope.names, inner_dims=scope.inner_dims)
        except NotReady as error:  # the next call may have an empty cache
            self.results[str(scope), mode] = Result(str(error))
            if mode in self.scopes[0].done and not (self.is_staged or self.results[str(self.scopes[0]), mode].reason):
                scope.done[mode] = 1  # the root's check ran it; the first layer has filled a later one's cache
            return
        is_root = scope.is_root and not self.is_staged
        if is_root and not self.has_compared_replicas:
            self._compare_replicas(scope)
            self.has_compared_replicas = True
        if is_root and inputs.differ and not scope.inner_dims:
            hint = "tensor-parallel ranks take the same batch: give each data-parallel group one sampler; where inputs"
            hint += " are shards, declare it: PrepareModuleInput(input_layouts=Shard(dim)) on the model"
            raise StyleInputError(
                Problem("ranks-disagree", f"{scope}({leaf.place.path})", found="other values on each rank", hint=hint)
                for leaf in inputs.differ
            )
        unchecked = ""
        if has_fsdp_below(scope.module):
            # FSDP2's hooks would gather and reduce within both runs. Regions inside its units are checked in the call.
            unchecked = "FSDP2 shards modules inside; regions within them are checked"
        elif inputs.differ or (scope.inner_dims and not scope.is_root and not inputs.has_shards):
            unchecked = "its inputs are shards, and no style on the module declares how: PrepareModuleInput does"
        if unchecked:
            self.results[str(scope), mode] = Result(unchecked)
            if is_root and inputs.differ:
                warnings.warn(f"{scope}: the sharded model is not checked: {unchecked}", stacklevel=4)
            is_final = True
        else:
            is_final = self._check(scope, inputs, mode) or not IN_FLOAT64.get()
            if scope.is_root and self.results[str(scope), mode].reason == ALIKE:
                return  # the next call is checked
        if is_final:  # what raised is checked again by the next call
            scope.done[mode], _ = size_and_options(args, kwargs)
        else:
            scope.not_in_float64.add(mode)

    def _compare_replicas(self, scope: Scope) -> None:
        """Compare parameters without a style: nothing has made them equal on all ranks.

        Raises:
            CheckError: Some are not; on every rank.
        """
        different = []
        styled = self.planned - scope.unstyled
        for name, parameter in scope.module.named_parameters():
            owner = scope.module.get_submodule(name.rpartition(".")[0])
            if name in styled or isinstance(vars(owner).get("forward"), Forward):
                continue  # these have other checks
            if type(parameter) is nn.Parameter and not hasattr(parameter, "_sharding_info"):
                value = parameter.detach()
                if not is_close(value, agreed_values(value, self.axis, 0)):
                    different.append(Difference("replica", name, 0.0))
        if union := self.union(different):
            hint = (
                "seed every rank alike before the model is made, load one checkpoint on all, or broadcast from one rank"
            )
            raise CheckError(
                Problem("replicas-differ", one.name, found="other values on each rank, and no style", hint=hint)
                for one in union
            )

    def _check(self, scope: Scope, inputs: Inputs, mode: Mode) -> bool:
        """Compare; return False if the two runs could not be compared."""
        verdict, constant = self._verdict(scope, inputs, mode, lively=True), inputs.is_constant
        if verdict.stage < Stage.ALL or any(d.kind == "raises" for d in verdict.differences):
            # The forward may refuse other numbers (an id in a float), or writes to a frozen parameter.
            verdict, constant = self._verdict(scope, inputs, mode, lively=False), constant or inputs.has_noise
        if verdict.differences:
            worst = sorted(verdict.differences, key=lambda difference: -difference.error)[:8]
            has_cache = any(leaf.place.is_state for leaf in inputs.leaves)
            raise CheckError(_problem(scope, one, verdict.place, has_cache=has_cache) for one in worst)
        reason = verdict.failure
        if verdict.stage >= Stage.OUTPUTS:
            if not reason and not verdict.compared:
                reason = "its forward returns and keeps no tensors that could be compared"
            elif not reason and constant:
                reason = ALIKE
            if verdict.stage == Stage.ALL and verdict.is_closed and not inputs.has_shards:
                scope.verified.add(mode)
        self.results[str(scope), mode] = Result(reason, verdict.compared, tuple(verdict.blank))
        if scope.is_root and not self.is_staged and verdict.stage == Stage.SHARDED:  # else the call itself will raise
            self._refuse_late_modules(scope, verdict)
        # A staged part may not run alone on full weights: other calls complete it.
        if scope.is_root and reason and verdict.stage >= (Stage.SHARDED_BACKWARD if self.is_staged else Stage.SHARDED):
            subject = "outputs" if verdict.stage < Stage.OUTPUTS else "gradients"
            warnings.warn(f"{scope}: {subject} of the sharded model are not checked: {reason}", stacklevel=5)
        return verdict.stage >= Stage.OUTPUTS

    def _refuse_late_modules(self, scope: Scope, verdict: Verdict) -> None:
        """Refuse an incomparable model with layers added after the plan: adapters, mostly.

        Raises:
            CheckError: There are such layers; on every rank, since modules are replicas.
        """
        late = [
            name for name, module in scope.module.named_modules() if module not in self.names and module._parameters
        ]
        if late:
            text = f"{', '.join(late[:5])} came after apply_plan, sized for one shard; the original: {verdict.failure}"
            hint = "add layers first, then call apply_plan with a style for them: for LoRA, LoRAParallel on the pair"
            raise CheckError([Problem("model-changed", str(scope), found=text, hint=hint)])

    # ------------------------------------------------------------------ both runs

    def _verdict(self, scope: Scope, inputs: Inputs, mode: Mode, *, lively: bool) -> Verdict:
        """Compare both runs in the first possible way; the same verdict on every rank."""
        small = sum(full_numel(p) for p in scope.module.parameters()) <= FLOAT64_LIMIT
        best = Verdict()
        # Some code takes one type only (grouped products of experts no float64), and in half precision routers round
        # to other experts. Inside a run in float64 the run around it, in its own type, covers this.
        types = (torch.float64, torch.float32, None) if small else (None,)
        for dtype in types[:1] if IN_FLOAT64.get() else types:
            verdict = self._compared(scope, inputs, Way(mode, dtype, lively, small))
            if verdict.stage == Stage.ALL:
                return verdict
            best = verdict if verdict.stage >= best.stage else best
        return best

    def _compared(self, scope: Scope, inputs: Inputs, way: Way) -> Verdict:
        may_leave, has_partial = self.may_leave or not scope.is_root, scope.has_partial_output
        comparison = Comparison(self.axis, has_partial, may_leave, only_first=not scope.is_root)
        verdict = Verdict(compared=comparison.compared, blank=comparison.blank)
        with ExitStack() as stack:
            constants = stack.enter_context(self._isolated())
            ours = self.agreed(lambda: inputs.copies(way.dtype, full=False, noise=way.lively))
            wanted = self.agreed(lambda: inputs.copies(way.dtype, full=True, noise=way.lively))
            weights = self.agreed(lambda: Weights(scope.module, self.axis, way.dtype, lively=way.lively))
            constants.epsilon = 0.0  # copying is no part of the runs
            if ours is None or wanted is None or weights is None:
                return verdict.failed(self.failure)

            def run(*, original: bool, traced: bool = False) -> Run | None:
                copies = wanted if original else ours
                result: Run | None = self.agreed(
                    lambda: self._run(scope, copies, way, weights, constants, original=original, traced=traced)
                )
                return result

            # The original of a small scope runs first. It has no collectives: an error on one rank reaches all ranks,
            # instead of leaving the others waiting in the sharded run. For a large scope it uses verified regions
            # sharded, so the sharded run comes first and verifies them.
            reference = run(original=True) if way.small else None
            original_failure = self.failure
            if way.small and reference is None:
                self._raise_lone_error(scope)
                if way.dtype is not None:
                    return verdict.failed(original_failure)
            sharded = run(original=False)
            failure, place = self.failure, self._place()
            if sharded is None and (way.dtype is not None or self.failed_by_plan):
                return verdict.failed(failure)
            if not way.small:
                reference = run(original=True)
                original_failure = self.failure
            if sharded is None:
                if reference is not None:
                    verdict.differences = self.union([Difference("raises", place, math.inf, failure)])
                return verdict.failed(failure)
            verdict.stage = Stage.SHARDED
            if reference is None:
                return verdict.failed(original_failure)
            if scope.is_root and not self.is_staged and way.mode[0] and constants.has_drawn:
                self._compare_generators(scope)
            verdict.stage = Stage.OUTPUTS
            comparison.tolerance = self.tolerance(constants)
            differences, outputs = comparison.outputs(sharded, reference)
            verdict.differences = self.union(differences)
            if any(one.kind == "output" for one in verdict.differences):  # repeat both, traced
                ours = self.agreed(lambda: inputs.copies(way.dtype, full=False, noise=way.lively))
                wanted = self.agreed(lambda: inputs.copies(way.dtype, full=True, noise=way.lively))
                one, other = run(original=False, traced=True), run(original=True, traced=True)
                if one is not None and other is not None:
                    verdict.place = comparison.first_difference(one, other)
            full = [output.layout == "full" for output in outputs if output.is_output]
            verdict.is_closed = len(full) > 0 and all(full)
            if not verdict.differences and way.mode[1]:
                (ones, starts), (its, its_starts) = cotangents(outputs, self.axis)
                if ones:
                    with self._original():  # a checkpoint runs forwards again
                        if not self.agreed(lambda: sharded.backward(ones, starts, ours.leaves)):
                            return verdict.failed(self.failure)
                        verdict.stage = Stage.SHARDED_BACKWARD
                        if not self.agreed(lambda: reference.backward(its, its_starts, wanted.leaves)):
                            return verdict.failed(self.failure)
                    comparison.tolerance = 10 * self.tolerance(constants)  # gradients are sums over the batch
                    verdict.differences = self.union(comparison.gradients(sharded, reference, ours, wanted))
            verdict.stage = Stage.ALL
            verdict.differences = verdict.differences or self.union(comparison.buffers(sharded, reference))
            everyone = self.axis.all_gather_objects(comparison.blank, "the check")
            verdict.blank = [name for name in dict.fromkeys(comparison.blank) if all(name in one for one in everyone)]
        return verdict

    def _raise_lone_error(self, scope: Scope) -> None:
        """Raise the original's error on all ranks if it raised on some of them only.

        Raises:
            CheckError: It raised on some ranks only.
        """
        if all(text for text, _ in self.failures):
            return
        hint = "this error is one rank's own; it is raised on all ranks, so that none waits"
        raise CheckError(
            Problem("check-raises", str(scope), found=f"the original on rank {rank}: {text}", hint=hint)
            for rank, (text, _) in enumerate(self.failures)
            if text
        )

    def _compare_generators(self, scope: Scope) -> None:
        """Compare the default generators of the ranks.

        Raises:
            StyleInputError: They differ, and the model draws; on every rank.
        """
        generator = default_generator(torch.device(self.axis.mesh.device_type))
        digest = hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()
        if len(set(self.axis.all_gather_objects(digest, "the check"))) > 1:
            reason = "the model draws random numbers in training, from other states on each rank"
            hint = "seed all ranks of a tensor-parallel group alike: torch.manual_seed(seed + data_parallel_rank)"
            raise StyleInputError(Problem("ranks-disagree", f"{scope} generators", found=reason, hint=hint))

    def _run(
        self,
        scope: Scope,
        copies: Copies,
        way: Way,
        weights: Weights,
        constants: Precision,
        *,
        original: bool,
        traced: bool,
    ) -> Run:
        others = self._checkers_below(scope.module)
        originals = [one for checker in (*others, self) for one in (*checker.originals, *checker.successors())]
        reverted = {one.module for one in originals}
        # Modules made parallel over another mesh, or without the check, stay as they are.
        opaque = {
            child
            for child in scope.module.modules()
            if child not in reverted and isinstance(vars(child).get("forward"), Forward)
        }
        for inner in scope.inside:
            # Modules that share a parameter with others outside run as the original too: its gradient is one sum.
            if not way.small and way.mode in inner.verified and not _shares(inner.module, scope.module):
                opaque.add(inner.module)
        self.entered.clear()
        epsilon = constants.epsilon  # gathering weights in their own type is no part of the run
        run = Run(
            scope.module,
            self.standing,
            weights,
            originals=originals if original else None,
            opaque=frozenset(opaque if original else ()),
            skipped=scope,
            entered=None if original and not traced else self.entered,
            traced=traced,
        )
        constants.epsilon = epsilon
        token = IN_FLOAT64.set(IN_FLOAT64.get() or (way.dtype is not None and not original))
        try:
            # Both runs draw alike: Python's and NumPy's numbers are not torch operations, so they are not constants.
            with random_state_restored(), self._original() if original else nullcontext():
                run.forward(copies.args, copies.kwargs)
        finally:
            IN_FLOAT64.reset(token)
        return run

    def successors(self) -> list[Original]:
        """Return modules in the places of changed ones, of the same kinds. They are copies, with our forwards."""
        changed = {self.names[one.module]: one for one in self.originals if one.module in self.names}
        late = {module: changed.get(name) for module, name in self.standing.items() if module not in self.names}
        return [replace(one, module=new) for new, one in late.items() if one is not None and type(new) is one.kind]

    def _place(self) -> str:
        """Return the innermost module of the sharded run's error, with global shapes of its parameters."""
        if not self.entered:
            return ""
        module = self.entered[-1]
        shapes = []
        for key, parameter in module._parameters.items():
            if parameter is not None:
                shapes.append(f"{key} {list((sharding_info_of(parameter) or parameter).shape)}")
        return " ".join([self.standing.get(module, ""), f"({', '.join([type(module).__name__, *shapes])})"]).strip()

    def _checkers_below(self, module: nn.Module) -> list[Checker]:
        """Return checkers of other calls for modules below, over the same mesh."""
        hooks = (hook for child in module.modules() for hook in child._forward_pre_hooks.values())
        checkers = {hook.checker: None for hook in hooks if isinstance(hook, Scope) and hook.is_root}
        return [one for one in checkers if one is not self and one.axis.mesh == self.axis.mesh]

    @contextmanager
    def _original(self) -> Iterator[None]:
        """Skip checks of scopes within."""
        token = IN_ORIGINAL.set(True)
        try:
            yield
        finally:
            IN_ORIGINAL.reset(token)

    @contextmanager
    def _isolated(self) -> Iterator[ConstantRandomness]:
        """Leave nothing of the runs in generators, in autograd's hooks, or in autocast's cache."""
        kind, grad, modes = self.axis.mesh.device_type, torch.is_grad_enabled(), dispatch_modes()
        with ExitStack() as stack:
            stack.enter_context(random_state_restored())
            if "torch._dynamo" in sys.modules:  # compiled blocks cannot run under a mode
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast(kind, enabled=False))
            # The innermost hooks count: a checkpoint around the call would take the runs' saved tensors for its own.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
            yield stack.enter_context(ConstantRandomness())
        # An exit pops modes by position, not by owner: one left behind would keep the constants.
        if dispatch_modes() != modes:
            raise RuntimeError(f"the check left dispatch modes behind: {dispatch_modes()}, before it {modes}")

    def tolerance(self, runs: Precision) -> float:
        """Return the relative tolerance: rounding of the coarsest type in the runs of all ranks."""
        epsilons = self.axis.all_gather_objects(runs.epsilon, "the check")
        epsilon = float(max(epsilons))
        return max(1e-9, epsilon * (8 if epsilon > 1e-4 else 1000))

    def agreed(self, act: Callable[[], Any]) -> Any:
        """Return the result of an action; None if it raised on any rank."""
        result, failure = None, ("", False)
        try:
            result = act()
        except CheckError:
            raise  # of a region inside; on every rank
        except Exception as error:
            line, *more = str(error).splitlines() or [""]
            text = " ".join([f"{type(error).__name__}: {line}", *(more[:1] if line.endswith(":") else ())])
            failure = text, isinstance(error, PlanError)
        self.failures = self.axis.all_gather_objects(failure, "the check")
        first = next((one for one in self.failures if one[0]), None)
        if first is not None:
            self.failure, self.failed_by_plan = first
            return None
        return result

    def union(self, found: list[Difference]) -> list[Difference]:
        """Return the largest differences of all ranks, one list for every rank."""
        everyone = self.axis.all_gather_objects(found, "the check")
        worst: dict[tuple[str, str], Difference] = {}
        for difference in (one for rank in everyone for one in rank):
            key = (difference.kind, difference.name)
            if key not in worst or worst[key].error < difference.error:
                worst[key] = difference
        return list(worst.values())


_CHECKERS: WeakKeyDictionary[Checker, None] = WeakKeyDictionary()
"""In the order of their plans."""


def live_checkers() -> list[Checker]:
    """Return checkers of all plans still applied, in the order of the plans: it is the same on all ranks."""
    return [checker for checker in _CHECKERS if checker.scopes[0].is_installed]


def _watch(checker: Checker) -> None:
    """Watch registrations: late modules (adapters) have no hooks, and scanning in each call costs more."""
    watch_registrations()
    _CHECKERS[checker] = None


@cache
def watch_registrations() -> None:
    register_module_module_registration_hook(_on_module)
    register_module_parameter_registration_hook(_on_parameter)


def _on_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        refuse_plain_ddp(submodule)
    for checker in [*_CHECKERS]:
        if module in checker.standing and submodule is not module._modules.get(name):
            checker.forget()


def refuse_plain_ddp(module: nn.Module) -> None:
    """Refuse `DistributedDataParallel` around shards: it would broadcast rank 0's, and reduce shards of other rows.

    Raises:
        PlanError: Parameters are shards, and no bridge has made leaves for them.
    """
    if BRIDGED in vars(module):  # local shards stay as they are in it
        return
    hint = "tp_ddp_bridge makes leaves that DDP takes; or fully_shard on the data-parallel mesh"
    problems = [
        Problem("mesh-mismatch", name, found="a shard inside of DistributedDataParallel", hint=hint)
        for name, parameter in module.named_parameters()
        if isinstance(parameter, ShardParameter | DTensor) and BRIDGED not in vars(parameter)
    ]
    if problems:
        raise PlanError(problems[:8])


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    for checker in [*_CHECKERS]:
        if module in checker.standing:
            old = module._parameters.get(name)
            # One of the same shape only has new values, as from `load_state_dict(assign=True)`.
            if old is None or old.shape != parameter.shape:
                checker.forget()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def _note_compiled(scope: Scope, training: bool) -> None:
    """Report a mode compiled before its check. The compiler runs this once for each traced graph."""
    mode, checker = (training, torch.is_grad_enabled()), scope.checker
    if mode in scope.done or IN_ORIGINAL.get() or (str(scope), mode) in checker.results:
        return
    checker.results[str(scope), mode] = Result(f"compiled before its first call; {EAGER_CALL}")
    warnings.warn(f"{scope}: compiled before its first call, so it is unchecked: {EAGER_CALL}", stacklevel=2)


EAGER_CALL = 'call it once inside of torch.compiler.set_stance("force_eager")'
"""Remedy for a compiled model: a checked call."""


def size_and_options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the largest argument's elements, at least 1, and keywords that are True or learn."""
    largest, options = 1, []
    for index, x in enumerate((*args, *kwargs.values())):  # plain loops: a steady call asks, too
        if isinstance(x, torch.Tensor):
            if x.requires_grad:  # an input without a gradient now may have one later
                options.append(f"gradient of {index}")
            if x.numel() > largest:
                largest = x.numel()
    for name, x in kwargs.items():
        if x is True:
            options.append(name)
    return largest, tuple(options)


def originals(changes: list[ModuleChange]) -> list[Original]:
    """Return `changes` without their undo closures (hooks of the check are pickled with a model)."""
    table: dict[nn.Module, Original] = {}
    for change in changes:
        keys = {remover.key for remover in change.removers if isinstance(remover, KeyRemover)}
        # A parallel nn.TransformerEncoder computes padded positions; the original fills in zeros.
        attributes = {name: value for name, value in change.attributes.items() if name != "use_nested_tensor"}
        original = table.setdefault(change.module, Original(change.module, type(change.module)))
        original.attributes.update(attributes)
        original.foreign_hooks |= keys
    return list(table.values())


def install_check(checker: Checker, model: nn.Module, plan: TPPlan, regions: list[str]) -> list[Callable[[], None]]:
    """Install hooks of all scopes, the root's first, before every other hook. They see the caller's inputs.

    Args:
        checker: Their checker.
        model: The root.
        plan: The applied plan.
        regions: FQNs of regions, and of styled modules with forwards of their own outside of all regions.

    Returns:
        Functions to remove them.
    """
    unstyled = frozenset(left.name for left in plan.unstyled)
    scopes = [Scope(checker, "", model, is_root=True)]
    scopes += [Scope(checker, name, model.get_submodule(name)) for name in sorted(set(regions) - {""})]
    for scope in scopes:
        below = [planned for planned in plan.modules if is_below(planned.name, scope.name)]
        own = next((planned for planned in below if planned.name == scope.name), None)
        if own is not None:
            scope.declared = {name: flow.src for name, flow in own.spec.inputs}
            scope.names = own.info.arguments
        # A row-wise layer's features come from the column-wise layer before it; other shards come in from outside.
        flows = [flow for one in below for _, flow in one.spec.inputs if (flow.src, flow.dst) != (Shard(-1), Shard(-1))]
        if not any(isinstance(layout, Shard) for layout in scope.declared.values()):
            scope.inner_dims = tuple({flow.src.dim: None for flow in flows if isinstance(flow.src, Shard)})
        outputs = [flow for planned in below for flow in planned.spec.outputs if flow is not None]
        scope.has_partial_output = any(flow.dst.is_partial() for flow in outputs)
        scope.unstyled = unstyled
        scope.inside = [other for other in scopes if other.name != scope.name and is_below(other.name, scope.name)]
        scope.install()
    checker.scopes = scopes
    return [scope.take_back for scope in scopes]


def _shares(inner: nn.Module, outer: nn.Module) -> bool:
    """True if a parameter within a module also belongs to the module around it."""
    inside = {id(p) for p in inner.parameters()}
    below = set(inner.modules())
    outside = (m for m in outer.modules() if m not in below)
    return any(id(p) in inside for m in outside for p in m._parameters.values())


# ---------------------------------------------------------------------------------------------- texts


HINTS = {
    "output": "FusedColwiseParallel where a weight has several sections (q, k, v; gate, up); local head counts"
    " (GQAParallel, or view(..., -1, head_size)) where heads are divided; ColwiseParallel(output_layouts=Replicate())"
    " for what needs all features",
    "gradient": "each rank has a partial sum of this gradient: NoParallel(sum_gradient=True) for its module (norms= of"
    " GQAParallel), or a style that shards it",
    "input-gradient": "the ranks' gradients of the input are not summed: a module takes a shard's part of it unstyled",
    "raises": "a layer after a column-wise one takes its shard: RowwiseParallel() for it, or"
    " ColwiseParallel(output_layouts=Replicate()) for the one before; RowwiseParallel(input_layouts=Replicate())"
    " for a full input; local sizes where code has numbers of its own; BlockParallel(shard={name: dim}) for a module's"
    " own parameter of each head or channel (sinks, scales of [heads, 1, 1])",
    "cache": "a filled key-value cache comes in with all heads (prefix tuning of peft makes one), where a rank's cache"
    " holds its own: PromptTuningConfig and LoRA are right",
    "buffer": "each rank updates it from its own shard",
    "attribute": "the forward leaves it behind, computed from one rank's shard: compute it from full outputs, or reduce"
    " it over the tensor-parallel ranks",
    "shard-leaves": "every rank would go on with its own features: output_layouts=Replicate() gives full outputs;"
    " output_layouts=Shard(-1) declares that shards are meant (vocab_parallel_cross_entropy takes them); attention"
    " weights are of this rank's heads: all of them come after undo()",
}


def _problem(scope: Scope, difference: Difference, place: str, *, has_cache: bool) -> Problem:
    name = (
        f"{scope} {difference.name}" if "output" in difference.name or "input" in difference.name else difference.name
    )
    code = {"shard-leaves": "shard-leaves", "raises": "check-raises"}.get(difference.kind, "check-mismatch")
    reason = f"{difference.kind} differs from the original module's by {difference.error:.2g} (run on full weights)"
    if difference.detail:
        reason = f"{difference.kind}: {difference.detail}, run on full weights"
    if difference.kind == "output" and place:
        reason += f"; both part first at the output of {place}"
    if difference.kind == "shard-leaves":
        reason = f"a shard leaves the model as a plain tensor: {difference.detail}"
    if difference.kind == "raises":
        name, reason = difference.name or name, f"{difference.detail}; the original, on full weights, runs"
    hints = getattr(vars(scope.module).get("forward"), "hints", None) or HINTS  # a style may have its own
    hint = hints["cache" if difference.kind == "raises" and has_cache else difference.kind]
    if "mixed torch.Tensor and DTensor" in difference.detail:
        hint = "one of both is a DTensor: PrepareModuleInput(use_local_output=True) for plain parameters; a style of"
        hint += " your own that makes DTensors of parameters prepares the inputs too (distribute_module(input_fn=...))"
    if difference.kind == "gradient" and difference.name not in scope.unstyled and hints is HINTS:
        hint = "the forward uses this parameter other than its style expects: as a bare weight, or on other inputs"
    return Problem(
        code, name, found=f"in region {str(scope)!r}: {reason}", hint=hint + '; check="never" skips the check'
    )
