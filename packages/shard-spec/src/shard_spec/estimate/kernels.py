"""Operators on the meta device, where torch's shape functions differ from its kernels in memory.

A shape function may refuse a dtype that the kernel takes, or lay its result out otherwise: a linear layer then copies
an input that it would read in place, or the other way round. Autograd's engine adds gradients without a dispatch mode
in place, and with one into new memory.

Casts of ``torch.autocast`` are made here too, which has no rules for the meta device: they are made before each
function is called.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shard_spec._torch_compat import engine_references, memory_of, references
from shard_spec.estimate.step_options import mapped

_ATEN = torch.ops.aten
_CONVOLUTIONS = {_ATEN.convolution.default: (0, 1), _ATEN.convolution_backward.default: (1, 2)}  # input, weight
# Of an input (batch, channels, ...) these kernels make a contiguous or channels-last result, whatever its strides are.
# Positions of what decides among the arguments: the first that is channels-last, or else contiguous.
_CONTIGUOUS = {
    _ATEN.native_batch_norm.default: (0,),
    _ATEN._native_batch_norm_legit.default: (0,),
    _ATEN._native_batch_norm_legit.no_stats: (0,),
    _ATEN._batch_norm_with_update.default: (0,),
    _ATEN.native_batch_norm_backward.default: (1,),
    _ATEN.batch_norm_backward.default: (1,),
    _ATEN.native_layer_norm_backward.default: (1,),
    _ATEN.max_pool2d_with_indices.default: (0,),
    _ATEN.max_pool2d_with_indices_backward.default: (1,),
    _ATEN.avg_pool2d.default: (0,),
    _ATEN.avg_pool2d_backward.default: (1,),
    **_CONVOLUTIONS,
}
# Autograd writes these results into an operand that it alone holds; while a mode watches it makes a new tensor.
_IN_PLACE = {
    _ATEN.add.Tensor: _ATEN.add_.Tensor,
    _ATEN.scatter.src: _ATEN.scatter_.src,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
    _ATEN.index_add.default: _ATEN.index_add_.default,
    _ATEN.index_fill.int_Tensor: _ATEN.index_fill_.int_Tensor,
    _ATEN.index_put.default: _ATEN.index_put_.default,
}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def run_operator(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run one operator on meta tensors; new memory is what the kernel would allocate."""
    if operator is _ATEN.clone.default and args[0].layout == torch.sparse_coo:
        return args[0].detach()  # a real step keeps a sparse gradient as it is; on meta a clone would lose its size
    if operator in _IN_PLACE and not torch.is_grad_enabled() and _is_held_by_engine(operator, args):
        return _IN_PLACE[operator](*args, **kwargs)
    if operator is _ATEN._grouped_mm.default:
        # Torch's shape function takes bfloat16 alone, its kernels more. Autograd is above: it saves the originals.
        halves = (each.to(torch.bfloat16) for each in args[:2])
        return operator(*halves, *args[2:], **kwargs).to(args[0].dtype)
    result = operator(*args, **kwargs)
    if operator not in _CONTIGUOUS:
        return result
    models = [args[at] for at in _CONTIGUOUS[operator]]
    model = next((each for each in models if _memory_format(each) != torch.contiguous_format), models[0])
    if isinstance(result, torch.Tensor):
        return _laid_out(result, model)
    return (result[0] if result[0] is None else _laid_out(result[0], model), *result[1:])


# Operands that a kernel reads in rows alone: it copies others before it starts.
_READ_CONTIGUOUS = {
    _ATEN.native_layer_norm.default: (0,),
    _ATEN.native_layer_norm_backward.default: (0, 1),
    # Up to torch 2.14 the function around them makes these contiguous; from 2.15 on each kernel does.
    _ATEN.native_group_norm.default: (0,),
    _ATEN.native_group_norm_backward.default: (0, 1),
    _ATEN.convolution.default: (0, 1),
    _ATEN.convolution_backward.default: (0, 1, 2),
    **dict.fromkeys((_ATEN.max_pool2d_with_indices.default, _ATEN.avg_pool2d.default), (0,)),
    **dict.fromkeys((_ATEN.max_pool2d_with_indices_backward.default, _ATEN.avg_pool2d_backward.default), (0,)),
}
# These backwards make their gradient contiguous: that of a sum, for example, is one expanded number.
_UPSAMPLED = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
_OF_EXPANDED = (
    *(f"{kind}_pad{dim}d_backward" for kind in ("reflection", "replication") for dim in (1, 2, 3)),
    *(f"upsample_{kind}_backward" for kind in _UPSAMPLED),
    *(f"_upsample_nearest_exact{dim}d_backward" for dim in (1, 2, 3)),
    *(f"_adaptive_avg_pool{dim}d_backward" for dim in (2, 3)),
    *(f"adaptive_max_pool{dim}d_backward" for dim in (2, 3)),
    *("grid_sampler_2d_backward", "grid_sampler_3d_backward", "col2im"),
)
_READ_CONTIGUOUS |= {getattr(_ATEN, name).default: (0,) for name in _OF_EXPANDED}
# Matrices that BLAS reads in rows or in columns.
_READ_BY_BLAS = {
    _ATEN.mm.default: (0, 1),
    _ATEN.bmm.default: (0, 1),
    _ATEN.addmm.default: (1, 2),
    _ATEN.baddbmm.default: (1, 2),
}


# Kernels that read lazy conjugates and negatives; for others they are made in new memory.
_READ_LAZY = {"mm", "bmm", "addmm", "baddbmm", "dot", "vdot", "clone", "copy_", "resolve_conj", "resolve_neg"}


@functools.cache
def _name_of(operator: Any) -> str:
    return str(operator.overloadpacket.__name__)


@functools.cache
def _reads_lazy(operator: Any) -> bool:
    return operator.is_view or _name_of(operator) in _READ_LAZY


_FLASH_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
_NORM_BACKWARD = {_ATEN.native_batch_norm_backward.default, _ATEN.batch_norm_backward.default}


def copied_operands(operator: Any, args: Any, tensors: Sequence[torch.Tensor], *, on_cpu: bool) -> list[torch.Tensor]:
    """Return the operands that the operator's kernel copies while it runs, or tensors as large as what it allocates.

    A kernel copies operands whose strides it cannot read. On a CPU the backward of a batch norm keeps a product in new
    memory, that of attention a gradient by heads; on every device a tensor rolled along several dims is
    rolled once for each.
    """
    lazy = [each for each in tensors if each.is_conj() or each.is_neg()]
    if lazy and not _reads_lazy(operator):
        return lazy
    if on_cpu and operator is _FLASH_BACKWARD and not args[0].transpose(1, 2).is_contiguous():
        return [args[0]]
    if on_cpu and operator in _NORM_BACKWARD and args[0].is_contiguous(memory_format=_memory_format(args[1])):
        return [args[1]]
    if operator is _ATEN.roll.default and len(args[1]) > 1:
        return [args[0]]
    read = [args[at] for at in _READ_CONTIGUOUS.get(operator, ()) if args[at] is not None]
    copied = [each for each in read if not each.is_contiguous(memory_format=_memory_format(each))]
    for matrix in (args[at] for at in _READ_BY_BLAS.get(operator, ())):
        (rows, columns), (by_row, by_column) = matrix.shape[-2:], matrix.stride()[-2:]
        in_rows = by_column == 1 and by_row >= max(1, columns)
        if not in_rows and not (by_row == 1 and by_column >= max(1, rows)):
            # A batch of them is read one after another on a CPU.
            copied.append(matrix[:1] if on_cpu and matrix.dim() > 2 else matrix)
    return copied


_ATTENTION = {  # products of queries by keys, each of two operations a factor
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: (0, 2),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 5),
}


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of a product, a convolution or fused attention; 0 for other operators."""
    if operator in _ATTENTION:
        first, products = _ATTENTION[operator]
        query, key = args[first : first + 2]
        return int(2 * products * prod(query.shape) * key.shape[-2])
    if operator is _ATEN._grouped_mm.default:
        first, second = args[:2]
        groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
        return int(2 * groups * prod(first.shape[-2:]) * second.shape[-1])
    counted = flop_registry.get(operator._overloadpacket)
    return int(counted(*args, **kwargs, out_val=result)) if counted is not None else 0


def _is_held_by_engine(operator: Any, args: Any) -> bool:
    """Return True if autograd alone holds the first operand; a sum has to have its shape."""
    owned = engine_references()
    if owned is None:
        return False
    if operator is _ATEN.index_put.default:  # zeros that the formula of indexing holds by a name of its own
        owned = owned[0] + 1, owned[1]
    fits = operator is not _ATEN.add.Tensor or (isinstance(args[1], torch.Tensor) and args[0].shape == args[1].shape)
    return fits and owned == references(args[0])


def _memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the format that kernels choose for a result like ``tensor``."""
    last = _CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _laid_out(result: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    wanted = _memory_format(model)
    return result if result.is_contiguous(memory_format=wanted) else torch.empty_like(result, memory_format=wanted)


# Recorded peaks of these on a CPU are higher by a tensor as large as the input, or by more; a name stands for all that
# begin with it.
_WITH_WORKSPACE = (
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy", "multilabel_margin_loss"),
    *("linalg_", "cholesky", "lu_unpack", "_fft_", "_embedding_bag", "_trilinear", "upsample_", "_upsample_"),
    *("fractional_max_pool", "masked_scatter", "index_reduce", "kthvalue", "median", "nanmedian", "nansum", "rrelu"),
    *("_euclidean_dist", "var_mean", "std_mean", "scatter_reduce"),  # sums within their formulas
)
_WITHOUT_WORKSPACE = {"linalg_vector_norm", "linalg_cross", "linalg_diagonal"}
# On the meta device their backward is a formula of many results, where kernels on real devices keep fewer.
_FORMULAS = {
    *(_ATEN.mish.default, _ATEN.prod.default, _ATEN.prod.dim_int, _ATEN.cumprod.default),
    *(_ATEN.max.default, _ATEN.min.default),
}


def uncounted_workspace(operator: Any, args: Any) -> str:
    """Return the kind of an operator whose kernel on a CPU allocates workspace that is not counted, or ``""``.

    A convolution unfolds its input into columns or reorders it into blocks; a sum of booleans (in the backward of
    ``amax``) converts them to integers first.
    """
    name = _workspace_of(operator)
    if _is_pointwise(operator):
        dtypes = {each.dtype for each in args if isinstance(each, torch.Tensor) and each.dim()}
        if torch.float64 in dtypes and torch.float32 in dtypes:
            return "operands of two dtypes"
    if operator is _ATEN.sum.dim_IntList and args[0].dtype == torch.bool:
        return "sums of booleans"
    if (
        operator is _ATEN.max_pool2d_with_indices_backward.default
        and _memory_format(args[1]) in _CHANNELS_LAST.values()
    ):
        return "pooling with channels last"
    return name or ("convolutions" if operator in _CONVOLUTIONS else "")


@functools.cache
def _is_pointwise(operator: Any) -> bool:
    return torch.Tag.pointwise in operator.tags


@functools.cache
def _workspace_of(operator: Any) -> str:
    name = _name_of(operator)
    return name if name.startswith(_WITH_WORKSPACE) and name not in _WITHOUT_WORKSPACE else ""


def counted_formula(operator: Any) -> str:
    """Return the name of an operator whose backward counts more than kernels allocate, or ``""``."""
    return _name_of(operator) if operator in _FORMULAS else ""


# torch/csrc/autocast_mode.h of 2.13: products in the lower dtype on every device; the rest differs.
_LOWER = {
    "linear",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "einsum",
    *("tensordot", "inner"),
    *("linalg_vecdot", "linalg_matmul", "linalg_multi_dot", "linalg_matrix_power"),
    *(f"conv{kind}{dim}d" for kind in ("", "_transpose") for dim in (1, 2, 3)),
    "scaled_dot_product_attention",
    "prelu",
    "chain_matmul",
}
_VIEWED = {"einsum", "tensordot", "inner"}  # their products get views of weights, whose casts are not kept
_LOWER_CUDA = {"mv", "addmv", "addr"}
# Losses that both devices compute in float32.
_LOSSES = {
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "cross_entropy",
    "nll_loss",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "hinge_embedding_loss",
    "margin_ranking_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "poisson_nll_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
}
_FULL_CUDA = _LOSSES | {
    "softmax",
    "log_softmax",
    "layer_norm",
    "group_norm",
    "rms_norm",
    "norm",
    "sum",
    "cumsum",
    "cumprod",
    "prod",
    "exp",
    "expm1",
    "log",
    "log10",
    "log1p",
    "log2",
    "pow",
    "__pow__",
    "rsqrt",
    "softplus",
    "reciprocal",
    "cosine_similarity",
    "logsumexp",
    "interpolate",
    *("acos", "asin", "cosh", "sinh", "tan", "erfinv", "dist", "pdist", "renorm", "cdist"),
}
_FULL_CPU = _LOSSES | {
    *("binary_cross_entropy", "ctc_loss", "prod", "cdist", "trace", "quantile", "grid_sample", "stft"),
    *("avg_pool3d", "max_pool3d", "adaptive_avg_pool3d", "view_as_complex", "polar", "nanquantile"),
    *("inverse", "pinverse", "cholesky", "cholesky_inverse", "cholesky_solve", "logdet"),
}
_FULL_CPU |= {
    f"linalg_{name}"
    for name in (
        *("cond", "matrix_rank", "cholesky", "cholesky_ex", "inv", "inv_ex", "tensorinv", "qr", "svd", "svdvals"),
        *("eig", "eigvals", "eigh", "eigvalsh", "solve", "lstsq", "householder_product"),
    )
} | {f"fft_{way}{kind}fft{dims}" for way in ("", "i") for kind in ("", "r", "h") for dims in ("", "2", "n")}


class Autocast:
    """Autocast of one step: the option's, or that which the forward enters itself.

    Args:
        dtype: Lower dtype of the option; None: only where the forward enters ``torch.autocast``.
        device: Device type whose rules hold: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, dtype: torch.dtype | None, device: str) -> None:
        self._dtype, self.device = dtype, device
        # Memory of a weight -> its cast, kept until autocast ends.
        self._weights: MutableMapping[int, torch.Tensor] = {}

    def end(self) -> None:
        """Forget the casts of weights: autograd alone keeps them from here on, those of recomputed blocks too."""
        self._weights = weakref.WeakValueDictionary()

    def arguments(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the function called ``name`` as autocast casts them."""
        dtype = self._dtype
        entered = [each for each in ("cpu", "cuda") if torch.is_autocast_enabled(each)]
        if entered:
            dtype = torch.get_autocast_dtype(entered[0])
        elif dtype is None:
            self._weights.clear()
            return args, kwargs
        if (entered or [self.device])[0] == "cpu":
            lower, full = name in _LOWER, name in _FULL_CPU
            full |= name == "pad" and not {"reflect", "replicate"}.isdisjoint((*args[2:3], kwargs.get("mode")))
        else:
            lower, full = name in _LOWER or name in _LOWER_CUDA, name in _FULL_CUDA
        wanted = dtype if lower else torch.float32 if full else None
        if wanted is None:
            return args, kwargs

        def cast(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return mapped(value, cast)
            if not value.is_floating_point() or value.dtype in (wanted, torch.float64):
                return value
            is_weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32
            if name in _VIEWED or not is_weight:
                return value.to(wanted)
            cast_weight = self._weights.get(memory_of(value))
            if cast_weight is None:
                cast_weight = self._weights[memory_of(value)] = value.to(wanted)
            return cast_weight

        named = cast(kwargs)
        return tuple(map(cast, args[::-1]))[::-1], named  # torch casts the last argument first
