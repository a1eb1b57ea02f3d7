"""Optimizer state against that of a real step: by name, class, instance and pattern; sparse gradients of tables."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import recorded_ways
import torch
from shard_spec import FullyShardPlanner, OptimizerState, PlanError, ShardingPlan, metadata_of
from torch import nn

PLAN = ShardingPlan({}, mesh={"dp": 1})


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 50))


def state_bytes(*optimizers: torch.optim.Optimizer) -> int:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def stepped(make: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = make(model.parameters())
    model(torch.randint(0, 50, (4, 8))).sum().backward()
    optimizer.step()
    return model, optimizer


NAMES = [
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
    "Adafactor",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_of_torch_counts_as_a_real_step_leaves_it(name: str) -> None:
    kind = getattr(torch.optim, name)
    model, optimizer = stepped(kind)
    real = state_bytes(optimizer)
    for form in (name.lower(), name, kind, functools.partial(kind, lr=0.1), optimizer):
        memory = PLAN.memory(model, optimizer=form)
        assert memory.on(0)["optimizer"] == real, form
    bare = PLAN.memory(metadata_of(model), optimizer=kind)
    assert bare.on(0)["optimizer"] == real


OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.AdamW, {"foreach": True}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_options_of_an_instance_or_a_partial_count(kind: Any, options: dict[str, Any]) -> None:
    model, optimizer = stepped(functools.partial(kind, **options))
    for form in (functools.partial(kind, **options), optimizer):
        assert PLAN.memory(model, optimizer=form).on(0)["optimizer"] == state_bytes(optimizer)


def test_groups_of_one_instance_and_optimizers_by_pattern() -> None:
    model = net()
    matrices = [each for each in model.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if each.dim() != 2]
    both = torch.optim.Muon(matrices), torch.optim.AdamW(others)
    groups: list[Any] = [{"params": matrices, "momentum": 0.9}, {"params": others}]
    grouped = torch.optim.SGD(groups, lr=0.1)
    model(torch.randint(0, 50, (4, 8))).sum().backward()
    optimizer: Any
    for optimizer in (*both, grouped):
        optimizer.step()
    rules = {"{0,1,3}.weight": "muon", "**": torch.optim.AdamW}
    memory = PLAN.memory(model, optimizer=rules)
    assert memory.on(0)["optimizer"] == state_bytes(*both)
    assert memory.optimizer == "muon + adamw"
    assert PLAN.memory(model, optimizer=grouped).on(0)["optimizer"] == state_bytes(grouped)
    assert PLAN.memory(model, optimizer=both[1]).on(0)["optimizer"] == state_bytes(both[1])  # the rest has no state


class Lists(torch.optim.Optimizer):
    """An optimizer without foreach, whose state is in a list and a dict, as that of Shampoo."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state.setdefault("factors", [torch.zeros_like(p), torch.zeros_like(p)])
            state.setdefault("by name", {"root": torch.zeros_like(p)})
            p.add_(p.grad * 2 + 1)


def test_state_in_lists_counts_and_temporaries_come_one_at_a_time() -> None:
    memory = PLAN.memory(net(), torch.zeros(4, 8, dtype=torch.long), optimizer=Lists)
    assert memory.on(0)["optimizer"] == 3 * sum(p.nbytes for p in net().parameters())
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    on_gpu = PLAN.memory(model, torch.zeros(1, 256, device="meta"), optimizer=Lists)
    temporaries = on_gpu.max_bytes - PLAN.memory(model, optimizer=Lists).max_bytes
    of_foreach = PLAN.memory(model, torch.zeros(1, 256, device="meta"), optimizer="adamw")
    assert of_foreach.max_bytes - PLAN.memory(model).max_bytes >= 8 * 256 * 256 * 4  # all tensors at once
    assert on_gpu.moment == "optimizer" and 0 < temporaries <= 3 * 256 * 256 * 4, on_gpu.on(0)


Choice = tuple[Any, dict[str, Any]]
STEPS: dict[str, Choice] = {
    **{name: (getattr(torch.optim, name), {}) for name in (*NAMES, "Adam") if name != "Adafactor"},
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "centered": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "a tensor as learning rate": (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}),
}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11's profiler
@pytest.mark.parametrize(
    ("name", "foreach"),
    # Torch has no kernels for a tensor as learning rate over all tensors at once.
    [(name, foreach) for name in STEPS for foreach in (False, True) if not (foreach and "lr" in STEPS[name][1])],
)
def test_what_a_step_allocates_is_what_a_recorded_one_does(name: str, foreach: bool) -> None:
    """One tensor after another as on a CPU, all at once as on an accelerator; two large ones follow each other."""
    kind, options = STEPS[name]
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False), nn.Linear(64, 32))
    optimizer = kind(model.parameters(), foreach=foreach, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    events, _ = recorded_ways.record(lambda: [optimizer.step(), *(torch.empty(1) for _ in range(20))])
    if foreach:
        model.to("meta")
    x = torch.zeros(1, 64, device="meta" if foreach else "cpu")
    memory = PLAN.memory(model, x, optimizer=functools.partial(kind, **options))
    predicted = memory.on(0)["optimizer step"]
    real = recorded_ways.peak(events)
    if real > 2 * 4 * 96 * 64:
        assert memory.moment == "optimizer"
    if memory.moment == "optimizer":
        assert predicted == pytest.approx(real, abs=600)  # and scalars on a CPU
    else:
        assert real < 4 * 96 * 64


@pytest.mark.parametrize("fused", [False, True])
def test_options_that_need_an_accelerator_keep_the_state(fused: bool) -> None:
    """Fused kernels allocate nothing; a kernel for them is not on the meta device, and their state is the same."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    options: dict[str, Any] = {"fused": True} if fused else {"capturable": True}
    memory, plain = (
        PLAN.memory(model, torch.zeros(1, 256, device="meta"), optimizer=functools.partial(torch.optim.AdamW, **each))
        for each in (options, {})
    )
    assert memory.on(0)["optimizer"] == plain.on(0)["optimizer"] > 0
    assert (memory.on(0)["optimizer step"] == 0) is fused
    assert plain.on(0)["optimizer step"] >= 4 * 256 * 256 * 4


class Rows(torch.optim.Optimizer):
    """An optimizer with an option that its signature does not name, and one that is in no group."""

    def __init__(self, params: Any, second: bool = False, **options: Any) -> None:
        super().__init__(params, options)
        self.second = second

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                slots = ("first", "second") if self.second else ("first",)
                self.state[p] = {name: torch.zeros_like(p) for name in (*slots, *(["mom"] if group["mom"] else []))}


def test_options_of_an_instance_count_wherever_it_keeps_them() -> None:
    model = net()
    size = sum(each.nbytes for each in model.parameters())
    for options, slots in (({"mom": False}, 1), ({"mom": True}, 2), ({"mom": True, "second": True}, 3)):
        memory = PLAN.memory(model, optimizer=Rows(model.parameters(), **options))
        assert memory.on(0)["optimizer"] == slots * size, options


def test_a_class_of_ones_own_is_not_taken_for_that_of_torch() -> None:
    own = type("AdamW", (Lists,), {})
    assert (
        PLAN.memory(net(), optimizer=own).on(0)["optimizer"] == PLAN.memory(net(), optimizer=Lists).on(0)["optimizer"]
    )


def test_outputs_kept_over_the_optimizers_step_are_named() -> None:
    model = nn.Sequential(nn.Linear(64, 256))
    memory = PLAN.memory(model, torch.zeros(16, 64), loss=lambda output, batch: output.sum())
    assert memory.moment == "optimizer"
    assert [line for line in memory.assumptions if "outputs of forward (16.00 KiB) are freed" in line]
    assert "outputs of forward" in memory.verdict("80GB")


@pytest.mark.parametrize("wrong", [{"slots": -9}, {"row_slots": 1.5}, {"dtype": "bogus"}, {"master": "bf16"}])
def test_wrong_states_are_refused_by_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=rf"invalid-argument.*OptimizerState.{next(iter(wrong))}"):
        OptimizerState("mine", **wrong)


def test_wrong_optimizers_are_refused_with_a_way_on() -> None:
    model = net()
    wrong: list[tuple[Any, str]] = [
        ("adamw2", "a class or an instance"),
        (3, "a class or an instance"),
        (torch.optim.Muon, "a mapping from patterns"),  # biases are no matrices
        (torch.optim.LBFGS, "OptimizerState"),
        (torch.optim.AdamW(net().parameters()), "the class AdamW"),
        ({"*.weight": "sgd"}, "'\\*\\*' at the end for the rest"),
        ({"**": "sgd", "nothing.*": "adam"}, "no parameter is left"),
        ({"**": {"**": "adamw"}}, "optimizer.*give a name, a class or a partial"),
        ("", "a class or an instance"),
    ]
    for optimizer, message in wrong:
        with pytest.raises(PlanError, match=message):
            PLAN.memory(model, optimizer=optimizer)


def test_factored_state_of_a_sharded_matrix_is_refused() -> None:
    """DTensor raises in Adafactor's step on shards of rows (`pow_` of a pending norm), so no number would be right."""
    model = nn.Linear(64, 32, bias=False)
    sharded = FullyShardPlanner({"fsdp": 4}, "fsdp").build_plan(model)
    with pytest.raises(PlanError, match=r"\[32, 64\] in shards of \[8, 64\]"):
        sharded.memory(model, optimizer="adafactor")
    assert sharded.memory(model, optimizer="nadam").on(3)["optimizer"] == 2 * 4 * 8 * 64 + 8
    assert PLAN.memory(model, optimizer="adafactor").on(0)["optimizer"] == 4 * (32 + 64) + 4


@pytest.mark.extra("hypothesis")
def test_quantised_slots_have_a_scale_for_each_block() -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @given(st.integers(1, 10**5))
    @settings(max_examples=50, deadline=None)
    def holds(numel: int) -> None:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(numel, device="meta"))])
        blocks = -(-numel // 256)
        expected = 2 * numel + 2 * 4 * blocks if numel >= 4096 else 8 * numel
        for name in ("adamw8bit", "paged_adamw_8bit"):
            assert PLAN.memory(model, optimizer=name).on(0)["optimizer"] == expected
        rows = PLAN.memory(nn.Embedding(numel, 3, device="meta"), optimizer="rowwise-adagrad")
        assert rows.on(0)["optimizer"] == 4 * numel
        plain = OptimizerState("8-bit", slots=2, dtype="uint8")
        assert PLAN.memory(model, optimizer=plain).on(0)["optimizer"] == 2 * numel

    holds()


class Tables(nn.Module):
    """A table with sparse gradients under a product."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        bag = nn.EmbeddingBag(5000, dim, sparse=True, mode="sum")
        self.table = bag if kind == "bag" else nn.Embedding(5000, dim, sparse=True)
        self.out = nn.Linear(dim, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table(ids))
        return out.sum()


@pytest.mark.parametrize("kind", ["bag", "embedding"])
@pytest.mark.parametrize(("rows", "width", "dim"), [(8, 4, 16), (128, 10, 64), (3, 1, 7)])
def test_sparse_gradients_count_with_the_step_that_makes_them(kind: str, rows: int, width: int, dim: int) -> None:
    model, ids = Tables(kind, dim), torch.randint(0, 5000, (rows, width))
    model(ids).backward()
    gradient = model.table.weight.grad
    assert gradient is not None
    real = gradient._values().nbytes + gradient._indices().nbytes
    static = PLAN.memory(model, optimizer="sgd")
    assert static.on(0)["gradients"] == sum(each.nbytes for each in model.out.parameters())
    assert "gradients of sparse tables (table.weight)" in str(static)
    step = PLAN.memory(model, ids, optimizer="sgd")
    # Of a bag the workspace of its kernels is not counted; of both the gradients are.
    named = [note for note in step.notes if "not counted" in note]
    assert [note for note in named if kind != "bag" or "workspace of _embedding_bag" not in note] == []
    extra = step.max_bytes - static.max_bytes
    assert real <= extra <= real + 4 * (rows * width * (dim + 10) + 64)  # beside it the rows looked up, or their sums
    lines = PLAN.communication(model).assumptions
    assert any("gradients of sparse tables (table.weight) are not counted" in line for line in lines)
