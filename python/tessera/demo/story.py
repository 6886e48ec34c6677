# SPDX-License-Identifier: Apache-2.0
"""The parts of the demo, in the order in which they are told."""

import itertools

import numpy as np

from . import attentions, attribution, plots, scaling
from .model import (
    HEADS,
    LAYERS,
    MAX_TOKENS,
    Batch,
    Model,
    Tokenizer,
    load_weights,
    weights_folder,
)
from .plots import bytes_text, seconds_text

MOST_TOKENS = 2048  # of all sentences together; the rest is left out, and said so
SHOWN_PAIRS = 8
PADDED_LIMIT = 1 << 30  # bytes of scores up to which the padded unfused attention is run


class Story:
    """The model with its sentences. Each part prints its section and draws its picture."""

    def __init__(self, texts, ask, out, report):
        """ask: number of the one sentence whose pairs count; None: all do."""
        self.report, self.out, self.ask = report, out, ask
        self.pictures = []
        folder = weights_folder()
        self.tokenizer = Tokenizer(folder)
        self.weights = load_weights(folder)
        self.texts, self.sentences = self._tokenise(texts)
        self.batch = Batch.pack([s.ids for s in self.sentences])
        self.model = Model(self.weights, attentions.tessera_packed())
        self.vectors = self.model.embed(self.batch)
        self.similarities = self.vectors @ self.vectors.T

    def _tokenise(self, texts):
        sentences, total = [], 0
        for text in texts:
            sentence = self.tokenizer(text)
            total += len(sentence.ids)
            if total > MOST_TOKENS:
                self.report.say(
                    f"Only the first {len(sentences)} of {len(texts)} sentences are used: "
                    f"together they may have {MOST_TOKENS} tokens."
                )
                break
            if sentence.length > MAX_TOKENS:
                self.report.say(
                    f"Sentence {len(sentences) + 1} has {sentence.length} tokens; the model reads "
                    f"the first {MAX_TOKENS}."
                )
            sentences.append(sentence)
        return texts[: len(sentences)], sentences

    def _pairs(self):
        """All (i, j) with i < j, the nearest first."""
        rows, columns = np.triu_indices(len(self.texts), 1)
        order = np.argsort(-self.similarities[rows, columns], kind="stable")
        pairs = [(int(rows[o]), int(columns[o])) for o in order]
        return [p for p in pairs if self.ask is None or self.ask in p]

    def pair_of_other_words(self):
        """The nearest pair without a long word in common, or else the nearest."""
        long_words = [
            {w.strip(".,;:!?").lower() for w in s.words if len(w) > 3} for s in self.sentences
        ]
        pairs = self._pairs()
        return next((p for p in pairs if not long_words[p[0]] & long_words[p[1]]), pairs[0])

    def nearest(self):
        n, shortest, longest = len(self.texts), self.batch.lengths.min(), self.batch.lengths.max()
        self.report.section("Nearest sentences")
        self.report.say(
            f"{n} sentences of {shortest} to {longest} tokens, packed into {len(self.batch.ids)} "
            f"tokens (padded they would be {n * longest})."
        )
        rows = [
            (f"{self.similarities[i, j]:.3f}", _short(self.texts[i]), _short(self.texts[j]))
            for i, j in self._pairs()[:SHOWN_PAIRS]
        ]
        self.report.table(["cosine", "one", "other"], rows, left=(1, 2))
        self._picture("similarity.png", plots.similarity, self.texts, self.similarities)

    def agreement(self):
        """Against fp64, and time and memory beside unfused attention."""
        self.report.section("The same model with other attentions")
        exact = Model(self.weights, attentions.unfused_each(), np.float64).embed(self.batch)
        contenders = {
            "tessera, packed": self.model.attention,
            "unfused, each sentence": attentions.unfused_each(),
        }
        padded = attentions.padded_bytes(HEADS, self.batch.cu_seqlens)
        if padded <= PADDED_LIMIT:
            contenders["unfused, padded batch"] = attentions.unfused_padded()
        rows = []
        with self.report.progress("running", len(contenders)) as advance:
            for name, attention in contenders.items():
                model = Model(self.weights, attention)
                error = np.abs(model.embed(self.batch) - exact).max()
                whole, inside, peak = attentions.measure(model, self.batch)
                times = seconds_text(inside), seconds_text(whole)
                rows.append((name, f"{error:.1e}", *times, bytes_text(peak)))
                advance(name)
        columns = ["attention", "max error", f"its {LAYERS} layers", "model", "peak memory"]
        self.report.table(columns, rows, left=(0,))
        backend = attentions.tessera_backend(self.batch.cu_seqlens)
        self.report.say(
            f"All in fp32; tessera ran on its backend {backend}, unfused is NumPy. Max error: of "
            "any number of any vector, against the model in plain fp64 NumPy. Peak memory: of one "
            "attention call, beside its inputs."
        )
        if padded > PADDED_LIMIT:
            self.report.say(f"A padded batch would hold {bytes_text(padded)} of scores: not run.")

    def words(self, i, j):
        """Backward through the whole model."""
        self.report.section("Which words made them alike")
        self.report.say("\n".join(f"{n + 1}: {_short(self.texts[n], 76)}" for n in (i, j)))
        both = self.sentences[i], self.sentences[j]
        with self.report.progress("explaining", attribution.count(*both)) as advance:
            pair = attribution.explain_pair(self.model, self.tokenizer, *both, advance)
        sides = itertools.zip_longest(*map(_word_cells, pair), fillvalue=("", "", ""))
        columns = [f"word of {i + 1}", "share", "", f"word of {j + 1}", "share", ""]
        self.report.table(columns, [a + b for a, b in sides], left=(0, 2, 3, 5))
        sums = " and ".join(f"{s.share.sum():+.4f}" for s in pair)
        lifts = " and ".join(f"{s.similarity - s.hidden:+.4f}" for s in pair)
        self.report.say(
            "A share is what a word adds to the cosine when the words come out from behind [MASK]: "
            f"gradient x input, backward through all {LAYERS} layers. The shares sum to {sums}; "
            f"the cosine itself changed by {lifts}. The gradient agrees with fp64 NumPy to "
            f"{self._gradient_error(i, j):.1e} of its largest entry."
        )
        self._picture("words.png", plots.words, pair, [f"{n + 1}: {self.texts[n]}" for n in (i, j)])

    def _gradient_error(self, i, j):
        ids = np.array(self.sentences[i].ids)
        gradients = []
        for model in (self.model, Model(self.weights, attentions.unfused_each(), np.float64)):
            tokens, other = model.token_embeddings(ids)[None], self.vectors[j].astype(model.dtype)
            gradients.append(attribution.similarity_gradient(model, tokens, ids, other)[1])
        ours, exact = gradients
        return np.abs(ours - exact).max() / np.abs(exact).max()

    def scaling(self, longest):
        """How time and memory grow."""
        self.report.section("Long inputs: time and memory of one attention call")
        lengths = scaling.lengths(longest)
        with self.report.progress("measuring", scaling.count(longest)) as advance:
            fused, unfused = scaling.run(longest, advance)
        unfused_at = {p.tokens: (p, "") for p in unfused.measured}
        unfused_at |= {p.tokens: (p, "~") for p in unfused.extrapolated}
        rows = []
        for p in fused.measured:
            row = (f"{p.tokens:,}", seconds_text(p.seconds), bytes_text(p.bytes))
            if p.tokens in unfused_at:
                u, about = unfused_at[p.tokens]
                texts = seconds_text(u.seconds), bytes_text(u.bytes), f"{u.bytes / p.bytes:.0f} x"
                row += tuple(about + text for text in texts)
            rows.append(row + ("",) * (6 - len(row)))
        columns = ["tokens", "tessera", "memory", "unfused", "memory", "times more"]
        self.report.table(columns, rows)
        mark = " ~: extrapolated." if unfused.extrapolated else ""
        self.report.say(f"{scaling.SETTING[0].upper() + scaling.SETTING[1:]}.{mark}")
        if len(fused.measured) < len(lengths):
            self.report.say(f"Stopped there: this machine would need over {scaling.SECONDS:.0f} s.")
        if fused.measured:
            self._picture("scaling.png", plots.scaling, fused, unfused, scaling.SETTING)

    def _picture(self, name, draw, *args):
        draw(self.out / name, *args)
        self.pictures.append(name)


def _word_cells(shares, most=12):
    """(word, share, bar) of the strongest words, in reading order."""
    keep = np.sort(np.argsort(-np.abs(shares.share))[:most])
    largest = max(np.abs(shares.share).max(initial=0), 1e-9)
    return [
        (
            _short(shares.words[k], 20),
            f"{shares.share[k]:+.3f}",
            ("█" if shares.share[k] > 0 else "░") * round(abs(shares.share[k]) / largest * 12),
        )
        for k in keep
    ]


def _short(text, width=34):
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"
