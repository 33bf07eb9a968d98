"""Holds ``generate`` of transformers with stages on ranks to plain ``generate``, token for token."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.mpi.launch import run_on_forks

MISSING = [name for name in ("accelerate", "transformers") if find_spec(name) is None]
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}")]
TARGET = "tests.integrations.with_generate"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_all_ranks_generate_what_plain_generate_does(kind: str) -> None:
    from tests.integrations.with_generate import GREEDY, SAMPLED, WITHOUT, end_of, generate, model_of

    ending = {**GREEDY, "eos_token_id": end_of(kind)}
    runs = [(ending, 0, 3), (SAMPLED, 0, 3), (GREEDY, 0, 1), (SAMPLED, 2, 3)]
    runs += [(WITHOUT, 0, 3), ({**GREEDY, "num_beams": 2}, 0, 3)] if kind == "gpt2" else []
    plain = model_of(kind)
    expected = [generate(plain, *run) for run in runs]
    assert 0 in expected[0][0][5:] and 0 not in expected[0][1][5:], "the first row is to end first"
    for found, num_traces, num_stages in run_on_forks(2, f"{TARGET}:on_ranks", kind, runs, {"inputs": "replicated"}):
        assert found == expected and num_stages == 2
        assert num_traces <= (8 if kind == "gpt2" else 6)  # a prompt and two lengths, each with and without a mask


@pytest.mark.parametrize("num_stages", [1, 2])
def test_each_rank_gets_its_rows_of_what_plain_generate_makes_of_all_prompts(num_stages: int) -> None:
    from tests.integrations.with_generate import GREEDY, end_of, generate, model_of

    options, borders = {**GREEDY, "eos_token_id": end_of("gpt2")}, [0, 1, 4]
    expected = generate(model_of("gpt2"), options, 0, 4)
    settings = {"num_stages": num_stages, "num_micro_batches": 4}
    results = run_on_forks(2, f"{TARGET}:on_each", "gpt2", options, borders, settings)
    assert [row for found, _, _ in results for row in found[0]] == expected


def test_a_cache_goes_from_call_to_call_and_nowhere_else() -> None:
    for (difference, length), errors in run_on_forks(2, f"{TARGET}:by_hand"):
        assert difference < 1e-5 and length == 5
        expected = ["must match", "use_cache=False", "manual_seed|pass other numbers"]
        for error, words in zip(errors, expected, strict=True):
            assert re.search(words, error), error
