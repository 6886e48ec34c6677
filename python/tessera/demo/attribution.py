# SPDX-License-Identifier: Apache-2.0
"""Which words made two sentences alike: gradient x input, backward through the whole model.

The similarity is followed on the straight line from a sentence whose words are all hidden ([MASK])
to the sentence as it is, the other sentence held still, and each word is credited with gradient x
step (integrated gradients, Sundararajan et al., 2017). So the shares of the words add up to what
the words together did to the similarity, which is checked. The gradient at the end of the line
alone says little: there the layer norms have made it all but orthogonal to the embeddings.
"""

from typing import NamedTuple

import numpy as np

from .model import Batch

MOST_STEPS, FEWEST_STEPS = 24, 8
TOKENS = 4096  # wanted on the whole line: long sentences go in fewer steps
TOKENS_AT_ONCE = 2048  # bounds what backward keeps: about 90 KB a token


class Shares(NamedTuple):
    words: list[str]
    share: np.ndarray  # [words] of the similarity that each one brought
    similarity: float
    hidden: float  # similarity when every word of this sentence is hidden


def explain_pair(model, tokenizer, first, second, advance=lambda note: None):
    """Shares of both sentences. advance: is called count(first, second) times on the way."""
    vectors = model.embed(Batch.pack([first.ids, second.ids]))
    return (
        explain(model, tokenizer, first, vectors[1], advance),
        explain(model, tokenizer, second, vectors[0], advance),
    )


def count(*sentences):
    """Passes through the model, forward and backward, that explaining these takes."""
    return sum(len(_line(len(s.ids))) for s in sentences)


def explain(model, tokenizer, sentence, other, advance=lambda note: None):
    """Shares of the words of sentence in its similarity with the vector other."""
    ids, word_of = np.array(sentence.ids), np.array(sentence.word_of)
    end = model.token_embeddings(ids)
    start = model.token_embeddings(np.where(word_of < 0, ids, tokenizer.mask_id))
    step = end - start
    gradients = []
    for t in _line(len(ids)):
        gradients.extend(similarity_gradient(model, start + t * step, ids, other)[1])
        advance("backward through the model")
    of_token = (np.mean(gradients, axis=0) * step).sum(axis=1)
    share = np.zeros(len(sentence.words))
    np.add.at(share, word_of[word_of >= 0], of_token[word_of >= 0])
    ends = similarity_gradient(model, np.stack([end, start]), ids, other)[0]
    return Shares(sentence.words, share, *map(float, ends))


def similarity_gradient(model, tokens, ids, other):
    """For n versions of one sentence, tokens [n, length, hidden]: their similarities [n] with the
    vector other, and the gradients of these by tokens."""
    batch = Batch.pack([ids] * len(tokens))
    vectors, tape = model.forward(tokens.reshape(len(batch.ids), -1), batch)
    dvectors = np.broadcast_to(other, vectors.shape)
    return vectors @ other, model.backward(dvectors, tape).reshape(tokens.shape)


def _line(length):
    """Midpoints of equal pieces of [0, 1], in groups that go through the model packed together."""
    steps = min(MOST_STEPS, max(FEWEST_STEPS, TOKENS // length))
    points = ((np.arange(steps) + 0.5) / steps).astype(np.float32)[:, None, None]
    return np.array_split(points, -(-steps * length // TOKENS_AT_ONCE))
