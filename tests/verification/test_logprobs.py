"""Reported log-probabilities are those of the model, exactly, and the same wherever the row comes from."""

import numpy as np
import pytest
import torch

from forerun.verification.logprobs import token_logprob


def row(vocab: int = 300) -> np.ndarray:
    return (np.random.default_rng(1).normal(size=vocab) * 5).astype(np.float32)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_log_softmax_of_the_raw_logits(count):
    logits = row()
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    entry = token_logprob(logits, 17, count)
    assert entry.token_id == 17
    assert entry.logprob == pytest.approx(float(expected[17]), abs=1e-12)
    values, ids = expected.topk(count)
    assert [token for token, _ in entry.top] == ids.tolist()
    assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-12)


def test_top_holds_the_lowest_ids_among_equals_and_as_many_entries_as_asked_for():
    logits = np.zeros(30, np.float32)
    logits[[25, 4]] = 1.0
    assert [token for token, _ in token_logprob(logits, 29, 5).top] == [4, 25, 0, 1, 2]


def test_the_likeliest_token_has_the_same_value_in_both_places():
    logits = row()
    entry = token_logprob(logits, int(logits.argmax()), 3)
    assert entry.top[0] == (entry.token_id, entry.logprob)


def test_a_vocabulary_smaller_than_the_count_reports_all_of_it():
    assert len(token_logprob(row(6), 0, 20).top) == 6


def test_large_logits_do_not_overflow():
    logits = np.array([30000.0, 29999.0, -30000.0], np.float32)
    assert token_logprob(logits, 0, 0).logprob == pytest.approx(-np.log(1 + np.exp(-1)), abs=1e-12)


@pytest.mark.parametrize("vocab", [300, 49152 + 3])
def test_the_place_of_the_row_in_memory_changes_no_bit(vocab):
    logits = row(vocab)
    expected = token_logprob(logits, 5, 20)
    memory = np.empty(vocab + 64, np.float32)
    for offset in (0, 1, 3, 5, 8, 33):
        memory[offset : offset + vocab] = logits
        assert token_logprob(memory[offset : offset + vocab], 5, 20) == expected
