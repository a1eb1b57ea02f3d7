"""Random faults on ranks while state dicts, files and checkpoints move: right, refused, or an error in time.

Each world is three processes of its own. At one of its calls one rank does something odd, or dies. Nothing may hang
beyond the group's timeout, and no rank may return other values than the right ones. Then the ranks that are left make
a group of their own and try again, which has to succeed. Sampled by a test, in full by a script:

    python tests/random_faults.py 300
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor  # here, or every child would load it
from shard_reshard import (
    PlanError,
    StateDictResharder,
    StateDictWork,
    load_safetensors,
    reshard_state_dict,
    save_safetensors,
)
from stored_files import write

RANKS, CALLS, TIMEOUT = 3, 4, 3
NAMES = ("a", "b", "c", "d")


def full_values(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shapes = ((12, 6), (7, 5), (9,), (64, 48))
    return {name: torch.randn(shape, generator=generator) for name, shape in zip(NAMES, shapes, strict=True)}


def rows(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    step = -(-full.shape[0] // size)
    return full[min(rank * step, full.shape[0]) : (rank + 1) * step].clone()


class Fault:
    """What one rank does at one call: drawn by a seed, except for what is ``chosen``."""

    def __init__(self, seed: int, **chosen: Any) -> None:
        rng = random.Random(seed)
        self.what = rng.choice(sorted(FAULTS))
        self.rank, self.call = rng.randrange(RANKS), rng.randrange(CALLS)
        self.how = rng.choice(sorted(CALLERS))
        self.delay = rng.random() * 0.03
        self.atomic = rng.random() < 0.7
        # Alike on all ranks, as the bytes of a bucket are; files have no such form.
        self.call_options: dict[str, Any] = (
            {"async_op": True, "in_flight": rng.randrange(3)} if rng.random() < 0.4 else {}
        )
        self.bucket_bytes = rng.choice([4096, 64 * 2**20])
        vars(self).update(chosen)

    def __str__(self) -> str:
        options = f"atomic={self.atomic}, bucket_bytes={self.bucket_bytes}, {self.call_options}"
        return f"{self.how}: {self.what} on rank {self.rank} in call {self.call}, {options}"


def _dying(state: dict[str, Any], fault: Fault) -> None:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, max(fault.delay, 1e-4))


def _change(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any], Fault], None]:
    def apply(state: dict[str, Any], fault: Fault) -> None:
        state[name] = change(state[name])

    return apply


def _stay_away(state: dict[str, Any], fault: Fault) -> None:
    raise KeyboardInterrupt  # the rank's own trouble, before it calls


FAULTS: dict[str, Callable[[dict[str, Any], Fault], None]] = {
    "dies": _dying,
    "dies at once": lambda state, fault: os.kill(os.getpid(), signal.SIGKILL),
    "stays away": _stay_away,
    "a name less": lambda state, fault: state.pop("b"),
    "a name more": lambda state, fault: state.update(e=torch.ones(3)),
    "another dtype": _change("a", lambda t: t.double()),
    "another shape": _change("c", lambda t: torch.ones(99)),
    "a number": _change("d", lambda t: 3),
    "sparse": _change("a", lambda t: t.to_sparse()),
    "meta": _change("b", lambda t: t.to("meta")),
    "requires grad": _change("d", lambda t: t.clone().requires_grad_()),
    "turned": _change("d", lambda t: t.t().contiguous().t()),
    "nothing": lambda state, fault: None,
}


def _one_shot(state: dict[str, Any], out: Any, size: int, fault: Fault, cache: dict[str, Any], step: int) -> Any:
    return _waited(
        reshard_state_dict(state, out=out, **_layouts(size, fault), atomic=fault.atomic, **fault.call_options)
    )


def _kept(state: dict[str, Any], out: Any, size: int, fault: Fault, cache: dict[str, Any], step: int) -> Any:
    if "resharder" not in cache:
        cache["resharder"] = StateDictResharder(state, out=out, **_layouts(size, fault))
    return _waited(cache["resharder"](state, out=out, atomic=fault.atomic, **fault.call_options))


def _changed(state: dict[str, Any], out: Any, size: int, fault: Fault, cache: dict[str, Any], step: int) -> Any:
    if "changed" not in cache:
        cache["changed"] = StateDictResharder(state, out=out, **_layouts(size, fault), changed_only=True)
    return _waited(cache["changed"](state, out=out, atomic=fault.atomic, **fault.call_options))


def _waited(result: Any) -> Any:
    """Wait for a handle bucket by bucket; a result is returned as it is."""
    if isinstance(result, StateDictWork):
        for bucket in result.buckets:
            bucket.wait()
        return result.wait()
    return result


def _layouts(size: int, fault: Fault) -> dict[str, Any]:
    shapes = {name: tuple(value.shape) for name, value in full_values(0).items()}
    sources = dict.fromkeys(NAMES, f"{size}: S(0)")
    layouts: dict[str, Any] = {"dst_layouts": f"{size}: S(-1)", "src_layouts": sources, "shapes": shapes}
    return layouts | {"bucket_bytes": fault.bucket_bytes}


def _from_files(state: dict[str, Any], out: Any, size: int, fault: Fault, cache: dict[str, Any], step: int) -> Any:
    """Each rank writes its rows, odd ones among them, and all load; the files of a call are its own."""
    folder = Path(cache["folder"])
    mine = folder / f"{size}-{step}-{dist.get_rank()}.safetensors"
    write(mine.with_suffix(".part"), {name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
    os.replace(mine.with_suffix(".part"), mine)
    files = [folder / f"{size}-{step}-{rank}.safetensors" for rank in range(size)]
    waiting = time.monotonic() + 10  # any rank reads any header
    while time.monotonic() < waiting and not all(map(Path.exists, files)):
        time.sleep(0.01)
    layouts = _layouts(size, fault)
    return load_safetensors(
        files, layouts["dst_layouts"], stored_as=layouts["src_layouts"], shapes=layouts["shapes"], out=out,
        atomic=fault.atomic, bucket_bytes=4096,
    )  # fmt: skip


CALLERS: dict[str, Callable[..., Any]] = {
    "one-shot": _one_shot,
    "kept": _kept,
    "changed": _changed,
    "files": _from_files,
}


def _columns(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return rows(full.movedim(-1, 0), rank, size).movedim(0, -1)


def _run(rank: int, size: int, step: int, out: dict[str, Any], fault: Fault, cache: dict[str, Any], odd: bool) -> str:
    """One call; returns how it went on this rank."""
    full = full_values(step)
    state: dict[str, Any] = {name: rows(value, rank, size) for name, value in full.items()}
    before = {name: tensor.clone() for name, tensor in out.items() if isinstance(tensor, torch.Tensor)}
    try:
        if odd:
            FAULTS[fault.what](state, fault)
        CALLERS[fault.how](state, out, size, fault, cache, step)
    except KeyboardInterrupt:
        return "stayed away"
    except (PlanError, RuntimeError) as error:
        cache["e"] = error
        changed = any(not torch.equal(out[name], value) for name, value in before.items())
        atomic = fault.atomic or isinstance(error, PlanError)  # what ranks refuse they refuse before anything moves
        if atomic and changed:
            return f"wrong: an error after which out is another: {error}"
        return "refused" if isinstance(error, PlanError) else "failed"
    finally:
        if odd:
            signal.setitimer(signal.ITIMER_REAL, 0)
    for name, value in full.items():
        if not torch.equal(out[name], _columns(value, rank, size)):
            return f"wrong: {name}"
    return "right"


def _rank(rank: int, folder: str, fault: Fault, queue: Any) -> None:
    outcome = "dead"
    try:
        torch.set_num_threads(1)
        _join(f"{folder}/first", rank, RANKS)
        dist.barrier()  # a rank that dies while others still connect is none of this package's
        out: dict[str, Any] = {name: _columns(v, rank, RANKS) * 0 for name, v in full_values(0).items()}
        cache: dict[str, Any] = {"folder": folder}
        outcome = "right"
        for step in range(CALLS):
            outcome = _run(rank, RANKS, step, out, fault, cache, step == fault.call and rank == fault.rank)
            if outcome != "right":
                break
        dies = fault.what in ("dies", "dies at once")
        if not outcome.startswith("wrong") and (outcome != "right" or dies):
            # Whoever is left makes a group of its own: nothing that was kept of the old one may be of harm.
            survivors = [r for r in range(RANKS) if r != fault.rank] if dies else list(range(RANKS))
            if rank in survivors:
                dist.destroy_process_group()
                _join(f"{folder}/second", survivors.index(rank), len(survivors))
                me, size = survivors.index(rank), len(survivors)
                out = {name: _columns(v, me, size) * 0 for name, v in full_values(0).items()}
                for step in (10, 11, 12):
                    retry = _run(
                        me, size, step, out, fault, cache := {"folder": folder} | (cache if step > 10 else {}), False
                    )
                    cache.pop("resharder", None) if step == 10 and retry != "right" else None
                    if retry != "right":
                        outcome = f"wrong: the second try: {retry} {cache.get(chr(101))}"
    except BaseException as error:
        outcome = f"wrong: {type(error).__name__}: {str(error)[:300]}"
    finally:
        queue.put((rank, outcome))
        os._exit(0)


def _join(path: str, rank: int, size: int) -> None:
    store = dist.FileStore(path, size)  # type: ignore[attr-defined]  # public, though not declared so
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))


def check_fault(fault: Fault) -> dict[int, str]:
    """Run one world, and return the outcome of each rank that lived. Raises if one is wrong or hung."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        workers = [context.Process(target=_rank, args=(rank, folder, fault, queue)) for rank in range(RANKS)]
        for worker in workers:
            worker.start()
        end = time.monotonic() + 8 * TIMEOUT
        for worker in workers:
            worker.join(max(0.1, end - time.monotonic()))
        hung = [rank for rank, worker in enumerate(workers) if worker.is_alive()]
        for worker in workers:
            worker.kill()
        outcomes: dict[int, str] = {}
        while not queue.empty():
            rank, outcome = queue.get()
            outcomes[rank] = outcome
    assert not hung, f"{fault}: ranks {hung} hang; {outcomes}"
    wrong = {rank: outcome for rank, outcome in outcomes.items() if outcome.startswith("wrong")}
    assert not wrong, f"{fault}: {wrong}"
    if fault.what == "nothing" or fault.what == "turned":
        assert set(outcomes.values()) == {"right"}, f"{fault}: false alarm {outcomes}"
    if fault.how in ("kept", "changed") and fault.what not in ("dies", "dies at once", "stays away"):
        assert len(set(outcomes.values())) == 1, f"{fault}: not all ranks raised: {outcomes}"
    return outcomes


def check_faults(count: int, seed: int) -> Counter[str]:
    """Run `count` drawn worlds; the counts of their outcomes. Raises at the first wrong or hung one."""
    counts: Counter[str] = Counter()
    for number in range(seed, seed + count):
        counts["worlds"] += 1
        counts[", ".join(sorted(set(check_fault(Fault(number)).values())))] += 1
    return counts


# ---- a save that is cut off -----------------------------------------------------------------------------------


def _save(rank: int, folder: str, victim: int, delay: float, large: bool) -> None:
    torch.set_num_threads(1)
    _join(f"{folder}/store", rank, 2)
    full = torch.arange(float(1 << 20)).view(1024, 1024)
    state = {f"w{at}": full.chunk(2, at % 2)[rank] + at for at in range(8)}
    layouts = {name: f"2: S({at % 2})" for at, name in enumerate(state)}
    dist.barrier()
    if rank == victim:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, wherever it is
        signal.setitimer(signal.ITIMER_REAL, delay)
    outcome = "saved"
    try:
        sizes: dict[str, Any] = {"max_file_bytes": 1 << 33 if large else 9 << 20, "bucket_bytes": 4 << 20}
        shapes = dict.fromkeys(state, full.shape)
        save_safetensors(state, f"{folder}/checkpoint", src_layouts=layouts, shapes=shapes, **sizes)
    except (PlanError, RuntimeError):
        outcome = "raised"
    Path(f"{folder}/rank{rank}").write_text(outcome)
    os._exit(0)


def check_saves(count: int, seed: int) -> Counter[str]:
    """Kill a rank in the middle of `count` saves: the other raises or has saved, and files are all there or refused."""
    from safetensors.torch import load_file

    context, counts, rng = multiprocessing.get_context("fork"), Counter[str](), random.Random(seed)
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            delay = max(1e-4, rng.random() * rng.choice([0.05, 0.15, 0.5]))
            victim, large = rng.randrange(2), rng.random() < 0.5
            workers = [context.Process(target=_save, args=(rank, folder, victim, delay, large)) for rank in (0, 1)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(20 * TIMEOUT)
                assert not worker.is_alive(), (victim, delay)
            counts["saves"] += 1
            outcome = Path(f"{folder}/rank{1 - victim}").read_text()
            counts[outcome] += 1
            counts["killed"] += not Path(f"{folder}/rank{victim}").exists()
            files = sorted(Path(f"{folder}/checkpoint").glob("*.safetensors"))
            index = Path(f"{folder}/checkpoint/model.safetensors.index.json")
            named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
            tensors = {name: value for path in files for name, value in load_file(path).items()}
            for name, value in tensors.items():
                assert torch.equal(value, torch.arange(float(1 << 20)).view(1024, 1024) + int(name[1:]))
            if len(tensors) == 8:
                assert large or named == {path.name for path in files}
                counts["whole"] += 1
            else:  # none, or an index that names others
                assert outcome == "raised"
                assert not files or named > {path.name for path in files}
                counts["none"] += 1
    return counts


if __name__ == "__main__":
    print(check_faults(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    print(check_saves(int(sys.argv[1]) // 10, 0))
