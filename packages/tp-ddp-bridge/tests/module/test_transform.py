"""A bridged module from outside and inside, on two tensor-parallel ranks without DDP."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from tp_ddp_bridge import PlanError, dp_bridge, grad_norm, is_bridged, pre_dp_module_transform, undo_dp_transform
from tp_ddp_bridge import _pre_dp_module_transform as seed_name
from tp_ddp_bridge._shared.full_reads import FULL_READS
from tp_ddp_bridge.layout import LEAF_TAGS
from tp_ddp_bridge.module.transform import survey


@pytest.mark.ranks(2)
def test_parameters_are_leaves_and_attributes_are_dtensors(ranks: Ranks) -> None:
    # The seed: after a forward named_parameters() had 2 of 6 names left.
    model = models.bridged_mlp(ranks)
    x = torch.ones(2, 16)
    for _ in range(3):
        model(x).sum().backward()
        named = dict(model.named_parameters())
        assert len(named) == 6
        assert all(isinstance(parameter, nn.Parameter) and parameter.is_leaf for parameter in named.values())
        assert not any(isinstance(parameter, DTensor) for parameter in named.values())
    assert isinstance(model.up.weight, DTensor)
    assert model.up.weight.shape == (32, 16)
    assert named["up.weight"].shape == (16, 16)
    assert model.up.weight.placements == (Shard(0),)
    assert isinstance(model.up.weight, nn.Parameter)
    assert type(model.up).__name__ == "Linear" and isinstance(model.up, nn.Linear)
    assert repr(model) == repr(models.MLP())
    assert is_bridged(model)
    assert seed_name is pre_dp_module_transform


@pytest.mark.ranks(2)
def test_once_is_enough(ranks: Ranks) -> None:
    model = models.bridged_mlp(ranks)
    before = dict(model.named_parameters())
    classes = [type(module) for module in model.modules()]
    assert pre_dp_module_transform(model) is model
    after = dict(model.named_parameters())
    assert all(before[name] is after[name] for name in before) and len(after) == 6
    assert classes == [type(module) for module in model.modules()]
    assert type(model.up) is type(models.bridged_mlp(ranks).up)  # one class per class and names, not per module


@pytest.mark.ranks(2)
def test_undo_gives_back_what_there_was(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
    model.up.weight.requires_grad_(False)
    model.down.weight.mark = "mine"
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    classes = [type(module) for module in model.modules()]
    expected = {name: models.whole(value) for name, value in model.state_dict().items()}
    x = torch.ones(2, 16)
    model(x).sum().backward()
    optimizer.step()
    stepped = {name: models.whole(value).clone() for name, value in model.state_dict().items()}
    grads = {name: models.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() == stepped.keys()
    state_before = {key: models.whole(value["exp_avg"]) for key, value in optimizer.state_dict()["state"].items()}

    pre_dp_module_transform(model, optimizers=optimizer)
    frozen = dict(model.named_parameters())["up.weight"]
    assert not frozen.requires_grad
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert not any(isinstance(v, DTensor) for state in optimizer.state.values() for v in state.values())
    assert all(p.grad is not None for name, p in model.named_parameters() if name != "up.weight")

    undo_dp_transform(model, optimizers=[optimizer])
    assert not is_bridged(model)
    assert [type(module) for module in model.modules()] == classes
    models.assert_same_state(model.state_dict(), stepped, count=6, atol=0)
    back = dict(model.named_parameters())
    assert [name for name, p in back.items() if isinstance(p, DTensor)] == [
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    ]
    assert not back["up.weight"].requires_grad and back["up.bias"].requires_grad
    assert back["down.weight"].mark == "mine"
    assert not hasattr(back["down.weight"], "_sharding_info") and not hasattr(back["head.weight"], "_sharding_info")
    compared = 0
    for name, grad in grads.items():
        assert torch.equal(models.whole(back[name].grad), grad)
        compared += 1
    assert compared == 5
    for key, value in optimizer.state_dict()["state"].items():
        assert torch.equal(models.whole(value["exp_avg"]), state_before[key])
    optimizer.step()


@pytest.mark.ranks(2)
def test_a_block_that_raises_is_undone(ranks: Ranks) -> None:
    model = models.parallelize_mlp(models.MLP(), ranks.mesh((2,), ("tp",)))

    def fail_inside() -> None:
        with dp_bridge(model) as inside:
            assert inside is model and is_bridged(model)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail_inside()
    assert not is_bridged(model)
    assert isinstance(next(model.parameters()), DTensor)


@pytest.mark.ranks(2)
def test_ties_frozen_integers_and_attributes(ranks: Ranks) -> None:
    # The seed failed on ties and integers, and made frozen parameters trainable.
    mesh = ranks.mesh((2,), ("tp",))

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)
            self.b = nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight
            self.codes = nn.Parameter(torch.arange(8), requires_grad=False)
            self.items = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
            self.named = nn.ParameterDict({"scale": nn.Parameter(torch.full((4,), 2.0))})

        def forward(self, x: torch.Tensor) -> Any:
            assert self.a.weight is self.b.weight  # one view per leaf and forward
            y = self.b(self.a(x))
            extra = self.items[0] + self.items[1] * self.named["scale"]
            codes: Any = self.codes.sum()
            return y.sum().full_tensor() + extra.sum().full_tensor() + codes.full_tensor()

    torch.manual_seed(0)
    model = Odd()

    def spread(module: nn.Module) -> None:
        spread_parameters: dict[int, nn.Parameter] = {}
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                new = spread_parameters.setdefault(
                    id(parameter),
                    nn.Parameter(
                        distribute_tensor(parameter.detach(), mesh, [Shard(0)]), requires_grad=parameter.requires_grad
                    ),
                )
                owner.register_parameter(name, new)

    reference = copy.deepcopy(model)
    spread(model)
    pre_dp_module_transform(model)
    surveyed = survey(model).bridgeable
    assert surveyed[0].name == "codes"
    tied = next(each for each in surveyed if len(each.registrations) > 1)
    assert [fqn for _, _, fqn in tied.registrations] == ["a.weight", "b.weight"]
    names = [name for name, _ in model.named_parameters()]
    assert names == ["codes", "a.weight", "items.0", "items.1", "named.scale"]
    assert model.codes.dtype == torch.int64 and not dict(model.named_parameters())["codes"].requires_grad
    x = distribute_tensor(torch.ones(2, 8), mesh, [Replicate()])
    model(x).backward()
    want = functional.linear(functional.linear(torch.ones(2, 8), reference.a.weight), reference.a.weight).sum()
    torch.autograd.backward(want)
    leaf = dict(model.named_parameters())["a.weight"]
    assert leaf.grad is not None and not isinstance(leaf.grad, DTensor)
    torch.testing.assert_close(models.whole(model.a.weight.grad), reference.a.weight.grad, atol=1e-5, rtol=0)
    undo_dp_transform(model)
    assert model.a.weight is model.b.weight


@pytest.mark.ranks(2)
def test_full_parameters_are_refused_in_the_place_of_leaves(ranks: Ranks) -> None:
    """A handle that shards and gives back writes into the parameters' table itself."""
    model = models.bridged_mlp(ranks)
    refused = 0
    for name, leaf in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        full = nn.Parameter(models.whole(model.state_dict()[name]))
        full.__dict__.update({key: value for key, value in vars(leaf).items() if key != "_sharding_info"})
        with pytest.raises(PlanError, match="undo_dp_transform"):
            owner._parameters[name.rpartition(".")[2]] = full
        refused += 1
    assert refused == 6 and is_bridged(model)
    model.to(torch.float64)  # torch writes there as well
    model.head.weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.float64))
    model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
    undo_dp_transform(model)
    assert {type(module._parameters) for module in model.modules()} == {dict}


@pytest.mark.ranks(2)
def test_norms_of_shards_are_refused(ranks: Ranks) -> None:
    model = models.bridged_mlp(ranks)
    leaves = dict(model.named_parameters())
    with torch.no_grad():
        for name in ("up.weight", "up.bias", "down.weight"):
            with pytest.raises(PlanError, match="local-shard-as-full"):
                leaves[name].div_(leaves[name].norm())
        full: Any = model.up.weight.norm()
        assert float(full.full_tensor()) == pytest.approx(float(models.seeded(models.MLP).up.weight.norm()))
        assert float(leaves["down.bias"].norm()) == pytest.approx(float(models.seeded(models.MLP).down.bias.norm()))
    undo_dp_transform(model)
    assert all(type(parameter) is nn.Parameter or isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.ranks(2)
def test_reads_and_draws_of_a_full_weight_are_refused_on_shards(ranks: Ranks) -> None:
    # On a shard of 16 of 32 rows xavier_uniform_ takes a bound that is too large, and both ranks draw the same numbers.
    model = models.bridged_mlp(ranks)
    leaves = dict(model.named_parameters())
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    reads = [name for func, name in FULL_READS.items() if getattr(torch.Tensor, name, None) is func]
    if torch.__version__ >= "2.14":
        reads.remove("qr")  # the method raises on every tensor there: torch.linalg.qr replaced it
    assert {"norm", "std", "mean", "max", "sort", "svd", "normal_", "uniform_"} <= set(reads) and len(reads) > 50
    leaf = leaves["up.weight"]
    # torch parses arguments before it asks the class.
    arguments: dict[str, tuple[Any, ...]] = {"constant_": (0.5,), "sparse_": (0.5,), "renorm": (2, 0, 1.0)}
    arguments |= dict.fromkeys(("logsumexp", "softmax", "log_softmax", "cumsum", "cumprod", "cummax", "cummin"), (0,))
    arguments |= dict.fromkeys(("logcumsumexp", "flip", "argsort"), (0,)) | {"roll": (1,), "bernoulli_": (0.5,)}
    arguments |= dict.fromkeys(("quantile", "nanquantile", "geometric_"), (0.5,))
    arguments |= dict.fromkeys(("kthvalue", "topk", "matrix_power"), (1,))
    arguments |= dict.fromkeys(("dot", "vdot", "inner"), (leaf,))
    for name in reads:
        way_on = "initialise before" if name.endswith("_") else rf"{name} of module\.weight"
        with pytest.raises(PlanError, match=rf"local-shard-as-full\] {name}\(\): .*{way_on}"):
            getattr(leaf, name)(*arguments.get(name, ()))
    for name in ("std", "mean", "amax"):  # the way on, and replicated leaves, are right
        full: Any = getattr(model.up.weight.detach(), name)()
        expected = getattr(models.seeded(models.MLP).up.weight.detach(), name)()
        torch.testing.assert_close(full.full_tensor(), expected, rtol=1e-6, atol=1e-9)
        assert torch.equal(getattr(leaves["down.bias"], name)(), getattr(before["down.bias"], name)())
    # Rows are sharded: a reduction over the columns is right.
    assert torch.equal(leaf.sum(1), before["up.weight"].sum(1)) and leaf.norm(dim=-1).shape == (16,)
    with pytest.raises(PlanError, match="local-shard-as-full"):
        leaf.sum(0)

    refused = []
    for name in [each for each in dir(nn.init) if each.endswith("_") and not each.startswith("_")]:
        if name not in ("ones_", "zeros_", "constant_"):
            with pytest.raises(PlanError, match=r"local-shard-as-full.*initialise before"):
                getattr(nn.init, name)(leaf, *arguments.get(name, ()))
            refused.append(name)
            assert torch.equal(leaf, before["up.weight"]), name
    assert {"xavier_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_", "eye_", "dirac_"} <= set(refused)
    assert len(refused) == 11
    nn.init.uniform_(leaves["down.bias"])
    for name, value in (("zeros_", 0.0), ("ones_", 1.0), ("constant_", 0.5)):
        getattr(nn.init, name)(leaf, *arguments.get(name, ()))
        assert torch.equal(model.up.weight.full_tensor(), torch.full((32, 16), value))

    model.to(torch.float64)  # the tags are set again
    with pytest.raises(PlanError, match="local-shard-as-full"):
        nn.init.orthogonal_(dict(model.named_parameters())["down.weight"])
    copied = copy.deepcopy(leaf)  # a copy of a leaf alone is an ordinary parameter
    assert type(copied) is nn.Parameter and copied.norm() == copied.detach().norm() > 0
    undo_dp_transform(model)
    assert not vars(model.up.weight).keys() & LEAF_TAGS


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch.norm": torch.norm,
    "torch.linalg.norm": torch.linalg.norm,
    "svdvals": torch.linalg.svdvals,
    "vector_norm of several": lambda leaf: torch.linalg.vector_norm(leaf, dim=(0, 1)),
    "quantile": lambda leaf: torch.quantile(leaf, 0.9),
    "topk": lambda leaf: leaf.topk(2, dim=0),
    "cosine": lambda leaf: functional.cosine_similarity(leaf, torch.ones(16), dim=0),
    "largest magnitude": lambda leaf: leaf.abs().max(),
    "L1": lambda leaf: leaf.abs().sum(),
    "L2": lambda leaf: leaf.pow(2).sum(),
    "L2 by a product": lambda leaf: (leaf * leaf).mean(),
    "L2 beside others": lambda leaf: sum([torch.zeros(()), (leaf * 2 + 1).square().sum()]),
    "sparsity": lambda leaf: (leaf.abs() > 0.1).sum(),
    "flattened": lambda leaf: leaf.view(-1).norm(),
    "transposed": lambda leaf: leaf.t().std(1),
    "rows": lambda leaf: leaf[2:].amax(),
    "in single precision": lambda leaf: leaf.to(torch.float64).float().norm(),
    "as one vector": lambda leaf: torch.nn.utils.parameters_to_vector([leaf, leaf]).norm(),
    "foreach": lambda leaf: torch._foreach_norm([leaf, leaf]),
    "total norm": lambda leaf: torch.nn.utils.get_total_norm([leaf, leaf]),
    "softmax over rows": lambda leaf: functional.softmax(leaf, 0),
    "each column scaled by its rows": lambda leaf: leaf.renorm(2, 1, 1.0),
    "rolled as one vector": lambda leaf: leaf.roll(1),
    "flipped both ways": lambda leaf: leaf.flip(1, 0),
    "largest of each row's norm": lambda leaf: leaf.norm(dim=1).max(),
    "sorted rows": lambda leaf: leaf.sort(1).values.sum(0),
    "largest of chunks": lambda leaf: leaf.chunk(2)[1].max(),
    "shards of two layouts": lambda leaf: (leaf * leaf.t()).sum(1),
    "each row": lambda leaf: [row.sum() for row in leaf],
    "padded": lambda leaf: functional.pad(leaf, (1, 1)).max(),
    "broadcast": lambda leaf: (leaf.unsqueeze(0) * torch.ones(3, 1, 1)).sum(),
    "masked": lambda leaf: leaf[leaf > 0].mean(),
    "differences": lambda leaf: torch.diff(leaf).norm(),
    "a loss of it": lambda leaf: functional.mse_loss(leaf, torch.zeros(16, 16)),
    "its product with itself": lambda leaf: torch.einsum("ij,ij->", leaf, leaf),
    "its dot product": lambda leaf: torch.dot(leaf.view(-1), leaf.view(-1)),
    "a transform of it": lambda leaf: torch.fft.fft(leaf, dim=0),
    "covariance": torch.cov,
    "a copy": lambda leaf: leaf.clone().mean(),
    "one element": lambda leaf: leaf[0, 0].item(),
    "an element as a number": lambda leaf: float(leaf[2:, 3:][0, 0]),
    "an element of a list": lambda leaf: leaf[[0], [1]].item(),
    "an element in a sum": lambda leaf: torch.zeros(()) + leaf[0, 0],
    "an element that is compared": lambda leaf: bool(leaf[0, 0] > 0),
    "an element in a text": lambda leaf: f"{leaf[1, 1]:.3f}",
    "the gradient of an element": lambda leaf: leaf[0, 0].backward(),
    "elements one by one": lambda leaf: [each.tolist() for row in leaf for each in row],
    "the largest by Python": lambda leaf: max(leaf[0]),
}


@pytest.mark.ranks(2)
def test_functions_that_take_a_leaf_for_the_full_weight_are_refused(ranks: Ranks) -> None:
    # torch.norm(leaf) was the norm of 16 of 32 rows, another number on each rank.
    model = models.bridged_mlp(ranks)
    leaf = dict(model.named_parameters())["up.weight"]
    leaf.grad = torch.randn(16, 16)
    gradient: Any = leaf.grad
    for shard in (leaf, gradient):
        before = shard.detach().clone()
        for name, read in READS.items():
            with pytest.raises(PlanError, match="local-shard-as-full"):
                pytest.fail(f"{name}: {read(shard)}")
            assert torch.equal(shard, before), name


RIGHT: dict[str, Callable[[torch.Tensor], Any]] = {
    "detached": lambda leaf: torch.norm(leaf.detach()),
    "data": lambda leaf: leaf.data.abs().max(),
    "norm of each row": lambda leaf: torch.linalg.vector_norm(leaf, dim=1),
    "largest of each row": lambda leaf: leaf.abs().amax(1),
    "top of each row": lambda leaf: leaf.topk(2, 1).values,
    "shape": lambda leaf: torch.tensor([*leaf.shape, leaf.numel(), leaf.stride(0)]),
    "each row flipped and rolled": lambda leaf: leaf.flip(1).roll(2, 1).amax(1),
    "larger of two": lambda leaf: torch.max(leaf, leaf * 2).detach(),
    "NaN in memory": lambda leaf: torch.isnan(leaf).any() | ~torch.isfinite(leaf).all(),
    "another tensor": lambda leaf: torch.ones(3).add_(leaf.detach()[0, :3]).norm(),
    "on a batch": lambda leaf: functional.linear(torch.ones(16, 16), leaf).sum(),
    "products": lambda leaf: (torch.ones(16, 16) @ leaf).sum() + leaf.mm(torch.ones(16, 16)).sum(),
    "equal": lambda leaf: torch.tensor(torch.equal(leaf, leaf.clone())),
    "moving average": lambda leaf: torch.zeros(16, 16).lerp_(leaf.detach(), 0.1).mean(),
    "a tensor of its shape": lambda leaf: torch.ones_like(leaf).norm() + leaf.new_zeros(16, 16).sum(),
    "index": lambda leaf: leaf.detach()[0, 0].item() + torch.zeros(()),
}


@pytest.mark.ranks(2)
def test_reads_of_a_shard_as_a_shard_go_on(ranks: Ranks) -> None:
    model = models.bridged_mlp(ranks)
    leaf, replicated = (dict(model.named_parameters())[name] for name in ("up.weight", "down.bias"))
    plain = nn.Parameter(leaf.detach().clone())
    leaf.grad, plain.grad = torch.ones(16, 16), torch.ones(16, 16)
    for name, read in RIGHT.items():
        for shard, expected in ((leaf, plain), (leaf.grad, plain.grad)):
            result = read(shard).detach()
            assert type(result) is torch.Tensor and torch.equal(result, read(expected).detach()), name
    with torch.no_grad():  # writes by index go to the shard
        for each in (leaf, plain):
            each[0] = 1.0
            each[3:].mul_(2.0)
            each.view(-1)[7] += 1.0
    assert torch.equal(leaf, plain)
    for read in (torch.norm, torch.linalg.vector_norm, lambda each: each.abs().max(), lambda each: each.pow(2).sum()):
        assert torch.equal(read(replicated), read(replicated.detach()))
    loaded = pickle.loads(pickle.dumps(leaf.abs()))
    assert type(loaded) is torch.Tensor and torch.equal(loaded, plain.abs())
    for kind in (copy.copy, copy.deepcopy):  # a module's copy has leaves of its own, refused as well
        with pytest.raises(PlanError, match="local-shard-as-full"):
            torch.norm(dict(kind(model).named_parameters())["up.weight"])


@pytest.mark.ranks(2)
def test_gradients_are_refused_as_leaves_are(ranks: Ranks) -> None:
    # torch's clip_grad_norm_ scaled by the norm of one rank's shards, and raised at some steps alone.
    model, reference = models.bridged_mlp(ranks), models.seeded(models.MLP)
    leaf = dict(model.named_parameters())["up.weight"]
    x = torch.ones(2, 16)
    for each in (model, reference):
        each(x).pow(2).sum().backward()
    clips: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda: nn.utils.clip_grad_norm_([leaf], 1e6, foreach=False),
        lambda: nn.utils.get_total_norm([leaf.grad, leaf.grad]),
        lambda: leaf.grad.norm(),
    ]
    before = [p.grad.detach().clone() for p in model.parameters()]
    for clip in clips:
        with pytest.raises(PlanError, match=r"local-shard-as-full.*tp_ddp_bridge.clip_grad_norm_"):
            clip()
    assert all(torch.equal(p.grad, saved) for p, saved in zip(model.parameters(), before, strict=True))
    full = model.up.weight.grad.full_tensor()  # the way on
    torch.testing.assert_close(full, reference.up.weight.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad_norm([leaf]), full.norm())
    for each in (model, reference):
        nn.utils.clip_grad_value_(each.parameters(), 0.01)
    torch.testing.assert_close(model.up.weight.grad.full_tensor(), reference.up.weight.grad)

    gradient = leaf.grad
    assert gradient is leaf.grad is not None
    gradient.data = torch.full((16, 16), 2.0)  # of the leaf's gradient, no copy of it
    assert torch.equal(leaf.grad, torch.full((16, 16), 2.0))
    leaf.grad = leaf.grad * 0.5 + 1
    assert torch.equal(leaf.grad, torch.full((16, 16), 2.0)) and copy.deepcopy(leaf.grad).sum() == 512
    model.zero_grad(set_to_none=False)
    assert torch.count_nonzero(leaf.grad.detach()) == 0


@pytest.mark.ranks(2)
def test_hooks_of_leaves_see_gradients_that_are_refused(ranks: Ranks) -> None:
    model = models.bridged_mlp(ranks)
    leaf = dict(model.named_parameters())["up.weight"]
    norms: list[torch.Tensor] = []
    handle = leaf.register_hook(lambda gradient: gradient / gradient.norm())
    with pytest.raises(PlanError, match="local-shard-as-full"):
        model(torch.ones(2, 16)).sum().backward()
    handle.remove()
    handles = [
        leaf.register_hook(lambda gradient: gradient * 2),
        leaf.register_hook(lambda gradient: norms.append(gradient.detach().norm())),
    ]
    model.zero_grad()
    model(torch.ones(2, 16)).sum().backward()
    doubled = leaf.grad.detach().clone()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    model(torch.ones(2, 16)).sum().backward()
    assert torch.equal(doubled, leaf.grad * 2) and torch.equal(norms[0], doubled.norm())


@pytest.mark.ranks(2)
def test_the_way_on_for_a_penalty_trains_as_one_process(ranks: Ranks) -> None:
    # `sum(p.pow(2).sum() for p in model.parameters())` would count replicated leaves as often as there are ranks.
    reference, model = models.seeded(models.MLP), models.bridged_mlp(ranks)
    x = torch.randn(4, 16)
    for step in range(5):
        losses = []
        for each in (reference, model):
            each.zero_grad()
            full: Any = each.state_dict(keep_vars=True)
            terms = [weight.abs().sum() + weight.pow(2).sum() for weight in full.values()]
            penalty: Any = sum(each.full_tensor() if isinstance(each, DTensor) else each for each in terms)
            loss = each(x + step).pow(2).mean() + 0.01 * penalty
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.sub_(0.1 * parameter.grad)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    for name, weight in reference.named_parameters():
        full = model.state_dict()[name]
        torch.testing.assert_close(full.full_tensor() if isinstance(full, DTensor) else full, weight.detach())


@pytest.mark.ranks(2)
def test_leaves_are_ordinary_parameters_in_a_step_alone(ranks: Ranks) -> None:
    # torch takes multi-tensor and fused kernels for no class but Parameter.
    model = models.bridged_mlp(ranks)
    kinds: list[type] = []

    class Seeing(torch.optim.SGD):
        is_elementwise = True

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            kinds.extend(type(each) for group in self.param_groups for each in group["params"])
            for each in self.param_groups[0]["params"]:
                assert type(each.grad) is torch.Tensor
                each.sub_(0.1 * each.grad / (each.norm() + each.grad.norm()))  # the author says that shards will do

    optimizer = Seeing(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(2, 16)).sum().backward()
        with pytest.raises(PlanError, match="local-shard-as-full"):
            dict(model.named_parameters())["up.bias"].grad.mean()
        assert all(p.grad is not None for p in model.parameters())  # read before the step
        optimizer.step()
        assert set(kinds) == {nn.Parameter} and len(kinds) == 6
        kinds.clear()
        with pytest.raises(PlanError, match="local-shard-as-full"):
            torch.norm(optimizer.param_groups[0]["params"][0])


@pytest.mark.ranks(2)
def test_hook_on_a_leaf_stops_undo(ranks: Ranks) -> None:
    model = models.bridged_mlp(ranks)
    handle = dict(model.named_parameters())["up.weight"].register_hook(lambda grad: None)
    with pytest.raises(ValueError, match="parameter-hooks"):
        undo_dp_transform(model)
    assert is_bridged(model)
    handle.remove()
    undo_dp_transform(model)


@pytest.mark.ranks(2)
def test_a_module_that_keeps_a_reference_to_a_replaced_parameter_raises(ranks: Ranks) -> None:
    # Its gradient would go to an object that no optimizer holds; with find_unused_parameters DDP would not notice.
    mesh = ranks.mesh((2,), ("tp",))

    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
            self.kept = [self.w]

        def forward(self) -> Any:
            return (self.kept[0] * 2).sum()

    model = pre_dp_module_transform(Keeper())
    with pytest.raises(PlanError, match=r"parameter-replaced\] w: a gradient arrived"):
        model().backward()
