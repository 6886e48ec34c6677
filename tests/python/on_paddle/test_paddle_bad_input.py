# SPDX-License-Identifier: Apache-2.0
"""What tessera.paddle says of calls that are wrong, or cannot be."""

import subprocess
import sys
import textwrap

import pytest

paddle = pytest.importorskip("paddle")

import tessera.paddle as tp  # noqa: E402


def inputs():
    found = [paddle.randn([2, 7, h, 8]) for h in (4, 2, 2)]
    for x in found:
        x.stop_gradient = False
    return found


Q = paddle.ones([1, 4, 2, 8])


@pytest.mark.parametrize("given, message", [
    (dict(q=Q.numpy()), "q=ndarray: must be a Paddle tensor"),
    (dict(q=None), "q=None"),
    (dict(q=Q.astype("int32")), "q.dtype=int32"),
    (dict(k=Q[0]), "k.shape"),
    (dict(k=Q.astype("float16")), "k.dtype"),
    (dict(v=Q[:, :3]), "v.shape"),
    (dict(window=(1, 1)), None),
    (dict(window=(1,)), "window"),
    (dict(causal=1), "causal=1"),
    (dict(softcap=float("nan")), "softcap"),
    (dict(dropout_p=1.0), "dropout_p=1"),
    (dict(dropout_p=0.5, rng_state=paddle.zeros([3], "int64")), "rng_state"),
    (dict(keep=Q), "keep.dtype"),
    (dict(keep=paddle.ones([1], "bool"), drop=paddle.ones([1], "bool")), "drop"),
    (dict(seqlens_k=paddle.to_tensor([9], dtype="int32")), r"seqlens_k\[0\]=9"),
    (dict(sink="on"), "sink"),
    (dict(out=Q[..., :3]), "out.shape"),
    (dict(batch_invariant=True, dropout_p=0.1), "batch_invariant"),
])
def test_illegal(given, message):
    arguments = dict(dict(q=Q, k=Q, v=Q), **given)
    if message is None:
        tp.attention(**arguments)
        return
    with pytest.raises(ValueError, match=f"tessera.attention: .*{message}"):
        tp.attention(**arguments)


@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("name", ["return_lse", "return_max_logit"])
def test_switches_are_booleans(name, wants_gradient):
    q, k, v = (x if wants_gradient else x.detach() for x in inputs())
    with pytest.raises(ValueError, match=f"{name}=1: must be True or False"):
        tp.attention(q, k, v, **{name: 1})


def test_unknown_and_refused():
    with pytest.raises(TypeError, match="casual"):
        tp.attention(Q, Q, Q, casual=True)
    with pytest.raises(tp.Refused, match="cuda_sm90"):
        tp.attention(Q, Q, Q, backend="cuda_sm90")
    with pytest.raises(tp.Refused):
        tp.attention(Q.astype("float64"), Q.astype("float64"), Q.astype("float64"))
    with pytest.raises(ValueError, match="to_dense"):
        sparse = paddle.sparse.sparse_coo_tensor([[0]] * 4, [1.0], [1, 4, 2, 8])
        tp.attention(sparse, sparse, sparse)
    with pytest.raises(ValueError, match="batch_invariant"):
        tp.attention(*inputs(), batch_invariant=True)
    with pytest.raises(ValueError, match="grads"):
        tp.attention_backward(Q, Q, Q, Q, Q, paddle.zeros([1, 2, 4]), grads=["dq"])
    with pytest.raises(ValueError, match="parts"):
        tp.merge([])


def test_what_the_backward_pass_refuses_is_said_before_it():
    """Autograd would make an OSError of it."""
    q, k, v = inputs()
    with pytest.raises(tp.Refused, match="e4m3"):
        tp.attention(q.astype("bfloat16"), *(x.astype("float8_e4m3fn") for x in (k, v)))


def test_outputs_that_do_not_fit_in_memory():
    huge = paddle.as_strided(paddle.zeros([8]), [1 << 20, 1 << 20, 64, 8], [0, 0, 0, 1])
    small = paddle.zeros([1 << 20, 1, 1, 8][:4])
    with pytest.raises(MemoryError, match="o.shape"):
        tp.attention(huge, paddle.as_strided(small, [1 << 20, 1, 1, 8], [0, 0, 0, 1]),
                     paddle.as_strided(small, [1 << 20, 1, 1, 8], [0, 0, 0, 1]))


def test_second_derivatives_and_subsets_of_gradients():
    q, k, v = inputs()
    with pytest.raises(Exception, match="second derivatives"):
        paddle.grad(tp.attention(q, k, v).sum(), [q, k, v], create_graph=True)
    with pytest.raises(ValueError, match="should return None"):  # Paddle's own, of every PyLayer
        paddle.grad(tp.attention(q, k, v).sum(), [q])
    alone = paddle.grad(tp.attention(q, k.detach(), v.detach()).sum(), [q])[0]
    assert bool((alone == paddle.grad(tp.attention(q, k, v).sum(), [q, k, v])[0]).all())


def test_distributed_tensors_are_refused():
    code = """
        import paddle, tessera.paddle as tp
        import paddle.distributed as dist
        x = dist.shard_tensor(paddle.ones([1, 4, 2, 8]), dist.ProcessMesh([0]), [dist.Replicate()])
        assert x.is_dist()
        try:
            tp.attention(x, x, x)
        except ValueError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True,
                          text=True, timeout=300)
    assert "local_map" in done.stdout, done.stderr
