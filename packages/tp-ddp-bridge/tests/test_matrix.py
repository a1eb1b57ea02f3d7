"""DDP's options and ways of training: a sample of the matrix, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import bridge_models as models
import pytest
from bridge_cells import OPTIONS, SITUATIONS, cells, run_cell, zero_optimizer
from bridge_subjects import ADAM_ATOL, SUBJECTS, adam
from ranktest import Ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from tp_ddp_bridge import check_optimizer, wrap_ddp

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
        difference = run_cell(ranks, situation, subject)
        assert difference > 0 or situation == "default"  # a sum in another order: something was trained


def test_every_situation_and_every_model_is_sampled() -> None:
    sampled = [cell for sample in SAMPLED.values() for cell in sample]
    assert {situation for situation, _ in sampled} == set(SITUATIONS)
    assert {subject for _, subject in sampled} == set(SUBJECTS)
    assert set(sampled) <= set(cells()) and len(cells()) == 3 * len(SITUATIONS) - 2


@pytest.mark.ranks(4)
def test_options(ranks: Ranks) -> None:
    run(ranks, "options")


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
    # Torch's hooks read None as the default group: gradients of different shards would be averaged.
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    ddp = wrap_ddp(models.parallelize_mlp(models.MLP(), mesh["tp"]), mesh=mesh)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    with pytest.raises(ValueError, match="different shards would be mixed"):
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    with pytest.raises(ValueError, match="groups-mix"):
        ddp.register_comm_hook(mesh["tp"].get_group(), default_hooks.fp16_compress_hook)


@pytest.mark.ranks(4)
def test_zero_1(ranks: Ranks) -> None:
    run(ranks, "zero")
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    ddp = wrap_ddp(models.parallelize_mlp(models.MLP(), mesh["tp"]), mesh=mesh)
    wrong = zero_optimizer(ddp.parameters())  # cut over all ranks, which hold different shards
    with pytest.raises(ValueError, match="groups-mix"):
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
