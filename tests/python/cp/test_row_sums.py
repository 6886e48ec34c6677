# SPDX-License-Identifier: Apache-2.0
"""Tables of sums and copies of rows against the same by PyTorch, one after the other. TESSERA_TEST_DEVICE=cuda runs
them on a GPU."""

import itertools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cp_ranks import DEVICE  # noqa: E402
from tessera.torch.context_parallel import _row_sums  # noqa: E402
from tessera.torch.context_parallel._row_sums import Kind, Part, Table  # noqa: E402
from tessera.torch.context_parallel._rows import Rows, Sum, sums_beside  # noqa: E402

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ANY = [*FLOATS, torch.int32, torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


def drawn(draw: random.Random, rows: int, heads: int, columns: int, dtype) -> torch.Tensor:
    """[rows, heads, columns] with stride 1 in the last axis, perhaps a part of a larger tensor at an odd place."""
    more = [draw.choice((0, 0, 1, 3)) for _ in range(3)]
    size = (rows + more[0], heads + more[1], columns + more[2])
    whole = torch.from_numpy(np.random.default_rng(draw.randrange(99)).integers(-40, 40, size)) / 8
    first = [draw.randint(0, n) for n in more]
    return whole.to(DEVICE, dtype)[first[0]:first[0] + rows, first[1]:first[1] + heads, first[2]:first[2] + columns]


def order_of(draw: random.Random, rows: int, count: int, kind: str) -> np.ndarray:
    """`count` of so many rows: neighbours, a few slices, or any."""
    if kind == "slice":
        first = draw.randint(0, rows - count)
        return np.arange(first, first + count)
    if kind == "any":
        return np.array(draw.sample(range(rows), count), np.int64)
    cut = draw.randint(0, count)
    first = draw.randint(count, rows - (count - cut)) if rows >= 2 * count else count
    return np.concatenate([np.arange(first, first + count - cut), np.arange(cut)]) if first + count - cut <= rows \
        else np.arange(count)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("seed", range(60))
def test_tables(seed):
    draw = random.Random(seed)
    # 40: more than a launch has room for
    sums = [draw.choice((0, 1, 1, 2, 3, _row_sums.MAX_TERMS)) for _ in range(draw.choice((1, 3, 40)))]
    table, tensors, wanted = Table(sum(1 + terms for terms in sums)), [], []
    for terms in sums:
        count, heads, columns = draw.choice((1, 5, 33)), draw.choice((1, 2, 5)), draw.choice((1, 7, 8, 64, 40))
        dtypes = [draw.choice(ANY)] * 2 if terms == 1 else [draw.choice(FLOATS) for _ in range(terms + 1)]
        parts = [drawn(draw, 2 * count, heads, columns, dtype) for dtype in dtypes]
        orders = [Rows(order_of(draw, 2 * count, count, draw.choice(("slice", "slices", "any"))), torch.device(DEVICE))
                  for _ in parts]
        places = [Part.of(len(tensors) + i, Kind.of(x)) for i, x in enumerate(parts)]
        want = parts[0].clone()
        took = [rows.take(x) for x, rows in zip(parts[1:], orders[1:])]
        total = took[0] if terms == 1 else \
            sum((x.float() for x in took), torch.zeros(count, heads, columns, device=DEVICE))
        orders[0].put(want, total.to(want.dtype))
        if all(rows.spans is not None for rows in orders):
            table.add_spans(places[0], orders[0].spans,
                            [(place, rows.spans) for place, rows in zip(places[1:], orders[1:])])
        else:
            table.add(count, places[0], places[1:], numbers=[rows.numbers for rows in orders])
        wanted.append((len(tensors), want))
        tensors += parts
    table.run(tensors)
    for i, want in wanted:
        assert torch.equal(bits(tensors[i]), bits(want)), (seed, i, want.dtype, want.shape)


def test_a_row_without_terms_is_zero_and_others_stay():
    x, out = torch.ones(4, 2, 8, device=DEVICE), torch.full((6, 2, 8), torch.nan, device=DEVICE)
    table = Table(2)
    table.add_spans(Part.of(0, Kind.of(out)), ((0, 0, 5),), [(Part.of(1, Kind.of(x)), ((0, 1, 3),))])
    table.run([out, x])
    assert out[:, 0, 0].tolist()[:5] == [0, 1, 1, 1, 0] and out[5].isnan().all()


def test_a_term_may_be_the_target():
    total = torch.arange(16.0, device=DEVICE).view(2, 1, 8)
    want, x, table = total * 2, total.to(torch.bfloat16), Table(2)
    table.add(2, Part.of(0, Kind.of(total)), [Part.of(0, Kind.of(total)), Part.of(1, Kind.of(x))])
    table.run([total, x])
    assert torch.equal(total, want)


def test_what_no_kernel_can_do_is_a_value_error():
    x = torch.zeros(2, 1, 8, device=DEVICE)
    table = Table(2)
    table.add(2, Part.of(0, Kind.of(x)), [Part.of(1, Kind.of(x.to(torch.int32)))])
    with pytest.raises(ValueError, match=r"sum_rows: sums\[0\].term\[0\].dtype=int32: must be fp32"):
        table.run([x, x.to(torch.int32)])
    with pytest.raises(ValueError, match="three axes at most, and stride 1"):
        Part.of(0, Kind.of(torch.zeros(4, 6, 8).transpose(1, 2)))


@pytest.mark.parametrize("terms, dtype", [*itertools.product((1, 2, 5, 20), FLOATS)])
def test_sums_are_rounded_once(terms, dtype):
    """Any number of terms, of which more than a launch takes are summed in fp32 before."""
    draw = random.Random(terms)
    sums, want = [Sum((64, 3, 8), torch.device(DEVICE)) for _ in range(2)], torch.zeros(2, 64, 3, 8, device=DEVICE)
    for one, exact in zip(sums, want):
        for _ in range(terms):
            count = draw.randint(1, 64)
            rows = Rows(order_of(draw, 64, count, draw.choice(("slice", "slices", "any"))), torch.device(DEVICE))
            values = drawn(draw, count, 3, 8, dtype)
            one.add(values, rows)
            rows.add(exact, values)
    assert torch.equal(sums_beside(sums, dtype), torch.cat([*want.to(dtype)], 1))
    assert torch.equal(sums[0].total(), want[0])


def test_rows_of_a_sum_join_another():
    draw = random.Random(1)
    inner, outer = (Sum((40, 2, 8), torch.device(DEVICE)) for _ in range(2))
    for first in (0, 10, 25):
        inner.add(drawn(draw, 15, 2, 8, torch.float32), Rows(np.arange(first, first + 15), torch.device(DEVICE)))
    rows = [Rows(np.r_[x], torch.device(DEVICE)) for x in ((slice(20, 32), slice(3, 8)), (slice(5, 9), slice(27, 40)))]
    want = torch.zeros(40, 2, 8, device=DEVICE)
    want[np.r_[5:9, 27:40]] = inner.value(torch.float32)[np.r_[20:32, 3:8]]
    outer.add_sum(inner, *rows)
    assert torch.equal(outer.value(torch.float32), want)
