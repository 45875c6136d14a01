"""Requests and answers, and everything about them that is checked or sized before anything is computed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from eagle3_jax.baselines import SmallModel
from eagle3_jax.cache import cache_bucket
from eagle3_jax.config import TargetConfig
from eagle3_jax.draft import Draft
from eagle3_jax.drafters import Drafter, Mixed, Plan, reach_of
from eagle3_jax.errors import InputError
from eagle3_jax.generate import Structure
from eagle3_jax.sampling import Sampling
from eagle3_jax.tree import FixedTree, TreeShape

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to answer it.

    Attributes:
      tokens: the prompt's ids.
      max_new_tokens: most tokens decided.
      temperature: 0 is greedy.
      top_k: 0 keeps all tokens.
      top_p: 1 keeps all tokens.
      seed: of this row's randomness, 0 to 2^32 - 1.
      stop: strings that end the answer.
    """

    tokens: tuple[int, ...]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a request got.

    Attributes:
      index: the request's place in the list.
      token_ids: the tokens decided, an end-of-sequence token included.
      finish_reason: stop, length or context.
      prompt_tokens: length of the prompt.
      verification_passes: passes of the target after prefill.
      accepted: drafts accepted in each round that no stop or limit cut short.
      logprobs: of `token_ids`; empty unless asked for.
      seconds: from admission to the last token.
      first_token_seconds: from admission to the first.
      stopped_text: the text before a stop string, if one ended the answer.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    verification_passes: int
    accepted: tuple[int, ...]
    logprobs: tuple[float, ...]
    seconds: float
    first_token_seconds: float
    stopped_text: str | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """Tokens just decided for a request; `answer` is set with the last of them."""

    index: int
    token_ids: tuple[int, ...]
    answer: Answer | None = None


def check_request(request: Request, config: TargetConfig, where: str) -> None:
    """Refuse a request that cannot be answered; `where` names it in messages.

    Raises:
      InputError: an empty prompt, a prompt that leaves no room in the context, an id outside the vocabulary, or a
        sampling value out of range.
    """
    length, limit = len(request.tokens), config.context_limit
    if not length:
        raise InputError(expected=f"at least one token in {where}", found="an empty prompt", remedy="Give some text.")
    if length >= limit:
        raise InputError(
            expected=f"{where} to leave room for an answer in the target's context of {limit} tokens",
            found=f"{length} tokens",
            remedy="Shorten the prompt.",
        )
    if min(request.tokens) < 0 or max(request.tokens) >= config.vocab_size:
        raise InputError(
            expected=f"token ids from 0 to {config.vocab_size - 1} in {where}",
            found=f"{max(request.tokens)}" if min(request.tokens) >= 0 else f"{min(request.tokens)}",
            remedy="The tokenizer is not this target's.",
        )
    for name, holds, rule in (
        ("max_new_tokens", request.max_new_tokens >= 1, "at least 1"),
        # Logits divided by less, or by infinity, leave the range of fp32.
        (
            "temperature",
            request.temperature == 0 or 1e-4 <= request.temperature <= 1e4,
            "0 (greedy) or from 0.0001 to 10000",
        ),
        ("top_k", 0 <= request.top_k < 2**31, "from 0 (all tokens) to 2147483647"),
        ("top_p", 0 < request.top_p <= 1, "above 0 and at most 1"),
        ("seed", 0 <= request.seed < 2**32, "from 0 to 4294967295"),
    ):
        if not holds:
            raise InputError(expected=f"{name} {rule}", found=str(getattr(request, name)), remedy="Correct the value.")


def structure_for(requests: Sequence[Request], plan: Plan, *, logprobs: bool = False) -> Structure:
    """The one structure that serves all requests.

    Raises:
      InputError: greedy and sampled requests mixed.
    """
    greedy = {request.temperature == 0 for request in requests}
    if len(greedy) > 1:
        raise InputError(
            expected="requests that are all greedy (temperature 0) or all sampled",
            found="both",
            remedy="Decode them in two calls.",
        )
    sampled = not greedy.pop()
    filters = sampled and any(request.top_k > 0 or request.top_p < 1 for request in requests)
    return Structure(plan=plan, greedy=not sampled, filters=filters, logprobs=logprobs)


def sampling_of(requests: Sequence[Request]) -> Sampling:
    """Per-row sampling values; a greedy row's temperature is 1, which nothing reads."""
    column = lambda values, dtype: jnp.asarray(np.asarray(list(values), dtype))
    return Sampling(
        temperature=column((request.temperature or 1.0 for request in requests), np.float32),
        top_k=column((request.top_k for request in requests), np.int32),
        top_p=column((request.top_p for request in requests), np.float32),
        seed=column((request.seed for request in requests), np.uint32),
    )


def cache_length_for(requests: Sequence[Request], config: TargetConfig, depth: int) -> int:
    """The cache bucket that holds every request's prompt, answer and one round's tokens, `depth` + 1."""
    block = depth + 1
    needed = max(
        min(len(request.tokens) + request.max_new_tokens, config.context_limit) + block for request in requests
    )
    return cache_bucket(needed, config.context_limit + block)


def plan_for(
    target: TargetConfig,
    draft: Drafter | None,
    *,
    draft_length: int = 0,
    tree: TreeShape | FixedTree | None = None,
    lookup_nodes: int = 0,
) -> Plan:
    """What a drafter is to propose in each round.

    Args:
      target: the model's description.
      draft: the drafter.
      draft_length: W of a chain; 0 with a tree, or without a drafter.
      tree: instead of a chain; of an EAGLE-3 draft only. A dynamic tree's M nodes include the lookup branch.
      lookup_nodes: nodes of the lookup branch; with `Mixed` only.

    Raises:
      InputError: a combination that cannot be, or a drafter for another vocabulary.
    """
    own = draft.draft if isinstance(draft, Mixed) else draft
    for name, value in (("draft_length", draft_length), ("lookup_nodes", lookup_nodes)):
        if value < 0:
            raise InputError(expected=f"{name} of at least 0", found=str(value), remedy="Correct the value.")
    if tree is not None:
        if draft_length:
            raise InputError(
                expected="a chain or a tree",
                found=f"draft_length {draft_length} and a tree",
                remedy="Pass one of them.",
            )
        if own is not None and not isinstance(own, Draft):
            raise InputError(
                expected="an EAGLE-3 draft, which alone grows trees",
                found=f"a {type(own).__name__}",
                remedy="Draft a chain.",
            )
        if isinstance(tree, TreeShape) and lookup_nodes:
            if tree.nodes - lookup_nodes < 2:
                raise InputError(
                    expected=f"more tree nodes than the {lookup_nodes} of lookup and the root",
                    found=str(tree.nodes),
                    remedy="The nodes of a dynamic tree include those that lookup fills.",
                )
            tree = dataclasses.replace(tree, nodes=tree.nodes - lookup_nodes)
        tree.check(target.vocab_size if own is None else own.config.draft_vocab_size)
        draft_length = tree.depth
    plan = Plan(draft_length=draft_length, tree=tree, lookup_nodes=lookup_nodes)
    if plan.depth >= target.context_limit:
        raise InputError(
            expected=f"a draft_length below the target's context of {target.context_limit} tokens",
            found=str(plan.depth),
            remedy="Chains of 2 to 8 drafts are usual.",
        )
    if (draft_length > 0) != (draft is not None):
        raise InputError(
            expected="a draft exactly when draft_length is above 0 or a tree is given",
            found=f"draft_length {draft_length} {'with' if draft is not None else 'without'} a draft",
            remedy="Pass both or neither.",
        )
    if (lookup_nodes > 0) != isinstance(draft, Mixed):
        raise InputError(
            expected="lookup_nodes above 0 exactly for a draft mixed with lookup",
            found=f"lookup_nodes {lookup_nodes} and {'no draft' if draft is None else f'a {type(draft).__name__}'}",
            remedy="Pass Mixed(draft, Lookup()) and its number of nodes, or neither.",
        )
    vocab = own.model.config.vocab_size if isinstance(own, SmallModel) else None
    if isinstance(own, Draft):
        vocab = own.config.vocab_size
    if vocab is not None and vocab != target.vocab_size:
        raise InputError(
            expected=f"a draft for the target's vocabulary of {target.vocab_size} tokens",
            found=f"{vocab} tokens",
            remedy="Take the draft that was trained for this target, or a smaller model of its own family.",
        )
    return plan


def warn_beyond(draft: Drafter | None, requests: Sequence[Request], config: TargetConfig) -> None:
    """Say once that texts may grow longer than what the drafter was made for, or trained on."""
    reach = reach_of(draft)
    own = draft.draft if isinstance(draft, Mixed) else draft
    trained = own.config.trained_length if isinstance(own, Draft) else None
    longest = max((len(request.tokens) + request.max_new_tokens for request in requests), default=0)
    longest = min(longest, config.context_limit)
    if reach is not None and longest > reach:
        logger.warning(
            "up to %d tokens of prompt and answer, but the draft was made for %d: the text stays right; beyond them it "
            "is decoded in plain steps", longest, reach,
        )  # fmt: skip
    elif trained is not None and longest > trained:
        logger.warning(
            "up to %d tokens of prompt and answer, but the draft was trained on %d: the text stays right, but fewer "
            "drafts may be accepted beyond them", longest, trained,
        )  # fmt: skip
