"""Checks of a root and its regions at the first call of each mode."""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
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

from tp_styles._shared.execution_check import Precision, random_state_restored
from tp_styles._shared.norms import BRIDGED
from tp_styles._shared.progress import each_shown
from tp_styles._torch_compat import (
    constant_in_graphs,
    dispatch_modes,
    is_compiling,
    is_fake,
    is_transformed,
    without_dispatch_modes,
)
from tp_styles.check import RUNNING, Running, running
from tp_styles.check.compare import ALIKE, Comparison, Stage, Verdict, cotangents, problem
from tp_styles.check.inputs import ConstantRandomness, Copies, Inputs, Mode, NotReady, is_close
from tp_styles.check.rows import Row, joined, tolerance_of
from tp_styles.check.runs import Original, Run, Trace, Weights, fsdp_units, full_numel, has_fsdp_below, is_of_fsdp
from tp_styles.check.watched_loss import watch_loss
from tp_styles.plan.model import TPPlan
from tp_styles.problems import CheckError, PlanError, Problem, StyleInputError
from tp_styles.runtime.dropout import default_generator
from tp_styles.runtime.forwards import Forward
from tp_styles.runtime.install import KeyRemover, ModuleChange
from tp_styles.runtime.parameters import ShardParameter, agreed_values
from tp_styles.runtime.redistribute import TPGroup
from tp_styles.runtime.votes import PeerRaised, Votes, before_collective, voting
from tp_styles.values import StyleSpec, is_below

Check = Literal["first", "always", "never"]

EXACT = torch.float64, torch.float32, None

# Elements of full parameters up to which both runs use float64. No rounding hides a mistake there.
FLOAT64_LIMIT = 2**26


@dataclass(frozen=True)
class Declared:
    """Declarations of styles about a scope's inputs.

    Attributes:
        layouts: Argument name -> layout, by a style on the module itself.
        names: Names of the module's positional arguments.
        inner_dims: Dims of incoming activations, sharded by declaration of styles inside, but of none on the module.
    """

    layouts: dict[str, Placement] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    inner_dims: tuple[int, ...] = ()

    @cached_property
    def dims(self) -> frozenset[int]:
        """Dims along which inputs may be shards."""
        return frozenset([*self.inner_dims, *(each.dim for each in self.layouts.values() if isinstance(each, Shard))])


@dataclass(eq=False)
class Scope:
    """A module checked as a unit, and its pre-hook. A region's is removed once its call is checked.

    Attributes:
        checker: Checker of the plan.
        name: Its FQN, `""` for the root.
        module: The module.
        is_root: The plan was applied to it.
        inside: Scopes within it.
        declared: Declarations of styles about its inputs.
        has_partial_output: A style inside outputs a partial sum.
        verified: Modes with results equal to the original's, from full inputs to full outputs.
        done: Modes already checked, or impossible to check -> elements of the largest input.
        options: Checked modes, each with the keyword arguments that were True.
    """

    checker: Checker
    name: str
    module: nn.Module
    is_root: bool = False
    inside: list[Scope] = field(default_factory=list)
    declared: Declared = field(default_factory=Declared)
    has_partial_output: bool = False
    verified: set[Mode] = field(default_factory=set)
    done: dict[Mode, int] = field(default_factory=dict)
    options: set[tuple[Mode, tuple[str, ...]]] = field(default_factory=set)
    _key: int = -1
    _before: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return self.name or type(self.module).__name__

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the call, if its mode is new; in a run of a check, record it."""
        if is_compiling():
            if self.is_root:
                _note_compiled(self, module.training)
            return
        if RUNNING:
            if RUNNING[-1].record is not None:
                RUNNING[-1].record(self, args, kwargs)
            return
        with_gradients = torch.is_grad_enabled()
        mode = module.training, with_gradients
        checked = self.done.get(mode)
        options: tuple[str, ...] = ()
        if self.is_root:
            largest, options = size_and_options(args, kwargs, self.declared)
            # A first batch of one token hides what depends on length, and `output_attentions=True` gives more outputs.
            is_new = checked and (2 * checked <= largest or (mode, options) not in self.options)
            if is_new and not self.checker.is_staged:
                for scope in self.checker.scopes:  # the regions too
                    scope.done.pop(mode, None)
                    scope.verified.discard(mode)
                checked = None
            for region in self.inside:  # those not yet checked in their mode; the check around this one removes them
                if (region.module.training, with_gradients) not in region.done:
                    region.install()
        if checked is None or self.checker.always:
            self.checker.check(self, args, kwargs)
            self.options.add((mode, options))
        elif not self.is_root and self.checker.scopes[0].done:
            # A steady step pays only for the root's hook, which installs this one for a new mode. If the root's
            # forward is not called (`encode()`), this one stays.
            self.remove()

    @property
    def is_small(self) -> bool:
        """True if both runs fit in float64, where no rounding hides a mistake."""
        return sum(full_numel(p) for p in self.module.parameters()) <= FLOAT64_LIMIT

    def install(self) -> None:
        """Install before every other hook, except for those already before it: FSDP2's gather the parameters."""
        hooks: Any = self.module._forward_pre_hooks
        if self._key in hooks:
            return
        if self._key < 0:
            self._before = [key for key, hook in hooks.items() if is_of_fsdp(hook)]
            self._key = self.module.register_forward_pre_hook(self, with_kwargs=True).id
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
class Attempt:
    """An action on all ranks.

    Attributes:
        value: This rank's result; None if the action raised on any rank.
        errors: Text of each rank's error, `""` without, and True for an error of a plan.
        is_lone: Some ranks alone raised, or the ranks made different collectives.
    """

    value: Any
    errors: tuple[tuple[str, bool], ...] = ()
    is_lone: bool = False

    @property
    def is_apart(self) -> bool:
        """True if no rank raised, and the ranks make different collectives."""
        return self.is_lone and all(text for text, _ in self.errors)

    @property
    def failure(self) -> str:
        """Text of the first rank's error, `""` without."""
        return next((text for text, _ in self.errors if text), "")

    @property
    def is_refusal(self) -> bool:
        """True if the first error is one of a plan: the call itself raises it, too."""
        return next((by_plan for text, by_plan in self.errors if text), False)


@dataclass
class Both:
    """The two runs of one call.

    Attributes:
        dtype: Type of floats in both; None for the model's own.
        lively: Constant inputs and weights give way to other numbers, and every floating parameter takes a gradient.
        copies: Arguments of the sharded run, and of the original's.
        weights: Makes the weights of both.
        sharded: The sharded run; None if something before it has failed.
        reference: The original's; None for a large scope, until the regions inside are compared.
        failure: An error before both runs.
        place: The module in which the sharded run has raised.
        precision: Precision and draws of both.
    """

    dtype: torch.dtype | None
    lively: bool
    copies: list[Copies] = field(default_factory=list)
    weights: Weights | None = None
    sharded: Attempt | None = None
    reference: Attempt | None = None
    failure: str = ""
    place: str = ""
    precision: tuple[float, bool] = (0.0, False)


@dataclass
class Call:
    """One call of a scope, with the best comparison so far.

    Attributes:
        inputs: Its arguments, compared between the ranks and copied.
        mode: The module's mode.
        size: Elements of the largest input.
        verdict: The comparison that got furthest.
    """

    inputs: Inputs
    mode: Mode
    size: int
    verdict: Verdict = field(default_factory=Verdict)


def inner_first(calls: dict[Scope, Call]) -> list[Scope]:
    """Return scopes in the order in which their calls have ended: those inside of another before it."""
    places = {scope: place for place, scope in enumerate(calls)}
    ends = {scope: max(places.get(inner, 0) for inner in (scope, *scope.inside)) for scope in calls}
    root = next(iter(calls))  # scopes of other plans inside are not among its own
    return sorted(calls, key=lambda scope: (scope is root, ends[scope], -len(scope.inside)))


class Checker:
    """Checks the scopes of one applied plan.

    Args:
        model: The root, with the plan applied.
        axis: Its ranks.
        originals: Modules as they were before.
        plan: The applied plan.
        always: Check every call.
        is_staged: The root may be a part of a model: its inputs may be shards.
        may_leave: A shard may leave the root as a plain tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: TPGroup,
        originals: list[Original],
        plan: TPPlan,
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
        self.planned = {planned.name: (planned.spec, planned.info.arguments) for planned in plan.modules}
        self.styled = frozenset(name for name, _ in model.named_parameters()) - {left.name for left in plan.unstyled}
        self.results: dict[tuple[str, Mode], Verdict] = {}
        self.has_compared_replicas = False
        self.scopes: list[Scope] = []
        self.present = dict(self.names)  # as of the last check: the model may have changed since the plan
        _watch(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Watch the copy's own model."""
        vars(self).update(state)
        _watch(self)

    def check_again(self) -> None:
        """Check again, on every rank: the model has another module or parameter now."""
        if not any(scope.done for scope in self.scopes):
            return  # nothing checked so far
        self.has_compared_replicas = False
        for scope in self.scopes:
            scope.done.clear()
            scope.verified.clear()

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

    def check(self, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check one call of a scope, before it happens: record, compare the regions inside, then the scope itself.

        Raises:
            StyleInputError: The root's inputs, modes or generators differ between the ranks.
            CheckError: The sharded module is not equal to the original; on every rank.
        """
        has_values = dist.get_backend(self.axis.group) != "fake" and not any(map(is_fake, scope.module.parameters()))
        if is_transformed() or self.axis.size == 1 or not has_values:
            return
        self.present = {module: name for name, module in self.scopes[0].module.named_modules()}
        call = self._call(scope, args, kwargs)
        if call is None:
            return
        calls = {scope: call}
        # Some code takes one type only (grouped products of experts no float64), some no other numbers (an id in a
        # float), or writes to a frozen parameter.
        dtypes = EXACT if scope.is_small else (None,)
        for lively, dtype in itertools.product((True, False), dtypes):
            both = self._runs(scope, call, Both(dtype, lively), calls)  # the sharded one records the regions' calls
            order = inner_first(calls)
            for current in each_shown("tp_styles: check of the first call", order, len(order)):
                checker, inner = current.checker, calls[current]
                # Inputs that were recorded in the model's own type are compared in the most exact one.
                is_open = current is not scope and dtype is None and current.is_small
                for exact in EXACT if is_open else (dtype,):
                    if inner.verdict.is_final:
                        break
                    runs = both if current is scope else checker._runs(current, inner, Both(exact, lively))
                    verdict = checker._compared(current, inner, runs)
                    inner.verdict = verdict if verdict.stage >= inner.verdict.stage else inner.verdict
                    if verdict.differences and not (verdict.raises and lively):
                        raise checker._error(current, inner, verdict)
            if call.verdict.is_final:
                break
        for current in inner_first(calls):
            # A region that alone runs in its own type only is checked in the call itself.
            if calls[current].verdict.is_final or not call.verdict.is_final:
                current.checker._finish(current, calls[current])

    # ------------------------------------------------------------------ recording

    def _call(self, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Compare a call's inputs between the ranks, and copy them; None if it is not to be compared.

        Raises:
            StyleInputError: The root's inputs differ, or modes do; on every rank.
            CheckError: Parameters without a style differ; on every rank.
        """
        mode = scope.module.training, torch.is_grad_enabled()
        size, _ = size_and_options(args, kwargs, scope.declared)
        layouts, names, inner_dims = scope.declared.layouts, scope.declared.names, scope.declared.inner_dims
        try:
            inputs = Inputs(args, kwargs, self.axis, mode, layouts, names, inner_dims=inner_dims)
        except NotReady as error:  # the next call may have an empty cache
            self.results[str(scope), mode] = Verdict(failure=str(error))
            if mode in self.scopes[0].done and not (self.is_staged or self.results[str(self.scopes[0]), mode].reason):
                scope.done[mode] = 1  # the root's check ran it; the first layer has filled a later one's cache
            return None
        is_root = scope.is_root and not self.is_staged
        if is_root and not self.has_compared_replicas:
            self._compare_replicas(scope)
            self.has_compared_replicas = True
        if is_root and inputs.differ and not inner_dims:
            raise StyleInputError(
                Problem(
                    "ranks-disagree",
                    f"{scope}({leaf.place.path})",
                    found="other values on each rank",
                    hint="tensor-parallel ranks take the same batch: give each data-parallel group one sampler; where"
                    " inputs"
                    " are shards, declare it: PrepareModuleInput(input_layouts=Shard(dim)) on the model",
                )
                for leaf in inputs.differ
            )
        if has_fsdp_below(scope.module):
            # FSDP2's hooks would gather and reduce within both runs. Its units are checked in the call, gathered.
            unchecked = "FSDP2 shards modules inside; those with styles are checked"
            self._add_units(scope)
        elif inputs.differ or (inner_dims and not scope.is_root and not inputs.has_shards):
            unchecked = "its inputs are shards, and no style on the module declares how: PrepareModuleInput does"
        else:
            detached = self._attempt(partial(_detach, inputs, scope.module))
            if detached.is_refusal:
                self._raise_lone_error(scope, detached, "the call")
                refuse_ordinary(scope.module)
            unchecked = detached.failure
        if not unchecked:
            return Call(inputs, mode, size)
        self.results[str(scope), mode] = Verdict(failure=unchecked)
        if is_root and inputs.differ:
            warnings.warn(f"{scope}: the sharded model is not checked: {unchecked}", stacklevel=5)
        scope.done[mode] = size
        self._watch_loss(scope, mode, None)
        return None

    def _add_units(self, root: Scope) -> None:
        """Add a scope for each module that FSDP2 shards as a unit: it stands for its part of the root.

        Beside a region of its own, a layer has norms whose gradient is summed and inputs that are redistributed.
        """
        for name, unit in fsdp_units(root.module).items():
            is_styled = any(is_below(planned, name) for planned in self.planned)
            if is_styled and all(scope.module is not unit for scope in self.scopes):
                self.scopes.append(self.scope(name, unit))
                self.scopes[-1].install()
        self._nest()

    def scope(self, name: str, module: nn.Module) -> Scope:
        """Return a scope, with the declarations of styles on its module and below."""
        below = [spec for planned, (spec, _) in self.planned.items() if is_below(planned, name)]
        spec, names = self.planned.get(name, (StyleSpec(), ()))
        layouts, inner_dims = {key: flow.src for key, flow in spec.inputs}, tuple[int, ...]()
        # A row-wise layer's features come from the column-wise layer before it; other shards come in from outside.
        flows = [flow for each in below for _, flow in each.inputs if (flow.src, flow.dst) != (Shard(-1), Shard(-1))]
        if not any(isinstance(layout, Shard) for layout in layouts.values()):
            inner_dims = tuple({flow.src.dim: None for flow in flows if isinstance(flow.src, Shard)})
        has_partial = any(flow.dst.is_partial() for each in below for flow in each.outputs if flow is not None)
        declared = Declared(layouts, names, inner_dims)
        return Scope(self, name, module, is_root=not name, declared=declared, has_partial_output=has_partial)

    def _nest(self) -> None:
        for scope in self.scopes:
            scope.inside = [other for other in self.scopes if other is not scope and is_below(other.name, scope.name)]

    def install(self, model: nn.Module, regions: list[str]) -> None:
        """Install hooks of all scopes, the root's first, before every other hook. They see the caller's inputs.

        Args:
            model: The root.
            regions: FQNs of regions, and of styled modules with forwards of their own outside of all regions.
        """
        self.scopes = [self.scope(name, model.get_submodule(name)) for name in sorted({"", *regions})]
        self._nest()
        for scope in self.scopes:
            scope.install()

    def take_back(self) -> None:
        """Remove all traces of the check from the model."""
        for scope in self.scopes:
            scope.take_back()

    def _recorder(self, scope: Scope, calls: dict[Scope, Call]) -> Callable[..., None]:
        """Return a function that adds the first call of each region to `calls`, unless it is compared already."""
        recorded = {scope}

        def record(region: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            mode, checker = (region.module.training, torch.is_grad_enabled()), region.checker
            is_compared = region in calls and calls[region].verdict.is_final
            is_done = is_compared or (mode in region.done and not checker.always)
            if region in recorded or is_done or checker.axis.mesh != self.axis.mesh:
                return
            before_collective(self.axis.group, f"the record of {region}")
            with without_dispatch_modes(), voting(None):
                call = checker._call(region, args, kwargs)
            if call is not None:
                recorded.add(region)
                call.verdict = calls[region].verdict if region in calls else call.verdict
                calls[region] = call

        return record

    def _compare_replicas(self, scope: Scope) -> None:
        """Compare parameters without a style: nothing has made them equal on all ranks.

        Raises:
            CheckError: Some are not; on every rank.
        """
        different = []
        for name, parameter in scope.module.named_parameters():
            owner = scope.module.get_submodule(name.rpartition(".")[0])
            if name in self.styled or isinstance(vars(owner).get("forward"), Forward):
                continue  # these have other checks
            if type(parameter) is nn.Parameter and not hasattr(parameter, "_sharding_info"):
                value = parameter.detach()
                if not is_close(value, agreed_values(value, self.axis, 0)):
                    different.append(Row("replica", name))
        if differing := self.joined(different):
            raise CheckError(
                Problem(
                    "replicas-differ",
                    item.name,
                    found="other values on each rank, and no style",
                    hint="seed every rank alike before the model is made, load one checkpoint on all, or broadcast from"
                    " one rank",
                )
                for item in differing
            )

    # ------------------------------------------------------------------ both runs

    def _runs(self, scope: Scope, call: Call, both: Both, calls: dict[Scope, Call] | None = None) -> Both:
        """Run the original on full weights, and the sharded module, on copies of a call's inputs.

        Args:
            scope: The scope.
            call: Its call.
            both: Settings of both runs; completed with the runs.
            calls: Gets the calls of regions inside.

        Returns:
            The runs.

        Raises:
            CheckError: The original raised on some ranks only.
        """
        dtype = both.dtype
        with self._isolated(call.mode) as constants:
            both.failure = self._prepare(scope, call, both)
            if both.failure:
                return both
            constants.epsilon = 0.0  # copying is no part of the runs
            # The original of a small scope runs first. It has no collectives: an error on one rank reaches all ranks,
            # instead of leaving the others waiting in the sharded run. A large scope's uses verified regions sharded.
            if scope.is_small:
                both.reference = self._attempt(lambda: self._run(scope, call.mode, both, original=True))
                self._raise_lone_error(scope, both.reference)
            if both.reference is None or both.reference.value is not None or dtype is None:
                record = None if calls is None else self._recorder(scope, calls)
                both.sharded = self._attempt(lambda: self._run(scope, call.mode, both, original=False, record=record))
            both.precision = constants.epsilon, constants.has_drawn
        return both

    def _prepare(self, scope: Scope, call: Call, both: Both) -> str:
        """Copy a call's inputs for both runs, and prepare their weights; return the text of an error."""
        copies = partial(call.inputs.copies, both.dtype, noise=both.lively)
        weights = partial(Weights, scope.module, self.axis, both.dtype, lively=both.lively)
        prepared = self._attempt(lambda: (copies(full=False), copies(full=True), weights()))
        if prepared.value is not None:
            *both.copies, both.weights = prepared.value
        return prepared.failure

    def _compared(self, scope: Scope, call: Call, both: Both) -> Verdict:
        """Compare both runs: outputs, then gradients, then buffers; the same verdict on every rank."""
        may_leave, has_partial = self.may_leave or not scope.is_root, scope.has_partial_output
        comparison = Comparison(self.axis, has_partial, may_leave, only_first=not scope.is_root)
        constant = call.inputs.is_constant or (call.inputs.has_noise and not both.lively)
        verdict = Verdict(rows=comparison.rows, is_constant=constant)
        if both.sharded is None:
            return verdict.failed(both.failure or (both.reference.failure if both.reference else ""))
        sharded, reference = both.sharded, both.reference
        if sharded.is_refusal:  # the call raises it too, but for a rank's own error, with which the others would wait
            self._raise_lone_error(scope, sharded, "the sharded forward")
        if sharded.value is None and (both.dtype is not None or sharded.is_refusal):
            return verdict.failed(sharded.failure)
        with self._isolated(call.mode) as constants:
            constants.epsilon, constants.has_drawn = both.precision
            if reference is None:
                reference = self._attempt(lambda: self._run(scope, call.mode, both, original=True))
                self._raise_lone_error(scope, reference)
            if sharded.value is None:
                if reference.value is not None and not sharded.is_apart:
                    own, _ = sharded.errors[self.axis.rank]
                    verdict.joined = self.joined([Row("raises", both.place, reason=own)] if own else [])
                elif not both.lively:
                    self._raise_lone_error(scope, sharded, "the sharded forward")
                return verdict.failed(sharded.failure)
            verdict.stage = Stage.SHARDED
            if reference.value is None:
                return verdict.failed(reference.failure)
            if scope.is_root and not self.is_staged and call.mode[0] and constants.has_drawn:
                self._compare_generators(scope)
            verdict.stage = Stage.OUTPUTS
            comparison.tolerance = self.tolerance(constants)
            outputs = comparison.outputs(sharded.value, reference.value)
            verdict.joined = self.joined(comparison.rows)
            if any(item.kind == "output" for item in verdict.differences):
                verdict.place = self._first_difference(scope, call, both, comparison)
            full = [output.layout == "full" for output in outputs if output.is_output]
            verdict.is_closed = len(full) > 0 and all(full)
            verdict.local = tuple(output.path for output in outputs if output.is_local_shard)
            starts = cotangents(outputs)
            if not verdict.differences and call.mode[1] and starts[0][0]:
                if failure := self._backward(scope, verdict, both, (sharded.value, reference.value), starts):
                    return verdict.failed(failure)
                comparison.tolerance = 10 * self.tolerance(constants)  # gradients are sums over the batch
                comparison.gradients(sharded.value, reference.value, *both.copies)
            verdict.stage = Stage.ALL
            if not verdict.differences:
                comparison.buffers(sharded.value, reference.value)
                verdict.joined = self.joined(comparison.rows)
        if verdict.stage == Stage.ALL and verdict.is_closed and not (verdict.differences or call.inputs.has_shards):
            scope.verified.add(call.mode)
        return verdict

    def _backward(
        self, scope: Scope, verdict: Verdict, both: Both, runs: tuple[Run, Run], starts: tuple[Any, ...]
    ) -> str:
        """Run both backwards; return the text of an error of all ranks."""
        for run, copies, (outputs, gradients) in zip(runs, both.copies, starts, strict=True):
            with running(Running(is_original=run is runs[1])):  # a checkpoint runs forwards again
                backward = self._attempt(partial(run.backward, outputs, gradients, copies.leaves))
            self._raise_lone_error(scope, backward, f"the {'original' if run is runs[1] else 'sharded'} backward")
            if backward.value is None:
                return backward.failure
            verdict.stage = Stage.SHARDED_BACKWARD
        return ""

    def _first_difference(self, scope: Scope, call: Call, both: Both, comparison: Comparison) -> str:
        """Run both once more, and return the first module with another output."""
        self._prepare(scope, call, both)  # once more: the runs have written to their own
        run = partial(self._run, scope, call.mode, both, keeps=True)
        runs = [self._attempt(partial(run, original=original)).value for original in (False, True)]
        return "" if None in runs else comparison.first_difference(*runs)

    def _error(self, scope: Scope, call: Call, verdict: Verdict) -> CheckError:
        """Return the error of a scope's differences, the largest ones first."""
        worst = sorted(verdict.differences, key=lambda difference: -difference.error)[:8]
        cache = any(leaf.place.is_state for leaf in call.inputs.leaves)
        hints = getattr(vars(scope.module).get("forward"), "hints", None)  # a style may have its own
        return CheckError(
            problem(
                str(scope),
                item,
                verdict.place,
                styled=self.styled,
                has_cache=cache,
                adapter=self._half_styled(scope.module, item.name),
                hints=hints,
            )
            for item in worst
        )

    def _half_styled(self, module: nn.Module, place: str) -> str:
        """Return a low-rank adapter (peft's, with a `base_layer`) whose base layer or A or B alone has a style.

        An adapter around the failing place counts without a style, too; `""` for none.
        """
        for adapter in module.modules():
            name: str = self.present.get(adapter, "")
            forwards = [vars(layer).get("forward") for layer in adapter.modules() if isinstance(layer, nn.Linear)]
            styled = [isinstance(forward, Forward) for forward in forwards]
            if "base_layer" in adapter._modules and not all(styled) and (any(styled) or is_below(place, name)):
                return name
        return ""

    def _finish(self, scope: Scope, call: Call) -> None:
        """Report a call's verdict; from here on its mode is checked.

        Raises:
            CheckError: The model cannot be compared, and has layers that came after the plan.
        """
        verdict, mode = call.verdict, call.mode
        self.results[str(scope), mode] = verdict
        if scope.is_root and not self.is_staged and verdict.stage == Stage.SHARDED:  # else the call itself will raise
            self._refuse_late_modules(scope, verdict)
        # A staged part may not run alone on full weights: other calls complete it.
        if scope.is_root and verdict.reason and verdict.stage >= Stage.SHARDED + 2 * self.is_staged:
            subject = "outputs" if verdict.stage < Stage.OUTPUTS else "gradients"
            warnings.warn(f"{scope}: {subject} of the sharded model are not checked: {verdict.reason}", stacklevel=5)
        if not (scope.is_root and verdict.reason == ALIKE):  # the next call is checked
            scope.done[mode] = call.size
        self._watch_loss(scope, mode, verdict.local if verdict.stage >= Stage.OUTPUTS else None)

    def _watch_loss(self, root: Scope, mode: Mode, paths: tuple[str, ...] | None) -> None:
        """Watch the loss of the call that follows, if a shard may leave the model as a plain tensor.

        Args:
            root: The root; other scopes' outputs go on in the model.
            mode: Its mode.
            paths: Outputs that are such shards; None if not known, as beside FSDP2.
        """
        if root.is_root and not self.is_staged and self.may_leave and mode[1]:
            watch_loss(root.module, paths, self.axis)

    def _refuse_late_modules(self, scope: Scope, verdict: Verdict) -> None:
        """Refuse an incomparable model with layers added after the plan: adapters, mostly.

        Raises:
            CheckError: There are such layers; on every rank, since modules are replicas.
        """
        late = [
            name for name, module in scope.module.named_modules() if module not in self.names and module._parameters
        ]
        if late:
            raise CheckError(
                [
                    Problem(
                        "model-changed",
                        str(scope),
                        found=f"{', '.join(late[:5])} came after apply_plan, sized for one shard; the original:"
                        f" {verdict.failure}",
                        hint="add layers first, then call apply_plan with a style for them: for LoRA, LoRAParallel on"
                        " the pair",
                    )
                ]
            )

    def _raise_lone_error(self, scope: Scope, attempt: Attempt, run: str = "the original") -> None:
        """Raise a run's error on all ranks if it raised on some of them only: in the call the others would wait."""
        if attempt.is_lone:
            hint = (
                "every rank makes the same collectives in the same order: code that asks for the rank is at fault"
                if attempt.is_apart
                else "this error is one rank's own; it is raised on all ranks, so that none waits"
            )
            raise CheckError(
                Problem("check-raises", str(scope), found=f"{run} on rank {rank}: {text}", hint=hint)
                for rank, (text, _) in enumerate(attempt.errors)
                if text
            )

    def _compare_generators(self, scope: Scope) -> None:
        """Compare the default generators of the ranks.

        Raises:
            StyleInputError: They differ, and the model draws; on every rank.
        """
        state = default_generator(torch.device(self.axis.mesh.device_type)).get_state().numpy().tobytes()
        if len(set(self.axis.all_gather_objects(hashlib.sha256(state).hexdigest(), "the check"))) > 1:
            raise StyleInputError(
                Problem(
                    "ranks-disagree",
                    f"{scope} generators",
                    found="the model draws random numbers in training, from other states on each rank",
                    hint="seed all ranks of a tensor-parallel group alike: torch.manual_seed(seed +"
                    " data_parallel_rank)",
                )
            )

    def _run(
        self,
        scope: Scope,
        mode: Mode,
        both: Both,
        *,
        original: bool,
        keeps: bool = False,
        record: Callable[..., None] | None = None,
    ) -> Run:
        """Run a forward on copies, sharded or as the original."""
        assert both.weights is not None
        checkers = (*self._checkers_below(scope.module), self)
        originals = [item for checker in checkers for item in (*checker.originals, *checker.successors())]
        reverted = {item.module for item in originals}
        # Modules made parallel over another mesh, or without the check, stay as they are.
        opaque = {
            child
            for child in scope.module.modules()
            if child not in reverted and isinstance(vars(child).get("forward"), Forward)
        }
        for inner in () if scope.is_small else scope.inside:
            # Modules that share a parameter with others outside run as the original too: its gradient is one sum.
            if mode in inner.verified and not _shares(inner.module, scope.module):
                opaque.add(inner.module)
        trace = Trace(self.present, keeps=keeps)
        with without_dispatch_modes():  # gathering weights in their own type is no part of the run
            run = Run(
                scope.module,
                both.weights,
                trace,
                originals=originals if original else None,
                opaque=frozenset(opaque if original else ()),
            )
        copies = both.copies[original]
        # Both runs draw alike: Python's and NumPy's numbers are not torch operations, so they are not constants.
        with random_state_restored(), running(Running(original, record)):
            try:
                run.forward(copies.args, copies.kwargs)
            except Exception:
                both.place = both.place if original else trace.place()
                raise
        return run

    def successors(self) -> list[Original]:
        """Return modules in the places of changed ones, of the same kinds. They are copies, with our forwards."""
        changed = {self.names[item.module]: item for item in self.originals if item.module in self.names}
        late = {module: changed.get(name) for module, name in self.present.items() if module not in self.names}
        return [replace(item, module=new) for new, item in late.items() if item is not None and type(new) is item.kind]

    def _checkers_below(self, module: nn.Module) -> list[Checker]:
        """Return checkers of other calls for modules below, over the same mesh."""
        hooks = (hook for child in module.modules() for hook in child._forward_pre_hooks.values())
        checkers = {hook.checker: None for hook in hooks if isinstance(hook, Scope) and hook.is_root}
        return [item for item in checkers if item is not self and item.axis.mesh == self.axis.mesh]

    @contextmanager
    def _isolated(self, mode: Mode) -> Iterator[ConstantRandomness]:
        """Leave nothing of the runs in generators, in autograd's hooks, or in autocast's cache."""
        kind, modes = self.axis.mesh.device_type, dispatch_modes()
        with ExitStack() as stack:
            stack.enter_context(random_state_restored())
            if "torch._dynamo" in sys.modules:  # compiled blocks cannot run under a mode
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(mode[1]))
            stack.enter_context(torch.autocast(kind, enabled=False))
            # The innermost hooks count: a checkpoint around the call would take the runs' saved tensors for its own.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
            yield stack.enter_context(ConstantRandomness())
        # An exit pops modes by position, not by owner: one left behind would keep the constants.
        if dispatch_modes() != modes:
            raise RuntimeError(f"the check left dispatch modes behind: {dispatch_modes()}, before it {modes}")

    def tolerance(self, runs: Precision) -> float:
        """Return the relative tolerance: rounding of the coarsest type in the runs of all ranks."""
        return tolerance_of(max(self.axis.all_gather_objects(runs.epsilon, "the check")))

    def _attempt(self, act: Callable[[], Any]) -> Attempt:
        """Run an action on all ranks. An error on one of them ends it on the others before their next collective."""
        votes, result, error = Votes(self.axis.group), None, ("", False)
        try:
            with voting(votes):
                result = act()
        except PeerRaised:
            pass  # the others' errors follow
        except Exception as raised:
            line, *more = str(raised).splitlines() or [""]
            text = " ".join([f"{type(raised).__name__}: {line}", *(more[:1] if line.endswith(":") else ())])
            error = text, isinstance(raised, PlanError)
        if votes.end(raised=bool(error[0])):
            return Attempt(result)
        everyone = self.axis.all_gather_objects((error, votes.collective), "the check")
        errors = tuple(raised for raised, _ in everyone)
        count = sum(bool(text) for text, _ in errors)
        if not count:  # in the call these ranks would misread each other's messages, or wait
            errors = tuple((f"goes on to {name or 'its end'}, other ranks do not", False) for _, name in everyone)
        return Attempt(None, errors, is_lone=count < self.axis.size)

    def joined(self, rows: list[Row]) -> list[Row]:
        """Return the largest differences of all ranks, and what any has left unchecked; one list for every rank."""
        return joined(self.axis.all_gather_objects([row for row in rows if row.verdict != "equal"], "the check"))


# In the order of their plans.
_CHECKERS: WeakKeyDictionary[Checker, None] = WeakKeyDictionary()


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
        if module in checker.present and submodule is not module._modules.get(name):
            checker.check_again()


def refuse_plain_ddp(module: nn.Module) -> None:
    """Refuse `DistributedDataParallel` around shards: it would broadcast rank 0's, and reduce shards of other rows.

    Raises:
        PlanError: Parameters are shards, and no bridge has made leaves for them.
    """
    if BRIDGED in vars(module):  # local shards stay as they are in it
        return
    problems = [
        Problem(
            "mesh-mismatch",
            name,
            found="a shard inside of DistributedDataParallel",
            hint="tp_ddp_bridge makes leaves that DDP takes; or fully_shard on the data-parallel mesh",
        )
        for name, parameter in module.named_parameters()
        if isinstance(parameter, ShardParameter | DTensor) and BRIDGED not in vars(parameter)
    ]
    if problems:
        raise PlanError(problems[:8])


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    for checker in [*_CHECKERS]:
        if module in checker.present:
            old = module._parameters.get(name)
            # One of the same shape only has new values, as from `load_state_dict(assign=True)`.
            if old is None or old.shape != parameter.shape:
                checker.check_again()


def _detach(inputs: Inputs, module: nn.Module) -> None:
    """Copy a call's inputs; numbered experts that FSDP2 shards, say, would be taken for replicas and are refused."""
    refuse_ordinary(module)
    inputs.detach()


def refuse_ordinary(module: nn.Module) -> None:
    """Refuse ordinary parameters in place of shards in a module and below; see `ShardCheck.refuse_ordinary`."""
    for child in module.modules():
        if isinstance(forward := vars(child).get("forward"), Forward):
            forward.parts.refuse_ordinary()


@constant_in_graphs
def _note_compiled(scope: Scope, training: bool) -> None:
    """Report a mode compiled before its check. The compiler runs this once for each traced graph."""
    mode, checker = (training, torch.is_grad_enabled()), scope.checker
    if mode in scope.done or RUNNING or (str(scope), mode) in checker.results:
        return
    checker.results[str(scope), mode] = Verdict(failure=f"compiled before its first call; {EAGER_CALL}")
    warnings.warn(f"{scope}: compiled before its first call, so it is unchecked: {EAGER_CALL}", stacklevel=2)


# Remedy for a compiled model: a checked call.
EAGER_CALL = 'call it once inside of torch.compiler.set_stance("force_eager")'


def size_and_options(args: tuple[Any, ...], kwargs: dict[str, Any], declared: Declared) -> tuple[int, tuple[str, ...]]:
    """Return the largest argument's elements, at least 1, and keywords that are True or learn.

    Sharded dims count as one element: uneven shards differ from rank to rank, and all ranks have to decide alike. Token
    ids (integers) are full but for a batch that is sharded along dim 0.
    """
    largest, options, dims = 1, [], declared.dims
    for index, x in enumerate((*args, *kwargs.values())):  # plain loops: a steady call asks, too
        if isinstance(x, torch.Tensor):
            if x.requires_grad:  # an input without a gradient now may have one later
                options.append(f"gradient of {index}")
            size = x.numel()
            if dims:
                ndim, is_full = x.ndim, not x.is_floating_point() and not declared.layouts
                sharded = {dim % ndim for dim in dims if -ndim <= dim < ndim and (dim == 0 or not is_full)}
                size = math.prod([length for dim, length in enumerate(x.shape) if dim not in sharded])
            if size > largest:
                largest = size
    if kwargs:
        options += [name for name, x in kwargs.items() if x is True]
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


def _shares(inner: nn.Module, outer: nn.Module) -> bool:
    """True if a parameter within a module also belongs to the module around it."""
    inside = {id(p) for p in inner.parameters()}
    below = set(inner.modules())
    outside = (m for m in outer.modules() if m not in below)
    return any(id(p) in inside for m in outside for p in m._parameters.values())
