"""The estimate of activations against what a real forward keeps: whole in one process, and cut on two ranks."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from imported_first import before_ranks  # noqa: F401  # ranktest calls it
from memory_families import FAMILIES, PARTS, Family, measured, predicted
from ranktest import Ranks
from shard_spec import MegatronPlanner, MeshSpec, PlanError, ShardingPlan
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Attention by torch's kernel and a gated feed-forward, heads first where weights are cut."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.wo = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (w(h).view(batch, length, -1, 8).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm2(x)
        fed: torch.Tensor = self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return x + fed


RULES = {"*.{wq,wk,wv,gate,up}.weight": "tp:S(0)", "*.{wo,down}.weight": "tp:S(1)"}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saved_bytes(module: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes that autograd keeps after a real forward, each memory once, parameters left out."""
    owned = {local_of(p).untyped_storage().data_ptr() for p in module.parameters()}
    sizes: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        local = local_of(tensor)
        alive.append(local)
        memory = local.untyped_storage()
        if memory.data_ptr() not in owned:
            sizes[memory.data_ptr()] = memory.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*inputs)
    return sum(sizes.values())


@pytest.mark.parametrize("batch", [1, 4])
def test_the_estimate_of_a_whole_model_is_close_to_a_real_forward(batch: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    inputs = torch.randn(batch, 16, 32)
    estimate = ShardingPlan({}, mesh={"dp": 2}).activations(model, inputs)
    real = saved_bytes(model, inputs)
    assert estimate.local_bytes == real


@pytest.mark.ranks(2)
def test_the_estimate_of_a_tensor_parallel_model_is_close_to_a_real_rank(ranks: Ranks) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    plan = ShardingPlan(RULES, mesh=ranks.mesh((2,), ("tp",)))
    inputs = torch.randn(4, 16, 32)
    estimate = plan.activations(model, inputs)
    full = ShardingPlan({}, mesh={"tp": 2}).activations(model, inputs)
    parallelize_module(model, ranks.mesh((2,), ("tp",)), plan.to_parallelize_plan(model))
    owned_before = saved_bytes(model, inputs)
    assert estimate.local_bytes < 0.75 * full.local_bytes
    # DTensor keeps gathered copies of its inputs beside what the model keeps: an estimate, within a quarter.
    assert abs(estimate.local_bytes - owned_before) <= 0.25 * owned_before, (estimate.local_bytes, owned_before)
    assert "estimate" in str(estimate)


def test_the_model_is_not_touched_and_may_be_on_meta() -> None:
    with torch.device("meta"):
        model = Block(64)
    estimate = ShardingPlan({}, mesh={"dp": 1}).activations(model, torch.zeros(2, 8, 64))
    assert estimate.local_bytes > 0
    assert all(p.grad is None and p.device.type == "meta" for p in model.parameters())


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


class Stack(nn.Module):
    """Blocks in a list, with a projection after them; each block checkpointed or not."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(4))
        self.head = nn.Linear(32, 7)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        out: torch.Tensor = self.head(x)
        return out


def peak_of(step: Callable[[], object]) -> int:
    """Most bytes that the CPU allocator handed out at one time during a real step."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        result = step()
    assert profile.profiler is not None
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes = torch.tensor([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())])
    assert len(sizes) > 20
    del result
    return int(sizes.cumsum(0).max())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_peak_of_a_step_is_that_of_a_real_one(checkpointed: bool) -> None:
    x = torch.randn(16, 256, 32)
    plan = ShardingPlan({}, mesh={"dp": 1})
    by_option = plan.activations(Stack(), x, checkpointing=checkpointed)
    own = plan.activations(Stack(checkpointed), x)
    model = Stack(checkpointed)
    real = peak_of(lambda: model(x).backward(torch.ones(16, 256, 7)))
    gradients = sum(p.nbytes for p in model.parameters())
    assert own.peak_bytes == by_option.peak_bytes
    assert real - gradients <= own.peak_bytes <= 1.03 * real  # the inputs are there before


def test_products_in_half_precision_on_a_cpu_are_a_lower_bound() -> None:
    """oneDNN copies the operands of these products, which no shape function counts."""
    plan, x = ShardingPlan({}, mesh={"dp": 1}), torch.randn(8, 64, 64)
    model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    bounds = {}
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        for device in ("cpu", "meta"):
            notes = plan.activations(copy.deepcopy(model).to(device, kind), x.to(kind)).notes
            bounds[kind, device] = any("lower bound" in note for note in notes)
    assert {case for case, bound in bounds.items() if bound} == {(torch.bfloat16, "cpu"), (torch.float16, "cpu")}
    assert len(bounds) == 6
    by_dtype = plan.activations(model, x.bfloat16(), dtype="bfloat16")
    assert any("lower bound" in note for note in by_dtype.notes)


@pytest.mark.extra("transformers")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Falcon", "GPT-2"])
def test_logits_and_loss_count_into_the_peak(name: str, checkpointed: bool) -> None:
    family = next(each for each in FAMILIES if each.name == name)
    model: Any = family.make()
    ids = family.inputs()["input_ids"].repeat(4, 1)
    if checkpointed:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # transformers renames it
            model.gradient_checkpointing_enable()
    plan = ShardingPlan({}, mesh={"dp": 1})
    by_tokens = plan.activations(model, tuple(ids.shape))
    by_labels = plan.activations(model, {"input_ids": ids, "labels": ids})

    def step() -> object:
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        return output

    real, gradients = peak_of(step), sum(p.nbytes for p in model.parameters())
    for estimate in (by_tokens, by_labels):
        assert real - gradients <= 1.01 * estimate.peak_bytes
        assert estimate.peak_bytes <= 1.03 * real
        assert estimate.loss_bytes >= ids.numel() * 512 * 4
    memory = plan.memory(model, tuple(ids.shape))
    assert memory.moment == by_tokens.moment
    assert memory.on(0)["activations"] + memory.on(0)["logits and loss"] == by_tokens.peak_bytes
    silent = plan.memory(model, tuple(ids.shape), loss=None)
    assert any("the loss is not counted" in line for line in silent.notes)
    with pytest.raises(PlanError, match="invalid-argument"):
        plan.memory(model, tuple(ids.shape), loss="mse")


@pytest.mark.extra("transformers")
def test_gathered_logits_are_full_and_vocabulary_parallel_ones_are_not() -> None:
    family = FAMILIES[0]
    model = family.make()
    mesh = MeshSpec({"tp": 2})
    plan = MegatronPlanner(mesh).build_plan(model)
    assert plan.resolve(model)["lm_head.weight"].sharded_axes == {"tp": 0}
    one = ShardingPlan({}, mesh={"tp": 1}).activations(model, (8, 64))
    gathered = plan.activations(model, (8, 64))
    sharded = plan.activations(model, (8, 64), loss="vocab-parallel")
    assert gathered.moment == sharded.moment == one.moment == "loss"
    assert gathered.loss_bytes == one.loss_bytes
    # Token ids and the scalars of the loss are not sharded.
    assert one.loss_bytes / 2 <= sharded.loss_bytes <= one.loss_bytes / 2 + 8 * 64 * 8 + 64


def test_a_module_without_a_forward_is_refused_with_a_way_on() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    with pytest.raises(PlanError, match="ModuleDict has no forward") as caught:
        ShardingPlan({}, mesh={"dp": 1}).memory(model, (2, 4))
    assert "whose forward calls its parts" in caught.value.problems[0].hint


class Branching(nn.Module):
    """Asks integers that follow from its inputs for their values, as the masks of transformers do."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        assert (positions[1:] - positions[:-1] == 1).all()
        return torch.ones(int(positions.max()) + 1, 3, device=ids.device).requires_grad_().square()


def test_values_of_integers_are_known_on_meta() -> None:
    plan = ShardingPlan({}, mesh={"dp": 1})
    ids = torch.zeros(2, 5, dtype=torch.long)
    for inputs in (ids, ids.to("meta")):
        assert plan.activations(Branching(), inputs).local_bytes == 5 * 3 * 4


@pytest.mark.extra("transformers")
def test_hugging_face_models_need_input_ids_only() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.zeros(2, 8, dtype=torch.long)
    plan = ShardingPlan({}, mesh={"dp": 2})
    alone = plan.activations(model, {"input_ids": ids}).local_bytes
    assert alone == plan.activations(model, {"input_ids": ids, "use_cache": False}).local_bytes > 0
    assert plan.activations(model, {"input_ids": ids, "labels": ids}).local_bytes > alone


@pytest.mark.extra("transformers")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_predicted_bytes_of_a_step_are_those_of_a_real_one(family: Family) -> None:
    expected, real = predicted(family), measured(family)
    assert {part: expected[part] for part in PARTS[:3]} == {part: real[part] for part in PARTS[:3]}
    assert real["activations"] > 100_000
    assert abs(expected["activations"] - real["activations"]) <= 0.001 * real["activations"]


@pytest.mark.parametrize("weights", [False, True])
def test_attention_inside_of_torchs_modules_is_counted_as_it_runs(weights: bool) -> None:
    x = torch.randn(2, 10, 32)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model: nn.Module = nn.MultiheadAttention(32, 4, batch_first=True) if weights else layer
    inputs = (x, x, x) if weights else (x,)
    assert ShardingPlan({}, mesh={"dp": 1}).activations(model, inputs).local_bytes == saved_bytes(model, *inputs)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(16),
    "instance norm": lambda: nn.InstanceNorm1d(16, affine=True),
    "group norm": lambda: nn.GroupNorm(4, 16),
    "layer norm": lambda: nn.LayerNorm(128),
    "softmax": lambda: nn.Softmax(-1),
    "log sigmoid": nn.LogSigmoid,
    "gelu": nn.GELU,
    "pool": lambda: nn.AvgPool1d(3, 1, 1),
}


class Transposed(nn.Module):
    """A layer over a transposed input, between two linears."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(16, 16), layer, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between: torch.Tensor = self.layer(self.first(x).transpose(1, 2))
        out: torch.Tensor = self.last(between.transpose(1, 2))
        return out


def peaks(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Predicted and recorded peak; oneDNN is off, since it copies operands of its own."""
    estimate = ShardingPlan({}, mesh={"dp": 1}).activations(model, x, loss=lambda output, batch: output.sum())

    def step() -> torch.Tensor:
        output: torch.Tensor = model(x)
        output.sum().backward()
        return output

    torch.backends.mkldnn.set_flags(False)
    try:
        real = peak_of(step)
    finally:
        torch.backends.mkldnn.set_flags(True)
    return estimate.peak_bytes, real


@pytest.mark.parametrize("layer", LAYERS)
def test_results_lie_in_memory_as_kernels_lay_them_out(layer: str) -> None:
    """A linear layer copies an input that it cannot read in place: strides decide a fifth of the peak here."""
    predicted_peak, real = peaks(Transposed(LAYERS[layer]()), torch.randn(64, 128, 16))
    assert real - 16384 <= predicted_peak <= real + 4096  # gradients of the weights count elsewhere
    assert real > 5 * 64 * 128 * 16 * 4 // 2


class Scan(nn.Module):
    """A recurrence over steps, as Mamba's slow path: backward adds one gradient a step to that of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = self.first(x)
        state, states = torch.zeros_like(inputs[:, 0]), []
        for at in range(inputs.shape[1]):
            state = 0.5 * state + inputs[:, at, :]
            states.append(state)
        out: torch.Tensor = self.last(torch.stack(states, 1))
        return out


def test_gradients_are_added_in_place_as_autograds_engine_does() -> None:
    predicted_peak, real = peaks(Scan(), torch.randn(64, 32, 16))
    assert real - 16384 <= predicted_peak <= real + 4096  # gradients of the weights count elsewhere


class Registered(nn.Module):
    """One module under two names, and one parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.table, self.head = nn.PReLU(), nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.again, self.head.weight = self.act, self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.again(self.act(self.table(ids))))
        return out


def test_a_module_of_two_names_keeps_its_weights() -> None:
    model = Registered()
    before = {name: (id(each), each.clone()) for name, each in model.named_parameters()}
    estimate = ShardingPlan({}, mesh={"dp": 1}).activations(model, torch.zeros(2, 5, dtype=torch.long))
    assert estimate.local_bytes > 0
    after = dict(model.named_parameters(remove_duplicate=False))
    assert len(after) == 4
    assert all(each.device.type == "cpu" for each in after.values())
    for name, (identity, values) in before.items():
        assert id(after[name]) == identity
        assert torch.equal(after[name], values)
