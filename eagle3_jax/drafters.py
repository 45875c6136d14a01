"""Who proposes: one interface over the EAGLE-3 draft, a small model, prompt lookup, and the first and last together.

Decoding asks four things of a drafter: which states of the target it reads (`taps_of`), how far it reaches
(`reach_of`), what it keeps of the text (`empty_cache_of`, `read_prompt`), and what it proposes after the last round
(`propose`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from eagle3_jax.baselines import (
    Lookup,
    SmallModel,
    extend_history,
    extend_small,
    propose_lookup,
    propose_small,
)
from eagle3_jax.cache import History, KVCache, empty_cache
from eagle3_jax.chain import catch_up, propose_chain
from eagle3_jax.draft import Draft
from eagle3_jax.tree import FixedTree, TreeShape, graft, propose_fixed, propose_tree
from eagle3_jax.verify import Tree, chain_tree


@struct.dataclass
class Mixed:
    """An EAGLE-3 draft's chain or tree, with what lookup finds as one more branch from the root."""

    draft: Draft
    lookup: Lookup


@struct.dataclass
class MixedCache:
    """What both keep."""

    draft: KVCache
    history: History


Drafter = Draft | SmallModel | Lookup | Mixed
DrafterCache = KVCache | History | MixedCache


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is proposed in each round; static.

    Attributes:
      draft_length: W, tokens or levels drafted a round; 0 is plain decoding.
      tree: a tree of W levels, grown or fixed; None drafts a chain.
      lookup_nodes: nodes of a lookup branch beside what the draft drafts.

    Raises:
      ValueError: a tree of other than W levels.
    """

    draft_length: int = 0
    tree: TreeShape | FixedTree | None = None
    lookup_nodes: int = 0

    def __post_init__(self) -> None:
        if self.tree is not None and self.tree.depth != self.draft_length:
            raise ValueError(f"a tree of {self.tree.depth} levels in a plan of draft_length {self.draft_length}")

    @property
    def depth(self) -> int:
        """Most proposals that one round can accept."""
        return max(self.draft_length, self.lookup_nodes)

    @property
    def nodes(self) -> int:
        """M, nodes that the target verifies, the root among them."""
        own = self.draft_length + 1 if self.tree is None else self.tree.nodes
        return own + self.lookup_nodes

    @property
    def tries(self) -> int:
        """Most proposals that are tried at one position, one after another."""
        return (1 if self.tree is None else self.tree.top_k) + (self.lookup_nodes > 0)


@struct.dataclass
class Drafted:
    """What a round verifies.

    Attributes:
      tree: the proposals.
      ranks: [B, M] int32, each node's place among its siblings.
      distribution: [B, M, V] fp32, what each node was drawn from; None if all are deterministic.
      cache: what the drafter keeps, after catching up.
    """

    tree: Tree
    ranks: jax.Array
    distribution: jax.Array | None
    cache: DrafterCache | None


def taps_of(drafter: Drafter | None) -> tuple[int, ...]:
    """The boundaries of the target whose states the drafter reads."""
    draft = drafter.draft if isinstance(drafter, Mixed) else drafter
    return draft.config.taps if isinstance(draft, Draft) else ()


def reach_of(drafter: Drafter | None) -> int | None:
    """Positions that the drafter was made for; None for any."""
    match drafter:
        case Draft():
            return drafter.config.reach
        case SmallModel():
            return drafter.model.config.context_limit
        case Mixed():
            return reach_of(drafter.draft)
    return None


def empty_cache_of(drafter: Drafter | None, batch: int, length: int, dtype: DTypeLike) -> DrafterCache | None:
    """What the drafter keeps of `batch` rows that have read nothing, for up to `length` tokens."""
    match drafter:
        case Lookup():
            return History(tokens=jnp.zeros((batch, length), jnp.int32), lengths=jnp.zeros((batch,), jnp.int32))
        case Mixed():
            draft, history = (empty_cache_of(part, batch, length, dtype) for part in (drafter.draft, drafter.lookup))
            assert isinstance(draft, KVCache)
            assert isinstance(history, History)
            return MixedCache(draft, history)
        case Draft():
            # A draft computes in the dtype of the states that it reads, whatever its weights are kept in.
            config = drafter.config
            return empty_cache(1, batch, config.num_kv_heads, length, config.head_dim, dtype)
        case SmallModel():
            config = drafter.model.config
            return empty_cache(config.num_layers, batch, config.num_kv_heads, length, config.head_dim, dtype)
    return None


def read_prompt(
    drafter: Drafter | None,
    cache: DrafterCache | None,
    taps: jax.Array,
    tokens: jax.Array,
    following: jax.Array,
    count: jax.Array,
    following_count: jax.Array,
) -> DrafterCache | None:
    """Extend what the drafter keeps by a part of the prompt.

    Args:
      drafter, cache: the drafter, and what it keeps of the parts before.
      taps: [B, T, A*D] of the target at these tokens.
      tokens: [B, T] int32.
      following: [B, T] int32, the token after each.
      count: [B] int32, real tokens.
      following_count: [B] int32, tokens whose following token is known.
    """
    match drafter, cache:
        case Draft(), KVCache():
            return catch_up(drafter, cache, taps, following, following_count)[1]
        case SmallModel(), KVCache():
            return extend_small(drafter, cache, tokens, count)[1]
        case Lookup(), History():
            return extend_history(cache, tokens, count)
        case Mixed(), MixedCache():
            return MixedCache(
                catch_up(drafter.draft, cache.draft, taps, following, following_count)[1],
                extend_history(cache.history, tokens, count),
            )
    return cache


def propose(
    drafter: Drafter | None,
    cache: DrafterCache | None,
    taps: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
    root: jax.Array,
    plan: Plan,
    temperature: jax.Array | None,
    uniforms: jax.Array | None,
) -> Drafted:
    """Catch up with the last round, then draft what the plan says.

    Args:
      drafter, cache: the drafter and what it keeps.
      taps: [B, P, A*D] of the tokens that the target read in the last round.
      tokens: [B, P] int32, the tokens decided in it.
      count: [B] int32, how many of them are real.
      root: [B] int32, the last of them.
      plan: static.
      temperature: [B] for sampled decoding; None drafts the most likely tokens.
      uniforms: [B, P - 1] in [0, 1), with a temperature.
    """
    width = plan.draft_length
    last = (tokens, count)
    if (plan.lookup_nodes > 0) != isinstance(drafter, Mixed):
        raise ValueError(
            f"lookup_nodes {plan.lookup_nodes} with a {type(drafter).__name__}: Mixed alone looks up beside"
        )
    match drafter, cache:
        case Draft(), KVCache() if plan.tree is not None:
            if isinstance(plan.tree, FixedTree):
                tree, ranks, kept = propose_fixed(drafter, cache, taps, *last, root, plan.tree)
            else:
                tree, ranks, kept = propose_tree(drafter, cache, taps, *last, root, plan.tree)
            return Drafted(tree, ranks, None, kept)
        case Draft(), KVCache():
            chain = propose_chain(drafter, cache, taps, *last, width, temperature, uniforms)
        case SmallModel(), KVCache():
            chain = propose_small(drafter, cache, *last, width, temperature, uniforms)
        case Lookup(), History():
            chain = propose_lookup(drafter, cache, *last, width)
        case Mixed(), MixedCache():
            own = dataclasses.replace(plan, lookup_nodes=0)
            drafted = propose(drafter.draft, cache.draft, taps, *last, root, own, temperature, uniforms)
            found = propose_lookup(drafter.lookup, cache.history, *last, plan.lookup_nodes)
            return _with_branch(drafted, found.tokens, found.cache)
        case _:
            return Drafted(chain_tree(root[:, None]), jnp.zeros_like(root)[:, None], None, cache)
    tree = chain_tree(jnp.concatenate([root[:, None], chain.tokens], axis=1))
    distribution = chain.distribution
    if distribution is not None:
        distribution = jnp.pad(distribution, ((0, 0), (1, 0), (0, 0)))
    return Drafted(tree, jnp.zeros_like(tree.tokens), distribution, chain.cache)


def _with_branch(drafted: Drafted, tokens: jax.Array, history: History | KVCache) -> Drafted:
    """Add a branch of deterministic proposals [B, L] to what the draft drafted."""
    tree, ranks = graft(drafted.tree, drafted.ranks, tokens)
    distribution = drafted.distribution
    if distribution is not None:
        # A deterministic proposal has all its mass on its token.
        certain = jax.nn.one_hot(tokens, distribution.shape[-1], dtype=distribution.dtype)
        distribution = jnp.concatenate([distribution, certain], axis=1)
    assert isinstance(drafted.cache, KVCache)
    assert isinstance(history, History)
    return Drafted(tree, ranks, distribution, MixedCache(drafted.cache, history))
