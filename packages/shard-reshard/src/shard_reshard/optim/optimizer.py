"""WholeMatrices: any torch optimizer on full matrices, for parameters in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shard_reshard._shared.elementwise import elementwise_problems
from shard_reshard._shared.problems import PlanError, Problem, raise_problems
from shard_reshard.execution.mover import NotPicklable
from shard_reshard.group import group_info, raise_on_all_ranks
from shard_reshard.layout.parse import LayoutLike
from shard_reshard.layout.shard_map import by_key
from shard_reshard.optim.block import Block, Engine
from shard_reshard.optim.exchange import Exchange, metadata_of, plan_together
from shard_reshard.optim.families import Family, Group, Make, groups_of, routed
from shard_reshard.optim.plan import OwnerPlan, Owners, unmatched
from shard_reshard.optim.state import load_state, state_of
from shard_reshard.optim.step import Scaling, agree, take_step


class WholeMatrices(NotPicklable, Optimizer):
    """Run any optimizer on full matrices, of parameters that are sharded in any layout.

    Each matrix has one owner rank, which holds a master copy and the optimizer's state as plain tensors. In a step
    gradients go to the owners, in one all-to-all for each chunk of matrices, and new values come back. The updates of
    one chunk run while the gradients of the next one travel. The result is bit for bit that of one process.

    A parameter of three dims is a stack of matrices (experts), and a fused one (with sections in its
    ``_sharding_info``) is its sections. Parameters without a gradient on all ranks are left alone, as in one process.

    All ranks of the group construct it, and call `step`, `add_param_group`, `state_dict` and `load_state_dict`
    together. A step fails on all ranks or on none, and parameters keep their old values if it fails.

    Args:
        named_parameters: ``model.named_parameters()``, a mapping, or parameter groups with such pairs:
            ``[{"params": [("0.weight", p)], "lr": 0.02}]``. DTensors, local shards with ``_sharding_info``, local
            shards of ``layouts``, or full tensors that are equal on all ranks.
        make: Makes the optimizer of matrices: ``lambda params: torch.optim.Muon(params, lr=0.02)``. It gets groups if
            the caller wrote groups. Each owner calls it for each chunk of its matrices, and every rank calls it once
            with tensors on the meta device. Or a mapping of globs of parameters' names to such functions; the first
            match counts.
        group: The ranks that hold the parameters; None is the default group.
        in_shards: Makes the optimizer of parameters that no glob of ``make`` matches. It gets the parameters as they
            are, in their shards, so it has to be elementwise (SGD, AdamW).
        bucket_bytes: The most bytes of an owner's matrices in one exchange, unless a single matrix has more.
        owners: Which ranks own matrices. None: all ranks of the group. A number of them, a list, or a mapping of
            parameters' names to ranks (of the group); others are planned. Few owners keep a large group's all-to-alls
            sparse.
        together: Globs of parameters that are one matrix each: neither their sections nor their experts are apart.
        layouts: Layouts of local tensors that declare none, by name, see `reshard_state_dict`.
        shapes: Global shapes of those, if their layout has none.
        per_matrix: True declares that ``make`` returns an optimizer that updates each tensor from its own gradient and
            state. Torch's optimizers are known; others are tried on small tensors.

    Attributes:
        plan: Owners of the matrices, as `plan_owners` returns them; ``print(optimizer.plan.explain())``.
        param_groups: The groups of all optimizers, with the model's parameters; values written to them count from the
            next step on.

    Raises:
        PlanError: On all ranks, for parameters, layouts or optimizers that do not fit.
    """

    _instead = "make another one, and load its state_dict()"
    _step_supports_amp_scaling = True  # GradScaler calls `step` on every rank, and says what it has found
    is_elementwise = True  # a step may be taken on shards: owners have full matrices

    def __init__(
        self,
        named_parameters: Any,
        make: Make | Mapping[str, Make],
        group: dist.ProcessGroup | None = None,
        *,
        in_shards: Make | None = None,
        bucket_bytes: int = 64 * 2**20,
        owners: Owners = None,
        together: Sequence[str] = (),
        layouts: Mapping[str, LayoutLike] | None = None,
        shapes: Mapping[str, Any] | None = None,
        per_matrix: bool = False,
    ) -> None:
        self._engine = Engine(group_info(group))
        self._makes = dict(make) if isinstance(make, Mapping) else {"*": make}
        self._options: dict[str, Any] = {
            "in_shards": in_shards,
            "bucket_bytes": bucket_bytes,
            "owners": owners,
            "together": tuple(together),
            "layouts": layouts or {},
            "shapes": shapes or {},
            "per_matrix": per_matrix,
        }
        try:
            groups, grouped = groups_of(named_parameters)
        except Exception as error:
            raise_on_all_ranks(self._engine.members, error)
        block = self._block(groups, grouped, whole=True)
        # A default is written to groups that lack it: those of one optimizer are not for groups of another.
        single = len(block.families) == 1 and block.in_shards is None
        super().__init__(block.outer, block.families[0].defaults if single else {})
        self._engine.blocks.append(block)

    @property
    def plan(self) -> OwnerPlan:
        """Owners of the matrices of the constructor's parameters; those of added groups are in ``plans``."""
        return self._engine.blocks[0].owners

    @property
    def plans(self) -> tuple[OwnerPlan, ...]:
        """The plans of the constructor's parameters, and of each added group."""
        return tuple(block.owners for block in self._engine.blocks)

    def _block(self, groups: list[Group], grouped: bool, whole: bool) -> Block:
        """Plan owners and moves of parameter groups; a collective."""
        members, options = self._engine.members, self._options
        parameters = {name: p for group in groups for name, p in group.parameters.items()}
        try:
            routes = routed(parameters, list(self._makes), options["in_shards"] is not None, whole)
            owned = {name: p for name, p in parameters.items() if routes[name] >= 0}
            if whole:  # names of a group that is added later are not known here
                raise_problems(self._unused(owned))
            kinds = {name: f"make {routes[name]}, requires_grad {p.requires_grad}" for name, p in owned.items()}
            layouts, shapes = ({n: v for n, v in options[key].items() if n in owned} for key in ("layouts", "shapes"))
            mine = metadata_of(owned, kinds, layouts, shapes, members)
        except Exception as error:
            raise_on_all_ranks(members, error)
        owners = options["owners"]
        if isinstance(owners, Mapping) and not whole:
            owners = {name: rank for name, rank in owners.items() if name in owned}
        planned = plan_together(members, mine, owners, options["bucket_bytes"], options["together"])
        rest = {name: p for name, p in parameters.items() if name not in owned}
        plain = [name for name, meta in mine.facts.sources.items() if meta.layout is None]
        block, failure = Block(Exchange(members, planned), list(parameters), owned, rest, plain), None
        try:
            self._make_optimizers(block, groups, grouped, routes)
        except Exception as error:
            failure = error
        agree(members, "WholeMatrices", failure)
        return block

    def _unused(self, owned: Iterable[str]) -> Iterator[Problem]:
        """Yield what the caller says of parameters that have no owner."""
        for key in ("layouts", "shapes"):
            for name in self._options[key].keys() - set(owned):
                yield Problem(
                    "unknown-name", key, found=repr(name), hint="name parameters that a pattern of make= matches"
                )
        yield from unmatched(self._options["together"], owned)

    def _make_optimizers(self, block: Block, groups: list[Group], grouped: bool, routes: Mapping[str, int]) -> None:
        """Call the caller's functions for a block; no communication."""
        positions = by_key((matrix.parameter, at) for at, matrix in enumerate(block.owners.matrices))
        for number, make in enumerate(self._makes.values()):
            own = {name: at for name, at in positions.items() if routes[name] == number}
            if own:
                parts = [(group.options, [at for n in group.parameters for at in own.get(n, ())]) for group in groups]
                family = Family(make, parts, grouped)
                family.lay_out(block.owners.matrices, block.parameters, self._options["per_matrix"])
                block.families.append(family)
        if block.rest:
            by_group = [(g.options, [p for name, p in g.parameters.items() if name in block.rest]) for g in groups]
            as_groups = [{"params": own, **options} for options, own in by_group if own]
            block.make_in_shards = self._options["in_shards"]
            block.in_shards = block.make_in_shards(as_groups if grouped else as_groups[0]["params"])
            raise_problems(elementwise_problems(block.in_shards, lambda _: True))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; a collective.

        Args:
            closure: Evaluates the model and returns the loss; called once, before anything is sent.

        Returns:
            The closure's result.

        Raises:
            PlanError: On all ranks, if ranks have gradients of different parameters, other hyperparameters, or if an
                optimizer raised on its owner (where the error has that one as its cause).
            RuntimeError: A rank died.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        take_step(self._engine, Scaling(getattr(self, "found_inf", None), getattr(self, "grad_scale", None)))
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; a collective.

        Args:
            param_group: ``{"params": [(name, parameter), ...], "lr": 0.01}``.
        """
        if not self._engine.blocks:  # torch's constructor calls this
            self._add(param_group)
            return
        try:
            groups, _ = groups_of([param_group])
            before = {id(p) for group in self.param_groups for p in group["params"]}
            names = set(self._engine.names.values())
            for name, parameter in groups[0].parameters.items():
                if id(parameter) in before or name in names:
                    raise PlanError(
                        Problem(
                            "duplicate-name", name, found="it is in a group already", hint="a parameter is in one group"
                        )
                    )
        except Exception as error:
            raise_on_all_ranks(self._engine.members, error)
        block = self._block(groups, True, whole=False)
        for group in block.outer:
            self._add(group)
        self._engine.blocks.append(block)

    def _add(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        # get_optimizer_state_dict of DCP takes an optimizer without entries for a new one, and would step it on zeros.
        self.state.update({parameter: {} for parameter in group["params"]})

    def state_dict(self, *, allocate: bool = False) -> dict[str, Any]:
        """Return this rank's part of the state by names: that of the matrices that it owns, in full.

        The names are those of ``plan``, whichever rank owns them. So torch.distributed.checkpoint saves every tensor
        once, and loads it on another number of ranks.

        Args:
            allocate: True: make state for every matrix, to load into: ``dcp.load({"optimizer": state})``, and then
                `load_state_dict`. It is that of a step with zeros as gradients.

        Returns:
            ``{"state": {matrix: {key: value}}, "param_groups": [...], "steps": n, "stepped": [matrices]}``.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = state_of(self._engine, self.param_groups, allocate)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of any number of ranks; a collective.

        Each rank passes what it has: its own part, all parts, or the state dict of torch's optimizer in one process.
        State of a matrix that its owner lacks is sent by a rank that has it.

        Raises:
            PlanError: On all ranks, if no rank has the state of a matrix that was updated before, or other groups.
        """
        to_load: dict[str, Any] = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, to_load)
            to_load = to_load if changed is None else changed
        load_state(self._engine, self.param_groups, to_load)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
