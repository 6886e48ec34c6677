# SPDX-License-Identifier: Apache-2.0
"""Lines of case files, for make_cases.py and kernel_cases.py."""

PASSES = ("fwd", "bwd")


def both(**tokens):
    """A case body in both passes; gradients and max_logit go where they belong."""
    for which in PASSES:
        yield line(which, **tokens)


def line(which, dtype, **tokens):
    """One line. True is a flag, None leaves the key out, '_' of `grads` etc. is decided by the pass."""
    if which == "fwd":
        tokens.pop("grads", None)
        tokens.pop("dlse", None)
    else:
        tokens.pop("max_logit", None)
        tokens.pop("batch_invariant", None)
    words = [which, dtype]
    for key, value in tokens.items():
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f"{key}={value}")
    return " ".join(words)


def heads(rng):
    return rng.choice(({"h": 1}, {"h": 2}, {"h": 3}, {"hq": 4, "hk": 2}, {"hq": 6, "hk": 2}, {"hq": 3, "hk": 1}))
