"""The draft vocabulary's map: offsets in files, absolute ids in memory. JAX clamps an index out of range in silence, so
every id that cannot be is refused when the map is built, each kind with its own message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.errors import InputError
from eagle3_jax.vocab import most_frequent, vocab_from_ids, vocab_from_offsets, vocab_offsets

VOCAB = 320


def member(*ids: int) -> np.ndarray:
    flags = np.zeros(VOCAB, bool)
    flags[list(ids)] = True
    return flags


def test_offsets_are_added_to_the_draft_id():
    vocab = vocab_from_offsets(np.array([0, 0, 3, 3]), VOCAB, member(0, 1, 5, 6))
    np.testing.assert_array_equal(vocab.d2t, [0, 1, 5, 6])
    np.testing.assert_array_equal(vocab.t2d, member(0, 1, 5, 6))
    assert vocab.size == 4
    assert (vocab.d2t.dtype, vocab.t2d.dtype) == (np.int32, np.bool_)


def test_zero_offsets_are_the_first_ids_and_refused_where_t2d_says_otherwise():
    zeros = np.zeros(4, np.int64)
    np.testing.assert_array_equal(vocab_from_offsets(zeros, VOCAB, member(0, 1, 2, 3)).d2t, [0, 1, 2, 3])
    with pytest.raises(InputError, match=r"all zeros, so it maps to the first ids"):
        vocab_from_offsets(zeros, VOCAB, member(0, 1, 5, 6))


def test_each_kind_of_impossible_id_has_its_own_error():
    messages = []
    for ids in ([-1, 3, 4], [2, 3, VOCAB], [2, 7, 7]):
        offsets = np.array(ids) - np.arange(3)
        with pytest.raises(InputError) as error:
            vocab_from_offsets(offsets, VOCAB, where="d2t of x")
        assert "d2t of x" in str(error.value)
        messages.append(error.value.found)
    negative, beyond, duplicate = messages
    assert negative == "negative id -1 at draft id 0"
    assert beyond == "id 320 at draft id 2, beyond the vocabulary"
    assert duplicate == "a duplicate: id 7 occurs 2 times"


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_offsets_that_are_no_integers_are_refused(dtype: type):
    with pytest.raises(InputError, match=np.dtype(dtype).name):
        vocab_from_offsets(np.zeros(4, dtype), VOCAB)


def test_unsorted_maps_and_negative_offsets_keep_their_order():
    offsets = np.array([310, -1, 5, 0])  # ids 310, 0, 7, 3
    vocab = vocab_from_offsets(offsets, VOCAB, member(0, 3, 7, 310))
    np.testing.assert_array_equal(vocab.d2t, [310, 0, 7, 3])
    np.testing.assert_array_equal(vocab_offsets(vocab), offsets)


def test_membership_flags_must_match_the_map():
    offsets = np.array([0, 0, 3, 3])
    for wrong in (member(0, 1, 5), member(0, 1, 5, 6, 9), member(0, 1, 5, 7)):
        with pytest.raises(InputError, match="differing tokens in d2t"):
            vocab_from_offsets(offsets, VOCAB, wrong)
    with pytest.raises(InputError, match=r"shape \(300,\)"):
        vocab_from_offsets(offsets, VOCAB, np.zeros(300, bool))
    np.testing.assert_array_equal(vocab_from_offsets(offsets, VOCAB).t2d, member(0, 1, 5, 6))


def test_full_vocabulary_is_the_identity():
    vocab = vocab_from_ids(np.arange(VOCAB), VOCAB)
    np.testing.assert_array_equal(vocab.d2t, np.arange(VOCAB))
    assert np.asarray(vocab.t2d).all()
    assert not vocab_offsets(vocab).any()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, unique=True))
def test_offsets_survive_the_round_trip(ids: list[int]):
    vocab = vocab_from_ids(np.array(ids), VOCAB)
    offsets = vocab_offsets(vocab)
    assert offsets.dtype == np.int64
    again = vocab_from_offsets(offsets, VOCAB, np.asarray(vocab.t2d))
    np.testing.assert_array_equal(again.d2t, ids)
    np.testing.assert_array_equal(np.flatnonzero(again.t2d), np.sort(ids))


def test_most_frequent_tokens_are_chosen_sorted_by_id():
    counts = np.array([1, 9, 0, 7, 8, 0])
    np.testing.assert_array_equal(most_frequent(counts, 3), [1, 3, 4])
    assert (np.diff(vocab_offsets(vocab_from_ids(most_frequent(counts, 3), 6))) >= 0).all()


def test_ties_go_to_the_lower_id():
    np.testing.assert_array_equal(most_frequent(np.array([2, 5, 2, 2, 0]), 3), [0, 1, 2])
    np.testing.assert_array_equal(most_frequent(np.zeros(6), 2), [0, 1])


def test_tokens_to_keep_in_any_case_are_taken_whatever_their_count():
    counts = np.array([1, 9, 0, 7, 8, 0])
    np.testing.assert_array_equal(most_frequent(counts, 3, always=(2, 5)), [1, 2, 5])
    np.testing.assert_array_equal(most_frequent(counts, 2, always=(5, 5)), [1, 5])
    np.testing.assert_array_equal(most_frequent(counts, 6, always=(1,)), np.arange(6))


@pytest.mark.parametrize("size", [0, -1, 7])
def test_vocabulary_size_out_of_range_is_refused(size: int):
    with pytest.raises(InputError, match="1 to 6 tokens"):
        most_frequent(np.arange(6), size)


@pytest.mark.parametrize("always", [(0, 1, 2), (6,), (-1,)])
def test_tokens_to_keep_that_do_not_fit_are_refused_and_not_dropped(always: tuple[int, ...]):
    with pytest.raises(InputError, match="keep in any case"):
        most_frequent(np.arange(6), 2, always=always)
