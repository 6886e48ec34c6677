# SPDX-License-Identifier: Apache-2.0
"""TE's ways to save memory and launches: offloading, recomputation, graphed callables."""

import contextlib
import gc

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.te.pytorch as te  # noqa: E402
from tessera.te.common.recipe import DelayedScaling  # noqa: E402
from tessera.te.pytorch import cpu_offload, graph  # noqa: E402
from tessera.te.pytorch.distributed import CudaRNGStatesTracker  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "one_device")
B, S, H, D = 2, 16, 4, 8


class Block(torch.nn.Module):
    """A projection, attention, a residual."""

    def __init__(self, **options):
        super().__init__()
        self.qkv = torch.nn.Linear(H * D, 3 * H * D)
        self.attention = te.DotProductAttention(H, D, qkv_format="bshd", **options)

    def forward(self, x, mask="causal"):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).unbind(2)
        return x + self.attention(q, k, v, attn_mask_type=mask)


@pytest.fixture
def blocks(monkeypatch):
    monkeypatch.setattr(cpu_offload, "SMALLEST", 256)
    torch.manual_seed(0)
    return [Block() for _ in range(4)]


def gradients(blocks, x, context, sync, after=lambda i: None, before_backward=lambda: None):
    x = x.clone().requires_grad_()
    y = x
    for i, block in enumerate(blocks):
        with context:
            y = block(y)
        y = sync(y)
        after(i)
    before_backward()
    return torch.autograd.grad(y.square().sum(), [x, *(p for block in blocks for p in block.parameters())])


def on_device(context):
    """For each layer: how many of the tensors that it saved are on the device, and how many there are."""
    alive = [layer.alive() for layer in context.layers]
    return [(sum(saved.tensor is not None for saved in each), len(each)) for each in alive]


def test_what_is_marked_stays(blocks):
    x = torch.randn(B, S, H * D, requires_grad=True)
    context, sync = te.get_cpu_offload_context(True, 1, 2)

    def layer(x, mark):
        y = blocks[0].qkv(x)
        if mark:
            cpu_offload.mark_not_offload(y, None)
        cpu_offload.start_offload(y, offload_base_tensor=True)
        return y[..., :H * D] * y[..., H * D:2 * H * D]

    counts = []
    for mark in (False, True):
        assert not cpu_offload.is_cpu_offload_enabled()
        with context:
            assert cpu_offload.is_cpu_offload_enabled()
            y = sync(layer(x + 0, mark))
        with context:
            z = sync(y * 2)
        alive = context.layers[0].alive()
        counts.append(len(alive))
        gradient, = torch.autograd.grad(z.sum(), x)
    assert counts == [3, 1]  # x + 0 and two views of y, or x + 0 alone
    want, = torch.autograd.grad((layer(x, False) * 2).sum(), x)
    assert torch.equal(gradient, want)


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_offloaded_gradients_are_the_same(blocks, num_layers, retain):
    x = torch.randn(B, S, H * D)
    expected = gradients(blocks, x, *te.get_cpu_offload_context())
    context, sync = te.get_cpu_offload_context(True, num_layers, 4, retain_pinned_cpu_buffers=retain)
    seen, copies = [], []
    for _ in range(2):  # as a second step of training
        def look():
            seen.append(on_device(context))
            copies.append([saved.copy.data_ptr() for layer in context.layers for saved in layer.alive()])
        for ours, theirs in zip(gradients(blocks, x, context, sync, before_backward=look), expected):
            assert torch.equal(ours, theirs)
        for layer, (here, all) in enumerate(seen[-1]):
            assert here == 0
            assert all >= 4 if layer < num_layers else all == 0  # q, k, v, o at the least
    assert (copies[0] == copies[1]) == (retain or num_layers == 0)
    gc.collect()
    assert not any(layer.alive() for layer in context.layers)


def test_the_last_layers_come_back_in_time(blocks):
    """While a layer goes backward, what is on the device is its own and what comes next."""
    context, sync = te.get_cpu_offload_context(True, 3, 4)
    seen = {}

    def synced(x):
        x, number = sync(x), context.current

        def look(_):
            seen[number] = [here > 0 for here, _ in on_device(context)][:3]
        x.grad_fn.register_prehook(look)
        return x
    gradients(blocks, torch.randn(B, S, H * D), context, synced)
    assert seen == {3: [False, False, True], 2: [False, True, True], 1: [True, True, False],
                    0: [True, False, False]}


def test_offloading_by_hand(blocks):
    x = torch.randn(B, S, H * D)
    expected = gradients(blocks, x, *te.get_cpu_offload_context())
    context, sync, by_hand = te.get_cpu_offload_context(True, None, 4, manual_synchronization=True)

    def release():
        assert all(here == all for here, all in on_device(context))
        for layer in (0, 2):
            by_hand.release_activation_forward_gpu_memory(layer)
        here = [here for here, _ in on_device(context)]
        assert here[0] == here[2] == 0 < min(here[1], here[3])
        by_hand.start_reload_layer(0)  # layer 2 comes back when it is asked for
    for ours, theirs in zip(gradients(blocks, x, context, sync, lambda i: i % 2 or by_hand.start_offload_layer(i),
                                      release), expected):
        assert torch.equal(ours, theirs)


def test_what_a_layer_saved_must_not_change(blocks):
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    with context:
        y = torch.randn(64, 64, requires_grad=True).exp()  # saves its result
        z = sync(y.sin())
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="was modified in place"), context:
        z.cos()


def test_bad_offloads():
    with contextlib.ExitStack() as none:
        context, sync, by_hand = te.get_cpu_offload_context(False, manual_synchronization=True)
        none.enter_context(context)
        by_hand.start_offload_layer(0)
        assert sync(3) == 3
    with pytest.raises(ValueError, match=r"num_layers=2: must be from 0 to model_layers - 1 = 1"):
        te.get_cpu_offload_context(True, 2, 2)
    with pytest.raises(ValueError, match="offload_activations=False"):
        te.get_cpu_offload_context(True, 1, 2, offload_activations=False)
    with pytest.warns(DeprecationWarning, match="offload_weights=True"):
        context, _ = te.get_cpu_offload_context(True, 1, 2, True, True)
    with pytest.raises(RuntimeError, match="entered inside itself"), context, context:
        pass


# ---- recomputation ----

@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_computes_the_same_again(reentrant):
    """With dropout from a tracker's states too."""
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    torch.manual_seed(0)
    block, runs = Block(attention_dropout=0.3, get_rng_state_tracker=lambda: tracker), []
    x = torch.randn(B, S, H * D, requires_grad=True)

    def run(x, mask):
        runs.append(mask)
        return torch.nn.functional.dropout(block(x, mask=mask), 0.2)
    start, results = tracker.get_states(), []
    for wrap in (lambda *given, **_: run(*given[1:], "causal"), te.checkpoint):
        tracker.set_states(dict(start))
        torch.manual_seed(1)
        loss = wrap(run, x, mask="causal", use_reentrant=reentrant, get_rng_state_tracker=lambda: tracker,
                    distribute_saved_activations=False, tp_group=None).square().sum()
        x.grad = block.qkv.weight.grad = None
        loss.backward()
        results.append((loss, x.grad, block.qkv.weight.grad, tracker.get_states()["model-parallel-rng"]))
    assert all(map(torch.equal, *results))
    assert runs == ["causal"] * 3
    with pytest.raises(NotImplementedError, match="distribute_saved_activations=True"):
        te.checkpoint(run, x, distribute_saved_activations=True)


# ---- graphs ----

class _Replayed(torch.autograd.Function):
    """A graph's gradients: those of its inputs, in memory that each pass overwrites."""
    static = None

    @staticmethod
    def forward(ctx, module, *tensors):
        ctx.module, ctx.tensors = module, tensors
        return module(*tensors)

    @staticmethod
    def backward(ctx, gradient):
        samples = (*(x.detach().requires_grad_(x.requires_grad) for x in
                     ctx.tensors[:len(ctx.module.places)]), *ctx.module.parameters)
        with torch.enable_grad():
            out = ctx.module(*samples)
        found = iter(torch.autograd.grad(out, [x for x in samples if x.requires_grad], gradient))
        found = [next(found) if x.requires_grad else None for x in samples]
        if _Replayed.static is None:
            _Replayed.static = found
        for kept, new in zip(_Replayed.static, found):
            if kept is not None:
                kept.copy_(new)
        return None, *(None if x is None else x.detach() for x in _Replayed.static)


@pytest.fixture
def replayed(monkeypatch):
    """In the place of PyTorch's capture: runs of what it was given, on tensors as it captures them."""
    def capture(modules, sample_args, num_warmup_iters, allow_unused_input, pool):
        calls.append((num_warmup_iters, allow_unused_input, pool))
        graphed = []
        for module, sample in zip(modules, sample_args):
            assert callable(module) and all(isinstance(x, torch.Tensor) for x in sample)

            def replay(*tensors, module=module, sample=sample):
                assert [x.shape for x in tensors] == [x.shape for x in sample]
                runs.append(module)
                return _Replayed.apply(module, *tensors) if torch.is_grad_enabled() else module(*tensors)
            graphed.append(replay)
        return tuple(graphed)
    calls, runs = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    for name in ("synchronize", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    return calls, runs


def test_graphed_modules(blocks, replayed):
    calls, runs = replayed
    x = torch.randn(B, S, H * D)
    expected = [block(x, mask="no_mask") for block in blocks[:2]]
    both = graph.make_graphed_callables(
        tuple(blocks[:2]), ((x,), (x,)), num_warmup_iters=1, allow_unused_input=True,
        sample_kwargs=({"mask": "no_mask"}, {"mask": "no_mask"}), pool=(0, 1))
    assert both == tuple(blocks[:2]) and calls == [(0, True, (0, 1))] and not runs
    for block, o in zip(both, expected):
        assert torch.equal(block(x, mask="no_mask"), o)
    assert [set(map(id, module.parameters)) for module in runs] == \
        [set(map(id, block.parameters())) for block in both]  # PyTorch asks for their gradients
    with pytest.raises(ValueError, match="argument 'causal': was 'no_mask'"):
        both[0](x, mask="causal")
    with pytest.raises(ValueError, match="with other arguments"):
        both[0](x)
    assert len(runs) == 2
    both[0].eval()  # was captured in training
    assert both[0](x, mask="causal").shape == x.shape and len(runs) == 2


@pytest.mark.parametrize("clones", [True, False])
def test_gradients_are_accumulated(replayed, clones):
    """A second backward pass adds to the first's, though a graph writes where it wrote."""
    _Replayed.static = None
    block, x, y = Block(), torch.randn(B, S, H * D), torch.randn(B, S, H * D)
    expected = [sum(grads) for grads in zip(*(torch.autograd.grad(block(z).square().sum(), block.parameters())
                                              for z in (x, y)))]
    te.make_graphed_callables(block, (x,), clone_param_grads_on_return=clones)
    for z in (x, y):
        block(z).square().sum().backward()
    got = [p.grad for p in block.parameters()]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, expected)) == clones


def test_hooks_of_the_warm_up(replayed):
    seen = []
    block, x = Block(), torch.randn(B, S, H * D)
    plain = block.forward
    block.forward = lambda *args: (seen.append("run"), plain(*args))[1]
    te.make_graphed_callables(block, (x,), num_warmup_iters=2, pre_warmup_hook=lambda: seen.append("before"),
                              post_warmup_hook=lambda: seen.append(graph.is_graph_capturing()),
                              capture_time_hooks=[None])
    assert seen == ["before", "run", "run", True] and not graph.is_graph_capturing()

    def fails():
        raise OSError
    with pytest.raises(OSError):
        te.make_graphed_callables(block, (x,), pre_warmup_hook=fails)
    assert not graph.is_graph_capturing()


def test_graphs_of_a_programs_own():
    """What a program does round a warm-up and a capture of its own."""
    graph.set_capture_start()
    assert graph.is_graph_capturing()
    graph.set_capture_end()
    assert not graph.is_graph_capturing()

    recipe = DelayedScaling(fp8_dpa=True, amax_history_len=2)
    modules = [Block().bfloat16(), Block().bfloat16()]
    x = torch.randn(B, S, H * D, dtype=torch.bfloat16)

    def step(scale):
        with te.autocast(enabled=True, recipe=recipe):
            modules[0](scale * x).sum().backward()

    def state():
        return modules[0].attention.get_fp8_meta_tensors()["scaling_fwd"]
    step(1)
    before = state()
    saved = graph.save_fp8_tensors(modules, recipe)
    assert len(saved) == sum(len(list(module.modules())) for module in modules)
    step(5)
    assert not all(map(torch.equal, before, state()))
    graph.restore_fp8_tensors(modules, saved)
    assert all(map(torch.equal, before, state()))
    with pytest.raises(ValueError, match="fp8_tensors of .* modules"):
        graph.restore_fp8_tensors(modules[:1], saved)
    assert graph.save_fp8_tensors(modules, None) is None
    graph.restore_fp8_tensors(modules, None)
    assert all(map(torch.equal, before, state()))


def test_evaluation_has_no_backward_graph(replayed):
    """Parameters are no inputs of the graph then, and need no gradient of what a cache detached."""
    block, x = Block().eval(), torch.randn(B, S, H * D)
    expected = block(x)
    te.make_graphed_callables(block, (x,))
    assert torch.equal(block(x), expected) and not block(x).requires_grad and replayed[1][0].parameters == ()
    block = Block().eval()
    te.make_graphed_callables(block, (x.clone().requires_grad_(),))
    assert block(x.requires_grad_()).requires_grad


def test_reset_gives_the_graph_up(replayed):
    block, x = Block(), torch.randn(B, S, H * D)
    plain, expected = block.forward, block(x)
    te.make_graphed_callables(block, (x,))
    block(x)
    assert len(replayed[1]) == 1 and block.forward != plain
    block.reset()
    assert torch.equal(block(x), expected) and len(replayed[1]) == 1 and block.forward == plain
    add = te.make_graphed_callables(lambda x: x + 1, (torch.zeros(3),))
    add.reset()
    assert torch.equal(add(torch.ones(3)), torch.full((3,), 2.0)) and len(replayed[1]) == 1


def test_regions_without_fp8_attention_are_graphed(replayed):
    """Layers multiply in 16 bits: such a region changes nothing."""
    block, x = Block(), torch.randn(B, S, H * D)
    expected = block(x)
    te.make_graphed_callables(block, (x,), enabled=True, recipe=DelayedScaling())
    assert torch.equal(block(x), expected) and len(replayed[1]) == 1


def test_a_graphed_function(replayed):
    add = te.make_graphed_callables(lambda x, y=None, scale=1: x + scale * y["a"], (torch.zeros(3),),
                                    sample_kwargs={"y": {"a": torch.ones(3)}, "scale": 2})
    assert torch.equal(add(torch.ones(3), scale=2, y={"a": torch.ones(3)}), torch.full((3,), 3.0))


def test_graphs_that_cannot_be(monkeypatch):
    block, x = Block(), torch.randn(B, S, H * D)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(tessera.Refused, match="no CUDA device.*call the modules as they are"):
        te.make_graphed_callables(block, (x,))
    for given in ({"fp8_enabled": (False, True), "fp8_recipe": DelayedScaling(fp8_dpa=True)},
                  {"enabled": True, "recipe": DelayedScaling(fp8_mha=True)}, {"_order": [1, -1]},
                  {"capture_time_hooks": [{"forward_pre_hooks": {0: print}}]},
                  {"retain_graph_in_backward": True}):
        with pytest.raises(NotImplementedError, match=next(iter(given))):
            te.make_graphed_callables(block, (x,), **given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="sample_args of 1 callables: must be one for each of 2"):
        te.make_graphed_callables((block, block), ((x,),))
