"""Private torch names used in this package; read against torch 2.13.0 (and 2.11.0)."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed._composable_state as _composable_state
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
import torch.distributed.distributed_c10d as c10d
import torch.nn.modules.module as modules
import torch.nn.modules.transformer as transformers
import torch.optim.optimizer as optimizers
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._sympy.symbol import SymT, symbol_is_type

# Names of torch, imported from here by other modules.
__all__ = ["FakeTensor", "FakeTensorMode", "OpOverload", "TorchDispatchMode", "make_fx", "pytree"]

collectives: Any = torch.ops._c10d_functional


def is_gloo(group: c10d.ProcessGroup, device_type: str) -> bool:
    """Return True if gloo is a group's backend for a kind of device."""
    return str(group._get_backend(torch.device(device_type)).name()) == "gloo"


def global_hooks() -> tuple[Any, ...]:
    return (
        *modules._global_forward_hooks.values(),
        *modules._global_forward_pre_hooks.values(),
        *modules._global_backward_hooks.values(),
        *modules._global_backward_pre_hooks.values(),
        *optimizers._global_optimizer_pre_hooks.values(),
        *optimizers._global_optimizer_post_hooks.values(),
    )


def default_store() -> Any:
    """Return the store of the default process group; None for a backend without one."""
    return c10d._get_default_store()


def symbolic_scalar(mode: FakeTensorMode, value: Any, label: str) -> torch.Tensor:
    """Return a fake 0-dim CPU tensor of float64 or int64. Its ``item()`` is a symbol with ``value`` as its hint.

    Args:
        mode: The fake mode, with a shape environment.
        value: The value for decisions on the symbol; each decision becomes a guard.
        label: Name of the symbol's source; unique in the mode.
    """
    from torch._dynamo.source import ConstantSource  # imports dynamo, as making an optimizer does

    real = torch.tensor(value, device="cpu", dtype=torch.float64 if isinstance(value, float) else torch.int64)
    return mode.from_tensor(real, source=ConstantSource(label))


def symbolic_size(mode: FakeTensorMode, value: int, label: str) -> Any:
    """Return a size with its own symbol in a mode's shape environment. Arguments as for `symbolic_scalar`."""
    from torch._dynamo.source import ConstantSource

    shapes: Any = mode.shape_env
    source = ConstantSource(label)
    symbol = shapes.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=value, source=source)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Run operators in the block outside of all dispatch modes: neither recorded nor fake."""
    return _disable_current_modes()


@contextlib.contextmanager
def without_looks_at_values() -> Iterator[None]:
    """Skip, in the block, argument checks of distributions and transformers' detection of causal masks.

    A causal mask is then used as an ordinary mask, for the same attention.
    """
    kind, detect = torch.distributions.Distribution, transformers._detect_is_causal_mask
    enabled = kind._validate_args
    kind.set_default_validate_args(False)
    transformers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        kind._validate_args, transformers._detect_is_causal_mask = enabled, detect


@contextlib.contextmanager
def symbolic_math() -> Iterator[None]:
    """Let functions of ``math`` take symbols, and give a symbol its value's text, by a guard.

    For other code they compute what they did: symbols exist in the tracing thread alone.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ONE_TRACE)  # two interleaved blocks would restore each other's functions
        for name in ("sqrt", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos", "asin", "atan", "log2"):
            plain, symbolic = getattr(math, name), getattr(torch, f"_sym_{name}")

            def call(x: Any, plain: Any = plain, symbolic: Any = symbolic) -> Any:
                return symbolic(x) if isinstance(x, torch.SymInt | torch.SymFloat) else plain(x)

            stack.enter_context(patch.object(math, name, call))
        for kind, number in ((torch.SymInt, int), (torch.SymFloat, float)):

            def text(self: Any, spec: str = "", number: Any = number) -> str:
                return format(number(self) if self.node.has_hint() else str(self.node), spec)

            stack.enter_context(patch.object(kind, "__format__", text))
            stack.enter_context(patch.object(kind, "__str__", text))
        yield


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN's kernels in the block. ``torch.backends.mkldnn.flags`` would warn about TF32."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Disable casts of operators in the block: a recorded graph contains the step's casts."""
    if not torch._C._is_any_autocast_enabled():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def global_modes() -> tuple[Any, ...]:
    """Return torch's modes and defaults in this thread that a step may change."""
    flags = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled())
    casts = (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    stack = [id(mode) for mode in _get_current_dispatch_mode_stack()]
    return *flags, *casts, torch.get_default_dtype(), torch.get_default_device(), *stack


_ONE_TRACE = threading.RLock()


class _Scalars(ShapeEnv):
    """Symbols without reasoning about conditions that only a run can decide.

    ``beta ** step`` checks for a negative base. With a step counter for each parameter torch spends half of a
    trace on solving such conditions for a number read from a tensor, and nothing uses the solution.
    """

    def guard_or_defer_runtime_assert(  # type: ignore[override]  # torch caches its own
        self, orig_expr: Any, msg: str, fx_node: fx.Node | None = None
    ) -> bool:
        if any(symbol_is_type(symbol, SymT.UNBACKED_FLOAT) for symbol in orig_expr.free_symbols):
            return True
        return bool(super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node))


def new_fake_mode() -> FakeTensorMode:
    """Return a fake mode with the caller's scalars as its only symbols."""
    return FakeTensorMode(shape_env=_Scalars(), allow_non_fake_inputs=True)


def current_trace_nodes() -> list[str]:
    """Return names of the nodes recorded by make_fx so far."""
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    return [node.name for node in tracer.graph.nodes] if tracer is not None else []


def failed_node(module: fx.GraphModule, error: BaseException) -> fx.Node | None:
    """Return the node of the failing line in a graph module's forward, or None."""
    lines = [item.lineno or 0 for item in traceback.extract_tb(error.__traceback__) if "eval_with_key" in item.filename]
    places: Any = module._lineno_map or {}
    index = places.get(lines[-1] - module._prologue_start) if lines else None
    return None if index is None else list(module.graph.nodes)[index]


def trace_options() -> dict[str, Any]:
    """Return options of make_fx: no torch functions on nodes, as they need a mode."""
    name = "_disable_torch_fn_metadata_mode"
    return {name: True} if name in inspect.signature(make_fx).parameters else {}


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key, equal for tensors that share memory, fake ones too. Valid while one of them lives."""
    key: int = tensor.untyped_storage()._cdata  # fake tensors have one too
    return key


def storage_keys(tensors: Iterable[torch.Tensor]) -> list[int]:
    keys = []
    for tensor in tensors:
        keys.append(tensor.untyped_storage()._cdata)
    return keys


def after_backward(call: Callable[[], None]) -> None:
    """Run ``call`` at the end of the present backward pass; ``backward()`` raises its errors."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def backward_pass() -> int:
    """Return a number of the present backward pass, other than that of any other pass; -1 outside of them."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Return True within a backward pass, for example while a checkpoint runs its forward again."""
    return backward_pass() != -1


foreach_copy_ = torch._foreach_copy_  # not of empty lists
flatten: Any = torch._utils._flatten_dense_tensors
unflatten: Any = torch._utils._unflatten_dense_tensors  # empty tensors lose their shape


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function within `torch.compile`, or the function itself."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def hooks_after_accumulation(tensor: torch.Tensor) -> int:
    """Count the hooks to run after a leaf's gradient is accumulated."""
    return len(tensor._post_accumulate_grad_hooks or ())


def flat_group(mesh: DeviceMesh) -> c10d.ProcessGroup:
    """Return one group over all ranks of a mesh. It is a collective the first time for several axes."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def group_like(group: c10d.ProcessGroup, ranks: list[int]) -> c10d.ProcessGroup:
    """Make another group of a group's ranks for the CPU alone, with its timeout; a collective of these ranks."""
    backend: Any = group._get_backend(torch.device("cpu"))
    settings: Any = {"backend": str(backend.name()), "timeout": backend.options._timeout}
    group_again: c10d.ProcessGroup = c10d.new_group(ranks, use_local_synchronization=True, **settings)
    return group_again


_OF_FSDP = ("__composable_api", "__deepcopy__", "__reduce_ex__")  # attributes of placed modules: FSDP2's, and ours
_FSDP_HOOKS = ("torch.distributed.fsdp", "dp_partition.eager", "dp_partition.runtime")  # ours too


def _is_from_fsdp(hook: Any) -> bool:
    inner = getattr(hook, "hook", hook)  # torch wraps hooks of load_state_dict
    return (getattr(inner, "__module__", None) or "").startswith(_FSDP_HOOKS)


def without_fsdp(value: Any) -> tuple[type, dict[str, Any]]:
    """Return an object's class from before `fully_shard`, and its attributes without FSDP2's, hooks included."""
    kind = type(value).__mro__[2] if isinstance(value, FSDPModule) else type(value)
    own = {key: item for key, item in vars(value).items() if not key.startswith(_OF_FSDP)}
    for key, table in own.items():
        if "_hooks" in key and isinstance(table, dict) and any(map(_is_from_fsdp, table.values())):
            own[key] = type(table)((n, hook) for n, hook in table.items() if not _is_from_fsdp(hook))
    if isinstance(value, torch.nn.RNNBase) and "_flat_weights" in own:  # as gathered last, or from before the shards
        pairs = zip(value._flat_weights_names, value._flat_weights, strict=True)
        own["_flat_weights"] = [value._parameters.get(name, x) for name, x in pairs]
        own["_flat_weight_refs"] = [None] * len(value._flat_weights)  # not compared
    return kind, own


def _strip(module: torch.nn.Module) -> None:
    kind, own = without_fsdp(module)
    for key in vars(module).keys() - own.keys():
        del vars(module)[key]
    for key, table in vars(module).items():
        if "_hooks" in key and isinstance(table, dict):
            for number in table.keys() - own[key].keys():
                del table[number]
    if kind is not type(module):
        module.__class__ = kind


@contextlib.contextmanager
def without_fsdp_in(root: torch.nn.Module) -> Iterator[None]:
    """Make all modules of a model plain ones for the block; afterwards their hooks have their order again."""
    held = [(m, type(m), dict(vars(m))) for m in root.modules() if any(k.startswith(_OF_FSDP) for k in vars(m))]
    tables = [t for m in root.modules() for key, t in vars(m).items() if "_hooks" in key and isinstance(t, dict)]
    before = [(table, dict(table)) for table in tables]
    for module in root.modules():
        _strip(module)
    try:
        yield
    finally:
        for table, hooks in before:
            remaining = {n: hook for n, hook in hooks.items() if n in table or _is_from_fsdp(hook)}
            new = {n: hook for n, hook in table.items() if n not in hooks}  # registered within the block
            table.clear()
            table.update(remaining | new)
        for module, kind, own in held:
            if kind is not type(module):
                module.__class__ = kind
            vars(module).update({key: value for key, value in own.items() if key.startswith(_OF_FSDP)})


def remove_fsdp(unit: torch.nn.Module) -> None:
    """Make a unit of FSDP2 a plain module; parameters stay shards."""
    unit.reshard()  # type: ignore[operator]
    for module in unit.modules():
        _strip(module)
    _composable_state._module_state_mapping.pop(unit, None)  # else it could not be sharded again


def hook_views_quietly(unit: Any) -> None:
    """Let FSDP2 hook a module's outputs as ever, without torch 2.13's warning where one is a view.

    A linear layer of a batch of sequences returns a view. The danger that torch warns of, ``output += x`` behind it,
    is found where a step's first calls are compared with the step on a full copy.
    """
    state = unit._get_fsdp_state()
    original = getattr(state, "_register_pre_backward_hook", None)

    def register(output: Any) -> Any:
        views = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not any(x._base is not None for x in views) or torch._C._are_functorch_transforms_active():
            return original(output)  # type: ignore[misc]
        for x in views if torch.is_grad_enabled() else ():
            x.register_hook(state._pre_backward)
        return output

    if original is not None:
        state._register_pre_backward_hook = register


#: FSDP2 shards frozen parameters of integers from torch 2.13 on. Earlier it makes each shard trainable, which raises.
SHARDS_INTEGERS = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def is_outermost(unit: Any) -> bool:
    """Return True if no other module of FSDP2 around a module runs its forward now."""
    return unit._get_fsdp_state()._state_ctx.iter_forward_root is None


def hook_outputs(unit: Any, before: Callable[[], None]) -> None:
    """Call ``before`` in a backward pass where a gradient comes to an output of FSDP2's module, ahead of its gather."""
    state = unit._get_fsdp_state()
    original = state._pre_backward

    def reached(gradient: torch.Tensor) -> torch.Tensor:
        before()
        return original(gradient)  # type: ignore[no-any-return]

    state._pre_backward = reached  # FSDP2 registers the attribute as a hook of each output


def reset_fsdp(units: Iterable[Any]) -> None:
    """Make FSDP2's modules ready for the next forward, after an error in a step."""
    for unit in units:
        state = unit._get_fsdp_state()
        if state._is_root is None:
            continue  # it has not run
        if hasattr(unit, "reset_iter_state"):
            with contextlib.suppress(RuntimeError):  # only a root accepts it, for all modules below
                unit.reset_iter_state()
        else:  # torch 2.11, which has no method for it
            group, idle = state._fsdp_param_group, type(state._training_state).IDLE
            state._modules_to_run_forward.clear()
            state._comm_ctx.post_forward_order.clear()
            state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
            state._training_state = idle
            if group is not None:
                group.finalize_backward()  # waits for what is on its way
                group._partial_reduce_output, group._training_state = None, idle
            unit.reshard()
            state._state_ctx.iter_forward_root, state._state_ctx.post_backward_final_callback_queued = None, False


def is_backward_unfinished(units: Iterable[Any]) -> bool:
    """Return True if a backward pass through FSDP2's modules has not reached its end."""
    return any(unit._get_fsdp_state()._state_ctx.post_backward_final_callback_queued for unit in units)


def become(tensor: Any, other: Any) -> None:
    """Give a DTensor the local tensor and the placements of another one of its shape."""
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


def parameter_like(value: torch.Tensor, old: torch.Tensor) -> torch.nn.Parameter:
    """Make a parameter in place of another. It keeps the attributes set by users, such as ``p.no_decay``."""
    new = torch.nn.Parameter(value, old.requires_grad)
    vars(new).update({key: own for key, own in vars(old).items() if key not in vars(new)})
    return new


def refuse_before(operator: Any, refuse: Callable[[Any, Any], None]) -> None:
    """Call a function, which may raise, with an operator and its arguments before it runs on DTensors."""

    def checked(call: Callable[[], Any], op: Any, args: Any) -> Any:
        refuse(op, args)
        return call()

    wrap_operator(operator, checked)


def wrap_operator(operator: Any, around: Callable[[Callable[[], Any], Any, Any], Any]) -> None:
    """Run an operator on DTensors within a function, which gets the call, the operator and its arguments.

    Torch has a table of handlers by operator; the call is torch's own.
    """
    from torch.distributed.tensor import DTensor

    table: Any = DTensor._op_dispatcher._custom_op_handlers
    torchs = table.get(operator)

    def handler(op: Any, args: Any, kwargs: Any) -> Any:
        def call() -> Any:
            if torchs is not None:
                return torchs(op, args, kwargs)
            table.pop(operator, None)  # torch looks the handler up in each dispatch: without one the call is its own
            try:
                return op(*args, **kwargs)
            finally:
                table[operator] = handler

        return around(call, op, args)

    table[operator] = handler


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks)


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """Return torch's own decomposition of an operator, if there is one."""
    from torch._decomp import get_decompositions

    decompositions = get_decompositions([op])
    return decompositions.get(op)
