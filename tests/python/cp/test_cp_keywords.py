# SPDX-License-Identifier: Apache-2.0
"""No keyword is ignored by context parallelism: each is carried to a rank's own calls, or refused by name."""

import pytest

torch = pytest.importorskip("torch")

import cp_ranks  # noqa: E402
import every_keyword  # noqa: E402
import tessera.torch as tt  # noqa: E402
from tessera._call import _keywords  # noqa: E402
from tessera.context_parallel import Shards  # noqa: E402
from tessera.torch import _functions  # noqa: E402
from tessera.torch import context_parallel as cp  # noqa: E402

# Without these a keyword means nothing; a diagonal of 0 is the usual one.
BESIDE = {"bias_at": {"bias": torch.ones(4, 4)}, "rng_state": {"dropout_p": 0.5}}
VALUES = every_keyword.VALUES | {"align": [3], "rng_state": [torch.tensor([1, 2])]}


def values_of(name: str, row) -> list:
    if name not in VALUES and isinstance(row, (_keywords.Tensor, _keywords.Output)):
        dtype = getattr(row, "dtype", "float32").removeprefix("q's dtype or ").split()[0]
        return [torch.ones((1,) * (row.axes.count(",") + 1), dtype=getattr(torch, dtype))]
    return VALUES.get(name, [True, False])


@pytest.fixture
def outcome(monkeypatch):
    """What a call of keywords on one rank comes to: its own calls and how much it returns, or its error."""
    own = _functions.attention

    def spy(*arguments, **keywords):
        calls.append({name: repr(value) for name, value in keywords.items()})
        return own(*arguments, **keywords)
    monkeypatch.setattr(_functions, "attention", spy)
    calls: list[dict] = []
    x = torch.ones(1, 4, 2, 8, dtype=torch.bfloat16)

    def run(**keywords):
        calls.clear()
        try:
            result, = cp_ranks.Ranks(1).run(lambda rank, group: cp.attention(
                x, x, x, shards=Shards.contiguous([4], 1), group=group, **keywords))
        except (ValueError, TypeError, tt.Refused) as error:
            return str(error)
        return list(calls), len(result) if isinstance(result, tuple) else 1
    return run


@pytest.mark.parametrize("name, row", _keywords.FORWARD.items(), ids=_keywords.FORWARD)
def test_a_keyword_is_carried_or_refused(name, row, outcome):
    plain = outcome(**BESIDE.get(name, {}))
    assert not isinstance(plain, str), plain
    found = [outcome(**BESIDE.get(name, {}), **{name: value}) for value in values_of(name, row)]
    assert any(each != plain for each in found)
    assert all(name in each or "shape" in each for each in found if isinstance(each, str))


@pytest.mark.parametrize("name", ["precision", "smooth", "out_dtype"])
def test_what_parts_do_not_take_is_refused(name, outcome):
    assert f"{name}=...: does not go with shards; leave it out" in outcome(**{name: VALUES[name][0]})


def test_room_for_communication_is_left_by_each_call(outcome):
    (call,), _ = outcome(sm_margin=1)
    assert call["sm_margin"] == "1"
