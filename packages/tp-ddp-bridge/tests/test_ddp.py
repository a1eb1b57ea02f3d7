"""A sample of the matrix, and the guards of every DDP around leaves."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any, ClassVar

import bridge_models as models
import pytest
import torch
import torch.distributed as dist
from bridge_cells import OPTIONS, SITUATIONS, cells, run_cell, zero_optimizer
from bridge_subjects import ADAM_ATOL, SUBJECTS, adam
from ranktest import Ranks
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tp_ddp_bridge import PlanError, check_optimizer, check_replicas, pre_dp_module_transform, wrap_ddp

SAMPLED: dict[str, list[tuple[str, str]]] = {
    "options": [(name, "MLP") for name in OPTIONS],
    "options of a transformer": [
        ("static_graph", "transformer"),
        ("gradient_as_bucket_view", "transformer"),
    ],
    "unused parameters": [("unused parameters", "MLP")],
    "ways to step": [
        ("no_sync accumulation", "MLP"),
        ("two forwards, one backward", "MLP"),
        ("clip_grad_norm_", "MLP"),
        ("GradScaler", "MLP"),
    ],
    "join": [("join, uneven inputs", "MLP")],
    "hooks": [(name, "MLP") for name in SITUATIONS if name.endswith(" hook")],
    "zero": [("ZeroRedundancyOptimizer", "MLP")],
    "checkpointing": [(name, "transformer") for name in SITUATIONS if name.startswith("checkpointing")],
    "autocast": [("autocast", "MLP")],
    "sequence and loss": [("SequenceParallel", "transformer"), ("loss_parallel", "transformer")],
    "Llama": [("default", "Llama of transformers")],
}


def run(ranks: Ranks, sample: str) -> None:
    for situation, subject in SAMPLED[sample]:
        compared = run_cell(ranks, situation, subject)
        assert compared.tensors >= SUBJECTS[subject].tensors > 0
        assert compared.greatest <= compared.atol
        # Ranks add gradients in another order than one process: a difference of 0 would say that nothing was trained.
        assert compared.greatest > 0 or situation == "default"


def test_every_situation_and_every_model_is_sampled() -> None:
    sampled = [cell for sample in SAMPLED.values() for cell in sample]
    assert {situation for situation, _ in sampled} == set(SITUATIONS)
    assert {subject for _, subject in sampled} == set(SUBJECTS)
    assert set(sampled) <= set(cells()) and len(cells()) == 3 * len(SITUATIONS) - 2


@pytest.mark.ranks(4)
def test_options(ranks: Ranks) -> None:
    run(ranks, "options")


@pytest.mark.ranks(4)
def test_weights_are_averaged_through_the_module_inside(ranks: Ranks) -> None:
    # AveragedModel copies what it gets, and torch copies no DDP over a group of some ranks.
    mesh, task = ranks.mesh((2, 2), ("dp", "tp")), models.vectors()
    reference = models.seeded(models.MLP)
    ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
    for copies in (copy.deepcopy, pickle.dumps, AveragedModel):
        with pytest.raises(PlanError, match=r"unsupported-wrapper.*AveragedModel\(ddp\.module\)"):
            copies(ddp)
    averages: list[Any] = []
    for model, inner, index, count in ((reference, reference, 0, 1), (ddp, ddp.module, mesh["dp"].get_local_rank(), 2)):
        average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            models.train(model, optimizer, task, index=index, count=count, steps=1)
            average.update_parameters(model)
        averages.append(average.module)
    expected = averages[0].state_dict()
    models.assert_same_state(averages[1].state_dict(), expected, count=6, atol=1e-6)
    started = models.seeded(models.MLP).state_dict()
    assert all(not torch.equal(expected[name], started[name]) for name in expected)


@pytest.mark.ranks(4)
def test_transformer_options(ranks: Ranks) -> None:
    """Tied embeddings beside the sample: one leaf, reduced once."""
    run(ranks, "options of a transformer")
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.tokens()
    reference = models.seeded(functools.partial(models.GPT, tied=True, depth=1))
    models.train(reference, adam(reference.parameters()), task)
    count = len(list(reference.parameters()))
    for options in ("default", "static_graph", "tiny buckets"):
        model: Any = models.parallelize_gpt(models.seeded(functools.partial(models.GPT, depth=1)), mesh["tp"])
        model.head.weight = model.embedding.weight  # torch's parallelize_module unties; tie what it made
        optimizer = adam(model.parameters())
        ddp = wrap_ddp(model, mesh=mesh, optimizers=optimizer, **OPTIONS[options])
        assert check_optimizer(ddp, optimizer) == len(list(ddp.parameters())) == count, options
        models.train(ddp, optimizer, task, index=mesh["dp"].get_local_rank(), count=2)
        models.assert_same_state(model.state_dict(), reference.state_dict(), count=count + 1, atol=ADAM_ATOL)


@pytest.mark.ranks(4)
def test_unused_parameters(ranks: Ranks) -> None:
    run(ranks, "unused parameters")


@pytest.mark.ranks(4)
def test_ways_to_step(ranks: Ranks) -> None:
    run(ranks, "ways to step")


@pytest.mark.ranks(4)
def test_join_with_uneven_inputs(ranks: Ranks) -> None:
    run(ranks, "join")


@pytest.mark.ranks(4)
def test_communication_hooks(ranks: Ranks) -> None:
    run(ranks, "hooks")


@pytest.mark.ranks(4)
def test_hooks_over_the_wrong_ranks_are_refused(ranks: Ranks) -> None:
    # In the default group, gradients of different shards would be averaged.
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    ddp = wrap_ddp(models.parallelize_mlp(models.MLP(), mesh["tp"]), mesh=mesh)
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2)
    with pytest.raises(ValueError, match="different shards would be mixed"):
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    with pytest.raises(ValueError, match="mesh-mismatch"):
        ddp.register_comm_hook(mesh["tp"].get_group(), default_hooks.fp16_compress_hook)
    pairs, _ = dist.new_subgroups(2)  # torch's default: ranks of one node, which hold different shards
    local = post_localSGD_hook.PostLocalSGDState(ddp.process_group, pairs, 2)
    with pytest.raises(ValueError, match=r"mesh-mismatch.*subgroup"):
        ddp.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)


def average_over(group: Any, divide: bool = True) -> Any:
    """A hook as users write it. ``None`` is the default group, whose ranks hold different shards."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotation that is a text
        size = dist.get_world_size(group) if divide else 1
        work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / size)

    return hook


@pytest.mark.ranks(4)
def test_hooks_of_users_are_tried_when_they_are_registered(ranks: Ranks) -> None:
    mesh, model = sharded(ranks)
    group = mesh["dp"].get_group()
    pairs = [
        (average_over(None), "does it name the group"),
        (default_hooks.fp16_compress_wrapper(average_over(None)), "does it name the group"),
        (average_over(group, divide=False), "does it name the group"),
        (average_over(mesh["tp"].get_group()), "does it name the group"),
        (lambda state, bucket: 1 / 0, "ZeroDivisionError"),
    ]
    pre_dp_module_transform(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for hook, reason in pairs:
        ddp: Any = wrap_ddp(model, mesh=mesh)
        with pytest.raises(PlanError, match=rf"invalid-hook.*{reason}"):
            ddp.register_comm_hook(None, hook)
        plain: Any = DistributedDataParallel(model, process_group=group)  # asks nobody: tried in its first forward
        plain.register_comm_hook(None, hook)
        with pytest.raises(PlanError, match=rf"invalid-hook.*{reason}"):
            plain(torch.ones(1, 16))
    assert sum(torch.equal(before[name], parameter) for name, parameter in model.named_parameters()) == 6
    by_design = average_over(None)
    by_design.is_data_parallel = True
    wrap_ddp(model, mesh=mesh).register_comm_hook(None, by_design)


@pytest.mark.ranks(4)
def test_a_right_hook_of_a_user_trains_as_one_process(ranks: Ranks) -> None:
    class Counter:
        calls = 0
        counts: ClassVar[dict[int, int]] = {}

    for make in (average_over, lambda group: default_hooks.fp16_compress_wrapper(average_over(group))):
        mesh, model = sharded(ranks)
        reference, state = models.seeded(models.MLP), Counter()
        ddp: Any = wrap_ddp(model, mesh=mesh)
        ddp.register_comm_hook(state, make(ddp.process_group))
        assert state.calls == 0 and state.counts == {}
        index = mesh["dp"].get_local_rank()
        models.train(ddp, torch.optim.SGD(ddp.parameters(), 0.1), models.vectors(), index=index, count=2)
        models.train(reference, torch.optim.SGD(reference.parameters(), 0.1), models.vectors())
        atol = 5e-7 if make is average_over else 1e-3  # float16 on the wire
        models.assert_same_state(model.state_dict(), reference.state_dict(), count=6, atol=atol)


@pytest.mark.ranks(4)
def test_zero_1(ranks: Ranks) -> None:
    run(ranks, "zero")
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    ddp = wrap_ddp(models.parallelize_mlp(models.MLP(), mesh["tp"]), mesh=mesh)
    wrong = zero_optimizer(ddp.parameters())  # cut over all ranks, which hold different shards
    with pytest.raises(ValueError, match="mesh-mismatch"):
        check_optimizer(ddp, wrong)


@pytest.mark.ranks(4)
def test_activation_checkpointing(ranks: Ranks) -> None:
    run(ranks, "checkpointing")


@pytest.mark.ranks(4)
def test_autocast(ranks: Ranks) -> None:
    run(ranks, "autocast")


@pytest.mark.ranks(4)
def test_sequence_and_loss_parallel(ranks: Ranks) -> None:
    run(ranks, "sequence and loss")


@pytest.mark.extra("transformers")
@pytest.mark.ranks(4, timeout=240)  # four imports of transformers
def test_a_transformers_model(ranks: Ranks) -> None:
    run(ranks, "Llama")


# ---- guards --------------------------------------------------------------------------------------------------------


def sharded(ranks: Ranks) -> tuple[Any, Any]:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    return mesh, models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])


@pytest.mark.ranks(4)
def test_parameters_that_ddp_does_not_reduce_are_refused(ranks: Ranks) -> None:
    # Data-parallel replicas of them would drift apart without a word.
    def thawed(model: Any) -> None:
        model.head.requires_grad_(True)

    def replaced(model: Any) -> None:
        model.head = nn.Linear(16, 16)

    def reassigned(model: Any) -> None:
        model.head.weight = nn.Parameter(torch.zeros(16, 16))

    def added(model: Any) -> None:
        model.up.register_parameter("lora", nn.Parameter(torch.zeros(2, 2)))

    def added_below(model: Any) -> None:
        model.up.adapter = nn.Sequential(nn.Linear(2, 2))

    def assigned(model: Any) -> None:
        model.load_state_dict(model.state_dict(), assign=True)

    refused = 0
    for change in (thawed, replaced, reassigned, added, added_below, assigned):
        for steps in (0, 3):
            mesh, model = sharded(ranks)
            model.head.requires_grad_(change is not thawed)
            ddp = wrap_ddp(model, mesh=mesh)
            optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
            models.train(ddp, optimizer, models.vectors(), index=mesh["dp"].get_local_rank(), count=2, steps=steps)
            torch.manual_seed(ranks.rank)
            change(model)
            with pytest.raises(PlanError, match="parameter-replaced"):
                ddp(torch.ones(1, 16))
            refused += 1
    assert refused == 12


@pytest.mark.ranks(4)
def test_parameters_that_ddp_reduces_may_be_frozen_and_thawed(ranks: Ranks) -> None:
    mesh, model = sharded(ranks)
    reference = models.seeded(models.MLP)
    ddp = wrap_ddp(model, mesh=mesh, find_unused_parameters=True)
    pairs = ((ddp, model, mesh["dp"].get_local_rank(), 2), (reference, reference, 0, 1))
    for run, inner, index, count in pairs:
        optimizer = torch.optim.SGD(inner.parameters(), 0.1)
        for step in range(6):
            inner.down.requires_grad_(step % 2 == 0)
            x, y = models.vectors().part(step, index, count)
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(run(x), y))
            optimizer.step()
    models.assert_same_state(model.state_dict(), reference.state_dict(), count=6, atol=5e-7)


@pytest.mark.ranks(4)
def test_plain_ddp_over_tensor_parallel_ranks_raises_before_it_broadcasts(ranks: Ranks) -> None:
    mesh, model = sharded(ranks)
    pre_dp_module_transform(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    outer = nn.Sequential(nn.Linear(16, 16), model)  # wherever in the module the leaves are
    composed = pre_dp_module_transform(sharded(ranks)[1])
    wraps: list[Any] = [
        lambda: DistributedDataParallel(model),
        lambda: DistributedDataParallel(outer, find_unused_parameters=True),
        lambda: DistributedDataParallel(model, process_group=mesh["tp"].get_group()),
        lambda: replicate(composed)(torch.ones(1, 16)),  # it makes its DDP in the first forward
    ]
    with ranks.record(allow_empty=True) as log:
        for wrap in wraps:
            with pytest.raises(PlanError, match="mesh-mismatch"):
                wrap()
    assert not log.events
    assert sum(torch.equal(before[name], p) for name, p in model.named_parameters()) == 6
    ddp = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    models.train(
        ddp, torch.optim.SGD(ddp.parameters(), 0.1), models.vectors(), index=mesh["dp"].get_local_rank(), count=2
    )
    model.head = nn.Linear(16, 16)
    with pytest.raises(PlanError, match="parameter-replaced"):  # guarded like that of wrap_ddp
        ddp(torch.ones(1, 16))


@pytest.mark.ranks(4)
def test_the_first_forward_compares_all_ranks(ranks: Ranks) -> None:
    mesh, _ = sharded(ranks)
    pairs: Any = [[0, 3], [1, 2]]
    crossed, _ = dist.new_subgroups_by_enumeration(pairs)
    refused = []
    for name in ("up.weight", "down.bias", "head.weight"):  # sharded, a replicated leaf, plain
        for kind in ("wrap_ddp", "plain"):
            _, model = sharded(ranks)
            if kind == "plain":
                pre_dp_module_transform(model)
                ddp: Any = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
            else:
                ddp = wrap_ddp(model, mesh=mesh)
            with torch.no_grad():  # a checkpoint that one rank reads wrongly
                dict(model.named_parameters())[name].view(-1)[0] += ranks.rank == 3
                ddp(torch.ones(1, 16))  # nothing is compared without gradients,
            ddp.eval()(torch.ones(1, 16))  # nor in evaluation,
            ddp.train()
            with ddp.no_sync():
                ddp(torch.ones(1, 16))  # nor where DDP does not synchronize
            with pytest.raises(PlanError, match=rf"replicas-differ\] {name}"):
                ddp(torch.ones(1, 16))
            refused.append(name)
    assert len(refused) == 6
    # Torch has broadcast one rank's shard to a rank with another by now; it is not trained on.
    _, model = sharded(ranks)
    ddp = DistributedDataParallel(pre_dp_module_transform(model), process_group=crossed)
    with pytest.raises(PlanError, match="ranks-disagree"):
        ddp(torch.ones(1, 16))
    # Torch's hooks read no group as the default group.
    _, model = sharded(ranks)
    ddp = DistributedDataParallel(pre_dp_module_transform(model), process_group=mesh["dp"].get_group())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(PlanError, match="different shards would be mixed"):
        ddp(torch.ones(1, 16))


@pytest.mark.ranks(4)
def test_only_the_first_forward_communicates(ranks: Ranks) -> None:
    mesh, model = sharded(ranks)
    data = tuple(dist.get_process_group_ranks(mesh["dp"].get_group()))
    ddp = wrap_ddp(model, mesh=mesh)
    counts = []
    for _ in range(3):
        with ranks.record() as log:
            out = ddp(torch.ones(1, 16))
        counts.append([event.op for event in log.events if event.ranks == data and "gather" in event.op])
        out.sum().backward()
    assert counts[0] and counts[1:] == [[], []]


@pytest.mark.ranks(4)
def test_join_where_a_rank_has_no_input_at_all(ranks: Ranks) -> None:
    mesh, model = sharded(ranks)
    reference = models.seeded(models.MLP)
    ddp = wrap_ddp(model, mesh=mesh)
    full_optimizer, optimizer = torch.optim.SGD(reference.parameters(), 0.1), torch.optim.SGD(ddp.parameters(), 0.1)
    task = models.vectors()
    with ddp.join():
        for step in range(3 if mesh["dp"].get_local_rank() == 0 else 0):
            x, y = task.part(step, 0, 2)
            optimizer.zero_grad()
            torch.autograd.backward(task.loss(ddp(x), y))
            optimizer.step()
    for step in range(3):
        x, y = task.part(step, 0, 2)
        full_optimizer.zero_grad()
        torch.autograd.backward(task.loss(reference(x), y) / 2)  # join divides by the initial number of replicas
        full_optimizer.step()
    models.assert_same_state(model.state_dict(), reference.state_dict(), count=6, atol=5e-7)


@pytest.mark.ranks(4)
def test_communication_hooks_under_the_guards(ranks: Ranks) -> None:
    """fp16 and PowerSGD hooks leave replicas equal to the bit. A parameter replaced meanwhile is refused."""
    hooks: list[Any] = [
        lambda group: (None, default_hooks.fp16_compress_hook),
        lambda group: (
            powerSGD_hook.PowerSGDState(group, 32, start_powerSGD_iter=2, min_compression_rate=0.0),
            powerSGD_hook.powerSGD_hook,
        ),
    ]
    for make in hooks:
        mesh, model = sharded(ranks)
        ddp: Any = wrap_ddp(model, mesh=mesh)
        ddp.register_comm_hook(*make(ddp.process_group))
        models.train(
            ddp, torch.optim.SGD(ddp.parameters(), 0.1), models.vectors(), index=mesh["dp"].get_local_rank(), count=2
        )
        assert check_replicas(ddp, ddp.process_group) == 6
        model.head = nn.Linear(16, 16)
        with pytest.raises(PlanError, match="parameter-replaced"):
            ddp(torch.ones(1, 16))
