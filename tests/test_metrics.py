"""Metrics against counts made by hand."""

from __future__ import annotations

import pytest

from eagle3_jax.metrics import conditional_n_alpha, joint_n_alpha, ratio, tau, teacher_forced, tokens_per_second


def test_tau_never_accepted_is_one_and_always_accepted_is_the_block() -> None:
    # 1 token from prefill, then 9 passes of one token.
    assert tau([10], [9]) == 1.0
    # W = 3: 1 token from prefill, then 5 passes of 4.
    assert tau([21], [5]) == 4.0


def test_tau_pools_over_requests() -> None:
    # Requests of 7, 1 and 13 tokens: 6 + 0 + 12 tokens from passes, in 2 + 0 + 4 passes.
    assert tau([7, 1, 13], [2, 0, 4]) == 3.0
    # A mean of the requests' own values would differ, and so would counting the last request only.
    assert tau([3, 21], [2, 5]) == pytest.approx(22 / 7)


def test_tau_counts_only_what_was_emitted() -> None:
    # 5 drafts match, the third is the end: the pass yields 3 tokens, beside the one of prefill.
    assert tau([4], [1]) == 3.0


def test_n_alpha_counts_rounds() -> None:
    accepted = [0, 1, 1, 3, 2, 3, 0, 3]
    assert joint_n_alpha(accepted, 3) == [6 / 8, 4 / 8, 3 / 8]
    assert conditional_n_alpha(accepted, 3) == [6 / 8, 4 / 6, 3 / 4]


def test_n_alpha_of_steps_never_reached_is_none() -> None:
    assert joint_n_alpha([0, 0], 2) == [0.0, 0.0]
    assert conditional_n_alpha([0, 0], 2) == [0.0, None]


def test_speed_leaves_out_the_first_token() -> None:
    assert tokens_per_second([11, 21], [1.0, 2.0]) == 10.0


def test_teacher_forced_divides_each_by_its_own_count() -> None:
    result = teacher_forced([6.0, 4.0], [0.0, 1.0], [3, 2], [8, 4], [4, 1], [4, 1], [8, 2])
    assert result == {
        "cross_entropy": [2.0, 2.0],
        "feature_loss": [0.0, 0.5],
        "accuracy": [0.5, 0.25],
        "joint": [0.5, 0.25],
        "conditional": [0.5, 0.5],
    }


def test_a_ratio_over_nothing_is_none() -> None:
    assert ratio(0, 0) is None
    assert tau([1], [0]) is None
    assert tau([], []) is None
    assert joint_n_alpha([], 2) == [None, None]
    assert tokens_per_second([1], [0.0]) is None
