"""Mixtures of experts of transformers: small models of every type, and every class of expert modules alone."""

from __future__ import annotations

import ast
import copy
import importlib
from functools import cache
from pathlib import Path
from typing import Any

import hf_models
import torch
import tp_styles as tp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles.runtime.parameters import full_tensor, split_of
from tp_styles.runtime.redistribute import TPGroup
from tp_styles.styles.expert_parallel import expert_modules

SEEDED = 7
TOKENS = 10


def modeling_files(folder: str = "*") -> dict[str, Path]:
    """Return modeling files of transformers with classes of experts, by the name of their folder; of all, or of one."""
    import transformers

    paths = sorted((Path(transformers.__file__).parent / "models").glob(f"{folder}/modeling_*.py"))
    return {path.parent.name: path for path in paths if _classes(path)}


@cache
def _classes(path: Path) -> list[str]:
    text = path.read_text()
    if "Experts(" not in text and "ParallelExperts" not in text:
        return []
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return [node.name for node in classes if node.name.endswith("Experts")]


def expert_types() -> list[str]:
    """Return types of causal models whose modeling file has a class of experts."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    files = modeling_files()
    return [name for name in hf_models.causal_types() if model_type_to_module_name(name) in files]


def expert_classes(folder: str = "*") -> list[tuple[str, str]]:
    """Return folder and name of every class of experts, or of those in one folder."""
    return [(folder, name) for folder, path in modeling_files(folder).items() for name in _classes(path)]


def outcome_of(error: Exception) -> str:
    """Return the word of a table for an error: a refusal by its code, or a failure."""
    if isinstance(error, tp.PlanError):
        return f"refused: {error.problems[0].code if error.problems else ''}"
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def check_expert_type(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Train a small model of a type for two steps with its experts spread, beside one process.

    Args:
        name: Model type.
        mesh: 1-D mesh.

    Returns:
        `"experts"`, the share of the parameters in experts that are spread, and `"outcome"` as of
        `hf_models.check_type`.
    """
    try:
        model = hf_models.small(name)
        alone = copy.deepcopy(model)
    except Exception as error:
        return {"experts": None, "outcome": f"no model: {type(error).__name__}"}
    names = expert_modules(model)
    if not names:
        kinds = {type(m).__name__ for m in model.modules() if "experts" in type(m).__name__.lower()}
        return {"experts": None, "outcome": f"refused: {', '.join(sorted(kinds))}" if kinds else "no experts so small"}
    count = sum(p.numel() for key in names for p in model.get_submodule(key).parameters())
    share = count / sum(p.numel() for p in model.parameters())
    try:
        tp.apply_plan(model, mesh, {key: tp.ExpertParallel() for key in names})
        results = [trained(one) for one in (model, alone)]
        state = tp.full_state_dict(model)
    except Exception as error:
        return {"experts": share, "outcome": outcome_of(error)}
    errors = {"loss": abs(results[0] - results[1]) / abs(results[1])}
    for key, value in alone.state_dict().items():
        if value.is_floating_point():
            errors[key] = float((state[key] - value).abs().max() / value.abs().max().clamp_min(1e-3))
    worst = max(errors, key=lambda key: errors[key])
    right = errors[worst] < 1e-4  # routers, norms and rotary embeddings compute in float32 whatever they get
    return {"experts": share, "outcome": "right" if right else f"wrong: {worst} off by {errors[worst]:.1e}"}


def trained(model: nn.Module) -> float:
    """Take two steps of SGD; return the second loss."""
    for _ in range(2):
        model.zero_grad()
        loss = hf_models.loss_of(model)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.05)
    return float(loss.detach())


# ---------------------------------------------------------------------------------------------- classes alone


def build_experts(folder: str, name: str, implementation: str = "eager") -> tuple[nn.Module, int]:
    """Return a module of experts with random weights in float64, and its width.

    Raises:
        ValueError: No configuration of its folder makes one.
    """
    from transformers import PretrainedConfig

    of = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    settings = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    kinds = [v for v in vars(settings).values() if isinstance(v, type) and issubclass(v, PretrainedConfig)]
    for kind in kinds:
        for config in _small_configs(kind):
            config._experts_implementation = implementation
            try:
                module: nn.Module = getattr(of, name)(*_arguments(name, config))
            except Exception:  # another configuration of the folder is meant
                continue
            torch.manual_seed(SEEDED)
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.3)
            return module.double().eval(), int(getattr(config, "moe_hidden_size", None) or config.hidden_size)
    raise ValueError(f"no configuration of {folder} makes {name}")


def _arguments(name: str, config: Any) -> tuple[Any, ...]:
    if name == "JetMoeParallelExperts":
        return 4, config.hidden_size, config.hidden_size
    return (config, 24) if name == "NllbMoeExperts" else (config,)


def _small_configs(kind: Any) -> list[Any]:
    configs = []
    for sizes in (hf_models.SIZES, {k: v for k, v in hf_models.SIZES.items() if k not in hf_models.LAYERS}):
        try:
            config = kind()
        except Exception:  # some need arguments
            continue
        for one in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
            for key, value in {**sizes, "moe_hidden_size": 32}.items():
                if isinstance(vars(one).get(key), int):
                    setattr(one, key, value)
        configs += [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]
    return configs


def routed_batch(module: nn.Module, width: int, count: int, form: str, seed: int) -> dict[str, Any]:
    """Return tokens, indices and weights in the form that the module takes, by argument name."""
    import inspect

    random = torch.Generator().manual_seed(seed)
    names = list(inspect.signature(module.forward).parameters)
    hidden = torch.randn(TOKENS, width, dtype=torch.float64, generator=random)
    if type(module).__name__ == "DbrxExperts":  # it takes a batch of sequences, and indices of all their tokens
        hidden = hidden[:, None]
    if form == "batched":
        return {names[0]: hidden.repeat(count, 1)}
    if form == "sorted":
        sizes = torch.bincount(torch.randint(0, count, (TOKENS,), generator=random), minlength=count)
        return {names[0]: hidden, names[1]: sizes.tolist()}
    scores = torch.rand(TOKENS, count, dtype=torch.float64, generator=random)
    weights, indices = scores.topk(1 if form == "one-hot" else 2, dim=-1)
    if form == "one-hot":
        indices = torch.nn.functional.one_hot(indices, count)
    return {names[0]: hidden, names[1]: indices, names[2]: weights}


def check_expert_class(folder: str, name: str, mesh: DeviceMesh, tokens: Any = "replicated") -> str:
    """Compare output and all gradients of one class with itself alone; return the outcome."""
    try:
        module, width = build_experts(folder, name)
    except Exception as error:
        return f"no module: {error}"
    alone, size, rank = copy.deepcopy(module), mesh.size(), mesh.get_local_rank()
    try:
        style = tp.ExpertParallel(tokens)
        handle = tp.apply_plan(module, mesh, {"": style})
        experts: Any = handle.plan.modules[0].spec
        full = routed_batch(alone, width, experts.experts.count, experts.experts.form, 1)
        own = dict(full)
        if tokens == "sharded":
            own = {key: value.tensor_split(size)[rank] for key, value in full.items()}
        pairs = []
        for one, batch in ((module, own), (alone, full)):
            inputs = {k: v.clone().requires_grad_() if _learns(v) else v for k, v in batch.items()}
            output = one(**inputs)
            pairs.append((output, inputs))
        (output, inputs), (wanted, references) = pairs
        weight = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view(wanted.shape)
        (wanted * weight).sum().backward()
        if tokens == "sharded":
            weight, wanted = (x.tensor_split(size)[rank] for x in (weight, wanted))
        (output * weight).sum().backward()
        errors = [float((output - wanted).abs().max()) if wanted.numel() else 0.0]
        for key, value in references.items():
            if _learns(value):
                gradient = gradient_of(value)
                gradient = gradient if tokens == "replicated" else gradient.tensor_split(size)[rank]
                errors.append(float((gradient_of(inputs[key]) - gradient).abs().max()) if gradient.numel() else 0.0)
        own_parameters = dict(module.named_parameters())
        for key, parameter in alone.named_parameters():
            errors.append(float((full_gradient(own_parameters[key], mesh) - gradient_of(parameter)).abs().max()))
    except Exception as error:
        return outcome_of(error)
    return "right" if max(errors) < 1e-5 else f"wrong: off by {max(errors):.1e}"


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient; zeros for a parameter without, as of a numbered expert without tokens."""
    return torch.zeros_like(parameter.detach()) if parameter.grad is None else parameter.grad


def full_gradient(parameter: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the global gradient of a parameter, whatever it is made of; every rank calls it."""
    gradient = gradient_of(parameter)
    info = sharding_info_of(parameter)
    if info is not None:
        return full_tensor(gradient.as_subclass(torch.Tensor), TPGroup(mesh), split_of(info))
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _learns(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
