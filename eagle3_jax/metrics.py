"""What the words mean: acceptance in training, tau, n-alpha and speedup in decoding. Nothing else defines them.

Counts come in, numbers come out; None stands for a ratio over nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ratio(part: float, whole: float) -> float | None:
    """part / whole, or None when the whole is 0."""
    return part / whole if whole else None


def tau(new_tokens: Iterable[int], passes: Iterable[int]) -> float | None:
    """Tokens a verification pass yields, pooled over answers: sum(new_tokens - 1) / sum(passes).

    The first token of an answer comes from prefill and belongs to no pass. The target's own token of each pass counts,
    so a draft that is never accepted has tau 1 and one always accepted W + 1; plain decoding has 1. Tokens after a stop
    or a limit were never emitted and do not count.
    """
    tokens = list(new_tokens)
    return ratio(sum(tokens) - len(tokens), sum(passes))


def joint_n_alpha(accepted: Sequence[int], length: int) -> list[float | None]:
    """Share of chain rounds in which the first n+1 drafts were all accepted, for n = 0 .. length-1.

    Args:
      accepted: drafts accepted in each whole round (rounds cut short by a stop or a limit are left out).
      length: W, drafts a round.
    """
    return [ratio(sum(count > n for count in accepted), len(accepted)) for n in range(length)]


def conditional_n_alpha(accepted: Sequence[int], length: int) -> list[float | None]:
    """n-alpha of the paper: acceptance of the draft whose input holds n of the draft's own predictions, among rounds
    in which those n were accepted (paper section 4.2, Figure 7).
    """
    return [ratio(sum(count > n for count in accepted), sum(count >= n for count in accepted)) for n in range(length)]


def tokens_per_second(new_tokens: Iterable[int], seconds_after_first: Iterable[float]) -> float | None:
    """Pooled decoding speed: sum(new_tokens - 1) / sum(seconds after the first token)."""
    tokens = list(new_tokens)
    return ratio(sum(tokens) - len(tokens), sum(seconds_after_first))


def teacher_forced(
    cross_entropy: Sequence[float],
    feature: Sequence[float],
    trained: Sequence[float],
    slots: Sequence[float],
    hits: Sequence[float],
    joint_hits: Sequence[float],
    joint_before: Sequence[float],
) -> dict[str, list[float | None]]:
    """Acceptance per unrolled step from the sums of `training.loss.StepSums`.

    Returns:
      cross_entropy, feature_loss: means over trained slots.
      accuracy: share of assistant slots whose guess at this step is the target's argmax.
      joint: share of assistant slots whose guesses up to this step are all right.
      conditional: share of right guesses among slots whose earlier guesses are all right.
    """
    return {
        "cross_entropy": [ratio(a, b) for a, b in zip(cross_entropy, trained)],
        "feature_loss": [ratio(a, b) for a, b in zip(feature, trained)],
        "accuracy": [ratio(a, b) for a, b in zip(hits, slots)],
        "joint": [ratio(a, b) for a, b in zip(joint_hits, slots)],
        "conditional": [ratio(a, b) for a, b in zip(joint_hits, joint_before)],
    }
