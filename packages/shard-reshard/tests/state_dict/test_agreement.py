"""Arguments that are equal on all ranks though tensors are not, and errors that name tensors and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, StateDictResharder, reshard_state_dict

FULL = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(12.0).view(2, 6) + 100}
SHAPES = {name: tuple(value.shape) for name, value in FULL.items()}


@pytest.mark.ranks(3)
def test_one_dict_of_layouts_serves_ranks_that_lack_tensors(ranks: Ranks) -> None:
    """Ranks 0 and 1 train, rank 2 generates: all pass the same arguments."""
    layouts = dict.fromkeys(FULL, "2: S(0)")
    state = {} if ranks.rank == 2 else {name: value.chunk(2)[ranks.rank].clone() for name, value in FULL.items()}
    resharder = StateDictResharder(state, "rank 2", src_layouts=layouts, shapes=SHAPES)
    for moved in (
        reshard_state_dict(state, "rank 2", src_layouts=layouts, shapes=SHAPES),
        resharder(state),
        resharder(state),
    ):
        assert moved.keys() == (FULL.keys() if ranks.rank == 2 else set())
        assert all(torch.equal(value, FULL[name]) for name, value in moved.items())
    with pytest.raises(PlanError, match=r"unknown-name.*'bb'.*did you mean 'b'"):  # no rank has it
        reshard_state_dict(state, "rank 2", src_layouts={**layouts, "bb": "2: S(0)"}, shapes=SHAPES)


@pytest.mark.ranks(2)
def test_ranks_that_disagree_read_the_tensor_and_both_layouts(ranks: Ranks) -> None:
    state = {name: value.chunk(2)[ranks.rank].clone() for name, value in FULL.items()}
    options: dict[str, Any] = {"src_layouts": dict.fromkeys(FULL, "2: S(0)"), "shapes": SHAPES}
    dst_layouts = {"a": "2: R", "b": "2: S(1)" if ranks.rank else "2: R"}
    with pytest.raises(PlanError) as caught:
        reshard_state_dict(state, dst_layouts, **options)
    text = str(caught.value)
    assert len(set(ranks.gather(text))) == 1
    (line,) = (line for line in text.splitlines() if "float32" in line)
    assert line.count("b: float32 (2, 6)") == 2
    assert "rank 0: b: float32 (2, 6) from 2: axis0:S(0) to 2: axis0:R, plan" in line
    assert "rank 1: b: float32 (2, 6) from 2: axis0:S(0) to 2: axis0:S(1), plan" in line


@pytest.mark.ranks(2)
def test_a_destination_without_a_layout_names_key_map(ranks: Ranks) -> None:
    state = {name: value.chunk(2)[ranks.rank].clone() for name, value in FULL.items()}
    options: dict[str, Any] = {"src_layouts": dict.fromkeys(FULL, "2: S(0)"), "shapes": SHAPES}
    with pytest.raises(PlanError, match=r"(?s)missing-argument.*b.*no destination layout.*key_map=\{name: None\}"):
        reshard_state_dict(state, {"a": "2: R"}, **options)
    moved = reshard_state_dict(state, {"a": "2: R"}, key_map={"b": None}, **options)
    assert moved.keys() == {"a"}
    assert torch.equal(moved["a"], FULL["a"])


@pytest.mark.ranks(2)
def test_plain_tensors_of_other_signs_are_no_replicas(ranks: Ranks) -> None:
    plain = torch.arange(1.0, 9.0, dtype=torch.float64) * (1 - 2 * ranks.rank)
    with pytest.raises(PlanError, match=r"missing-argument.*plain tensors that differ"):
        reshard_state_dict({"a": plain}, "rank 0")
