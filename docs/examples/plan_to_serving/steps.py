"""The steps of the job, each in terms of one package's public API."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import dp_partition
import shard_reshard
import shard_spec
import torch
import torch.distributed as dist
import tp_ddp_bridge
import tp_styles
import traffic
from model import GPT
from report import Report, coverage_bars, loss_curves, memory_bars, plan_picture, step_times, traffic_bars
from serving import greedy, logits_of
from setting import NAMES, Setting, printer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training import LiveBytes, Run, axis_group, new_optimizer, repeat, train_step

PROMPT = b"def __init__(self, "
NUM_NEW = 120
CLOSE_CALL = 1e-4  # where the two best logits are closer than this, rounding may choose the other one


@dataclass(frozen=True)
class Trained:
    """What serving starts from: the trained module under tensor parallelism and where its parameters lie."""

    model: nn.Module
    state: dict[str, Tensor]


# 1 ------------------------------------------------------------------------------------------------------------------


def plan(setting: Setting) -> shard_spec.ShardingPlan:
    """Plan the model for the mesh, on the meta device: nothing is allocated and nothing is communicated."""
    mesh = shard_spec.MeshSpec({"dp": setting.dp, "tp": setting.tp})
    with torch.device("meta"):
        model = GPT(setting.config)
    planned = shard_spec.MegatronPlanner(mesh=mesh).build_plan(model)
    if problems := planned.validate(model, world_size=setting.world.size):
        raise shard_spec.PlanError(problems)
    memory = planned.memory(model, optimizer="adamw")
    setting.pages["plan"] = planned.explain(module=model)
    setting.pages["layouts"] = {
        name: (layout, model.get_parameter(name).shape) for name, layout in planned.resolve(model).layouts.items()
    }
    setting.traffic += traffic.of_plan("TP x DDP", planned, model, (setting.batch, setting.config.context))
    setting.pages["predicted"] = {f"rank {rank}": memory.on(rank) for rank in range(setting.world.size)}
    setting.world.say(f"\n{planned.explain(module=model)}\n\n{memory}")
    return planned


# 2 ------------------------------------------------------------------------------------------------------------------


def train_on_one_device(setting: Setting) -> dict[torch.dtype, Run]:
    """The reference: the same step on one device; rank 0 runs it in float32, rank 1 in float64, all get the losses."""
    references: list[Run | None] = [None, None]
    for rank, dtype in enumerate((torch.float32, torch.float64)):
        if setting.world.rank == rank:
            model = setting.new_model(dtype)
            optimizer = new_optimizer(model)
            progress = printer(setting, f"one device, {NAMES[dtype]}", setting.num_compared)
            name = f"one device, {NAMES[dtype]}"
            step = lambda batch: train_step(model, optimizer, batch)  # noqa: B023, E731  # called in this turn only
            references[rank] = repeat(name, step, setting.batches(), setting.num_compared, progress=progress)
    runs: dict[torch.dtype, Run] = {}
    for rank, dtype in enumerate((torch.float32, torch.float64)):
        holder = [references[rank]]
        dist.broadcast_object_list(holder, src=rank)
        assert holder[0] is not None
        runs[dtype] = holder[0]
    setting.runs["one device"] = runs[torch.float32]
    return runs


def train_tensor_parallel(
    setting: Setting, planned: shard_spec.ShardingPlan, references: dict[torch.dtype, Run]
) -> Trained:
    """Tensor parallel inside, DistributedDataParallel outside; float64 for the tight comparison, then float32."""
    _train_2d(setting, planned, references[torch.float64], torch.float64, setting.num_compared)
    return _train_2d(setting, planned, references[torch.float32], torch.float32, setting.num_steps)


def _train_2d(
    setting: Setting, planned: shard_spec.ShardingPlan, reference: Run, dtype: torch.dtype, num_steps: int
) -> Trained:
    mesh = setting.world.mesh(dp=setting.dp, tp=setting.tp)
    model = setting.new_model(dtype)
    styles = tp_styles.from_sharding_plan(planned, model)
    handle = tp_styles.apply_plan(model, mesh["tp"], styles)
    ddp = tp_ddp_bridge.wrap_ddp(model, mesh=mesh)
    optimizer = new_optimizer(ddp)
    live = LiveBytes(optimizer)

    rows = setting.batches_of(mesh.get_local_rank("dp"), setting.dp)
    title = f"TP x DDP, {NAMES[dtype]}"
    progress = printer(setting, title, num_steps)
    run = repeat(
        "TP x DDP",
        lambda batch: train_step(ddp, optimizer, batch),
        rows,
        num_steps,
        mean_over=axis_group(mesh, "dp"),
        progress=progress,
    )
    setting.compare_losses(run, reference, dtype)
    if dtype == torch.float32:
        setting.runs["TP x DDP"] = run
        setting.pages["first call"] = handle.report()
        _compare_memory(setting, live)
    return Trained(model, dict(model.state_dict()))


def _compare_memory(setting: Setting, live: LiveBytes) -> None:
    """Live bytes of parameters, gradients and optimizer state on every rank against the plan's."""
    measured: list[dict[str, int] | None] = [None] * setting.world.size
    dist.all_gather_object(measured, live.parts)
    kinds = ("parameters", "gradients", "optimizer")
    setting.pages["measured"] = {f"rank {rank}": entry for rank, entry in enumerate(measured)}
    planned = [setting.pages["predicted"][f"rank {r}"][kind] for r in range(setting.world.size) for kind in kinds]
    live_bytes = [setting.pages["measured"][f"rank {r}"][kind] for r in range(setting.world.size) for kind in kinds]
    setting.comparisons.equal("bytes per rank, live and planned", live_bytes, planned)


# 3 ------------------------------------------------------------------------------------------------------------------


def train_as_graph(setting: Setting, references: dict[torch.dtype, Run]) -> None:
    """The same unmodified step as one data-parallel graph, in each style and both precisions."""
    for style in setting.styles:
        for dtype, reference in references.items():
            mesh = setting.world.mesh(dp=setting.world.size)
            model = setting.new_model(dtype)
            optimizer = new_optimizer(model)
            step = dp_partition.compile(train_step, mesh=mesh, style=dp_partition.DataParallelStyle[style.upper()])
            rows = setting.batches_of(setting.world.rank, setting.world.size)
            progress = printer(setting, f"graph, {style}, {NAMES[dtype]}", setting.num_compared)
            run = repeat(
                f"graph {style}",
                lambda batch: step(model, optimizer, batch),  # noqa: B023  # called in this turn only
                rows,
                setting.num_compared,
                mean_over=dist.group.WORLD,
                progress=progress,
            )
            setting.compare_losses(run, reference, dtype)
            if dtype == torch.float32:
                setting.runs[f"graph, {style}"] = run
                setting.pages[f"graph, {style}"] = step.explain()
                setting.traffic += traffic.of_graph(f"graph, {style}", step.graph, setting.world.size)


# 4 ------------------------------------------------------------------------------------------------------------------


def serve(setting: Setting, planned: shard_spec.ShardingPlan, trained: Trained) -> None:
    """Move the weights to a serving layout over all ranks and to one rank; the two must serve the same text."""
    world = setting.world
    mesh = world.mesh(tp=world.size)
    serving = setting.new_model()
    serving_plan = shard_spec.MegatronPlanner(mesh=shard_spec.MeshSpec({"tp": world.size})).build_plan(serving)
    tp_styles.apply_plan(serving, mesh, tp_styles.from_sharding_plan(serving_plan, serving))
    served_state = shard_reshard.reshard_state_dict(trained.state, out=serving)
    setting.pages["reshard"] = served_state.plan.explain()
    sent_bytes = served_state.plan.wire_bytes // world.size
    setting.traffic.append(traffic.Line("to the serving layout", "all_to_all", "weights, mean rank", 1, sent_bytes))

    full_state = shard_reshard.reshard_state_dict(trained.state, dict.fromkeys(trained.state, "rank 0"))
    single = setting.new_model()
    if world.rank == 0:
        single.load_state_dict(full_state)
    _compare_weights(setting, serving, single)
    _compare_text(setting, serving, single)


def _compare_weights(setting: Setting, serving: nn.Module, single: nn.Module) -> None:
    state = serving.state_dict()
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}  # on every rank
    if setting.world.rank == 0:
        setting.comparisons.bitwise("weights, serving layout and one rank", full, dict(single.state_dict()))


def _compare_text(setting: Setting, serving: nn.Module, single: nn.Module) -> None:
    ids = torch.tensor([list(PROMPT)], device=setting.world.device)
    logits, sample = logits_of(serving, ids), greedy(serving, PROMPT, NUM_NEW, setting.config.context)
    if setting.world.rank != 0:
        return
    setting.comparisons.absolute("logits, serving layout and one rank", logits, logits_of(single, ids), 1e-5)
    expected = greedy(single, PROMPT, NUM_NEW, setting.config.context)
    sure = expected.first_close_call(CLOSE_CALL)
    claim = f"greedy bytes up to the first close call ({sure})"
    setting.comparisons.equal(claim, sample.ids[:sure], expected.ids[:sure])
    setting.pages["text"] = PROMPT.decode() + sample.text
    setting.world.say(
        f"\ntext that {setting.world.size} ranks serve for the prompt {PROMPT.decode()!r}:\n{setting.pages['text']!r}"
    )


# 5 ------------------------------------------------------------------------------------------------------------------


def write_report(setting: Setting, folder: Path) -> Path:
    """One HTML page; written by rank 0."""
    page = folder / "index.html"
    if setting.world.rank == 0:
        subtitle = f"{setting.world.size} ranks, dp={setting.dp} x tp={setting.tp}"
        report = Report("From a plan to serving", subtitle, setting.comparisons.verdict())
        claims = [
            (c.what, c.num_values, f"{c.greatest:.1e}", f"{c.limit:.0e}", c.kind) for c in setting.comparisons.claims
        ]
        report.table("What was compared", ("what", "values", "greatest difference", "limit", "kind"), claims)
        report.picture("What was compared, drawn", coverage_bars(setting.comparisons.claims))
        report.picture("Loss", loss_curves({name: run.losses for name, run in setting.runs.items()}))
        report.picture("The plan: which rank holds what", plan_picture(setting.pages["layouts"], setting.world.size))
        report.text("The plan in words", setting.pages["plan"])
        columns = ("run", "collective", "of what", "times", "each rank sends")
        note = "TP x DDP as the plan predicts it, by tensor (DDP sends gradients in buckets); graphs as they stand."
        report.table("Bytes per collective, in a step", columns, [line.row() for line in setting.traffic], note)
        report.picture("What each rank sends in a step", traffic_bars(setting.traffic))
        report.picture("Memory per rank", memory_bars(setting.pages["measured"], setting.pages["predicted"]))
        report.text("Moving the weights to the serving layout", setting.pages["reshard"])
        for style in setting.styles:
            report.text(f"The graph, {style}", setting.pages[f"graph, {style}"])
        for heading, text in setting.pages.get("experts", {}).items():
            report.text(heading, text)
        report.text("What the first call of TP x DDP compared", setting.pages["first call"])
        report.picture("Step times", step_times({name: run.step_seconds for name, run in setting.runs.items()}))
        report.text("Text served", setting.pages["text"])
        page = report.write(folder)
    return page.resolve()
