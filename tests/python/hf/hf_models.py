# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers as small as they get, with random weights, on tessera beside eager.

compare(name) builds the model of one architecture twice and says whether what tessera computes is
what eager computes: forward, gradients, padding on both sides, and generation. What eager cannot do
either is not asked. `tools/sweep_hf.py` asks for every architecture, test_torch_hf_models.py for some.
"""
import contextlib
import copy
import dataclasses
import importlib
import inspect

import torch
import transformers
from hf_tiny import MOST, tiny_configs
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import getattribute_from_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

import tessera
import tessera.hf

BATCH, TOKENS, PADDED, NEW = 2, 12, 4, 4
# The heads under which an architecture is looked for, what uses all of it first.
HEADS = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM",
         "CAUSAL_LM", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM"]


@dataclasses.dataclass
class Outcome:
    """kind: "right", "refused", "wrong", or "not built"; why; the checks that eager passed; and how
    many times attention was tessera's."""
    kind: str
    why: str = ""
    checks: tuple[str, ...] = ()
    calls: int = 0


def architectures() -> dict[str, type]:
    """Every architecture that has a model: its name in transformers, and the name of the class."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS]
    tables += [modeling_auto.MODEL_MAPPING_NAMES]
    tables += [table for name, table in sorted(vars(modeling_auto).items())
               if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")]
    found = {}
    for name in sorted(CONFIG_MAPPING_NAMES):
        classes = next((table[name] for table in tables if name in table), None)
        if classes is not None:
            found[name] = classes if isinstance(classes, str) else classes[-1]
    return found


def compare(name: str) -> Outcome:
    """The outcome of one architecture, by its name in transformers."""
    why = ""
    try:
        cls = class_of(name)
        for config in tiny_configs(cls.config_class):
            try:
                if weights(cls, config) > MOST:
                    why = why or "too large even when small"
                    continue
                eager = randomised(build(cls, config, "eager"))
                inputs = some_inputs(eager)
                break
            except tessera.Refused:
                raise
            except Exception as error:  # whatever eager says of a configuration, another may do
                why = why or said(error)
        else:
            return Outcome("not built", why)
        ours = build(cls, config, "tessera")
    except tessera.Refused as refusal:
        return Outcome("refused", str(refusal))
    except Exception as error:
        return Outcome("not built", said(error))
    ours.load_state_dict(eager.state_dict())
    return run_checks(eager, ours, inputs)


def run_checks(eager, ours, inputs) -> Outcome:
    passed = []
    with counted() as calls:
        for check, run in checks_of(eager, inputs).items():
            try:
                expected = run(eager)
            except Exception:
                continue
            if not all(torch.isfinite(each).all() for each in expected if each.is_floating_point()):
                continue
            try:
                got = run(ours)
            except tessera.Refused as refusal:
                return Outcome("refused", str(refusal), tuple(passed), len(calls))
            except Exception as error:
                return Outcome("wrong", f"{check}: {said(error)}", tuple(passed), len(calls))
            off = distance(expected, got)
            if off > 1e-3:
                if any(distance(expected, run(nudged(eager, seed))) > 1e-3 for seed in range(8)):
                    continue  # rounding decides, as among equal candidates of a detector
                return Outcome("wrong", f"{check}: off by {off:.2g}", tuple(passed), len(calls))
            passed.append(check)
    if not passed:
        return Outcome("not built", "eager computes nothing finite")
    return Outcome("right", "", tuple(passed), len(calls))


# ---- models and inputs ----

def class_of(name: str) -> type:
    folder = importlib.import_module(f"transformers.models.{model_type_to_module_name(name)}")
    return getattribute_from_module(folder, architectures()[name])


def build(cls, config, implementation: str):
    config = copy.deepcopy(config)
    torch.manual_seed(0)
    config._experts_implementation = "eager"
    return cls._from_config(config, attn_implementation=implementation).eval()


def weights(cls, config) -> int:
    """How many elements a model's weights would have. Raises tessera.Refused where tessera refuses it."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(cls, config, "tessera").parameters())


def randomised(model):
    """Weights of a size that lets scores differ: fresh ones leave attention all but uniform."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
            elif parameter.dim() == 1 and parameter.is_floating_point():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def some_inputs(model) -> dict:
    """The first inputs that the model takes."""
    error = None
    for inputs in inputs_of(model):
        try:
            with torch.no_grad():
                if tensors_of(run_forward(model, inputs)):
                    return inputs
        except Exception as failed:
            error = error or failed
    raise error or ValueError("no inputs are known for it")


def inputs_of(model):
    """Inputs that the model may take, by its main input's name."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    names = inspect.signature(model.forward).parameters
    text = model.config.get_text_config()
    vocabulary = min(getattr(text, "vocab_size", None) or 96, 96)
    ids = torch.randint(3, vocabulary, (BATCH, TOKENS), generator=generator)
    decoder = {"decoder_input_ids": ids[:, :7]} if "decoder_input_ids" in names else {}

    def noise(*shape):
        return torch.randn(BATCH, *shape, generator=generator)

    main = model.main_input_name
    if "input_ids" in names and main in ("input_ids", "inputs", None):
        yield {"input_ids": ids, **decoder}
    size = getattr(model.config, "image_size", None)
    sizes = list(dict.fromkeys([size if isinstance(size, int) else 32, 32, 64, 224]))
    channels = getattr(model.config, "num_channels", 3)
    if "grid_thw" in names:  # patches of one picture, as Qwen's towers take them
        pixels = (getattr(model.config, "in_channels", getattr(model.config, "in_chans", 3))
                  * getattr(model.config, "temporal_patch_size", 1) * model.config.patch_size ** 2)
        yield {next(iter(names)): noise(16, pixels)[0], "grid_thw": torch.tensor([[1, 4, 4]])}
    if "pixel_values" in names:
        text_too = {"input_ids": ids} if "input_ids" in names else {}
        for size in sizes:
            yield {"pixel_values": noise(channels, size, size), **text_too, **decoder}
            for frames in (getattr(model.config, "num_frames", 4), 2):
                yield {"pixel_values": noise(frames, channels, size, size), **text_too}
    if "pixel_values_videos" in names:
        yield {"pixel_values_videos": noise(getattr(model.config, "frames_per_clip", 4), 3, sizes[0], sizes[0])}
    if "input_values" in names:
        for shape in ((1600,), (1, 1600), (1024, 128), (TOKENS, 80), (TOKENS, 32)):
            yield {"input_values": noise(*shape), **decoder}
    if "input_features" in names:
        bands = [getattr(model.config, key, None) for key in
                 ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim",
                  "input_dim")]
        for band in dict.fromkeys([*filter(None, bands), 80, 128]):
            for length in (2 * getattr(model.config, "max_source_positions", 32), 64):
                yield {"input_features": noise(band, length), **decoder}
                yield {"input_features": noise(length, band), **decoder}
    if "input_ids" in names and main != "input_ids":
        yield {"input_ids": ids, **decoder}


def nudged(model, seed: int):
    """The model with weights that differ by a few roundings."""
    model = copy.deepcopy(model)
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter *= 1 + 1e-6 * torch.randn(parameter.shape, generator=generator)
    return model


# ---- checks ----

def checks_of(model, inputs) -> dict:
    """name -> f(model), which answers with tensors to compare."""
    checks = {"forward": lambda m: tensors_of(no_grad(run_forward)(m, inputs)),
              "gradients": lambda m: gradients(m, inputs)}
    whole = torch.ones(BATCH, TOKENS, dtype=torch.long)
    left, right = whole.clone(), whole.clone()
    left[1, :PADDED] = 0
    right[1, -PADDED:] = 0
    text = "input_ids" in inputs
    if text and "attention_mask" in inspect.signature(model.forward).parameters:
        for side, mask in (("full mask", whole), ("left padding", left), ("right padding", right)):
            checks[side] = lambda m, mask=mask: real_tokens(m, inputs, mask)
        checks["gradients of padding"] = lambda m: gradients(m, inputs, left)
    if model.can_generate():
        more = {"attention_mask": right if model.config.is_encoder_decoder else left} if text else {}
        if model.config.is_encoder_decoder:
            more["decoder_start_token_id"] = 1
        for name, way in (("greedy", {}), ("beam", dict(num_beams=2)),
                          ("static cache", dict(cache_implementation="static"))):
            checks[name] = lambda m, way=way: generated(m, inputs, **more, **way)
    return checks


def no_grad(function):
    return torch.no_grad()(function)


def run_forward(model, inputs, **more):
    torch.manual_seed(3)
    return model(**inputs, **more)


def tensors_of(output) -> list[torch.Tensor]:
    """The floating-point tensors of a model's output, in order, caches left out."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [t for key, each in output.items() if "past" not in key and "cache" not in key
                for t in tensors_of(each)]
    return [t for each in output for t in tensors_of(each)] if isinstance(output, (list, tuple)) else []


def real_tokens(model, inputs, mask) -> list[torch.Tensor]:
    with torch.no_grad():
        return of_real_tokens(model, run_forward(model, inputs, attention_mask=mask), mask)


def of_real_tokens(model, output, mask) -> list[torch.Tensor]:
    """Outputs at the tokens that are not padding; those of an encoder's decoder are all real."""
    kept = [t[mask.bool()] if t.shape[:2] == mask.shape else t for t in tensors_of(output)
            if t.shape[:2] == mask.shape or (model.config.is_encoder_decoder and t.dim() > 2)]
    if not kept:
        raise ValueError("no output is by tokens")
    return kept[:4]


def gradients(model, inputs, mask=None) -> list[torch.Tensor]:
    model.zero_grad()
    output = run_forward(model, inputs, **({} if mask is None else {"attention_mask": mask}))
    total = 0.0
    for t in tensors_of(output)[:4] if mask is None else of_real_tokens(model, output, mask):
        if t.requires_grad:
            total = total + (t * torch.linspace(-1, 1, t.numel()).view_as(t)).mean()
    total.backward()
    zero = torch.zeros(1)
    return [zero if p.grad is None else p.grad.clone() for p in model.parameters()]


def generated(model, inputs, **more) -> list[torch.Tensor]:
    torch.manual_seed(3)
    out = model.generate(**{k: v for k, v in inputs.items() if k != "decoder_input_ids"},
                         max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, disable_compile=True,
                         return_dict_in_generate=True, output_logits=True, **more)
    return [out.sequences, *out.logits]


def distance(expected, got) -> float:
    """The largest difference, in units of the largest element of its tensor or of a hundredth of the
    largest of all."""
    if [t.shape for t in expected] != [t.shape for t in got]:
        return float("inf")
    largest = max((t.abs().max().item() for t in expected if t.numel() and t.is_floating_point()), default=0)
    worst = 0.0
    for a, b in zip(expected, got):
        if a.numel() == 0:
            continue
        if not a.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(a, b) else float("inf"))
            continue
        off = (a - b).abs().max().item() / max(a.abs().max().item(), largest / 100, 1e-30)
        worst = max(worst, float("inf") if off != off else off)
    return worst


@contextlib.contextmanager
def counted():
    """Collects the class of the module at each call of tessera's attention function."""
    calls = []

    def spy(module, *arguments, **keywords):
        calls.append(type(module).__name__)
        return tessera.hf.attention_forward(module, *arguments, **keywords)
    transformers.AttentionInterface.register("tessera", spy)
    try:
        yield calls
    finally:
        transformers.AttentionInterface.register("tessera", tessera.hf.attention_forward)


def said(error: Exception) -> str:
    """One line of an exception."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(lines)[:160]}"
