# SPDX-License-Identifier: Apache-2.0
"""accelerate's context parallelism with attn_implementation="tessera", on processes over gloo: losses and weights are
those of one process, with packed rows, windows, sinks and odd lengths; then TRL's trainer, which packs them.

accelerate and TRL themselves run, FSDP2 included; `./dev test nightly` installs them. accelerate takes context
parallelism on accelerators only, so `as_if_gpus` has it count processes on CPUs as such. TESSERA_TEST_DEVICE=cuda
runs without that, on as many GPUs.
"""
import copy
import os

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import door_examples  # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig  # noqa: E402

import tessera  # noqa: E402
import tessera.hf  # noqa: E402
from tessera.doors import accelerate_cp  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")
DEVICE = os.environ.get("TESSERA_TEST_DEVICE", "cpu")
LENGTHS = (5, 17, 9, 12, 20, 4)
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=97,
             num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
CONFIGS = {
    "LlamaDecoderLayer": lambda: transformers.LlamaConfig(**SIZES),
    "MistralDecoderLayer": lambda: transformers.MistralConfig(sliding_window=8, **SIZES),
    "GptOssDecoderLayer": lambda: transformers.GptOssConfig(  # windows in every other layer, sinks in all
        sliding_window=8, num_local_experts=2, num_experts_per_tok=1, **SIZES),
}


def on_ranks(size, function, tmp_path, *arguments):
    """What function(*arguments) returns on each of `size` processes that accelerate may use."""
    if DEVICE != "cpu" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    mp.start_processes(_rank, (size, function, str(tmp_path), arguments), nprocs=size, start_method="spawn")
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank, size, function, place, arguments):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="localhost", MASTER_PORT="0", OMP_NUM_THREADS="1")
    if DEVICE != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", init_method=f"file://{place}/meet", rank=rank,
                            world_size=size)
    torch.save(function(*arguments), f"{place}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def as_if_gpus():
    if DEVICE == "cpu":
        accelerate.PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def made(layer):
    torch.manual_seed(0)
    config = CONFIGS[layer]()
    config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera").to(DEVICE)


def batch_of(kind, seed=1):
    """A batch; "rows" are of an odd length, "packed" and "lengths" are one row of documents, "both" two of them."""
    shape = {"rows": (2, 37), "padded": (2, 37), "both": (2, sum(LENGTHS))}.get(kind, (1, sum(LENGTHS)))
    ids = torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    batch = dict(input_ids=ids, labels=ids.clone(), use_cache=False)
    if kind == "padded":
        batch["attention_mask"] = (torch.arange(37) < torch.tensor([[37], [20]])).long()
        batch["labels"][batch["attention_mask"] == 0] = -100
    if kind in ("packed", "lengths", "both"):
        halves = LENGTHS, LENGTHS[::-1]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in lengths])
                                             for lengths, _ in zip(halves, ids)])
    if kind == "lengths":  # as TRL's collator gives them
        cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
        batch |= dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS),
                      seq_idx=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None])
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def stepped(layer, kinds, dp, checkpointing):
    """A step of SGD for each kind of batch: the mean of losses over ranks and the weights are those of one process."""
    as_if_gpus()
    before = accelerate.Accelerator._prepare_cp
    handle = accelerate_cp.install()
    config = ParallelismConfig(cp_size=dist.get_world_size() // dp, dp_shard_size=dp)
    accelerator = accelerate.Accelerator(
        cpu=DEVICE == "cpu", parallelism_config=config, fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[layer],
            activation_checkpointing=checkpointing))
    model = made(layer)
    alone = copy.deepcopy(model)
    optimizer, optimizer_alone = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    model, optimizer = accelerator.prepare(model, optimizer)
    mine = dist.get_rank() // config.cp_size  # ranks of one cp group get one batch
    for kind in kinds:
        batches = [batch_of(kind, seed) for seed in range(dp)]
        losses = [alone(**batch).loss for batch in batches]
        want = torch.stack(losses).mean()
        want.backward()
        batch = batches[mine]
        with accelerator.maybe_context_parallel(buffers=[batch["input_ids"]], buffer_seq_dims=[1]):
            loss = model(**batch).loss
            accelerator.backward(loss)
        torch.testing.assert_close(accelerator.gather(loss.detach()[None]).mean(), want.detach(), msg=kind)
        for one in (optimizer, optimizer_alone):
            one.step()
            one.zero_grad()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-5, msg=f"{kind}: {name}")
    handle.remove()
    assert accelerate.Accelerator._prepare_cp is before


@pytest.mark.parametrize("layer", CONFIGS)
def test_steps_are_those_of_one_process(tmp_path, layer):
    kinds = ["rows", "padded", "packed", "both", "lengths"]
    if layer == "GptOssDecoderLayer":
        kinds = ["rows", "lengths"]  # one process needs lengths: this model makes no masks of position_ids
    on_ranks(2, stepped, tmp_path, layer, kinds, 1, False)


def test_beside_data_parallelism_and_checkpointing(tmp_path):
    on_ranks(4, stepped, tmp_path, "MistralDecoderLayer", ["packed", "rows"], 2, True)


def refused():
    as_if_gpus()
    said = []

    def say(function, *arguments, **keywords):
        try:
            function(*arguments, **keywords)
        except (ValueError, tessera.Refused) as error:
            said.append(f"{type(error).__name__}: {error}")

    def prepare(model):
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def accelerates_own():
        config = transformers.MistralConfig(sliding_window=8, **SIZES)
        return prepare(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))

    with accelerate_cp.install():
        accelerator = accelerate.Accelerator(
            cpu=DEVICE == "cpu", parallelism_config=ParallelismConfig(cp_size=2),
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        say(accelerates_own)
        recurrent = made("LlamaDecoderLayer")
        recurrent.config.layer_types = ["linear_attention", "full_attention"]
        say(prepare, recurrent)
        model, _ = prepare(made("LlamaDecoderLayer"))
        batch = batch_of("packed")
        say(model, **batch | dict(position_ids=batch["position_ids"] + 1))
        say(model, **batch | dict(attention_mask=torch.ones_like(batch["input_ids"])))
        cu = torch.tensor([0, 5, 9], dtype=torch.int32)
        say(model, **batch | dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu))
        mine = batch["input_ids"][:, :len(batch["input_ids"][0]) - dist.get_rank()]
        say(model, input_ids=mine)  # one rank's batch is shorter
        assert model(**batch).loss.isfinite()
    say(prepare, made("MistralDecoderLayer"))
    return said


def test_what_is_refused_is_refused_on_every_rank(tmp_path):
    first, second = on_ranks(2, refused, tmp_path)
    assert first == second
    for text, says in zip(first, ["does not support attention layers of type ['sliding_attention']",
                                  "config.layer_types=['linear_attention']: only attention sees",
                                  "position_ids=1: must begin at 0", "must count from 0 beside an attention_mask",
                                  "cu_seq_lens_q: has 9 tokens, input_ids [1, 67]", "all ranks must pass the same",
                                  "does not support attention layers of type ['sliding_attention']"], strict=True):
        assert says in text


def trl_trainer(model, keywords):
    import datasets
    import pyarrow
    import trl
    from tokenizers import Tokenizer, models
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 97, (n,), generator=generator, device="cpu").tolist() for n in LENGTHS * 2]
    dataset = datasets.Dataset(pyarrow.table({"input_ids": rows}), fingerprint="tessera")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "x": 3}, unk_token="x"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>",
                                                     eos_token="</s>")
    args = trl.SFTConfig(**keywords)
    if keywords.get("fsdp"):
        as_if_gpus()
    handle = accelerate_cp.install()
    trainer = trl.SFTTrainer(model, args=args, processing_class=tokenizer, train_dataset=dataset, eval_dataset=dataset)
    assert args.packing == keywords.get("packing", False)
    return trainer, handle


def hf_trainer(model, keywords):
    generator = torch.Generator().manual_seed(0)
    rows = [dict(input_ids=torch.randint(3, 97, (n,), generator=generator, device="cpu").tolist()) for n in LENGTHS * 2]
    args = transformers.TrainingArguments(**keywords)
    if keywords.get("fsdp"):
        as_if_gpus()
    handle = accelerate_cp.install()
    return transformers.Trainer(model, args, transformers.DataCollatorWithFlattening(), rows, rows), handle


def as_made(model):
    return model


def trained(place, size, make, keywords, changed=as_made, ends=(3,)):
    """(losses of three steps and of an evaluation, weights, tokens of a step) of a trainer of changed(model), alone or
    on ranks. Each of `ends` is the last step of another trainer, which has no weights but those of the checkpoint of
    the one before."""
    if size > 1:
        keywords = keywords | dict(parallelism_config=ParallelismConfig(cp_size=size), fsdp=True, fsdp_config={
            "version": 2, "transformer_layer_cls_to_wrap": ["MistralDecoderLayer"]})
    keywords = dict(dict(output_dir=f"{place}/trained{size}", use_cpu=DEVICE == "cpu", bf16=False, report_to=[],
                         learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.5,
                         save_strategy="no", disable_tqdm=True, logging_steps=1, logging_strategy="steps"), **keywords)
    for end in ends:
        accelerate.state.PartialState._reset_state()
        model = changed(made("MistralDecoderLayer"))
        if end != ends[0]:
            for x in model.parameters():
                x.data.zero_()
        trainer, handle = make(model, dict(keywords, max_steps=end))
        trainer.train(resume_from_checkpoint=end != ends[0])
        if end != ends[-1]:
            handle.remove()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    weights = [x.detach().full_tensor() if size > 1 else x.detach() for x in trainer.model.parameters()]
    losses.append(trainer.evaluate()["eval_loss"])
    if size > 1:
        trainer.compute_metrics = print
        with pytest.raises(tessera.Refused, match="compute_metrics: would see the logits"):
            trainer.evaluate()
    handle.remove()
    return losses, [x.cpu() for x in weights], trainer.state.log_history[0].get("num_tokens")


def trains_as_one_process(tmp_path, make, keywords, changed=as_made, ends=(3,)):
    """On ranks with a checkpoint at each of `ends`, on one process without a halt."""
    keywords["per_device_eval_batch_size"] = keywords["per_device_train_batch_size"]
    losses, weights, tokens = trained(tmp_path, 1, make, keywords, changed, ends[-1:])
    of_ranks = on_ranks(2, trained, tmp_path, tmp_path, 2, make, keywords, changed, ends)
    for ours, trained_weights, trained_tokens in of_ranks:
        assert ours == pytest.approx(losses, abs=1e-5) and trained_tokens == tokens
        for a, b in zip(trained_weights, weights, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def with_lora(model):
    import peft
    torch.manual_seed(1)
    words = dict(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **words))


@pytest.mark.parametrize("make, keywords", [
    (trl_trainer, dict(packing=True, max_length=sum(LENGTHS), per_device_train_batch_size=1)),
    (trl_trainer, dict(padding_free=True, max_length=None, per_device_train_batch_size=4,
                       gradient_accumulation_steps=2)),
    (trl_trainer, dict(per_device_train_batch_size=4)),
    (hf_trainer, dict(per_device_train_batch_size=6)),
    (hf_trainer, dict(per_device_train_batch_size=6, torch_compile=True, torch_compile_backend="aot_eager")),
], ids=["trl_packing", "trl_padding_free", "trl_padded", "flattened", "compiled"])
def test_trainers_train_as_one_process(tmp_path, make, keywords):
    if make is trl_trainer:
        pytest.importorskip("trl")
    trains_as_one_process(tmp_path, make, keywords)


def test_adapters_train_as_on_one_process(tmp_path):
    pytest.importorskip("peft")
    trains_as_one_process(tmp_path, hf_trainer, dict(per_device_train_batch_size=6), with_lora)


def test_prompts_that_an_adapter_learns_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(tessera.Refused, match="peft_type=PROMPT_TUNING: puts tokens before those of every rank"):
        tessera.hf.context_parallel(peft.get_peft_model(made("LlamaDecoderLayer"), config), None)


# PyTorch loads no sharded checkpoint of an optimizer without a state, such as plain SGD.
ADAM = dict(optim="adamw_torch", learning_rate=0.01, adam_epsilon=1e-3)


def test_training_resumes_as_on_one_process(tmp_path):
    trains_as_one_process(tmp_path, hf_trainer, dict(per_device_train_batch_size=3, save_strategy="steps",
                                                     save_steps=2, **ADAM), as_made, (2, 4))


def test_the_example():
    alone, spread = door_examples.losses(door_examples.printed_alone("accelerate_cp"))
    assert len(alone) == 3 and spread == pytest.approx(alone, abs=2e-4)
