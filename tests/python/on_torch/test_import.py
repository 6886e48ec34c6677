# SPDX-License-Identifier: Apache-2.0
"""What `import tessera.torch` leaves for later, each case in a process of its own."""
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera.torch import _later  # noqa: E402

DISTRIBUTED = torch.distributed.is_available()
MERGE = """
def merged(parts):
    return tt.merge(parts, layout="bshd", out_dtype="bfloat16")
parts = [(torch.randn(2, 3, 4, 8), torch.randn(2, 4, 3)) for _ in range(2)]
found, want = torch.compile(merged, backend="eager", fullgraph=True)(parts), merged(parts)
assert found[0].dtype == torch.bfloat16 and all(map(torch.equal, found, want))
"""
DTENSOR = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
whole = [torch.randn(2, 6, 4, 8) for _ in range(3)]
parts = [tt.attention(whole[0], *(x[:, at] for x in whole[1:]), return_lse=True) for at in (slice(3), slice(3, 6))]
spread = [tuple(distribute_tensor(x, mesh, [place]) for x, place in zip(part, (Shard(2), Shard(1)))) for part in parts]
o, lse = tt.merge(spread)                                                    # an operator's strategy
assert o.placements == (Shard(2),) and torch.equal(o.full_tensor(), tt.merge(parts)[0])
o = tt.attention(*(distribute_tensor(x, mesh, [Shard(2)]) for x in whole))   # taken apart before
assert o.placements == (Shard(2),) and torch.equal(o.full_tensor(), tt.attention(*whole))
dist.destroy_process_group()
"""
OF_DTENSOR = "from torch.distributed.tensor import Shard, distribute_tensor\n"
FLOPS = """
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    tt.attention(*(torch.ones(1, 3, 2, 8) for _ in range(3)))
assert counter.get_total_flops() == 2 * 2 * 3 * 3 * (8 + 8)
"""
CAUSAL_BIAS = """
def masked(q):
    return tt.scaled_dot_product_attention(q, q, q, causal_lower_right(3, 3))
from torch.nn.attention.bias import causal_lower_right
q = torch.randn(1, 2, 3, 8)
torch.testing.assert_close(masked(q), torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
"""


def run(*lines: str):
    paths = os.pathsep.join([os.path.dirname(os.path.dirname(tessera.__file__)), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr


def test_nothing_slow_is_imported():
    run("import sys, torch; before = set(sys.modules)", "import tessera.torch",
        "slow = {'torch._dynamo', 'torch.distributed.tensor', 'torch.utils.flop_counter', 'sympy'}",
        "assert not slow & (set(sys.modules) - before), slow & (set(sys.modules) - before)")


def test_a_constant_is_pytorchs():
    def function(): ...
    assert vars(_later.constant(function)) == vars(torch.compiler.assume_constant_result(lambda: None)) != {}


@pytest.mark.parametrize("order", ["import torch; import tessera.torch as tt\n",
                                   "import tessera.torch as tt; import torch\n",
                                   "import torch, torch._dynamo; import tessera.torch as tt\n"])
def test_merge_is_one_graph(order):
    run(order, MERGE)


@pytest.mark.skipif(not DISTRIBUTED, reason="PyTorch was built without torch.distributed")
@pytest.mark.parametrize("order", [
    OF_DTENSOR + "import tessera.torch as tt, torch\n",
    "import tessera.torch as tt, torch\n" + OF_DTENSOR,
    "import tessera.torch as tt, torch, torch._dynamo\n" + OF_DTENSOR,  # which imports it itself
    "import tessera.torch as tt, torch, importlib.util\n"               # which only looks for it
    "assert importlib.util.find_spec('torch.distributed.tensor')\n" + OF_DTENSOR,
], ids=["before", "after", "by torch._dynamo", "after a look"])
def test_dtensors_in_any_order(order):
    run(order, DTENSOR)


@pytest.mark.parametrize("program", [FLOPS, CAUSAL_BIAS], ids=["flop counter", "causal bias"])
def test_modules_imported_later(program):
    run("import torch, tessera.torch as tt", program)


def test_an_action_runs_once_and_the_finder_leaves(tmp_path, monkeypatch):
    (tmp_path / "tessera_imported_later.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    finders = list(sys.meta_path)
    _later.when_imported("tessera_imported_later", lambda: seen.append(sys.modules["tessera_imported_later"].value))
    assert not seen
    import tessera_imported_later  # noqa: F401
    assert seen == [3] and sys.meta_path == finders
    _later.when_imported("tessera_imported_later", lambda: seen.append(4))
    assert seen == [3, 4] and sys.meta_path == finders
    del sys.modules["tessera_imported_later"]
