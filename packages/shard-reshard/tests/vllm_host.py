"""vLLM takes weights from a sharded trainer, 20 times while that trains; `nox -s "hosts(vllm)"` runs it.

The engine starts with dummy weights in this process, the trainer's two ranks are processes of their own. After each
sync vLLM's greedy tokens are those of transformers on the trainer's full weights; bytes on the wire are the bound.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM and transformers

STEPS, NEW_TOKENS, TRAINERS = 20, 6, 2
PROMPTS = [[1, 2, 3, 4, 5], [7, 11, 13], [40, 30, 20, 10, 9, 8]]
SIZES = {
    "vocab_size": 90,  # padded by vLLM
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # logits that differ by more than roundings
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 1, "tie_word_embeddings": False},  # copied where sharded
    "qwen2": {"model_type": "qwen2", "hidden_size": 128, "num_key_value_heads": 2, "tie_word_embeddings": True},
    # Norms around both halves of a layer, capped logits, embeddings tied and scaled.
    "gemma2": {"model_type": "gemma2", "num_key_value_heads": 2, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "phi3": {"model_type": "phi3", "hidden_size": 128, "num_key_value_heads": 2},  # fused in the checkpoint as well
    "olmo2": {"model_type": "olmo2", "hidden_size": 128, "num_key_value_heads": 2},  # norms of all heads together
    "granite": {"model_type": "granite", "hidden_size": 128, "num_key_value_heads": 2, "embedding_multiplier": 2.0},
    "starcoder2": {"model_type": "starcoder2", "hidden_size": 128, "num_key_value_heads": 2},  # biases, no gate
    "smollm3": {"model_type": "smollm3", "hidden_size": 128, "num_key_value_heads": 2},  # layers without positions
    "mixtral": {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}
SIX = ("gemma2", "phi3", "olmo2", "granite", "starcoder2", "smollm3")


def new_model(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SIZES, **CONFIGS[kind]})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


# ---- the trainer's processes ----------------------------------------------------------------------------------


class Client:
    """The four methods that vLLM asks of a client, and some more, through a pipe to the engine's process."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def call(self, method: str, *arguments: Any) -> Any:
        self.pipe.send((method, arguments))
        result = self.pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update")


def train(rank: int, kind: str, layout: str, workers: int, ports: tuple[int, int], pipe: Any) -> None:
    """Train on one rank, send after each step, compare what vLLM generates."""
    from shard_reshard import PlanError
    from shard_reshard.engines.vllm import ShardedSource, TrainerInit, register
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=TRAINERS)
    mesh = init_device_mesh("cpu", (TRAINERS,), mesh_dim_names=("tp",))
    model, reference = new_model(kind), new_model(kind)
    if layout != "tp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from tp_styles import apply_plan, from_hf_tp_plan

        apply_plan(model, mesh, from_hf_tp_plan(model))
    sent = count_bytes()
    register()
    init = TrainerInit("127.0.0.1", ports[1], workers, 300.0, rank=rank)
    engine: Any
    if layout == "refused":
        with pytest.raises(RuntimeError if not rank else PlanError, match="not-recordable"):  # rank 0 hears vLLM first
            WeightTransferTrainerFactory.trainer_init(init, client=Client(pipe), source=ShardedSource(model))
        if not rank:
            Client(pipe).call("result", {"bytes": 0, "m2n": 0, "collectives": 1})
        return
    if layout == "trl":
        engine, send_weights = sync_of_trl(model, rank, ports, Client(pipe))
    else:
        engine = WeightTransferTrainerFactory.trainer_init(init, client=Client(pipe), source=ShardedSource(model))
        send_weights = engine.send_weights
    if not rank:
        engine.client.call("collective_rpc", count_bytes_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    ids = torch.arange(24).view(2, 12) * 7 % 90
    different: set[str] = set()
    off = 0.0
    steps = 5 if kind in SIX else STEPS
    for step in range(steps):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        send_weights()
        reference.load_state_dict(full_state(model, layout), strict=False)
        if not rank:
            expected = [greedy(reference, prompt) for prompt in PROMPTS]
            actual = engine.client.call("generate", PROMPTS)
            assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected], (step, actual, expected)
            logprobs = [torch.tensor([values for _, values in each]) for each in (actual, expected)]
            off = max(off, float((logprobs[0] - logprobs[1]).abs().max()))
            assert off < 1e-4, (step, off)  # float32 in other kernels; a tensor that is not sent shows long before
            different.add(str(expected))
        if layout == "killed":
            outlive(rank, engine)
            return
    plan, before = engine.resharder.plan, sent[0]
    assert plan.wire_bytes == plan.lower_bound
    total = [torch.tensor(before)]
    dist.all_reduce(total[0])
    if not rank:
        assert len(different) > steps // 4, different  # the weights had changed
        total[0] += sum(engine.client.call("collective_rpc", bytes_of))
        assert int(total[0]) == (steps + (layout == "trl")) * plan.wire_bytes
        described = [(meta.name, str(meta.dtype), meta.shape) for meta in engine.source.metadata()]
        m2n = engine.client.call("collective_rpc", m2n_bytes, described)
        engine.client.call(
            "result", {"bytes": plan.wire_bytes, "m2n": sum(m2n), "collectives": len(plan.buckets), "off": off}
        )
        engine.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def outlive(rank: int, engine: Any) -> None:
    """Rank 1 is killed before a sync: rank 0 raises, and vLLM goes on with the weights that it has."""
    before = None if rank else engine.client.call("generate", PROMPTS)
    dist.barrier()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"failed on rank|got no answer"):
        engine.send_weights()
    assert engine.client.call("generate", PROMPTS) == before
    engine.client.call("result", {"bytes": 0, "m2n": 0, "collectives": 1})


def sync_of_trl(model: Any, rank: int, ports: tuple[int, int], client: Client) -> tuple[Any, Any]:
    """Meet vLLM and send by trl's own sync, with the classes of the how-to."""
    from accelerate import Accelerator

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(TRAINERS), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(ports[0])  # not used: the group is there
    page = Path(__file__).parents[3] / "docs" / "howto" / "vllm-weight-sync.md"
    names: dict[str, Any] = {}
    exec(page.read_text().split("trl_sync.py -->\n```python\n")[1].split("```")[0], names)
    calls: list[str] = []
    server = SimpleNamespace(
        wait_for_server_ready=partial(calls.append, "ready"),
        pause=partial(calls.append, "pause"),
        resume=partial(calls.append, "resume"),
    )
    trainer = object.__new__(names["ShardedAsyncGRPOTrainer"])  # building one takes a CUDA kernel
    trainer.accelerator, trainer.model, trainer.meeting = Accelerator(cpu=True), model, ("127.0.0.1", ports[1], 1)
    assert trainer.accelerator.num_processes == TRAINERS
    trainer.weight_transfer = None if rank else names["WeightTransfer"](server, client)
    trainer.rollout_worker, trainer.model_version = None, 0

    def sync() -> None:
        trainer._sync_weight_merged(0.0)
        assert trainer.model_version == len(calls) // 2
        assert calls == [] if rank else calls[-2:] == ["pause", "resume"]

    trainer.engine = None
    next(trainer._streaming_iter(), None)  # meets, and sends once
    return trainer.engine, sync


def full_state(model: Any, layout: str) -> dict[str, torch.Tensor]:
    if layout != "tp":
        return {name: value.full_tensor() for name, value in model.state_dict().items()}
    from tp_styles import full_state_dict

    return dict(full_state_dict(model))


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities."""
    ids, logprobs = torch.tensor([prompt]), []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            best = model(ids).logits[:, -1].log_softmax(-1).max(-1)
            ids = torch.cat([ids, best.indices[:, None]], 1)
            logprobs.append(float(best.values))
    return ids[0, len(prompt) :].tolist(), logprobs


def count_bytes() -> list[int]:
    """Count what this process sends to others in all-to-alls from now on."""
    sent, own = [0], dist.all_to_all_single

    def counted(output: Any, input: Any, output_splits: Any, input_splits: Any, group: Any, async_op: bool) -> Any:
        sent[0] += sum(input_splits) - input_splits[group.rank()]
        return own(output, input, output_splits, input_splits, group=group, async_op=async_op)

    dist.all_to_all_single = counted  # type: ignore[assignment]  # as this package calls it
    return sent


# ---- in vLLM's workers ----------------------------------------------------------------------------------------


def count_bytes_of(worker: Any) -> None:
    worker.bytes_sent = count_bytes()


def bytes_of(worker: Any) -> int:
    return int(worker.bytes_sent[0])


def m2n_bytes(worker: Any, weights: list[tuple[str, str, tuple[int, ...]]]) -> int:
    """Bytes that a worker receives by vLLM's own ``nccl_m2n`` plan: a shard where that resolves it, else the tensor."""
    from shard_reshard.engines.vllm import _checkpoint_format
    from vllm.distributed.weight_transfer.m2n_layout import resolve_parameter_destinations

    engine, size = worker.weight_transfer_engine, worker.parallel_config.world_size
    names, dtypes, shapes = zip(*weights, strict=True)
    types = [getattr(torch, dtype.removeprefix("torch.")) for dtype in dtypes]
    with _checkpoint_format(engine.model, engine.model_config):
        destinations = resolve_parameter_destinations(
            engine.model, names, types, shapes, num_workers=size, shard_axis_size=size, allow_direct=True
        )
    total = 0
    for destination, dtype, shape in zip(destinations, types, shapes, strict=True):
        local = destination.tensor
        total += torch.Size(shape).numel() * dtype.itemsize if local is None else local.numel() * dtype.itemsize
    return total


# ---- the engine's process -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout", "workers"),
    [
        ("llama", "fsdp2", 1),
        ("llama", "tp", 2),
        ("qwen3", "tp", 1),
        ("qwen3", "fsdp2", 2),
        ("qwen2", "fsdp2", 2),
        ("llama", "trl", 1),
        ("llama", "killed", 1),
        ("llama", "killed", 2),
        ("mixtral", "refused", 1),
        *((kind, "fsdp2", 2) for kind in SIX),
        # Last: for some types vLLM changes transformers' own class in this process, where one worker runs.
        *((kind, "tp", 1) for kind in SIX),
    ],
)
def test_tokens_after_each_sync(
    kind: str, layout: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join("01"[:workers]))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions of this test run in the workers
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process less that imports everything
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    ours, theirs = mp.Pipe()
    ports, context = free_ports(), mp.get_context("fork")  # what is imported here they need not import
    trainers = [
        context.Process(target=train, args=(rank, kind, layout, workers, ports, theirs if not rank else None))
        for rank in range(TRAINERS)
    ]
    for trainer in trainers:
        trainer.start()
    theirs.close()
    results: list[dict[str, Any]] = []
    model = new_model(kind)
    config = model.config
    config.architectures = [type(model).__name__]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    llm = LLM(
        str(tmp_path), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        max_model_len=64, tensor_parallel_size=workers, disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend="shard_reshard"),
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
    try:
        while not results:
            assert ours.poll(180), "no call from the trainer"
            method, arguments = ours.recv()
            reply: Any = None
            try:
                if method == "result":
                    results += arguments
                elif method == "generate":
                    outputs = llm.generate([{"prompt_token_ids": p} for p in arguments[0]], sampling, use_tqdm=False)
                    reply = [
                        ([*o.token_ids], [p[token].logprob for token, p in zip(o.token_ids, o.logprobs, strict=True)])
                        for (o,) in (output.outputs for output in outputs)
                    ]
                elif method == "collective_rpc":
                    reply = llm.collective_rpc(arguments[0], args=arguments[1:])
                else:
                    reply = getattr(llm, method)(*arguments)
            except Exception as error:
                reply = RuntimeError(f"{type(error).__name__}: {error}")
            ours.send(reply)
        for trainer in trainers:
            trainer.join(60)
        assert [trainer.exitcode for trainer in trainers] == [0, -signal.SIGKILL if layout == "killed" else 0]
    finally:
        for trainer in trainers:
            trainer.kill()
        llm.llm_engine.engine_core.shutdown()
    (result,) = results
    print(f"\n{kind}, {layout} on {TRAINERS} -> {workers} workers: {result}")
    assert result["collectives"] == 1
    assert result["bytes"] < result["m2n"] if result["bytes"] and workers > 1 else result["bytes"] <= result["m2n"]


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]
