"""The sampling pipeline against plain definitions, and its independence of where a prefix comes from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core import Request, SamplingParams
from forerun.errors import SamplingError
from forerun.speculation.sampling import is_drawable, is_plain, probabilities, shape_row

V = 12
rows = st.lists(st.floats(-8, 8, width=32), min_size=V, max_size=V, unique=True)


def request(tokens: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), **params) -> Request:  # type: ignore[no-untyped-def]
    made = Request("r", tokens, SamplingParams(max_tokens=100, **params), seed=0, stop_token_ids=frozenset({0}))
    made.token_ids += output
    return made


def law(row: list[float], made: Request, path: tuple[int, ...] = ()) -> list[float]:
    return probabilities(shape_row(torch.tensor(row), made, path)).tolist()


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    top = max(row)
    weights = [math.exp((x - top) / temperature) for x in row]
    return [w / sum(weights) for w in weights]


@given(rows, st.sampled_from([0.3, 1.0, 2.0]))
def test_temperature(row: list[float], temperature: float) -> None:
    assert law(row, request(temperature=temperature)) == pytest.approx(softmax(row, temperature), abs=1e-6)


@given(rows)
def test_temperature_zero_is_one_hot(row: list[float]) -> None:
    assert law(row, request(temperature=0.0)) == [float(x == max(row)) for x in row]


@given(rows, st.integers(1, V + 3))
def test_top_k(row: list[float], k: int) -> None:
    kept = sorted(range(V), key=lambda i: -row[i])[:k]
    masked = [x if i in kept else -math.inf for i, x in enumerate(row)]
    assert law(row, request(top_k=k)) == pytest.approx(softmax(masked), abs=1e-6)


@given(rows, st.floats(0.05, 0.95))
def test_top_p(row: list[float], top_p: float) -> None:
    """The smallest set of best tokens whose mass reaches top_p."""
    chances = softmax(row)
    got = law(row, request(top_p=top_p))
    kept = [i for i in range(V) if got[i] > 0]
    order = sorted(range(V), key=lambda i: -row[i])
    assert kept == sorted(order[: len(kept)])
    mass = sum(chances[i] for i in kept)
    assert mass > top_p - 1e-5
    assert len(kept) == 1 or mass - min(chances[i] for i in kept) < top_p + 1e-5


@given(rows, st.floats(0.01, 0.9))
def test_min_p(row: list[float], min_p: float) -> None:
    chances = softmax(row)
    for chance, got in zip(chances, law(row, request(min_p=min_p)), strict=True):
        if chance > (min_p + 1e-5) * max(chances):
            assert got > 0
        if chance < (min_p - 1e-5) * max(chances):
            assert got == 0


def test_ties_at_the_boundary_go_to_the_lower_id() -> None:
    assert law([1.0] * V, request(top_k=3)) == pytest.approx([1 / 3] * 3 + [0.0] * (V - 3))


@given(rows)
def test_penalties(row: list[float]) -> None:
    made = request(output=(4, 4, 5), repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    expected = list(row)
    for token in (1, 2, 3, 4, 5, 6):
        expected[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
    for token, count in ((4, 2), (5, 1), (6, 1)):
        expected[token] -= 0.25 * count + 0.5
    assert law(row, made, path=(6,)) == pytest.approx(softmax(expected), abs=1e-5)


@given(rows)
def test_masks(row: list[float]) -> None:
    made = request(logit_bias={2: 3.0}, allowed_token_ids=(2, 3, 4, 5))
    expected = [x + 3.0 * (i == 2) if i in (2, 3, 4, 5) else -math.inf for i, x in enumerate(row)]
    assert law(row, made) == pytest.approx(softmax(expected), abs=1e-5)


def test_repeated_ids_are_one() -> None:
    """Two million equal ids made every step of everyone ten times slower."""
    params = SamplingParams(allowed_token_ids=(3, 1) * 500_000, stop_token_ids=(5,) * 9, stop=("x", "x"))
    assert (params.allowed_token_ids, params.stop_token_ids, params.stop) == ((3, 1), (5,), ("x",))
    assert law([0.0] * V, request(allowed_token_ids=[3, 1] * 9)) == [0, 0.5, 0, 0.5] + [0] * 8
    assert params.with_seed(3).allowed_token_ids == (3, 1)


@pytest.mark.parametrize("ids", [["a"], [1.5], [2**70], [-1]])
def test_allowed_ids_are_whole_numbers(ids: list[int]) -> None:
    with pytest.raises(SamplingError, match="allowed_token_ids must be a (whole number|list of token ids)"):
        SamplingParams(allowed_token_ids=tuple(ids))


def test_min_tokens_counts_the_path() -> None:
    made = request(output=(4,), min_tokens=3)
    row = [9.0, *range(V - 1)]
    assert law(row, made, (5,))[0] == 0.0
    assert law(row, made, (5, 6))[0] > 0.0


def test_bad_words_look_at_the_path() -> None:
    made = request(output=(8,))
    made.bad_word_ids = ((5,), (8, 9), (8, 9, 10))
    object.__setattr__(made.params, "bad_words", ("x",))
    row = [0.0] * V
    assert [i for i, p in enumerate(law(row, made)) if p == 0] == [5, 9]
    assert [i for i, p in enumerate(law(row, made, (9,))) if p == 0] == [5, 10]


PARAMETERS = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.4, "top_k": 5},
    {"top_p": 0.8, "min_p": 0.05, "temperature": 0.6},
    {"min_tokens": 4, "logit_bias": {3: 1.0}},
]


@given(rows, st.lists(st.integers(0, V - 1), max_size=5), st.sampled_from(PARAMETERS))
def test_a_path_is_as_good_as_known_tokens(row: list[float], path: list[int], params: dict) -> None:  # type: ignore[type-arg]
    """Plain decoding and a tree node after the same tokens give the same bits."""
    speculative = shape_row(torch.tensor(row), request(output=(7,), **params), path)
    plain = shape_row(torch.tensor(row), request(output=(7, *path), **params), ())
    assert torch.equal(speculative.logits, plain.logits)


def test_the_input_row_is_left_alone() -> None:
    row = torch.arange(V, dtype=torch.float32)
    shape_row(row, request(repetition_penalty=2.0, top_k=2, logit_bias={1: 5.0}), (4,))
    assert torch.equal(row, torch.arange(V, dtype=torch.float32))


def test_plain_requests_are_not_touched() -> None:
    row = torch.arange(V, dtype=torch.float32)
    assert shape_row(row, request(temperature=0.4), ()).logits is row
    assert is_plain(request(temperature=0.0, top_k=3).params)


@pytest.mark.parametrize(
    ("row", "good"),
    [
        ([0.0, 1.0], True),
        ([-math.inf, 0.0], True),
        ([-math.inf] * 2, False),
        ([math.nan, 0.0], False),
        ([math.inf, 0.0], False),
    ],
)
def test_is_drawable(row: list[float], good: bool) -> None:
    assert is_drawable(torch.tensor(row)) is good
