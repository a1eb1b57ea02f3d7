"""`compare`: models that other libraries sharded, beside their originals; planted mistakes are found in place."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import hf_models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from tp_styles.runtime.redistribute import Redistribute, TPGroup
from tp_styles.values import Redistribution

IDS = torch.arange(32).view(4, 8) % 17


class Net(nn.Module):
    """A small language model with a batch norm, whose buffers follow the batch, and an unused and a zero weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = models.GPT()
        self.norm = nn.BatchNorm1d(17)
        self.unused = nn.Linear(2, 2)
        self.closed = nn.Parameter(torch.zeros(17))
        self.behind = nn.Parameter(torch.ones(17))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.norm(self.gpt(ids).transpose(1, 2)).transpose(1, 2)
        return {"logits": logits + self.closed * self.behind, "mean": logits.square().mean()}


def make() -> nn.Module:
    return models.seeded(Net).double()


def gpt() -> nn.Module:
    return models.seeded(models.GPT).double()


def by_torch(model: nn.Module, mesh: Any, plan: dict[str, Any] | None = None) -> nn.Module:
    """Shard a GPT by torch's own styles."""
    full = {
        "layers.*.attn.[qkv]": ColwiseParallel(),
        "layers.*.attn.proj": RowwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, {**full, **(plan or {})})


def by_fsdp(model: Any, mesh: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.ranks(2, timeout=300)
def test_right_models(ranks: Ranks) -> None:
    """Torch's tensor parallelism, FSDP2 by hand and DDP are equal, with counts; nothing of the model is changed."""
    mesh = ranks.mesh((2,), ("x",))
    model = by_torch(gpt(), mesh)
    model.get_parameter("norm.weight").grad = torch.full((16,), 7.0, dtype=torch.float64)
    found = tp.compare(model, gpt, IDS)
    assert found.compared.tensors == 1
    assert found.compared.gradients == len(dict(gpt().named_parameters())) - 2  # biases of keys: noise
    assert [name.split(" ")[0] for name in found.unchecked] == ["layers.0.attn.k.bias", "layers.1.attn.k.bias"]
    kept = model.get_parameter("norm.weight").grad
    assert kept is not None
    assert kept.tolist() == [7.0] * 16
    assert all(p.grad is None for name, p in model.named_parameters() if name != "norm.weight")

    found = tp.compare(by_fsdp(gpt(), mesh), gpt, {"ids": IDS}, data_mesh=mesh)
    assert found.compared.gradients == len(dict(gpt().named_parameters())) - 2
    assert found.norm is not None
    total = gpt()
    total(IDS).backward(torch.ones(4, 8, 17, dtype=torch.float64))
    assert "gradients" in str(found)

    alone = make().eval()  # in training batch statistics are a rank's own
    for name, buffer in alone.named_buffers():
        buffer.copy_(buffer + (0.5 if "num" not in name else 3))
    wrapped = DistributedDataParallel(copy.deepcopy(alone), find_unused_parameters=True)
    before = {name: buffer.clone() for name, buffer in wrapped.named_buffers()}
    found = tp.compare(wrapped, lambda: copy.deepcopy(alone), (IDS,), data_mesh=mesh)
    assert all(torch.equal(before[name], buffer) for name, buffer in wrapped.named_buffers())
    text = " ".join(found.unchecked)
    for name in (
        "unused.weight (no gradient in both)",
        "behind (zero in both)",
        "gpt.layers.0.attn.k.bias (zero in both)",
    ):
        assert name in text, text


def wrong_divisor(mesh: Any) -> Any:
    model = by_fsdp(gpt(), mesh)
    model.set_gradient_divide_factor(1.0)
    return model


def lost_sum(mesh: Any) -> Any:
    """Feed-forward layers on sequence shards, whose partial gradients nobody sums."""
    model: Any = gpt()
    gather = Redistribute(Redistribution(Shard(1), Replicate()), TPGroup(mesh))
    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(lambda m, args: (args[0].chunk(2, 1)[mesh.get_local_rank()],))
        layer.mlp.register_forward_hook(lambda m, args, out: gather(out))
    return model


def fused_chunks(mesh: Any) -> Any:
    return parallelize_module(
        models.seeded(partial(Fused)).double(), mesh, {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
    )


class Fused(nn.Module):
    """A fused projection whose output is divided in three: columns of a rank are no q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.qkv, self.out = nn.Embedding(17, 16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.place(ids)).chunk(3, -1)
        result: torch.Tensor = self.out(F.scaled_dot_product_attention(q, k, v))
        return result


def local_statistics(mesh: Any) -> Any:
    return DistributedDataParallel(make(), find_unused_parameters=True)


def same_rows(mesh: Any) -> Any:
    """FSDP2 whose ranks all read the first rows."""
    model = by_fsdp(gpt(), mesh)
    model.register_forward_pre_hook(lambda m, args: (IDS[: len(args[0])],))
    return model


def doubled_bias(mesh: Any) -> Any:
    """A row-wise layer by hand whose bias every rank adds before the sum."""
    model: Any = gpt()
    for layer in model.layers:
        layer.mlp.down.register_forward_hook(lambda m, args, out: out + m.bias)
    return by_torch(model, mesh, {"layers.*.mlp.up": ColwiseParallel()})


class Routed(nn.Module):
    """Two outputs, as of a mixture with the loss of its router; some ranks detach what is named."""

    def __init__(self, detached: str = "", ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.place, self.router, self.out = nn.Embedding(17, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.detached, self.ranks = detached, ranks

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.place(ids)
        weights = self.router(x).softmax(-1)
        outputs = {"states": self.out(x * weights), "loss": weights.mean((0, 1)).square().sum()}
        here = self.detached if dist.get_rank() in self.ranks else ""
        return {key: value.detach() if key in here else value for key, value in outputs.items()}


def routed(detached: str = "", ranks: tuple[int, ...] = (0, 1)) -> Callable[..., Any]:
    return lambda mesh=None: models.seeded(partial(Routed, detached, ranks)).double()


WRONG: dict[str, tuple[Callable[[Any], Any], Callable[[], nn.Module], bool, str]] = {
    "a divisor of 1 in FSDP2": (wrong_divisor, gpt, True, r"gradient differs.*it is 2 times the original's"),
    "a sum over sequence shards that is missing": (
        lost_sum,
        gpt,
        False,
        r"layers\.1\.mlp\.up\.weight: gradient differs",
    ),
    "a fused projection by chunks": (fused_chunks, lambda: models.seeded(Fused).double(), False, r"output of out"),
    "batch statistics of a rank": (local_statistics, make, True, r"part first at the output of norm"),
    "the same rows on every rank": (same_rows, gpt, True, r"output differs.*output of embed .*ranks 1\)"),
    "a detached loss": (routed("loss"), routed(), False, r"loss.*without a gradient on rank 0, with one originally"),
    "all detached": (routed("states loss"), routed(), False, r"states.*without a gradient on rank 0"),
    "detached on one rank": (routed("states loss", (1,)), routed(), False, r"without a gradient on rank 1"),
    "detached originally": (routed(), routed("loss"), False, r"loss.*with a gradient on rank 0, without one orig"),
    "a bias that each rank adds": (doubled_bias, gpt, False, r"output of layers\.0\.mlp\.down"),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.ranks(2, timeout=300)
def test_planted_mistakes(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("x",))
    for name, (plant, original, has_rows, text) in WRONG.items():
        with pytest.raises(tp.PlanError, match="differences from the original") as error:
            tp.compare(plant(mesh), original, IDS, data_mesh=mesh if has_rows else None)
        texts = ranks.gather(str(error.value))
        assert len(set(texts)) == 1, name
        assert re.search(text, texts[0]), (name, texts[0])


before_ranks = partial(models.preload, "accelerate", *hf_models.code_of("qwen3", "qwen3_moe"))


def tiny_config(kind: str, **sizes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        kind, **{**hf_models.SMALL, **hf_models.FAMILIES.get(kind, {}), "use_cache": False, **sizes}
    )


def saved(kind: str, folder: str, rank: int) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    if rank == 0:
        model.save_pretrained(folder)


def load(folder: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", **options
    )


@pytest.mark.extra("transformers", "accelerate")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_models_of_transformers(ranks: Ranks, tmp_path: Any) -> None:
    """Tensor and expert parallelism of transformers are equal to the original; a doubled or halved gradient is not."""
    from transformers.distributed import DistributedConfig

    folder = ranks.gather(str(tmp_path))[0]
    for kind in ("qwen3", "qwen3_moe"):
        saved(kind, f"{folder}/{kind}", ranks.rank)
    ranks.gather("saved")
    batch = {"input_ids": torch.arange(1, 25).view(2, 12)}
    batch["labels"] = batch["input_ids"]
    dense = f"{folder}/qwen3"
    right = load(dense, distributed_config=DistributedConfig(tp_size=2))
    counts = tp.compare(right, lambda: load(dense), batch).compared
    assert counts.gradients == len(dict(right.named_parameters()))
    assert counts.tensors >= 2  # loss, logits
    norm = next(p for name, p in right.named_parameters() if name.endswith("k_norm.weight"))
    norm.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(tp.PlanError, match=r"k_norm\.weight: gradient differs.*it is 2 times"):
        tp.compare(right, lambda: load(dense), batch)
    moe = f"{folder}/qwen3_moe"
    experts = load(moe, distributed_config=DistributedConfig(tp_size=2, ep_size=2))
    assert tp.compare(experts, lambda: load(moe), batch).compared.gradients == len(dict(experts.named_parameters()))
    router = next(p for name, p in experts.named_parameters() if name.endswith("gate.weight"))
    router.register_hook(lambda gradient: gradient * 0.5)  # a router whose other half of the gradient is lost
    with pytest.raises(tp.PlanError, match=r"gate\.weight: gradient differs.*it is 0\.5 times"):
        tp.compare(experts, lambda: load(moe), batch)


def accelerator_of(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An Accelerator on the ranks of a test, which a launcher would have described by environment variables."""
    from accelerate import Accelerator

    places = {"RANK": ranks.rank, "LOCAL_RANK": ranks.rank, "WORLD_SIZE": ranks.world_size}
    for name, value in {**places, "LOCAL_WORLD_SIZE": ranks.world_size, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    return Accelerator(cpu=True)


@pytest.mark.extra("transformers", "accelerate")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(4, timeout=300)
def test_experts_of_transformers_beside_fsdp_and_their_norm(
    ranks: Ranks, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts over ep and efsdp, the rest over four ranks: torch's norm raises, accelerate's and ours are right."""
    from transformers.distributed import DistributedConfig

    folder = ranks.gather(str(tmp_path))[0]
    saved("qwen3_moe", folder, ranks.rank)
    ranks.gather("saved")
    axes = DistributedConfig(fsdp_size=4, ep_size=2, ep_implementation="all_to_all")
    model, alone = load(folder, distributed_config=axes), load(folder)
    ids = torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(1))
    rows = ids[ranks.rank :][:1]
    model(input_ids=rows, labels=rows).loss.backward()
    alone(input_ids=ids, labels=ids).loss.backward()
    assert len({p.device_mesh for p in model.parameters()}) == 2
    with pytest.raises(RuntimeError, match="same mesh"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    accelerator = accelerator_of(ranks, monkeypatch)
    theirs = accelerator.clip_grad_norm_(list(model.parameters()), 1e9)
    norms = tp.clip_grad_norm_(model.parameters(), 0.1), nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(theirs, norms[1], rtol=1e-5, atol=0)
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), wanted[name], rtol=1e-4, atol=1e-6, msg=name)
    everyone = next(p.device_mesh for p in model.parameters() if p.device_mesh.ndim == 1)
    compared = tp.compare(model, lambda: load(folder), {"input_ids": ids, "labels": ids}, data_mesh=everyone).compared
    assert compared.gradients == len(wanted)


@pytest.mark.extra("transformers", "accelerate")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(4, timeout=300)
def test_fsdp2_of_accelerate_around_tensor_parallelism(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate refuses FSDP2 on CPUs by the name of the device, so its state is told that it may."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType, ParallelismConfig
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from transformers import AutoModelForCausalLM

    def original() -> Any:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float64)

    accelerator = accelerator_of(ranks, monkeypatch)
    state = accelerator.state
    state.parallelism_config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrap)
    state.distributed_type = DistributedType.FSDP
    mesh = state.device_mesh = state.parallelism_config.build_device_mesh("cpu")
    column, row = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {f"model.layers.*.self_attn.{name}_proj": column for name in "qkv"}
    plan |= {f"model.layers.*.mlp.{name}_proj": column for name in ("gate", "up")}
    plan |= {"model.layers.*.self_attn.o_proj": row, "model.layers.*.mlp.down_proj": row}
    model = fsdp2_prepare_model(accelerator, parallelize_module(original(), mesh["tp"], plan))
    batch = {"input_ids": torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(1))}
    counts = tp.compare(model, original, batch, data_mesh=mesh["dp_shard"]).compared
    assert counts.gradients == len(dict(model.named_parameters()))
    model.model.layers[0].set_gradient_divide_factor(1.0)
    with pytest.raises(tp.PlanError, match=r"layers\.0\..*gradient differs.*it is 2 times"):
        tp.compare(model, original, batch, data_mesh=mesh["dp_shard"])
