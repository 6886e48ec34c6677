# SPDX-License-Identifier: Apache-2.0
"""Every keyword of a front end, and one more: that none is ignored, and that a new one is one row."""

import shutil
import subprocess
import sys
from pathlib import Path

import tessera
from tessera._call import _description, _keywords, _prepared

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "lib"

# Values that are not the defaults, of options that are no switches.
VALUES = {"layout": ["bhsd"], "softmax_scale": [2.0], "window": [(1, 1)], "align": ["top_left"], "softcap": [2.0],
          "bias_at": ["pre_scale"], "dropout_p": [0.5], "backend": ["cpu"], "sm_margin": [1], "precision": ["fp8"],
          "smooth": ["mean"], "scale_block": [(1, 1)], "out_dtype": ["float32"], "grad_dtype": ["float32"],
          "max_seqlen_q": [1], "max_seqlen_k": [1]}


def ignored(monkeypatch, front, array, known=None) -> list[str]:
    """The keywords of attention and attention_backward of a front end that neither the Call, nor what comes
    back, nor an error has a trace of. array(shape, dtype) is a new array of ones, `known` the dict in which
    the front end keeps what it described."""
    calls = []

    class Spy(_description.Description):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            calls.append(self.call)
    for module in [module for name, module in sys.modules.items() if name.startswith("tessera") and
                   getattr(module, "Description", None) is Spy.__base__]:
        monkeypatch.setattr(module, "Description", Spy)
    x, bias = array((2, 4, 2, 8), "bfloat16"), array((4, 4), "float32")
    rows = {"do": x, "o": x, "lse": array((2, 2, 4), "float32")}

    def outcome(function, **keywords):
        calls.clear()
        (_prepared._kept if known is None else known).clear()
        given = rows if function.__name__ == "attention_backward" else {}
        try:
            result = function(**given, q=x, k=x, v=x, **keywords)
            count = len(result) if isinstance(result, tuple) else 1
        except (ValueError, tessera.Refused) as error:
            count = None if calls else str(error)
        return (calls[0].text if calls else ""), count

    found = []
    for function, table in ((front.attention, _keywords.FORWARD), (front.attention_backward, _keywords.BACKWARD)):
        for name, row in table.items():
            if isinstance(row, _keywords.Output):
                continue  # goes beside the Call
            base = {"bias": bias} if name == "bias_at" else {}
            if isinstance(row, _keywords.Tensor):
                values = [array((1,) * (row.axes.count(",") + 1), row.dtype.removeprefix("q's dtype or ").split()[0])]
            else:
                values = VALUES.get(name, [True, False])
            plain = outcome(function, **base)
            if all(outcome(function, **base, **{name: value}) == plain for value in values):
                found.append(f"{function.__name__}: {name}")
    return found


# A flag and a tensor that the core has and no keyword names.
KEYWORD = "python/tessera/_call/_keywords.py", "class Single(Keywords, total=False):", '''
    v_in_k: Annotated[bool, _flag(_lib.V_IN_K, doc="Values are a part of k.")]
    keep_tail: Annotated[Array | None, Tensor(
        axes="b|1, hq|1, sq, sq", dtype="bool", refused=True, doc="Mask of the last sq keys.")]


class Single(Keywords, total=False):'''

CALLS = """
import importlib
import inspect
import sys
import tessera
import tessera._call._fold
module, library = sys.argv[1:]
front = importlib.import_module(module)
library = importlib.import_module(library)
for function in (front.attention, front.attention_backward):
    parameters = inspect.signature(function).parameters
    assert parameters["v_in_k"].default is False and parameters["keep_tail"].default is None
    assert "Values are a part of k." in function.__doc__
x = library.ones((1, 4, 2, 8), dtype="float32" if module != "tessera.torch" else library.float32)
mask = library.ones((1, 2, 4, 4)) == 1
assert " vink" in front.explain(x, x, x, v_in_k=True).headline
assert " vink" not in front.explain(x, x, x, v_in_k=False).headline
try:
    front.attention(x, x, x, keep_tail=mask)
except Exception as error:  # a compiler's, around ours
    assert "keep_tail.shape=" in str(error), error
else:
    raise AssertionError("keep_tail")
front.attention(x, x, x, v_in_k=False, keep_tail=None)
try:
    front.attention(x, x, x, keep_tail=3)
except ValueError as error:
    assert "keep_tail=3" in str(error), error
else:
    raise AssertionError("keep_tail=3")
axes = tessera._call._fold.Axes(("bshd", "bshd"), paged=False)
assert (axes.batch("keep_tail", 4), axes.heads("keep_tail", 4)) == (0, 1)
print(tessera.__file__)
"""


def add_a_row(tree: Path, module: str, library: str):
    """Checks that a front end has a keyword whose row was added to a copy of python/ at `tree`, and no more."""
    shutil.copytree(ROOT / "python", tree / "python", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "build").mkdir()
    (tree / "build" / "lib").symlink_to(BUILT.resolve())
    file, old, new = KEYWORD
    text = (tree / file).read_text()
    assert text.count(old) == 1
    (tree / file).write_text(text.replace(old, new.lstrip("\n")))
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tree / 'python')!r})\n{CALLS}",
                           module, library], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tree) in done.stdout
