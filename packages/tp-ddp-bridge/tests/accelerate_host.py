"""The bridge's Accelerator against Hugging Face accelerate, on 2 x 2 ranks; `nox -s "hosts(accelerate)"` runs it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import bridge_models as models
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from accelerate.test_utils.scripts import test_ddp_comm_hook as hook_script
from accelerate.test_utils.scripts import test_script as basic_script
from accelerate.test_utils.scripts import test_sync as sync_script
from accelerate.utils import DDPCommunicationHookType as Hook
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from tp_ddp_bridge import GradScaler, PlanError, check_replicas
from tp_ddp_bridge.accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

ROWS = 44  # 5 full batches of 2 x 4 rows, and one of 4


@pytest.fixture(autouse=True)
def _fresh_state() -> Any:
    yield
    AcceleratorState._reset_state()
    GradientState._reset_state()


def accelerator_of(**kwargs: Any) -> Accelerator:
    return Accelerator(2, cpu=True, **kwargs)


def model_of(accelerator: Accelerator | None) -> nn.Module:
    model: nn.Module = models.seeded(models.MLP).double()
    if accelerator is not None:
        models.parallelize_mlp(model, accelerator.mesh["tp"])
    return model


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, 16, generator=generator, dtype=torch.float64)
    return TensorDataset(rows, torch.arange(ROWS))


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    out = model(rows)
    return F.mse_loss(out, rows.roll(1, -1)[:, : out.shape[-1]])


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}


def reference(batches: list[torch.Tensor], accumulate: int = 1) -> tuple[nn.Module, list[float], list[float]]:
    """The same batches in one process: the model, its norms and learning rates."""
    model = model_of(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    norms, rates = [], []
    for index, rows in enumerate(batches):
        (loss_of(model, rows) / accumulate).backward()
        if (index + 1) % accumulate and index + 1 < len(batches):
            continue
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        scheduler.step()
        scheduler.step()  # accelerate steps once for each data-parallel rank
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return model, norms, rates


def train(accelerator: Accelerator, **loader: Any) -> tuple[Any, Any, list[torch.Tensor], list[float], list[float]]:
    model = model_of(accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, loader_, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data(), batch_size=4, **loader), scheduler
    )
    batches, norms, rates = [], [], []
    for rows, _ in loader_:
        with accelerator.accumulate(model):
            loss = loss_of(model, rows)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
        batches.append(accelerator.gather(rows))
    return model, optimizer, batches, norms, rates


@pytest.mark.ranks(4)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_equals_one_process(ranks: Ranks, accumulate: int) -> None:
    set_seed(0)
    accelerator = accelerator_of(gradient_accumulation_steps=accumulate)
    model, _, batches, norms, rates = train(accelerator, shuffle=True)
    assert isinstance(model, DistributedDataParallel) and len(batches) == 6
    assert all(each.shape == (8, 16) for each in batches)
    expected, expected_norms, expected_rates = reference(batches, accumulate)
    assert len(norms) == 6 // accumulate
    torch.testing.assert_close(norms, expected_norms, rtol=1e-9, atol=0)
    assert rates == pytest.approx(expected_rates, rel=1e-12)
    state = accelerator.get_state_dict(model)
    assert set(state) == set(expected.state_dict())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
    assert len(set(ranks.gather(str(norms)))) == 1


@pytest.mark.ranks(4)
def test_metrics_count_each_sample_once(ranks: Ranks) -> None:
    accelerator = accelerator_of()
    loader = accelerator.prepare(DataLoader(data(), batch_size=4))
    gathered_ids: list[int] = []
    gathered_objects: list[int] = []
    total = torch.zeros(())
    for rows, ids in loader:
        gathered_ids += accelerator.gather_for_metrics(ids).tolist()
        gathered_objects += accelerator.gather_for_metrics(ids.tolist(), use_gather_object=True)
        total += accelerator.reduce(torch.tensor(float(len(rows))))
        assert float(accelerator.reduce(torch.tensor(float(ranks.rank // 2)), "mean")) == 0.5
    assert gathered_ids == list(range(ROWS)) and gathered_objects == gathered_ids
    assert float(total) == 48  # with the rows that pad the last batch


@pytest.mark.ranks(4)
def test_a_checkpoint_goes_on_where_it_was_saved(ranks: Ranks, tmp_path: Path) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    accelerator = accelerator_of()
    model, optimizer, *_ = train(accelerator)
    accelerator.save_state(str(folder / "state"))
    saved = {name: value.clone() for name, value in full_state(model.module).items()}
    rows = data().tensors[0][:8]

    def one_step() -> dict[str, torch.Tensor]:
        loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        return {name: value.clone() for name, value in full_state(model.module).items()}

    next_state = one_step()
    one_step()
    accelerator.load_state(str(folder / "state"))
    loaded = full_state(model.module)
    assert len(loaded) == 6 and all(torch.equal(loaded[name], value) for name, value in saved.items())
    next_state_loaded = one_step()  # AdamW's state came back as well
    assert all(torch.equal(next_state_loaded[name], value) for name, value in next_state.items())


@pytest.mark.ranks(4)
def test_an_optimizer_that_was_built_before_and_ddp_arguments(ranks: Ranks) -> None:
    handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = accelerator_of(kwargs_handlers=[handler], mixed_precision="bf16")
    model, optimizer, *_ = train(accelerator)
    assert model.gradient_as_bucket_view
    optimizer_ids = {id(each) for group in optimizer.param_groups for each in group["params"]}
    assert optimizer_ids == {id(each) for each in model.parameters()}
    assert len(set(ranks.gather(str(sorted((n, float(v.sum())) for n, v in full_state(model.module).items()))))) == 1


@pytest.mark.ranks(4)
def test_other_batches_within_a_tensor_parallel_group_are_refused(ranks: Ranks) -> None:
    rows = torch.arange(16.0).view(8, 2) + (ranks.rank == 3)
    loader = accelerator_of().prepare(DataLoader(TensorDataset(rows), batch_size=2))
    if ranks.rank < 2:  # the other replica's ranks agree
        assert len(list(loader)) == 2
    else:
        with pytest.raises(PlanError, match="checksum"):
            next(iter(loader))


@pytest.mark.ranks(4)
def test_an_optimizer_of_the_full_model_is_refused(ranks: Ranks) -> None:
    """Torch's styles make new parameters; an optimizer that was built before them would train nothing."""
    accelerator = accelerator_of()
    model = models.seeded(models.MLP)
    optimizer = torch.optim.AdamW(model.parameters())
    models.parallelize_mlp(model, accelerator.mesh["tp"])
    with pytest.raises(PlanError, match="parameter-not-in-module"):
        accelerator.prepare(model, optimizer)


@pytest.mark.ranks(4)
def test_other_configurations_are_refused(ranks: Ranks) -> None:
    with pytest.raises(PlanError, match="invalid-mesh"):
        Accelerator(3, cpu=True)


@pytest.mark.ranks(4)
def test_a_trigger_of_any_rank_reaches_all(ranks: Ranks) -> None:
    accelerator = accelerator_of()
    answers = []
    for guilty in range(4):
        answers.append(accelerator.check_trigger())
        if ranks.rank == guilty:
            accelerator.set_trigger()
        answers.append(accelerator.check_trigger())
    assert answers == [False, True] * 4


@pytest.mark.ranks(4)
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_dropout_is_one_for_tensor_parallel_ranks_whatever_their_seeds(ranks: Ranks, when: str) -> None:
    accelerator = accelerator_of()
    if when == "before prepare":
        set_seed(42, device_specific=True)
    model = nn.Sequential(model_of(accelerator), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=4))
    if when == "after prepare":
        set_seed(42, device_specific=True)
    outputs = []
    for rows, _ in loader:
        out = model(rows)
        accelerator.backward(out.pow(2).sum())
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(float(out.detach().sum()))
    everyone = ranks.gather(str(outputs))
    assert len(outputs) == 6 and everyone[0] == everyone[1] != everyone[2] == everyone[3]
    assert check_replicas(model, accelerator.mesh["tp"].get_group()) == 3


@pytest.mark.ranks(4)
def test_an_optimizer_may_be_prepared_after_its_model(ranks: Ranks) -> None:
    states = []
    for together in (True, False):
        set_seed(0)
        accelerator = accelerator_of()
        model = model_of(accelerator)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if together:
            model, optimizer = accelerator.prepare(model, optimizer)
        else:
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        for rows in data().tensors[0].chunk(6):
            accelerator.backward(loss_of(model, rows))
            optimizer.step()
            optimizer.zero_grad()
        states.append(full_state(model.module))
        AcceleratorState._reset_state()
        GradientState._reset_state()
    assert len(states[0]) == 6 and all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["up.weight"], models.seeded(models.MLP).double().up.weight)


@pytest.mark.ranks(4)
def test_save_pretrained_without_a_state_dict_saves_full_weights(ranks: Ranks, tmp_path: Path) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    accelerator = accelerator_of()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    mlp = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(model.model.layers[0].mlp, accelerator.mesh["tp"], mlp)
    prepared = accelerator.prepare(model)
    for index, saver in enumerate((accelerator.unwrap_model(prepared), copy.deepcopy(prepared.module))):
        saver.save_pretrained(folder / str(index), is_main_process=accelerator.is_main_process)
        accelerator.wait_for_everyone()
        saved = LlamaForCausalLM.from_pretrained(folder / str(index)).state_dict()
        assert len(expected) == len(saved) > 9 and all(torch.equal(saved[name], expected[name]) for name in expected)


@pytest.mark.ranks(4)
def test_a_model_that_is_not_tensor_parallel_is_named(ranks: Ranks) -> None:
    accelerator = accelerator_of()
    with pytest.warns(UserWarning, match="MLP is not tensor parallel"):
        accelerator.prepare(model_of(None))


# ---- accelerate's own scripts, with a tensor-parallel model where they build theirs ----------------------------------


class OfAScript(Accelerator):
    """Makes the scripts' models tensor parallel; the scripts take one process for one replica."""

    def __init__(self, mixed_precision: str | None = None, **kwargs: Any) -> None:
        half = mixed_precision == "fp16"  # which accelerate has for no CPU; torch has
        super().__init__(2, cpu=True, mixed_precision="no" if half else mixed_precision, **kwargs)
        if half:
            self.state._mixed_precision, self.native_amp, self.scaler = "fp16", True, GradScaler("cpu")

    @property
    def num_processes(self) -> int:
        return self.data_parallel_size if hasattr(self, "_data_group") else super().num_processes

    @property
    def local_process_index(self) -> int:
        return torch.distributed.get_rank(self._data_group)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        plan = {"pair.0": ColwiseParallel(), "pair.2": RowwiseParallel()}
        for model in filter(lambda each: isinstance(each, Regression), args):
            full = list(model.parameters())
            parallelize_module(model, self.mesh["tp"], plan)
            sharded = dict(zip(full, model.parameters(), strict=True))
            for optimizer in filter(lambda each: isinstance(each, torch.optim.Optimizer), args):
                for group in optimizer.param_groups:  # the scripts build it first
                    group["params"] = [sharded[each] for each in group["params"]]
        return super().prepare(*args, **kwargs)


class Regression(nn.Module):
    """In place of the scripts' models: a parameter that is replicated comes first, shards follow."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        with torch.random.fork_rng([]):  # samplers start from the seed that a script has set
            torch.manual_seed(0)
            self.pair = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width))

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        rows = self.scale * x.view(len(x), -1) ** (1 + rank)  # [rows, width]; the regression's x has one number a row
        out: torch.Tensor = rows + self.pair(rows)
        return out.mean(1) if x.ndim == 1 else out


class ReferenceOfAScript(DistributedDataParallel):
    """The script names a device for its reference, which DDP takes for GPUs alone."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__(module)


@contextmanager
def tensor_parallel_scripts() -> Iterator[list[torch.Size]]:
    """Our classes in the scripts; their `allclose` takes this rank's shard. Yields the shapes compared."""
    shapes: list[torch.Size] = []
    allclose = torch.allclose

    def of_this_rank(full: torch.Tensor, own: torch.Tensor, **kwargs: Any) -> bool:
        for dim, size in enumerate(own.shape):
            if size != full.shape[dim]:
                full = full.chunk(2, dim)[torch.distributed.get_rank() % 2]
        shapes.append(own.shape)
        return allclose(full, own, **kwargs)

    GradientState._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "allclose", of_this_rank)
        patch.setattr(sync_script, "Accelerator", OfAScript)
        patch.setattr(hook_script, "Accelerator", OfAScript)
        patch.setattr(sync_script, "RegressionModel", Regression)
        # The scripts leave the data to each process.
        patch.setattr(sync_script, "RegressionDataset", partial(sync_script.RegressionDataset, seed=0))
        patch.setattr(hook_script, "MockModel", lambda: Regression(20))
        yield shapes


SHAPES = {(2,), (4, 2), (4,), (2, 4)}  # of the shards


@pytest.mark.ranks(4)
def test_script_of_gradient_synchronization(ranks: Ranks) -> None:
    with tensor_parallel_scripts() as compared:
        accelerator = OfAScript()
        sync_script.test_dataloader_break()
        sync_script.test_distributed_sync(accelerator)
        assert len(compared) == 3 * 5 and set(compared) == SHAPES
        sync_script.test_distributed_sync_multiple_fwd(accelerator)
        assert len(compared) == 6 * 5


@pytest.mark.ranks(4)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("each", [True, False])
def test_script_of_accumulation(ranks: Ranks, split: bool, each: bool) -> None:
    batches = 5 if split else 3
    with tensor_parallel_scripts() as compared:
        sync_script.test_gradient_accumulation(split, sync_each_batch=each)
        assert len(compared) == batches * 5 and set(compared) == SHAPES
        if not split and not each:  # as the script does on CPU
            sync_script.test_gradient_accumulation_with_opt_and_scheduler()
            assert len(compared) == 2 * batches * 5


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hook", ["NO", "FP16", "POWER_SGD", "BATCHED_POWER_SGD"])
def test_script_of_communication_hooks(ranks: Ranks, hook: str) -> None:
    with tensor_parallel_scripts(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.parallel, "DistributedDataParallel", ReferenceOfAScript)
        for wrapper in ["NO", "FP16"] if "POWER" in hook else ["NO"]:  # torch's bfloat16 hook is for NCCL
            hook_script.test_ddp_comm_hook(Hook[hook], Hook[wrapper], {})


class Line(Regression):
    """As the scripts' regression, with its two numbers beside sharded layers."""

    dtypes: ClassVar[set[torch.dtype]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Parameter(torch.zeros(2))

    @property
    def a(self) -> torch.Tensor:
        return self.line[0]

    @property
    def b(self) -> torch.Tensor:
        weight: Any = self.pair[0].weight  # of one process, or a DTensor
        full: torch.Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        return full

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        self.dtypes.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype)
        with torch.autocast("cpu", enabled=False):  # as the script's own model, which has nothing that autocast rounds
            return self.line[0] * x + self.line[1] + super().forward(x)


class StateOfReplicas:
    """The scripts count processes where they mean replicas."""

    num_processes = 2
    _reset_state = AcceleratorState._reset_state


@pytest.mark.ranks(4)
def test_script_of_training_samplers_and_triggers(ranks: Ranks) -> None:
    GradientState._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basic_script, "Accelerator", OfAScript)
        patch.setattr(basic_script, "RegressionModel", Line)
        patch.setattr(basic_script, "AcceleratorState", StateOfReplicas)
        OfAScript()  # the script's main() makes one
        basic_script.test_trigger()
        basic_script.check_seedable_sampler()
        basic_script.check_seedable_sampler_with_data_seed()
        for use_seedable_sampler in (False, True):
            Line.dtypes.clear()
            basic_script.training_check(use_seedable_sampler)
            assert Line.dtypes == {torch.float32, torch.bfloat16, torch.float16}
