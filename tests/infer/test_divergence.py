"""What counts as rounding: the gap between the token expected and the one that came, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from infer import divergence
from infer.divergence import FirstDifference, first_difference, plain_scores, tie_below
from infer.sampling import SamplingParams
from infer.target import TargetModel
from tests.infer.helpers import plain_ids, sampling

PROMPT = list(range(3, 30))


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"))


def test_first_difference() -> None:
    """Also where one answer begins the other."""
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2
    assert first_difference((1,), (1,)) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recomputed_scores_choose_plain_decodings_token(target: TargetModel, temperature: float) -> None:
    """They are those of the decision that plain decoding made: same processors, same noise, same position."""
    params = sampling(temperature, frequency_penalty=0.5)
    answer = plain_ids(target, PROMPT, params)
    for position in (0, 4, 9):
        assert int(plain_scores(target, PROMPT, answer[:position], params).argmax()) == answer[position]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_margin_is_that_of_the_two_tokens_as_logits(target: TargetModel, temperature: float) -> None:
    """With the noise of the position, and whatever the temperature in the unit in which rounding happens."""
    params = sampling(temperature)
    answer = plain_ids(target, PROMPT, params)
    wrong = (answer[5] + 1) % target.vocab_size
    found = FirstDifference.find(target, PROMPT, params, expected=answer, got=(*answer[:5], wrong, 7))
    assert (found.position, found.expected, found.got) == (5, answer[5], wrong)
    scores = plain_scores(target, PROMPT, answer[:5], params) * (temperature or 1.0)
    assert found.margin == pytest.approx(float(scores[answer[5]] - scores[wrong]), abs=1e-5)
    assert found.best_score == pytest.approx(float(scores.max()), abs=1e-5)
    assert not found.is_tie(torch.float32)


def test_a_wrong_third_token_at_a_close_position_is_no_tie(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two best lie within rounding of each other; only the second of them is excused. So is no token that the
    request rules out, and none that is missing."""
    scores = torch.tensor([8.0, 8.00001, 7.0, -torch.inf])
    monkeypatch.setattr(divergence, "plain_scores", lambda *args: scores)

    def find(*got: int) -> FirstDifference:
        return FirstDifference.find(target, PROMPT, SamplingParams(), expected=(5, 1, 4), got=got)

    assert find(5, 0, 4).is_tie(torch.float32)
    assert not find(5, 2, 4).is_tie(torch.float32)
    assert not find(5, 2, 4).is_tie(torch.bfloat16)
    for got in ((5, 3), (5,)):
        assert find(*got).margin is None
        assert not find(*got).is_tie(torch.bfloat16)


def test_ties_by_precision() -> None:
    """Four steps between neighbouring numbers of the best logit's size, never less than those of 16 to 32."""
    assert tie_below(torch.float32, 20.0) == tie_below(torch.float32, 200.0) == 1e-4
    for best_score in (-torch.inf, -1.0, 0.0, 20.0, 31.9):
        assert tie_below(torch.bfloat16, best_score) == 0.5
        assert tie_below(torch.float16, best_score) == 0.0625
    assert tie_below(torch.bfloat16, 33.0) == 1.0
    for dtype in (torch.bfloat16, torch.float16):
        number = torch.tensor(100.0, dtype=dtype)
        step = float(torch.nextafter(number, torch.tensor(torch.inf, dtype=dtype)) - number)
        assert tie_below(dtype, 100.0) == 4 * step
