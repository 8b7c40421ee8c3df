"""A fused weight of which only some rows train: one GEMM forward, no gradient for the rest.

``y = x W^T + b`` with W [m, n] and active row ranges R: forward is the library's own single
GEMM, so outputs are bit-equal to the unfrozen model. Backward is

    grad_x   = grad_y W                      (all of W)
    grad_W_R = grad_y[:, R]^T x              (active rows only)
    grad_b_R = sum_i grad_y[i, R]

Modules reach it through :class:`Fused`, a tensor that stands for W wherever library code
reads it: ``F.linear`` and ``torch.addmm`` (HF ``Conv1D``) take the path above, also inside
``nn.MultiheadAttention``, which slices W before it multiplies. Any other function sees an
ordinary differentiable tensor, so gradients are right whatever a library does with W.
"""

from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedfrozen_app.models.patterns import Ranges

# The library's own attention without its check for overrides: with the check, a mode is
# offered the function as a whole and never sees the GEMMs inside it.
_ATTENTION = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda tensors: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)


class _Piece(NamedTuple):
    """Rows of a fused tensor as one GEMM sees them, with their trained ranges."""

    values: Tensor
    ranges: Ranges
    active: tuple[Tensor, ...]


class _Assemble(torch.autograd.Function):
    """The whole tensor as a function of its active slices; backward slices the gradient."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, dim: int, ranges: Ranges, *active: Tensor) -> Tensor:
        ctx.dim, ctx.ranges = dim, ranges
        return full.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slices = [grad.narrow(ctx.dim, a, b - a) for a, b in ctx.ranges]
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *(s if n else None for s, n in zip(slices, needed, strict=True))


class PartialLinear(torch.autograd.Function):
    """``F.linear`` (or ``addmm``) whose weight gradient exists for the active rows only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        by_column: bool,
        weight_ranges: Ranges,
        bias_ranges: Ranges,
        *active: Tensor,
    ) -> Tensor:
        """Return x W^T + b, or b + x W with ``by_column``; active: weight then bias slices."""
        ctx.dtypes = [x.dtype, None if bias is None else bias.dtype, *(a.dtype for a in active)]
        x, weight, bias = _autocast(x, weight, bias)
        needs_x, needs_active = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        needs_weight = any(needs_active[: len(weight_ranges)])
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.by_column, ctx.x_shape = by_column, x.shape
        ctx.ranges = (weight_ranges, bias_ranges)
        if not by_column:
            # F.linear chooses its kernel by whether the weight requires a gradient.
            return F.linear(x, weight.detach().requires_grad_(), bias)
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the bias where it trains whole, and the active slices."""
        x, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_bias = None
        if weight is not None:
            grad_x = grad @ (weight.t() if ctx.by_column else weight)
            grad_x = grad_x.reshape(ctx.x_shape).to(ctx.dtypes[0])
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0).to(ctx.dtypes[1])
        weight_ranges, bias_ranges = ctx.ranges
        slices: list[Tensor | None] = []
        for i, (start, stop) in enumerate((*weight_ranges, *bias_ranges)):
            if not ctx.needs_input_grad[6 + i]:
                slices.append(None)
                continue
            rows = grad[:, start:stop]
            if i < len(weight_ranges):
                flat = x.reshape(-1, x.shape[-1])
                rows = flat.t() @ rows if ctx.by_column else rows.t() @ flat
            else:
                rows = rows.sum(0)
            slices.append(rows.to(ctx.dtypes[2 + i]))
        return grad_x, None, grad_bias, None, None, None, *slices


def _autocast(*tensors: Tensor | None) -> list[Any]:
    """Cast as autocast would before a GEMM, so that the cast tensors are what is saved."""
    kind = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    ]


class Fused(Tensor):
    """A partly frozen weight or bias as library code sees it: whole, and differentiable."""

    full: Tensor
    dim_: int
    ranges: Ranges
    active: tuple[Tensor, ...]

    @staticmethod
    def of(full: Tensor, dim: int, ranges: Ranges, active: tuple[Tensor, ...]) -> "Fused":
        """Return ``full`` with gradients flowing to ``active``, its slices along ``dim``."""
        fused: Fused = _Assemble.apply(full, dim, ranges, *active).as_subclass(Fused)
        fused.full, fused.dim_, fused.ranges, fused.active = full, dim, ranges, active
        return fused

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Route the GEMMs that libraries use; anything else sees a differentiable tensor."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear or func is torch.addmm or func is F.multi_head_attention_forward:
                fused = [a for a in (*args, *kwargs.values()) if isinstance(a, Fused)]
                with _SlicedGemms(fused):
                    return func(*args, **kwargs)
            if func == Tensor.data.__set__:  # type: ignore[attr-defined]
                # weight.data = new on this stand-in would be lost with it.
                return args[0].full.copy_(args[1])
            return func(*args, **kwargs)


class _SlicedGemms(TorchFunctionMode):
    """While active, GEMMs whose weight lies in a fused tensor skip its frozen rows' gradient."""

    def __init__(self, fused: list[Fused]) -> None:
        super().__init__()
        self.fused = fused
        self.in_attention = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = None
        if func is F.multi_head_attention_forward and not self.in_attention:
            self.in_attention = True
            with self:
                return _ATTENTION(*args, **kwargs)
        if func is F.linear:
            result = self.linear(*args, **kwargs)
        elif func is torch.addmm and not kwargs and len(args) == 3:
            result = self.addmm(*args)
        return func(*args, **kwargs) if result is None else result

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if (piece := self.find(weight, 0)) is None:
            return None
        return self.apply(input, piece, bias, by_column=False)

    def addmm(self, bias: Tensor, input: Tensor, weight: Tensor) -> Tensor | None:
        piece = self.find(weight, 1)
        if piece is None or input.ndim != 2 or bias.ndim != 1:
            return None
        return self.apply(input, piece, bias, by_column=True)

    def apply(self, x: Tensor, weight: _Piece, bias: Tensor | None, *, by_column: bool) -> Tensor:
        found = None if bias is None else self.find(bias, 0)
        values, ranges, active = found or (bias, (), ())
        out: Tensor = PartialLinear.apply(
            x, weight.values, values, by_column, weight.ranges, ranges, *weight.active, *active
        )
        return out

    def find(self, tensor: Tensor, dim: int) -> _Piece | None:
        """Return which slices of a fused tensor ``tensor`` is; None if it is none of them."""
        for fused in self.fused:
            full = fused.full
            if fused.dim_ != dim or not _is_slice(tensor, full, dim):
                continue
            offset = int(tensor.storage_offset() - full.storage_offset())
            start = offset // max(full.stride(dim), 1)
            return _within(fused, start, start + tensor.shape[dim])
        return None


def _is_slice(tensor: Tensor, full: Tensor, dim: int) -> bool:
    """Whether ``tensor`` is some slices along ``dim`` of the memory of ``full``."""
    same_memory = tensor.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    others = [d for d in range(full.ndim) if d != dim]
    return (
        same_memory
        and tensor.dtype == full.dtype
        and tensor.stride() == full.stride()
        and all(tensor.shape[d] == full.shape[d] for d in others)
    )


def _within(fused: Fused, start: int, stop: int) -> _Piece | None:
    """Return rows start:stop of a fused tensor; None if they cut through an active range."""
    ranges, active = [], []
    for (low, high), part in zip(fused.ranges, fused.active, strict=True):
        if high <= start or stop <= low:
            continue
        if low < start or stop < high:
            return None
        ranges.append((low - start, high - start))
        active.append(part)
    values = fused.full.narrow(fused.dim_, start, stop - start)
    return _Piece(values, tuple(ranges), tuple(active))
