# SPDX-License-Identifier: Apache-2.0
"""What stands round attention in TE's layers, with TE's parameters: projections, norms, an MLP. They
are PyTorch's own operators; TE's modules of these names have FP8 and userbuffers, which these have not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from ...torch import _tensors

Init = Callable[[torch.Tensor], object]


def default_init(weight: torch.Tensor):
    torch.nn.init.normal_(weight, 0.0, 0.023)


def device_of(device) -> torch.device:
    """TE's default device is "cuda"; a machine without takes the CPU."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device


def in_autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of an autocast region, where one is open for its device."""
    dtype = _tensors.autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


def unsupported(module: str, **given):
    """NotImplementedError for the first argument that is given."""
    for name, value in given.items():
        if value:
            raise NotImplementedError(
                f"{module}: {name}={value!r}: tessera.te's layers run on one device, on PyTorch's linear "
                f"layers; leave {name} at its default, or build the layer from DotProductAttention")


class FastSetattr:
    """What TE's modules have to set an attribute that is no parameter, buffer or module."""

    def fast_setattr(self, name: str, value):
        self.__dict__[name] = value


class Stateful(FastSetattr, torch.nn.Module):
    """A module whose state dict has TE's place for the state of FP8, kept as it is and never
    unpickled, and which does not miss it."""

    def get_extra_state(self):
        return getattr(self, "_extra_state", torch.empty(0, dtype=torch.uint8))

    def set_extra_state(self, state):
        self._extra_state = state

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys,
                              unexpected_keys, error_msgs):
        before = len(missing_keys)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)
        missing_keys[before:] = [key for key in missing_keys[before:]
                                 if key != f"{prefix}_extra_state"]


class Norm(Stateful):
    """LayerNorm or RMSNorm over the last axis; names of the parameters begin with `prefix`. With
    zero_centered_gamma the weight is what is added to 1."""

    def __init__(self, hidden_size: int, eps: float, normalization: str = "LayerNorm",
                 zero_centered_gamma: bool = False, prefix: str = "", **factory):
        super().__init__()
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f'normalization={normalization!r}: must be "LayerNorm" or "RMSNorm"')
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.prefix = prefix
        weight = torch.zeros if zero_centered_gamma else torch.ones
        self.register_parameter(f"{prefix}weight", torch.nn.Parameter(weight(hidden_size, **factory)))
        bias = torch.nn.Parameter(torch.zeros(hidden_size, **factory)) \
            if normalization == "LayerNorm" else None
        self.register_parameter(f"{prefix}bias", bias)

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        """In autocast's dtype, though PyTorch's norms then return fp32."""
        return in_autocast(self._normalised(x))

    def _normalised(self, x):
        weight, bias = getattr(self, f"{self.prefix}weight"), getattr(self, f"{self.prefix}bias")
        dtype = x.dtype
        if self.zero_centered_gamma:  # in fp32, since 16 bits round most of the weight away beside 1
            wide = torch.promote_types(dtype, torch.float32)
            x, weight, bias = x.to(wide), 1 + weight.to(wide), None if bias is None else bias.to(wide)
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.eps).to(dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalised(x)


class Linear(Stateful):
    """x Wᵀ + b. `split` maps names to widths: W and b are then parameters of their own for each
    ("query_weight"), else they are "weight" and "bias"."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True,
                 init_method: Init | None = None, split: dict[str, int] | None = None, **factory):
        super().__init__()
        add_linear(self, in_features, split or {"": out_features}, bias, init_method, factory)

    def forward(self, x: torch.Tensor, with_bias: bool = True) -> torch.Tensor:
        return F.linear(x, self.all("weight"), self.all("bias") if with_bias else None)

    def all(self, kind: str) -> torch.Tensor | None:
        """The weights, or the biases, one below the other."""
        parts = [getattr(self, name + kind) for name in self.names]
        return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)


class NormLinear(Norm):
    """A Norm and a Linear in one module, whose norm has the names "layer_norm_weight" and
    "layer_norm_bias"."""

    all = Linear.all

    def __init__(self, in_features: int, out_features: int, eps: float, *, bias: bool,
                 init_method: Init | None, normalization: str, zero_centered_gamma: bool,
                 split: dict[str, int] | None = None, **factory):
        super().__init__(in_features, eps, normalization, zero_centered_gamma, "layer_norm_", **factory)
        add_linear(self, in_features, split or {"": out_features}, bias, init_method, factory)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(projection, what was projected)."""
        x = self.normalised(x)
        return F.linear(x, self.all("weight"), self.all("bias")), x


def add_linear(module, in_features: int, widths: dict[str, int], bias: bool, init_method, factory):
    """Gives `module` the parameters of a projection; its names are kept in `names`."""
    module.names = tuple(f"{name}_" if name else "" for name in widths)
    for name, width in zip(module.names, widths.values()):
        weight = torch.nn.Parameter(torch.empty(width, in_features, **factory))
        with torch.no_grad():
            (init_method or default_init)(weight)
        module.register_parameter(f"{name}weight", weight)
        module.register_parameter(
            f"{name}bias", torch.nn.Parameter(torch.zeros(width, **factory)) if bias else None)


def _gelu(x):
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def _clamped_swiglu(gate, linear, limit=7.0, alpha=1.702, glu_linear_offset=1.0):
    """Both halves of fc1's outputs -> what fc2 is given."""
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear.clamp(-limit, limit) + glu_linear_offset)


def _squared_relu(x):
    return F.relu(x).square()


_ACTIVATIONS = {"gelu": _gelu, "qgelu": _quick_gelu, "relu": F.relu, "srelu": _squared_relu,
                "silu": F.silu}
# The activation of the first half of fc1's outputs, which the second half is multiplied by.
_GATED = {"geglu": _gelu, "qgeglu": _quick_gelu, "reglu": F.relu, "sreglu": _squared_relu,
          "swiglu": F.silu, "glu": torch.sigmoid}
_CLAMPED = "clamped_swiglu"  # the one with activation_params


class NormMLP(Norm):
    """fc2(activation(fc1(norm(x))))."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float, *, activation: str,
                 activation_params: dict | None, bias: bool, init_method: Init | None,
                 output_layer_init_method: Init | None,
                 normalization: str, zero_centered_gamma: bool, **factory):
        super().__init__(hidden_size, eps, normalization, zero_centered_gamma, "layer_norm_", **factory)
        if activation not in (*_ACTIVATIONS, *_GATED, _CLAMPED):
            raise ValueError(f"activation={activation!r}: must be one of " +
                             ", ".join([*_ACTIVATIONS, *_GATED, _CLAMPED]))
        known = {"limit", "alpha", "glu_linear_offset"} if activation == _CLAMPED else set()
        if not known.issuperset(activation_params or {}):
            raise ValueError(f"activation_params={activation_params!r}: must be a dict of limit, alpha and "
                             f'glu_linear_offset beside activation="{_CLAMPED}", and None beside others')
        self.activation, self.activation_params = activation, activation_params
        width = ffn_hidden_size * (1 if activation in _ACTIVATIONS else 2)
        for name, sizes, init in (("fc1", (width, hidden_size), init_method),
                                  ("fc2", (hidden_size, ffn_hidden_size), output_layer_init_method)):
            add_linear(self, sizes[1], {name: sizes[0]}, bias, init, factory)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(output without fc2's bias, that bias, what fc1 was given)."""
        x = self.normalised(x)
        y = F.linear(x, self.fc1_weight, self.fc1_bias)
        if self.activation == _CLAMPED:
            y = _clamped_swiglu(*y.chunk(2, -1), **self.activation_params or {})
        elif self.activation in _GATED:
            gate, y = y.chunk(2, -1)
            y = _GATED[self.activation](gate) * y
        else:
            y = _ACTIVATIONS[self.activation](y)
        return F.linear(y, self.fc2_weight), self.fc2_bias, x
