# SPDX-License-Identifier: Apache-2.0
"""FP8 tensors with one scale, and their two quantizers.

    stored = round(value * scale), to nearest even, saturating      value = stored * scale_inv

Infinities saturate, NaN stays NaN. Nothing here waits for a device.
"""

from __future__ import annotations

import torch

from ..._names import missing
from ..._words import DType
from .quantized_tensor import QuantizedTensor, Quantizer

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor"]
__getattr__ = missing(__name__)

_TORCH = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
_FLOAT_MAX = torch.finfo(torch.float32).max


def torch_dtype(fp8_dtype: DType) -> torch.dtype:
    if fp8_dtype not in _TORCH:
        raise ValueError(f"fp8_dtype={fp8_dtype!r}: must be DType.kFloat8E4M3 or DType.kFloat8E5M2")
    return _TORCH[fp8_dtype]


class Float8Tensor(QuantizedTensor):
    """A tensor of nominal `dtype`, by which operations see it, stored as FP8 with one scale.

    data: uint8 or a float8 dtype [shape], kept as uint8 in `_data`; fp8_scale_inv: fp32 [1], what a stored
    number is multiplied by, in `_scale_inv`; fp8_dtype: DType.kFloat8E4M3 or kFloat8E5M2, in `_fp8_dtype`;
    quantizer: what rounds what is written into this tensor. `_transpose` is always None.

    >>> x = Float8Tensor(shape=data.shape, dtype=torch.bfloat16, data=data, fp8_scale_inv=scale_inv,
    ...                  fp8_dtype=DType.kFloat8E4M3)
    """

    def __init__(self, shape, dtype: torch.dtype, *, data: torch.Tensor, fp8_scale_inv: torch.Tensor,
                 fp8_dtype: DType, requires_grad: bool = False, data_transpose=None,
                 quantizer: Quantizer | None = None):
        torch_dtype(fp8_dtype)
        if data_transpose is not None:
            raise ValueError("Float8Tensor: data_transpose: no kernel here reads one; leave it None")
        if data.dtype not in (torch.uint8, *_TORCH.values()):
            raise ValueError(f"Float8Tensor: data.dtype={data.dtype}: must be torch.uint8 or a float8 dtype")
        self._data = data.view(torch.uint8)
        self._scale_inv = fp8_scale_inv.reshape(1)
        self._fp8_dtype = DType(fp8_dtype)
        self._transpose = None
        self._quantizer = quantizer

    @property
    def stored(self) -> torch.Tensor:
        """`_data` in its float8 dtype, a view."""
        return self._data.view(torch_dtype(self._fp8_dtype))

    def _value(self, dtype):
        return (self.stored.float() * self._scale_inv).to(dtype)

    def _moved(self, data):
        return Float8Tensor(data.shape, self.dtype, data=data, fp8_dtype=self._fp8_dtype,
                            fp8_scale_inv=self._scale_inv.to(data.device), quantizer=self._quantizer)

    def _get_quantizer(self):
        if self._quantizer is None:
            raise ValueError("Float8Tensor: quantizer=None: writing into this tensor needs one")
        return self._quantizer

    def __repr__(self, *, tensor_contents=None):
        return (f"Float8Tensor(fp8_dtype={self._fp8_dtype.name}, scale_inv={self._scale_inv.item():g}, "
                f"data={self._value(self.dtype)})")

    def __reduce_ex__(self, protocol):
        return _made, (self._data, self._fp8_dtype, self._scale_inv, self.dtype)


def _made(data, fp8_dtype, scale_inv, dtype):
    return Float8Tensor(data.shape, dtype, data=data, fp8_scale_inv=scale_inv, fp8_dtype=fp8_dtype)


class _PerTensor(Quantizer):
    """What both quantizers share: `_scale_for` says what values are multiplied by, given their amax."""
    dtype: DType

    def _scale_for(self, amax: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def quantize_together(self, tensors, dtype=None, amax=None) -> list[Float8Tensor]:
        """Each of `tensors`, with one scale for all, without autograd. Who knows their amax, fp32 [1], spares
        reading them."""
        with torch.no_grad():
            scale = self._scale_for(largest(tensors) if amax is None else amax.reshape(1))
            return [self.wrap(_rounded(x, scale, self.dtype), 1 / scale, dtype or x.dtype) for x in tensors]

    def _quantized(self, tensor, dtype):
        return self.quantize_together([tensor], dtype)[0]

    def update_quantized(self, src, dst):
        if not isinstance(dst, Float8Tensor):
            raise ValueError(f"{type(self).__name__}: dst={type(dst).__name__}: must be a Float8Tensor")
        with torch.no_grad():
            src = src._value(src.dtype) if isinstance(src, QuantizedTensor) else src.detach()
            scale = self._scale_for(largest([src]))
            if dst._data.untyped_storage().nbytes() != dst._data.numel():
                scale = 1 / dst._scale_inv  # which the rest of the storage has too
            else:
                dst._fp8_dtype = self.dtype
                dst._scale_inv.copy_(1 / scale)
            dst._data.copy_(_rounded(src, scale, dst._fp8_dtype).view(torch.uint8))
        return dst

    def make_empty(self, shape, *, dtype=torch.float32, device=None, requires_grad=False) -> Float8Tensor:
        """A Float8Tensor [shape] to be written, on `device`, by default that of the scale."""
        device = self.scale.device if device is None else device
        return Float8Tensor(shape, dtype, data=torch.empty(tuple(shape), dtype=torch.uint8, device=device),
                            fp8_scale_inv=torch.ones(1, device=device), fp8_dtype=self.dtype,
                            requires_grad=requires_grad, quantizer=self)

    def wrap(self, stored, scale_inv, dtype, requires_grad=False):
        """What is stored already, as a tensor."""
        return Float8Tensor(stored.shape, dtype, data=stored, fp8_scale_inv=scale_inv, fp8_dtype=self.dtype,
                            requires_grad=requires_grad, quantizer=self)


class Float8Quantizer(_PerTensor):
    """Rounds by a scale that was decided before, and takes down what it saw.

    scale: fp32 [1], what values are multiplied by. amax: fp32 [1], raised to the largest |value| that was
    quantised since it was last 0. Both are read and written in place, so views of a state may be given.
    """

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: DType, *, rowwise: bool = True,
                 columnwise: bool = True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        torch_dtype(fp8_dtype)
        self.scale, self.amax, self.dtype = scale, amax, DType(fp8_dtype)

    def _scale_for(self, amax):
        self.note(amax)
        return self.scale

    def calibrate(self, *tensors: torch.Tensor):
        """Takes down the largest |value| alone."""
        self.note(largest(tensors))

    def note(self, amax: torch.Tensor):
        """Raises amax to a largest |value| [1] that somebody else found."""
        with torch.no_grad():
            self.amax.copy_(torch.maximum(self.amax, amax.reshape(self.amax.shape)))

    def create_tensor_from_data(self, data: torch.Tensor, fake_dtype: torch.dtype = torch.float32,
                                requires_grad: bool = False) -> Float8Tensor:
        """What was stored by this quantizer's scale, as a tensor."""
        return self.wrap(data, 1 / self.scale, fake_dtype, requires_grad)


class Float8CurrentScalingQuantizer(_PerTensor):
    """Rounds by the scale that just fits: max of the format / the tensor's own amax, 1 for zeros.

    force_pow_2_scales takes the power of two below; amax_epsilon is the least amax that counts;
    with_amax_reduction takes the largest amax of the ranks of amax_reduction_group. `scale` and `amax` are
    those of the last tensor.
    """

    def __init__(self, fp8_dtype: DType, device: torch.device | str, *, rowwise: bool = True,
                 columnwise: bool = True, with_amax_reduction: bool = False, amax_reduction_group=None,
                 force_pow_2_scales: bool = False, amax_epsilon: float = 0.0):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.largest_stored = torch.finfo(torch_dtype(fp8_dtype)).max
        self.dtype = DType(fp8_dtype)
        self.scale = torch.ones(1, dtype=torch.float32, device=device)
        self.amax = torch.zeros(1, dtype=torch.float32, device=device)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, amax_epsilon

    def _scale_for(self, amax):
        if self.with_amax_reduction:
            amax = amax.clone()
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, self.amax_reduction_group)
        self.amax, amax = amax, amax.clamp(min=self.amax_epsilon)
        scale = scale_of(amax, self.largest_stored, torch.ones_like(amax))
        if self.force_pow_2_scales:
            scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale)[1] - 1)
        self.scale = scale
        return scale

    def calibrate(self, *tensors: torch.Tensor):
        """Nothing is remembered."""

    def note(self, amax: torch.Tensor):
        """Nothing is remembered."""


def largest(tensors) -> torch.Tensor:
    """The largest |value| of several tensors, fp32 [1]; a tensor that is empty or holds NaN counts as 0."""
    found = [torch.linalg.vector_norm(x.detach(), torch.inf).float() for x in tensors if x.numel()]
    if not found:
        return torch.zeros(1, device=tensors[0].device)
    return torch.stack(found).nan_to_num(nan=0.0, posinf=torch.inf).amax().reshape(1)


def scale_of(amax: torch.Tensor, largest_stored: float, otherwise: torch.Tensor) -> torch.Tensor:
    """largest_stored / amax, FLT_MAX where that overflows; `otherwise` where amax is 0 or not finite."""
    fits = torch.isfinite(amax) & (amax > 0)
    return torch.where(fits, (largest_stored / amax).clamp(max=_FLOAT_MAX), otherwise)


def _rounded(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: DType) -> torch.Tensor:
    dtype = torch_dtype(fp8_dtype)
    limit = torch.finfo(dtype).max
    scaled = x * scale if x.dtype != torch.float64 else x.float() * scale  # fp32, as scale is no scalar
    return scaled.clamp_(-limit, limit).to(dtype).reshape(x.shape)
