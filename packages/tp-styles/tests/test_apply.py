"""All of a plan or nothing, and back again."""

from __future__ import annotations

import copy
import pickle
import random
from functools import partial
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks, functions_entered
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from tp_styles import legacy


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Hooks, instance forwards, attributes and parameter names of all modules."""
    return {
        name: (
            type(module),
            sorted(key for key in vars(module) if key != "training"),
            [len(table) for key, table in vars(module).items() if key.endswith("hooks")],
            list(module._parameters),
            getattr(module, "num_heads", None),
        )
        for name, module in model.named_modules()
    }


def random_plan(rng: random.Random) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    column = [tp.ColwiseParallel(), tp.ColwiseParallel(output_layouts=Replicate()), TorchColwise()]
    column += [tp.FusedColwiseParallel(2), legacy.ColwiseParallel(tp.make_input_replicate_1d, None)]
    for name in ("layers.0.mlp.up", "layers.*.attn.[qkv]", "**.up"):
        if rng.random() < 0.6:
            plan[name] = rng.choice(column)
    for name in ("layers.*.mlp.down", "layers.0.attn.proj"):
        if rng.random() < 0.6:
            plan[name] = rng.choice([tp.RowwiseParallel(), tp.RowwiseParallel(output_layouts=Shard(1))])
    if rng.random() < 0.5:
        plan["**.norm2"] = rng.choice([tp.SequenceParallel(), tp.NoParallel()])
    if rng.random() < 0.5:
        plan["layers.0"] = tp.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    plan["embed"] = tp.RowwiseParallel()
    plan["head"] = tp.ColwiseParallel()
    return plan


@pytest.mark.ranks(2)
def test_undo_of_random_plans(ranks: Ranks) -> None:
    """12 of them; the benchmark takes back 100."""
    mesh = ranks.mesh((2,), ("tp",))
    rng = random.Random(5)
    model = models.seeded(lambda: models.GPT(vocab=9, width=8, heads=2, layers=1, tied=True))
    model.get_parameter("layers.0.mlp.up.weight").requires_grad_(False)
    before = fingerprint(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    for _ in range(12):
        handle = tp.apply_plan(model, mesh, random_plan(rng), check="never")
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == frozen
        handle.undo()
        assert fingerprint(model) == before
        after = model.state_dict()
        assert after.keys() == state.keys()
        assert all(torch.equal(after[name], value) for name, value in state.items())
        assert not any(isinstance(value, DTensor) for value in after.values())
        assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    with pytest.raises(tp.PlanError, match="already-applied"):
        handle.undo()


@pytest.mark.ranks(2)
def test_undo_keeps_what_was_learned(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(models.MLP).double()
    reference = copy.deepcopy(model)
    handle = tp.apply_plan(model, mesh, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    batches = [torch.randn(4, 8, dtype=torch.float64) for _ in range(3)]
    models.train(model, batches, models.square_loss)
    models.train(reference, batches, models.square_loss)
    assert handle.undo() is model
    for name, parameter in reference.named_parameters():
        restored = model.get_parameter(name)
        torch.testing.assert_close(restored, parameter, atol=1e-12, rtol=0)
        torch.testing.assert_close(restored.grad, parameter.grad, atol=1e-12, rtol=0)


@pytest.mark.ranks(2)
def test_a_failed_call_changes_nothing(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(models.GPT)
    before, state = fingerprint(model), list(model.parameters())

    class Broken(tp.ParallelStyle):
        def __init__(self) -> None:
            super().__init__(None, None)

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            module.register_forward_hook(lambda *_: None)
            module.weight = nn.Parameter(torch.zeros(1))
            raise RuntimeError("on the way")

    for plan in (
        {**models.gpt_plan(), "nothing": tp.ColwiseParallel()},
        {**models.gpt_plan(), "layers.1.norm1": tp.ColwiseParallel()},
        {**models.gpt_plan(), "norm": Broken()},
    ):
        with pytest.raises((tp.PlanError, RuntimeError), match=r"unmatched|module-kind|on the way"):
            tp.apply_plan(model, mesh, plan)
        assert fingerprint(model) == before
        assert all(a is b for a, b in zip(model.parameters(), state, strict=True))


@pytest.mark.ranks(2)
def test_bad_calls(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.MLP()
    plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    with pytest.raises(tp.PlanError, match="invalid-mesh"):
        tp.apply_plan(model, ranks.mesh((1, 2), ("a", "b")), plan)
    with pytest.raises(tp.PlanError, match="wrong-type"):
        tp.apply_plan(model, mesh, ["up"])  # type: ignore[arg-type]
    with pytest.raises(tp.PlanError, match=r"wrong-type.*a dict of FQN and style"):
        tp.apply_plan(model, mesh, tp.plan_styles(model, plan, 2))  # type: ignore[arg-type]
    with pytest.raises(tp.PlanError, match="ranks-disagree"):  # on both ranks, before anything is moved
        tp.apply_plan(model, mesh, plan if ranks.rank else {"up": tp.ColwiseParallel()})
    tp.apply_plan(model, mesh, plan)
    with pytest.raises(tp.PlanError, match="already-applied"):
        tp.apply_plan(model, mesh, plan)
    with pytest.raises(tp.PlanError, match="replicas-differ"):
        tp.apply_plan(uneven_norm(ranks), mesh, tp.SequenceParallel(), src_data_rank=None)


def uneven_norm(ranks: Ranks) -> nn.Module:
    norm = nn.LayerNorm(4)
    nn.init.constant_(norm.weight, float(ranks.rank))
    return norm


@pytest.mark.ranks(2)
def test_values_of_the_source_rank_count(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    for source in (0, 1):
        torch.manual_seed(ranks.rank)
        layer = nn.Linear(4, 4)
        torch.manual_seed(source)
        expected = nn.Linear(4, 4)
        tp.parallelize_module(layer, mesh, {"": tp.ColwiseParallel()}, src_data_rank=source)
        assert isinstance(layer.weight, DTensor)
        assert torch.equal(layer.weight.full_tensor(), expected.weight)
    torch.manual_seed(ranks.rank)
    layer = nn.Linear(4, 4)
    own = layer.weight.detach().clone()
    tp.parallelize_module(layer, mesh, tp.ColwiseParallel(), src_data_rank=None)
    assert isinstance(layer.weight, DTensor)
    assert torch.equal(layer.weight.to_local(), own.chunk(2)[ranks.rank])


@pytest.mark.ranks(2)
def test_copies_and_pickles_of_a_parallel_model(ranks: Ranks) -> None:
    """Torch cannot `torch.save` a module with its styles: their hooks are closures."""
    mesh = ranks.mesh((2,), ("tp",))
    x = torch.randn(2, 8)
    model = models.seeded(models.Gated)
    tp.apply_plan(model, mesh, {"both": tp.FusedColwiseParallel(2), "down": tp.RowwiseParallel()})
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        assert not any(a is b for a, b in zip(other.parameters(), model.parameters(), strict=True))
        infos = [hasattr(p, "_sharding_info") for p in other.parameters()]
        assert infos == [hasattr(p, "_sharding_info") for p in model.parameters()]
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(model(x), expected)
        assert torch.equal(other(x), torch.zeros_like(expected))


@pytest.mark.ranks(2)
def test_meta_models(ranks: Ranks) -> None:
    """Plain tensors that are parts still know of which, after `to_empty()` has made new ones."""
    mesh = ranks.mesh((2,), ("tp",))
    with torch.device("meta"):
        model, local = models.MLP(), models.MLP()
    with ranks.record() as log:
        tp.apply_plan(model, mesh, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    assert set(log.ops) <= {"all_gather"}  # the plans are compared, no weights are sent
    model.to_empty(device=ranks.device)
    reference = models.seeded(models.MLP)
    handle = tp.apply_plan(local, mesh, {"up": tp.FusedColwiseParallel(2), "down": tp.RowwiseParallel()})
    local.to_empty(device=ranks.device).load_state_dict(reference.state_dict())
    state = tp.full_state_dict(local.double().float())
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in state.items())
    assert [type(p).__name__ for p in local.parameters()] == ["ShardParameter"] * 2 + ["DTensor"] * 2
    handle.undo()
    assert "_apply" not in vars(local.up)
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in model.named_parameters():
        value = reference.get_parameter(name).detach()
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            parameter.copy_(distribute_tensor(value, mesh, parameter.placements))
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), reference(x))


@pytest.mark.ranks(2)
def test_report(ranks: Ranks) -> None:
    model = models.MLP()
    handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {"up": tp.ColwiseParallel()})
    assert "ColwiseParallel" in handle.report()
    assert handle.plan.tp_size == 2


@pytest.mark.ranks(2)
def test_functions_that_apply_plan_enters(ranks: Ranks) -> None:
    """Each counts once, comprehensions with their function; a pair of layers, in the second call of the process."""
    mesh, plan = ranks.mesh((2,), ("tp",)), {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    for _ in range(2):
        model = models.seeded(models.MLP)
        entered = functions_entered(tp, partial(tp.apply_plan, model, mesh, plan))
    files = {file for file, _ in entered}
    assert len(entered) <= 130, (len(entered), sorted(entered))
    assert len(files) <= 18, sorted(files)
