# SPDX-License-Identifier: Apache-2.0
"""The conformance cases that TE can express, under the one error rule, through cpp_extensions."""

import pytest

torch = pytest.importorskip("torch")

from tessera.cli import case_lines, check  # noqa: E402
from tessera.te.pytorch.cpp_extensions.fused_attn import (  # noqa: E402
    QKVLayout, fused_attn_bwd, fused_attn_fwd)
from tessera.cli.through.torch import placer, to_numpy, to_torch  # noqa: E402

# What a case may say that TE has no word for.
BEYOND = {"softcap", "key_ranges", "segment_ids", "keep", "drop", "page_table", "k_scale",
          "v_scale", "batch_invariant", "backend", "out", "allow_quadratic", "partial", "accumulate", "q_start",
          "k_start", "windows", "precision"}
BEYOND_WORDS = {"shift", "rng", "o", "do", "grad"}  # of the case, whatever their keywords


class Inexpressible(Exception):
    pass


def formats(layout):
    pair = layout if isinstance(layout, tuple) else (layout, layout)
    if "_".join((*pair, pair[1])) not in QKVLayout:
        raise Inexpressible
    return pair


def mask_of(given, padded):
    """(attn_mask_type, window, bottom_right_diagonal)."""
    bottom_right = given.get("align") == "bottom_right"
    words = ["padding"] * padded
    if given.get("causal"):
        words += ["causal"] + ["bottom_right"] * bottom_right
    left, right = given.get("window") or (-1, -1)
    if (left, right) == (-1, 0) and not given.get("causal"):
        raise Inexpressible
    window = (left, 0) if given.get("causal") else (left, right)
    return "_".join(words) or "no_mask", window, bottom_right


def lengths_of(given, side, axes, x):
    """(cu_seqlens, padded, max_seqlen)."""
    packed = given.get(f"cu_seqlens_{side}")
    if packed is not None:
        return packed, given.get(f"cu_seqlens_{side}_padded"), given.get(f"max_seqlen_{side}")
    b, s = x.shape[axes.index("b")], x.shape[axes.index("s")]
    lengths = given.get(f"seqlens_{side}")
    lengths = torch.full((b,), s, device=x.device) if lengths is None else lengths
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), None, s


def te_call(given):
    """(positional lengths, keywords, bias, sink) of a case's arguments."""
    for name in BEYOND:
        value = given.get(name)
        if value is not None and value is not False and not (name == "softcap" and value == 0):
            raise Inexpressible
    q_format, kv_format = formats(given.get("layout", "bshd"))
    padded = any(given.get(f"{kind}_{side}") is not None for side in "qk"
                 for kind in ("seqlens", "cu_seqlens"))
    mask, window, bottom_right = mask_of(given, padded)
    cu_q, starts_q, max_q = lengths_of(given, "q", q_format, given["q"])
    cu_k, starts_k, max_k = lengths_of(given, "k", kv_format, given["k"])
    bias, slopes, sink = (given.get(name) for name in ("bias", "alibi_slopes", "sink"))
    if slopes is not None:
        raise Inexpressible  # fused_attn_fwd has the usual slopes only
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    keywords = dict(
        cu_seqlens_q_padded=starts_q, cu_seqlens_kv_padded=starts_k,
        attn_scale=given.get("softmax_scale"), qkv_layout=f"{q_format}_{kv_format}_{kv_format}",
        o_format=q_format, attn_mask_type=mask, window_size=window,
        bottom_right_diagonal=bottom_right,
        attn_bias_type="no_bias" if bias is None else f"{given.get('bias_at', 'post_scale')}_bias",
        softmax_type="vanilla" if sink is None else
        "off-by-one" if isinstance(sink, str) else "learnable")
    return (max_q, max_k, cu_q, cu_k), keywords, bias, None if isinstance(sink, str) else sink


def forward(case, given, outputs):
    if given.get("dropout_p"):
        raise Inexpressible  # TE draws the state itself
    lengths, keywords, bias, sink = te_call(given)
    q, k, v = given["q"], given["k"], given["v"]
    o, aux, *max_logit = fused_attn_fwd(True, *lengths, q, k, v, q.dtype, 1, bias,
                                        softmax_offset=sink, **keywords,
                                        return_max_logit="max_logit" in outputs)
    lse = aux[0].squeeze(-1)
    lse = lse.transpose(0, 1) if keywords["o_format"] == "thd" else lse
    return {"o": o, "lse": lse, **({"max_logit": max_logit[0]} if max_logit else {})}


def backward(case, given, outputs):
    place = placer(torch.get_default_device())
    saved = {name: place(x) for name, x in case.group("backward").items()}
    if "dlse" in saved or "dalibi_slopes" in outputs:
        raise Inexpressible
    lengths, keywords, bias, sink = te_call(given)
    lse = saved["lse"]
    stats = (lse.transpose(0, 1) if keywords["o_format"] == "thd" else lse).unsqueeze(-1)
    aux = [stats, given.get("rng_state")] + [x for x in (bias, sink) if x is not None]
    q = given["q"]
    grads = fused_attn_bwd(*lengths, q, given["k"], given["v"], saved["o"], saved["do"], q.dtype,
                           aux, 1, **keywords, dropout=given.get("dropout_p") or 0.0,
                           do_format=keywords["o_format"], dqkv_layout=keywords["qkv_layout"],
                           deterministic=bool(given.get("deterministic")))
    return dict(zip(("dq", "dk", "dv", "dbias", "dsink"), grads))


def run(case):
    words = case.text.split()
    if words[1] not in ("fp32", "bf16", "fp16") or \
            BEYOND_WORDS & {word.partition("=")[0] for word in words}:
        raise Inexpressible
    place = placer(torch.get_default_device())
    given = {name: place(x) for name, x in case.arguments().items()}
    if len({given[name].dtype for name in "qkv"}) > 1:
        raise Inexpressible
    outputs = case.group("outputs")
    case.poison_outputs()
    results = (backward if case.is_backward else forward)(case, given, outputs)
    for name, target in outputs.items():
        result = results[name].reshape(target.shape)
        dtype = to_torch(target).dtype
        target[...] = to_numpy(result.detach().to(dtype).cpu(), target.dtype)


@pytest.mark.parametrize("source, step", [("smoke", 1), ("ci", 6)])
def test_cases(source, step):
    passed, beyond, failures = 0, 0, []
    for text in case_lines.read(source)[::step]:
        try:
            outcome, why, _ = check.judge(text, run)
        except Inexpressible:
            beyond += 1
            continue
        failures += [] if outcome == "passed" else [f"{text}: {why}"]
        passed += outcome == "passed"
    assert not failures, "\n".join(failures)
    assert passed > (beyond + passed) // 5, (passed, beyond)
    print(f"{source}: {passed} passed, {beyond} beyond TE")
