"""Options of a step against recorded runs, within 3 %; options without effect are refused."""

import json
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recorded_ways
import torch
from imported_first import before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from shard_spec import FullyShardPlanner, PlanError, ShardingPlan, topology_preset
from shard_spec.estimate.kernels import Autocast
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only


@pytest.mark.extra("transformers")
def test_every_way_of_a_step_is_that_of_a_recorded_run() -> None:
    script = Path(recorded_ways.__file__)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], check=True, capture_output=True, text=True, timeout=280
    )
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 16
    for row in rows:
        for part, real in row["recorded"].items():
            rel = 0.16 if "re-entrant" in row["way"] else 0.03  # a note says that the root is freed earlier
            assert row["predicted"][part] == pytest.approx(real, rel=rel), (row["way"], part)
    # The ways differ: an option that is ignored would leave its row at the plain one.
    assert len({tuple(row["predicted"].values()) for row in rows}) == len(rows)


@pytest.mark.extra("transformers")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("ddp", ["buckets", "views"])
def test_buckets_of_ddp_are_those_of_a_recorded_step(ranks: Ranks, ddp: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = recorded_ways.llama()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=ddp == "views")

    def step() -> Any:
        output = wrapped(**recorded_ways.batch())
        output.loss.backward()
        return output

    recorded = recorded_ways.measure(model, step)
    gradients = sum(each.nbytes for each in model.parameters())
    plan = ShardingPlan({}, mesh={"dp": 2})
    memory = plan.memory(model, recorded_ways.batch(), ddp=ddp)
    # The record starts after the buckets were allocated.
    assert memory.max_bytes == pytest.approx(recorded["total"] + gradients, rel=0.03)
    plain = plan.memory(model, recorded_ways.batch())
    assert memory.on(0)["DDP buckets"] == (gradients if ddp == "buckets" else 0)
    assert memory.max_bytes > 1.05 * plain.max_bytes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_communication_follows_the_options() -> None:
    plan, x = FullyShardPlanner({"fsdp": 2}, "fsdp").build_plan(Net()), torch.zeros(2, 8)

    def counts(**options: Any) -> tuple[int, int]:
        moved = plan.communication(Net(), x, **options)
        return moved.count(op="all_gather"), moved.count(op="reduce_scatter")

    assert counts() == (6, 3)
    assert counts(accumulate=3) == (18, 9)
    assert counts(accumulate=3, sync="last") == (18, 3)
    assert counts(reshard_after_forward=False) == (3, 3)
    plain = plan.communication(Net(), x).by_axis()["fsdp"]
    half = plan.communication(Net(), x, mp_policy={"param_dtype": "bfloat16", "reduce_dtype": "float32"}).by_axis()[
        "fsdp"
    ]
    assert half["parameters"] == plain["parameters"] / 2
    assert half["gradients"] == plain["gradients"]


def test_gradients_count_when_they_are_made() -> None:
    plan, x = ShardingPlan({}, mesh={"dp": 1}), torch.zeros(64, 8)
    once, twice = plan.memory(Net(), x, optimizer=None), plan.memory(Net(), x, optimizer=None, accumulate=2)
    assert twice.on(0)["gradients to come"] == 0
    assert -once.on(0)["gradients"] <= once.on(0)["gradients to come"] < 0
    # Beside those of the batch before, the new ones are there until they are added.
    assert twice.max_bytes - once.max_bytes == once.on(0)["gradients"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acumulate": 4, "snyc": "last"}, r"(?s)acumulate: no option of a step -> accumulate.*snyc.*sync"),
        ({"reshard": False}, "reshard: no option of a step .*reshard_after_forward"),
        ({"reshard_after_forward": 2}, "a number of ranks, onto which fully_shard would reshard, is not counted"),
        ({"mp_policy": "bfloat16"}, "wrong-type.*MixedPrecisionPolicy"),
        ({"accumulate": 0}, "1 or more"),
        ({"accumulate": True}, "1 or more"),
        ({"sync": "never"}, "sync"),
        ({"sync": "last"}, "reduced once anyway"),
        ({"ddp": "yes"}, "ddp"),
        ({"ddp": "buckets"}, "DistributedDataParallel wraps models"),
        ({"mp_policy": {"param": "bfloat16"}}, "param_dtype, reduce_dtype, output_dtype"),
        ({"mp_policy": {"param_dtype": "bf16"}}, "unsupported-dtype"),
        ({"autocast": "half"}, "autocast.*bfloat16, float16"),
        ({"autocast": True}, "autocast.*bfloat16, float16"),
        ({"autocast": "float64"}, "autocast.*bfloat16, float16"),
        ({"checkpointing": "no"}, "checkpointing.*True or False"),
        ({"loss": 3}, "loss.*a function loss"),
        ({"loss": []}, "loss.*a function loss"),
        ({"loss": nn.CrossEntropyLoss()}, "loss.*a function loss"),
        ({"loss": nn.MSELoss}, "loss.*a function loss"),
        ({"units": [3]}, "a list of names"),
        ({"units": (name for name in ("first",))}, "a list of names"),
        ({"data_axes": 3}, "a list of names"),
    ],
)
def test_wrong_options_of_a_step_are_refused(options: dict[str, Any], message: str) -> None:
    plan = FullyShardPlanner({"fsdp": 2}, "fsdp").build_plan(Net())
    x = torch.zeros(2, 8)
    for call in (plan.memory, plan.communication, plan.activations, plan.cost):
        with pytest.raises(PlanError, match=message):
            call(Net(), x, **options)
    for static in (
        (plan.memory, plan.communication) if "wraps" not in message else ()
    ):  # which effects it has, a step says
        with pytest.raises(PlanError, match=message):
            static(Net(), **options)


def test_what_a_policy_casts_and_a_mesh_of_one_replica_holds_is_named() -> None:
    x = torch.zeros(2, 8)
    plan = FullyShardPlanner({"dp_replicate": 1, "fsdp": 2}, "fsdp").build_plan(Net())
    for policy in ({"param_dtype": "bfloat16"}, {"reduce_dtype": "bfloat16"}):
        notes = plan.memory(Net(), x, mp_policy=policy).notes
        assert [note for note in notes if "casts between the policy's dtypes" in note], policy
    assert [note for note in plan.memory(Net(), x).notes if note.startswith("dp_replicate: fully_shard on a mesh")]
    plain = FullyShardPlanner({"fsdp": 2}, "fsdp").build_plan(Net())
    assert plain.memory(Net(), x).notes == ()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, batch: 3.0, r"it returned 3\.0"),
        (lambda output, batch: None, "it returned None"),
        (lambda output, batch: output.detach().sum(), "a tensor without a gradient"),
    ],
)
def test_losses_without_a_gradient_are_refused(loss: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"loss: .*{message}.*backward"):
        ShardingPlan({}, mesh={"dp": 1}).memory(Net(), torch.zeros(2, 8), loss=loss)


def test_grads_are_a_flag_or_a_dtype() -> None:
    plan: Any = ShardingPlan({}, mesh={"dp": 1})
    with pytest.raises(PlanError, match="grads: None -> True, False, or a dtype"):
        plan.memory(Net(), grads=None)
    with pytest.raises(PlanError, match="unsupported-dtype"):
        plan.memory(Net(), grads="bf16")


def test_options_of_fully_shard_have_no_effect_on_a_replicated_plan() -> None:
    plan = ShardingPlan({}, mesh={"dp": 2})
    for options in ({"reshard_after_forward": False}, {"mp_policy": {"param_dtype": "bfloat16"}}):
        with pytest.raises(PlanError, match="no data axis of several ranks shards parameters"):
            plan.memory(Net(), torch.zeros(2, 8), **options)


F = functional
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda y, x: F.cross_entropy(y, x[:, 0].long()),
    "nll_loss": lambda y, x: F.nll_loss(y, x[:, 0].long()),
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "kl_div": lambda y, x: F.kl_div(y, x, reduction="sum"),
    "with logits": F.binary_cross_entropy_with_logits,
    "poisson": F.poisson_nll_loss,
    "soft margin": F.soft_margin_loss,
    "margin": lambda y, x: F.multi_margin_loss(y, x[:, 0].long()),
    "triplet": lambda y, x: F.triplet_margin_loss(y, x, x),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_losses_under_autocast_cast_as_torch_does(device: str) -> None:
    """The same bytes as with casts by hand; cross entropy of half-precision logits counted without its copy before."""
    plan, x = ShardingPlan({}, mesh={"dp": 1}), torch.zeros(64, 8, device=device)
    model = nn.Sequential(nn.Linear(8, 8)).to(device)

    def peak(loss: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> int:
        def applied(y: torch.Tensor, batch: Any) -> torch.Tensor:
            value: torch.Tensor = loss(cast(y), cast(batch[0][0]))
            return value

        return plan.memory(model, x, loss=applied, autocast="bfloat16", optimizer=None).max_bytes

    for name, loss in LOSSES.items():
        if device == "cpu":  # the name is in the list of the device if torch casts there
            with torch.autocast("cpu", torch.bfloat16):
                assert loss(torch.rand(4, 8).bfloat16(), torch.ones(4, 8).bfloat16()).dtype == torch.float32, name
        assert peak(loss, lambda t: t) == peak(loss, torch.Tensor.float) > 2 * 4 * 8 * 9, name


MATRIX, VECTOR = torch.rand(8, 8) + 8 * torch.eye(8), torch.rand(8)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    **{
        f"linalg.{name}": (getattr(torch.linalg, name), (MATRIX,))
        for name in ("vector_norm", "matrix_norm", "inv", "qr", "svdvals", "eigvals", "matrix_exp", "diagonal", "cond")
    },
    "linalg.cholesky": (torch.linalg.cholesky, (MATRIX @ MATRIX.T,)),
    "linalg.solve": (torch.linalg.solve, (MATRIX, MATRIX)),
    "linalg.multi_dot": (torch.linalg.multi_dot, ([MATRIX, MATRIX, MATRIX],)),
    "linalg.matmul": (torch.linalg.matmul, (MATRIX, MATRIX)),
    "linalg.matrix_power": (torch.linalg.matrix_power, (MATRIX, 2)),
    "linalg.vecdot": (torch.linalg.vecdot, (MATRIX, MATRIX)),
    **{f"fft.{name}": (getattr(torch.fft, name), (MATRIX,)) for name in ("fft", "rfft", "hfft", "ifft2", "fftshift")},
    **{
        name: (getattr(torch, name), (MATRIX, MATRIX))
        for name in ("matmul", "mm", "inner", "cdist", "kron", "mul", "atan2")
    },
    **{name: (getattr(torch, name), (MATRIX, VECTOR)) for name in ("mv", "dot")},
    **{
        name: (getattr(torch, name), (MATRIX,))
        for name in ("softmax", "cumsum", "prod", "trace", "inverse", "pinverse", "exp", "polar", "view_as_complex")
    },
    "reflected": (F.pad, (torch.rand(1, 1, 8, 8), (1, 1, 1, 1), "reflect")),
    "zeros around": (F.pad, (MATRIX, (1, 1))),
}
_MORE = {"softmax": (-1,), "cumsum": (-1,), "prod": (-1,), "polar": (MATRIX,)}


@pytest.mark.parametrize("name", CALLS)
def test_autocast_on_a_cpu_casts_as_torch_does(name: str) -> None:
    """Results of float32 and of bfloat16 have the dtypes of torch's own; a call that torch refuses has an error."""
    function, args = CALLS[name]
    args = {"dot": (VECTOR, VECTOR), "view_as_complex": (MATRIX.view(8, 4, 2),)}.get(name, args) + _MORE.get(name, ())
    dtypes: list[list[str]] = [[], []]  # torch's, ours
    for dtype in (torch.float32, torch.bfloat16):
        cast = tree_map_only(torch.Tensor, lambda each: each.to(dtype), args)  # noqa: B023  # called at once

        def result(args: Any) -> str:
            try:
                return str(function(*args)[0].dtype if "qr" in name else function(*args).dtype)
            except (NotImplementedError, RuntimeError):
                return "an error"

        with torch.autocast("cpu", torch.bfloat16):
            dtypes[0].append(result(cast))
        ours, named = Autocast(torch.bfloat16, "cpu").arguments(function.__name__, cast, {})
        assert named == {}
        dtypes[1].append(result(ours))
    assert dtypes[0] == dtypes[1] or name == "pinverse", dtypes  # of pinverse the products within alone are cast


def test_parameters_that_no_gradient_reaches_are_named() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = self.teacher(x)
            loss: torch.Tensor = (self.student(x) - wanted).square().mean()
            return loss

    plan = ShardingPlan({}, mesh={"dp": 1})
    memory = plan.memory(Distilled(), torch.zeros(2, 8))
    assert [note for note in memory.notes if "no gradient reaches 2 parameters" in note and "teacher.weight" in note]
    assert not [note for note in plan.memory(Net(), torch.zeros(2, 8)).notes if "no gradient" in note]


def test_attention_of_other_threads_keeps_its_kernel() -> None:
    seen: list[torch.Tensor] = []
    query = torch.randn(1, 1, 4, 8)
    before = functional.scaled_dot_product_attention

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def run() -> None:
                seen.append(functional.scaled_dot_product_attention(query, query, query))

            other = threading.Thread(target=run)
            other.start()
            other.join()
            return (x * self.weight).sum()

    ShardingPlan({}, mesh={"dp": 1}).activations(Asks(), torch.zeros(2))
    assert torch.equal(seen[0], before(query, query, query))
    assert functional.scaled_dot_product_attention is before


class Reads(nn.Module):
    """Forwards that read values of their inputs (known), or of what they compute (unknown)."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.table = what, nn.Embedding(16, 4)

    def forward(self, ids: torch.Tensor) -> Any:
        if self.what == "tolist":
            return self.table(ids[: max(ids.flatten().tolist()) % 2 + 1]).sum()
        if self.what == "numpy":
            return self.table(ids[: int(ids.numpy().max()) % 2 + 1]).sum()
        if self.what == "mask":
            return self.table(ids[ids > 3]).sum()
        if self.what == "nonzero":
            return self.table((ids > 3).nonzero()[:, 1]).sum()
        if self.what == "unique":
            return self.table(torch.unique(ids)).sum()
        if self.what == "rows":
            return self.table(ids)[ids > 3].sum()
        x = self.table(ids)
        if self.what == "if":
            return x.sum() if x.sum() > 0 else x.mean()
        if self.what == "own mask":
            return x[x.sum(-1) > 0].sum()
        return x.sum() + float(x.detach().numpy().sum())


IDS = torch.arange(12).view(2, 6)


class Makes(nn.Module):
    """A forward with tensors that no argument brings: made by shape, of numbers, from arrays, and kept attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.scale = torch.rand(64, 64)  # no buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        mask = torch.ones(64, 64).triu(1).bool()
        x = x.masked_fill(mask, 0.0) * torch.eye(64) + torch.tensor([1.0, 2.0] * 32)
        x = x * self.scale + torch.from_numpy(np.ones((64, 64), dtype=np.float32))
        x = torch.as_tensor(x) + torch.as_tensor(np.arange(64.0, dtype=np.float32)) + torch.asarray(self.scale)
        return (x + torch.arange(64)[torch.tensor(3)]).sum()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11's profiler
def test_tensors_that_a_forward_makes_lie_beside_the_model() -> None:
    model, x = Makes(), torch.randn(64, 64)
    plan = ShardingPlan({}, mesh={"dp": 1})
    predicted = plan.activations(model, x)

    def step() -> None:
        model(x).backward()

    assert predicted.peak_bytes == pytest.approx(recorded_ways.measure(model, step)["beside"], rel=0.03)
    with pytest.raises(PlanError, match=r"another device than the model.*x\.masked_fill.*device=x\.device"):
        plan.activations(Makes().to("meta"), x.to("meta"))


def test_what_a_forward_stores_is_taken_back() -> None:
    class Stores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen, self.by_name, self.both = nn.Linear(8, 8), [0], {"none": 0}, {0}
            self.last: Any = None
            self.queue, self.ordered, self.nested = deque([0]), OrderedDict(none=0), {"list": [[0]]}
            self.cache, self.count = SimpleNamespace(keys=None), torch.zeros(2)
            with torch.inference_mode():
                self.constant = torch.ones(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.layer(x)
            self.new = self.last
            self.seen.append(self.last)
            self.by_name["last"] = self.last
            self.both.add(self.last)
            self.queue.append(self.last)
            self.ordered["last"] = self.last
            self.nested["list"][0].append(self.last)
            self.cache.keys = self.last
            self.count[:1] += 1
            self.count.view(2, 1)[1:].add_(2)
            total: torch.Tensor = self.last.sum()
            return total

    model = Stores()
    seen, by_name = model.seen, model.by_name
    assert ShardingPlan({}, mesh={"dp": 1}).activations(model, torch.zeros(2, 8)).peak_bytes > 0
    assert model.last is None and not hasattr(model, "new")
    assert model.seen is seen == [0] and model.by_name is by_name == {"none": 0} and model.both == {0}
    assert model.queue == deque([0]) and model.ordered == {"none": 0} and model.nested == {"list": [[0]]}
    assert model.cache.keys is None and model.count.tolist() == [0, 0]


def test_two_threads_estimate_one_model_after_another() -> None:
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12))), torch.zeros(4, 32)
    plan = ShardingPlan({}, mesh={"dp": 1})
    wanted, found = plan.memory(model, x).total(0), list[int]()

    def estimate() -> None:
        found.extend(plan.memory(model, x).total(0) for _ in range(4))

    threads = [threading.Thread(target=estimate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 8
    assert not any(each.is_meta for each in model.parameters())


@pytest.mark.parametrize("what", ["tolist", "numpy", "mask", "nonzero", "unique", "rows"])
def test_values_of_inputs_are_followed_into_shapes(what: str) -> None:
    model = Reads(what)
    saved: dict[int, int] = {}
    table = model.table.weight.untyped_storage().data_ptr()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in (table, IDS.untyped_storage().data_ptr()):
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        model(IDS)
    estimate = ShardingPlan({}, mesh={"dp": 1}).activations(model, IDS)
    assert estimate.notes == () or all("loss" in note for note in estimate.notes)
    assert abs(estimate.local_bytes - sum(saved.values())) <= 12 * 8, "positions of a mask are int64"


@pytest.mark.parametrize("what", ["if", "own mask", "numpy of activations"])
def test_values_that_shapes_have_not_are_refused_with_their_line(what: str) -> None:
    with pytest.raises(PlanError) as caught:
        ShardingPlan({}, mesh={"dp": 1}).activations(Reads(what), IDS)
    (problem,) = caught.value.problems
    assert problem.code == "unverified"
    assert Path(__file__).name in problem.found
    assert "return x" in problem.found


class Stack(nn.Module):
    """Blocks whose saved tensors may be offloaded to the host's memory."""

    def __init__(self, offload: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.offload = offload

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with torch.autograd.graph.save_on_cpu() if self.offload else nullcontext():
                x = torch.relu(block(x))
        return x.sum()


def test_offloaded_activations_are_not_on_the_rank() -> None:
    plan, x = ShardingPlan({}, mesh={"dp": 1}), torch.randn(64, 16)
    kept, offloaded = (plan.activations(Stack(offload), x) for offload in (False, True))
    size = x.nbytes
    assert kept.local_bytes - offloaded.local_bytes == 5 * size  # the input and four results
    # Backward holds one block's copies at a time, beside a gradient and its product.
    assert kept.peak_bytes >= 5 * size
    assert offloaded.peak_bytes <= 4 * size + 64


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own import
def test_a_compiled_model_is_taken_by_its_original() -> None:
    plan = FullyShardPlanner({"fsdp": 2}, "fsdp").build_plan(Stack())
    x = torch.randn(64, 16)
    compiled: Any = torch.compile(Stack())
    assert plan.validate(compiled) == ()
    assert plan.memory(compiled, x).parts == plan.memory(Stack(), x).parts
    assert plan.communication(compiled, x).by_axis() == plan.communication(Stack(), x).by_axis()


@pytest.mark.extra("transformers")
@pytest.mark.parametrize("family", ["Mixtral", "JetMoe"])
def test_routing_that_the_forward_reads_counts_as_even(family: str) -> None:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False}
    sizes |= {"num_attention_heads": 4} if family == "Mixtral" else {"kv_channels": 16}
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    if family == "Mixtral":
        model.config._experts_implementation = "eager"
    ids = torch.arange(2 * 16).view(2, 16)
    counts = [ShardingPlan({}, mesh={"dp": 1}).activations(model, {"input_ids": each, "labels": each})
              for each in (ids, ids.repeat(2, 1))]  # fmt: skip
    for count in counts:
        assert any("counts as even" in note for note in count.notes)
    assert 1.95 * counts[0].local_bytes <= counts[1].local_bytes <= 2.05 * counts[0].local_bytes


def test_one_simulation_gives_memory_communication_and_time() -> None:
    plan, x = FullyShardPlanner({"fsdp": 2}, "fsdp").build_plan(Stack()), torch.randn(64, 16)
    machine = topology_preset("h100-sxm")
    runs = 0

    class Counted(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal runs
            runs += 1
            return super().forward(x)

    memory, moved = plan.cost(Counted(), x, topology=machine, accumulate=3)
    assert runs == 1
    assert memory.parts == plan.memory(Stack(), x, accumulate=3).parts
    alone = plan.communication(Stack(), x, topology=machine, accumulate=3)
    assert moved.to_json() == alone.to_json()
    # Forward, and gradients of weights and of inputs but the first one's.
    assert moved.flops == 3 * 2 * 64 * 16 * 16 * (3 * 4 - 1)
    assert moved.step_seconds is not None
    least, most = moved.step_seconds
    assert moved.compute_seconds is not None
    assert moved.seconds is not None
    assert least == max(moved.compute_seconds, moved.seconds["fsdp"])
    assert most == moved.compute_seconds + moved.seconds["fsdp"]
    assert "time of the step" in str(moved)


def test_products_are_counted_by_shard() -> None:
    rules = {"blocks.{0,2}.weight": "tp:S(0)", "blocks.{1,3}.weight": "tp:S(1)"}
    x = torch.randn(64, 16)
    full, halves = (ShardingPlan(each, mesh={"tp": 2}).cost(Stack(), x)[1].flops for each in ({}, rules))
    assert halves * 2 == full
