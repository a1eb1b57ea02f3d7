"""One rank makes a call that is odd: every rank raises one error within seconds, and none gets wrong data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import (
    PlanError,
    Resharder,
    load_safetensors,
    plan_reshard,
    redistribute,
    reshard,
    reshard_state_dict,
)
from shard_spec import Box
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Call = Callable[[bool, tuple[int, ...]], Any]


def _calls() -> dict[str, Call]:
    """By name, a call of a rank that may be the odd one, on tensors of a global shape of its own."""

    def rows(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape[0] // 3, shape[1])

    def other(**odd: Any) -> Call:
        def call(is_odd: bool, shape: tuple[int, ...]) -> Any:
            arguments: dict[str, Any] = {"tensor": rows(shape), "src": "3: S(0)", "dst": "3: S(1)", "shape": shape}
            return reshard(**(arguments | (odd if is_odd else {})))

        return call

    def placements(odd: Any) -> Call:
        def call(is_odd: bool, shape: tuple[int, ...]) -> Any:
            mesh = init_device_mesh("cpu", (3,))
            tensor = DTensor.from_local(rows(shape), mesh, [Shard(0)], run_check=False)
            return redistribute(tensor, mesh, odd if is_odd else [Replicate()])

        return call

    return {
        "placements of text": placements(["S(0)"]),
        "no placements": placements(None),
        "a placement without a list": placements(Shard(1)),
        "source on fewer ranks": other(src="rank 0"),
        "source on fewer ranks, none given": other(src="rank 0", tensor=None),
        "no tensor": other(tensor=None),
        "two tensors": other(tensor=[torch.zeros(1, 1)] * 2),
        "another dtype": other(tensor=torch.zeros(1, 1, dtype=torch.int16)),
        "a cast": other(dtype=torch.float64),
        "an unknown dtype": other(dtype=torch.quint8),
        "a dtype that is none": other(dtype=3.5),
        "layout of another kind": other(dst=3.5),
        "layout that cannot be read": other(dst="3; S(1"),
        "no layout": other(src=None),
        "boxes with a hole": other(src={0: [Box((0, 0), (1, 1))]}),
        "a shape of text": other(shape="abc"),
        "a shape of fractions": other(shape=(6.5, 3)),
        "a negative shape": other(shape=(-6, 3)),
        "a workspace": other(max_workspace_bytes=1 << 20),
        "a workspace too small": other(max_workspace_bytes=1),
        "a workspace of text": other(max_workspace_bytes="1 MB"),
        "a check that there is not": other(check="never"),
        "check always": other(check="always"),
        "a number for a tensor": other(tensor=3.0),
        "a list of numbers": other(tensor=[1.0, 2.0]),
        "a sparse tensor": other(tensor=torch.zeros(1, 1).to_sparse()),
        "a tensor on meta": other(tensor=torch.zeros(1, 1, device="meta")),
        "an out of another shape": other(out=torch.zeros(1, 1)),
        "an out of another dtype": other(out=torch.zeros(1, 1, dtype=torch.int64)),
        "an out of text": other(out="x"),
        "one that requires grad": other(tensor=torch.zeros(1, 1, requires_grad=True)),
    }


@pytest.mark.ranks(3)
def test_every_rank_raises_one_error_within_seconds(ranks: Ranks) -> None:
    # Before, a call that only the odd rank found wrong left the others waiting, or messages of two lengths met, and
    # gloo then ends the process.
    messages = {}
    for number, (name, call) in enumerate(_calls().items()):
        begin = time.monotonic()
        with ranks.record() as log:
            try:
                call(ranks.rank == number % 3, (3 * (number + 1), 5))  # a plan that no call before has agreed on
                messages[name] = "no error"
            except PlanError as error:
                messages[name] = f"{[problem.code for problem in error.problems]} {error}"
        assert time.monotonic() - begin < 20
        assert log.count("all_to_all") == 0
    everyone = ranks.gather(messages)
    for name, text in messages.items():
        assert all(theirs[name] == text for theirs in everyone), (name, everyone)
        assert text != "no error", name
    assert len(messages) > 25


@pytest.mark.ranks(3)
def test_other_calls_on_one_rank(ranks: Ranks) -> None:
    def one() -> object:
        return reshard(torch.zeros(1, 3), "3: S(0)", "3: R", shape=(3, 3), check="always")

    calls: list[Callable[[], object]] = [
        one,
        lambda: reshard_state_dict({"a": torch.zeros(2)}, "3: R"),
        lambda: reshard_state_dict({"a": 3.0}, "3: R"),
        lambda: reshard_state_dict({3: torch.zeros(2)}, "3: R"),  # type: ignore[dict-item]  # that is what is odd
        lambda: load_safetensors(7, "3: R"),  # type: ignore[arg-type]  # that is what is odd
        lambda: load_safetensors([], "3: R", out=3.0),  # type: ignore[arg-type]  # that is what is odd
        lambda: Resharder(plan_reshard((9,), torch.int8, "rank 2", "3: S(0)"), check="always")(torch.zeros(3)),
    ]
    messages = []
    for first in range(len(calls)):
        for second in {(first + 1) % 7, (first + 4) % 7}:
            with ranks.record() as log, pytest.raises(PlanError) as caught:
                calls[first if ranks.rank == 1 else second]()
            assert log.count("all_to_all") == 0
            messages.append(str(caught.value))
    assert len(messages) == 14
    assert ranks.gather(messages) == [messages] * 3
