"""State dicts are global: DTensors out; DTensors of any placement, or full tensors, in."""

from __future__ import annotations

from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from tp_ddp_bridge import is_bridged, pre_dp_module_transform, wrap_ddp


def bridged(ranks: Ranks, seed: int = 0) -> Any:
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    return pre_dp_module_transform(models.parallelize_mlp(models.seeded(models.MLP, seed), mesh))


@pytest.mark.ranks(2)
def test_out_without_communication(ranks: Ranks) -> None:
    # The seed: 2 of 6 entries after a forward, and shards that passed for the whole.
    model = bridged(ranks)
    with ranks.record(allow_empty=True) as log:
        state = model.state_dict()
        state_vars = model.state_dict(keep_vars=True)
    assert not log.events
    assert list(state) == list(models.MLP().state_dict())
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: tuple(value.shape) for name, value in models.MLP().state_dict().items()
    }
    assert state["up.weight"].placements == (Shard(0),) and not state["up.weight"].requires_grad
    assert state_vars["up.weight"].requires_grad
    leaf = dict(model.named_parameters())["up.weight"]
    assert state["up.weight"].to_local().data_ptr() == leaf.data_ptr()  # as with torch: the very memory
    models.assert_same_state(state, models.seeded(models.MLP).state_dict(), count=6, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_in_from_everything(ranks: Ranks, assign: bool) -> None:
    full = models.seeded(models.MLP, 7).state_dict()
    mesh = ranks.mesh((2,), ("tp",))
    other_mesh = ranks.mesh((1, 2), ("one", "two"))
    sources: dict[str, dict[str, Any]] = {
        "full": dict(full),
        "own": bridged(ranks, 7).state_dict(),
        "replicated": {name: distribute_tensor(value, mesh, [Replicate()]) for name, value in full.items()},
        "other dim": {name: distribute_tensor(value, mesh, [Shard(value.dim() - 1)]) for name, value in full.items()},
        "other mesh": {
            name: distribute_tensor(value, other_mesh, [Replicate(), Shard(0)]) for name, value in full.items()
        },
    }
    if not assign:
        del sources["replicated"]["head.weight"], sources["replicated"]["head.bias"]  # plain parameters stay plain
        del sources["other dim"]["head.weight"], sources["other dim"]["head.bias"]
        del sources["other mesh"]["head.weight"], sources["other mesh"]["head.bias"]
    compared = 0
    for name, source in sources.items():
        source = {
            key: value for key, value in source.items() if key.startswith(("up", "down")) or name in ("full", "own")
        }
        model = bridged(ranks)
        leaves = dict(model.named_parameters())
        missing = model.load_state_dict(source, strict=False, assign=assign)
        assert not missing.unexpected_keys
        loaded_leaves = dict(model.named_parameters())
        for key in source:
            assert torch.equal(models.whole(model.state_dict()[key]), full[key]), (name, key)
            assert (loaded_leaves[key] is leaves[key]) is (not assign)
            assert loaded_leaves[key].requires_grad and hasattr(loaded_leaves[key], "_sharding_info")
            assert not isinstance(loaded_leaves[key], DTensor)
            compared += 1
        assert is_bridged(model)
        model(torch.ones(1, 16)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert compared == 6 + 6 + 4 + 4 + 4


@pytest.mark.ranks(2)
def test_wrong_shapes_are_named_and_change_nothing(ranks: Ranks) -> None:
    model = bridged(ranks)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    bad = models.seeded(models.MLP, 3).state_dict()
    bad["up.weight"] = torch.zeros(16, 16)  # this rank's part alone: the seed loaded it
    bad["down.bias"] = torch.zeros(5)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(bad)
    text = str(caught.value)
    assert "up.weight" in text and "(32, 16)" in text and "one rank's shard" in text and "down.bias" in text
    state = model.state_dict()
    for name in ("up.weight", "down.bias"):
        assert torch.equal(models.whole(state[name]), models.whole(values[name]))
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**values, "up.other": torch.zeros(1)})


@pytest.mark.ranks(2)
def test_assign_keeps_ties_and_meta_models_can_be_filled(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.parallelize_gpt(models.seeded(models.GPT), mesh)
    model.head.weight = model.embedding.weight
    pre_dp_module_transform(model)
    expected = models.seeded(lambda: models.GPT(tied=True), 9).state_dict()
    model.load_state_dict(expected, assign=True)
    named = dict(model.named_parameters(remove_duplicate=False))
    assert named["head.weight"] is named["embedding.weight"]
    models.assert_same_state(model.state_dict(), expected, count=len(expected), atol=0)

    with torch.device("meta"):
        empty = models.MLP()
    models.parallelize_mlp(empty, mesh)
    pre_dp_module_transform(empty)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu")
    full = models.seeded(models.MLP, 2).state_dict()
    empty.load_state_dict(full)
    models.assert_same_state(empty.state_dict(), full, count=6, atol=0)
    with torch.device("meta"):
        empty = models.MLP()
    models.parallelize_mlp(empty, mesh)
    pre_dp_module_transform(empty)
    empty.load_state_dict(full, assign=True)
    models.assert_same_state(empty.state_dict(), full, count=6, atol=0)
    assert torch.equal(empty(torch.ones(1, 16)).isfinite(), torch.ones(1, 16, dtype=torch.bool))


@pytest.mark.ranks(4)
def test_through_ddp_and_the_swap_setting(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
    state = ddp.state_dict()
    assert list(state) == [f"module.{name}" for name in models.MLP().state_dict()]
    expected = models.seeded(models.MLP, 4).state_dict()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = bridged_on(mesh["tp"])
        model.load_state_dict(expected)
        model.to(torch.float64)
        assert all(hasattr(parameter, "_sharding_info") for parameter in model.parameters())
        models.assert_same_state(model.state_dict(), expected, count=6, atol=0)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    ddp.load_state_dict({f"module.{name}": value for name, value in expected.items()})
    models.assert_same_state(ddp.module.state_dict(), expected, count=6, atol=0)


def bridged_on(mesh: Any) -> Any:
    return pre_dp_module_transform(models.parallelize_mlp(models.seeded(models.MLP), mesh))


@pytest.mark.ranks(2)
def test_modules_with_state_dict_code_of_their_own(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))

    class Versioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
            register: Any = self.register_state_dict_post_hook
            register(lambda module, state, prefix, meta: state.update({prefix + "extra": 1}))
            register = self.register_load_state_dict_pre_hook
            register(lambda module, state, prefix, *rest: state.update({prefix + "w": state.pop(prefix + "old")}))

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "twice"] = self.w.detach() * 2  # reads a DTensor, as before the bridge

    model: Any = pre_dp_module_transform(Versioned())
    state = model.state_dict()
    assert state["extra"] == 1
    assert torch.equal(state["twice"].full_tensor(), torch.arange(4.0) * 2)
    assert torch.equal(state["w"].full_tensor(), torch.arange(4.0))
    model.load_state_dict({"old": torch.arange(4.0) + 1}, strict=False)  # renamed by the hook, then cut
    assert torch.equal(model.w.full_tensor(), torch.arange(4.0) + 1)
    with pytest.raises(RuntimeError, match=r"size mismatch for w: the checkpoint has shape \(5,\)"):
        model.load_state_dict({"old": torch.arange(5.0)}, strict=False)

    class Renaming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            state_dict[prefix + "w"] = state_dict.pop(prefix + "v")
            super()._load_from_state_dict(state_dict, prefix, *rest)

    renaming = pre_dp_module_transform(Renaming())
    renaming.load_state_dict({"v": torch.arange(4.0) + 2})
    assert torch.equal(models.whole(renaming.w), torch.arange(4.0) + 2)
