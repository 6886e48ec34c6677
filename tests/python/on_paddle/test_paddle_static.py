# SPDX-License-Identifier: Apache-2.0
"""tessera.paddle in graphs: paddle.jit.to_static in both of its modes."""

import subprocess
import sys
import textwrap

import pytest

paddle = pytest.importorskip("paddle")

import tessera.paddle as tp  # noqa: E402

if not hasattr(paddle.static, "register_op"):
    pytest.skip("static operators are from Paddle 3.3 on", allow_module_level=True)

LENGTHS = paddle.to_tensor([3, 5], dtype="int32")


def plain(q, k, v):
    return tp.attention(q * 2, k, v, causal=True) * 3


def with_lse(q, k, v):
    return tp.attention(q, k, v, causal=True, return_lse=True)


def with_max_logit(q, k, v):
    o, max_logit = tp.attention(q, k, v, return_max_logit=True)
    return o + 0 * max_logit.sum()


def lengths(q, k, v):
    return tp.attention(q, k, v, causal=True, seqlens_q=LENGTHS, seqlens_k=LENGTHS)


def biased(q, k, v, bias, sink):
    return tp.attention(q, k, v, bias=bias, sink=sink, softcap=3.0, window=(2, 2),
                        align="bottom_right", return_lse=True)


def segmented(q, k, v):
    ids = (paddle.cumsum(paddle.ones([2, 5]), 1) / 2).astype("int32")
    return tp.attention(q, k, v, segment_ids=(ids, ids + 0))


def loops(q, k, v):
    total = q * 0
    for _ in range(2):
        total = total + tp.attention(q, k, v, layout="sbhd")
    return total


CALLS = {plain: 3, with_lse: 3, with_max_logit: 3, lengths: 3, biased: 5, segmented: 3, loops: 3}


def inputs(count):
    paddle.seed(3)
    tensors = [paddle.randn([2, 5, 4, 8]), paddle.randn([2, 5, 2, 8]), paddle.randn([2, 5, 2, 8]),
               paddle.randn([4, 5, 5]), paddle.randn([4])][:count]
    for x in tensors:
        x.stop_gradient = False
    return tensors


def outcome(function, tensors):
    """Outputs, then gradients of the sum of their squares."""
    outputs = function(*tensors)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    loss = sum((x * x).sum() for x in outputs)
    return outputs + list(paddle.grad(loss, tensors))


@pytest.mark.parametrize("full_graph", [True, False], ids=["ast", "sot"])
@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_graph_agrees_with_eager(function, full_graph):
    expected = outcome(function, inputs(CALLS[function]))
    static = paddle.jit.to_static(function, full_graph=full_graph)
    for _ in range(2):  # built, then again
        for x, y in zip(outcome(static, inputs(CALLS[function])), expected):
            assert x.shape == y.shape
            assert float((x - y).abs().max()) < 2e-5


def test_one_graph_for_all_lengths():
    spec = [paddle.static.InputSpec([None, None, h, 8], "float32", stop_gradient=False)
            for h in (4, 2, 2)]
    static = paddle.jit.to_static(plain, full_graph=True, input_spec=spec)
    for b, s in ((2, 5), (1, 9)):
        tensors = [paddle.randn([b, s, h, 8]) for h in (4, 2, 2)]
        for x in tensors:
            x.stop_gradient = False
        for x, y in zip(outcome(static, tensors), outcome(plain, tensors)):
            assert float((x - y).abs().max()) < 2e-5


def dropped(x):
    return tp.attention(x, x, x, dropout_p=0.5)


def test_dropout_draws_anew_at_each_run():
    static = paddle.jit.to_static(dropped, full_graph=True)
    x = paddle.randn([1, 16, 1, 8])
    x.stop_gradient = False
    first, second = static(x), static(x)
    assert float((first - second).abs().max()) > 0
    paddle.seed(5)
    expected = outcome(dropped, [x])
    paddle.seed(5)
    for a, b in zip(outcome(static, [x]), expected):
        assert float((a - b).abs().max()) < 2e-5


def bad_window(q, k, v):
    return tp.attention(q, k, v, window=(1,))


def bad_shape(q, k, v):
    return tp.attention(q, k[..., :3], v)


def bad_name(q, k, v):
    return tp.attention(q, k, v, casual=True)


def bad_switch(q, k, v):
    return tp.attention(q, k, v, return_lse=1)


def bad_backend(q, k, v):
    return tp.attention(q, k, v, backend="cuda_sm90")


def bad_out(q, k, v):
    return tp.attention(q, k, v, out=q)


def constant_with_gradient(q, k, v):
    return tp.attention(q, k, v, sink=constant())


@paddle.jit.not_to_static
def constant():
    return SINK


SINK = paddle.ones([4])
SINK.stop_gradient = False


@pytest.mark.parametrize("function, message", [
    (bad_window, "window="), (bad_shape, "k.shape"), (bad_name, "casual"),
    (bad_switch, "return_lse=1"), (bad_backend, "cuda_sm90"), (bad_out, "out="), (constant_with_gradient, "sink=")],
    ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_wrong_is_said_while_the_graph_is_built(function, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        paddle.jit.to_static(function, full_graph=True)(*inputs(3))


def test_an_error_while_a_graph_runs_does_not_end_the_process(tmp_path):
    file = tmp_path / "model.py"  # to_static reads the source
    file.write_text(textwrap.dedent("""
        import paddle, tessera.paddle as tp

        def attend(x, lengths):
            return tp.attention(x, x, x, seqlens_k=lengths)

        graph = paddle.jit.to_static(attend, full_graph=True)
        x = paddle.ones([1, 4, 1, 8])
        print(graph(x, paddle.to_tensor([4], dtype="int32")).sum().item())
        try:
            graph(x, paddle.to_tensor([9], dtype="int32"))
        except BaseException as error:
            print("raised", type(error).__name__)
        print(graph(x, paddle.to_tensor([2], dtype="int32")).sum().item())
    """))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["32.0", "raised", "32.0"]
    assert "seqlens_k" in done.stderr + done.stdout


class Model(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = paddle.nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.linear(x).reshape([0, 0, 3, 2, 4]).unbind(2)
        return tp.attention(q, k, v, causal=True).flatten(2)


def test_a_model_trains():
    """Two steps of a model in a graph are two steps of it without one."""
    results = []
    for static in (False, True):
        paddle.seed(1)
        model = Model()
        call = paddle.jit.to_static(model, full_graph=True) if static else model
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        x = paddle.randn([2, 6, 8])
        for _ in range(2):
            loss = (call(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
        results.append(float(loss))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize("built", [False, True], ids=["fresh", "built"])
def test_jit_save_is_answered_in_words(tmp_path, built):
    model = paddle.jit.to_static(Model(), full_graph=True, input_spec=[
        paddle.static.InputSpec([None, None, 8], "float32")])
    model.eval()
    if built:
        model(paddle.randn([1, 3, 8]))
    with pytest.raises(Exception, match="tessera.*jit.save"):
        paddle.jit.save(model, str(tmp_path / "model"))
