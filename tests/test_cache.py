"""The key/value cache: what is committed is written in order, the rest leaves no trace, and lengths have buckets."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.cache import CACHE_BUCKETS, KVCache, cache_bucket, commit, empty_cache
from eagle3_jax.errors import InputError

LAYERS, ROWS, HEADS, LENGTH, WIDTH, BLOCK = 2, 3, 2, 10, 4, 5


def filled(lengths: list[int]) -> KVCache:
    """A cache in which every entry differs, so that any write shows."""
    rng = np.random.default_rng(0)
    blank = empty_cache(LAYERS, ROWS, HEADS, LENGTH, WIDTH)
    noise = lambda old: jnp.asarray(rng.normal(size=old.shape), jnp.float32)
    return jax.tree.map(noise, blank.replace(lengths=None)).replace(lengths=jnp.asarray(lengths, jnp.int32))


def block(seed: int = 1) -> tuple[list[jax.Array], list[jax.Array]]:
    rng = np.random.default_rng(seed)
    make = lambda *shape: [jnp.asarray(rng.normal(size=(ROWS, HEADS, *shape)), jnp.float32) for _ in range(LAYERS)]
    return make(WIDTH, BLOCK), make(BLOCK, WIDTH)


def by_row(array: jax.Array, *, keys: bool) -> np.ndarray:
    """[B, K, S, H] whichever way it is kept."""
    return np.array(array.swapaxes(2, 3) if keys else array)


@pytest.mark.parametrize("lengths", [[0, 3, 7], [5, 9, 10], [8, 6, 10]])
@pytest.mark.parametrize("count", [[0, 0, 0], [1, 2, 3], [3, 0, 1]])
def test_commit_appends_the_kept_path_and_touches_nothing_else(lengths: list[int], count: list[int]) -> None:
    cache, (keys, values) = filled(lengths), block()
    path = np.asarray([[0, 2, 4], [0, 1, 3], [0, 4, 0]], np.int32)
    after = jax.jit(commit)(cache, keys, values, jnp.asarray(path), jnp.asarray(count, jnp.int32))
    assert after.lengths.tolist() == [a + b for a, b in zip(lengths, count)]
    for is_key, trio in [
        *((True, trio) for trio in zip(cache.keys, keys, after.keys)),
        *((False, trio) for trio in zip(cache.values, values, after.values)),
    ]:
        expected, new, found = (by_row(array, keys=is_key) for array in trio)
        for row in range(ROWS):
            for place in range(count[row]):
                at = lengths[row] + place
                # Rows beyond the end are dropped: they must not come back at the border or at the start.
                if at < LENGTH:
                    expected[row, :, at] = new[row, :, path[row, place]]
        np.testing.assert_array_equal(found, expected)


def test_commit_keeps_the_dtype_of_the_cache() -> None:
    # Wider than what is written, as on a CPU under bf16 weights.
    cache = empty_cache(1, ROWS, HEADS, LENGTH, WIDTH, jnp.float32)
    keys, values = ([jnp.ones((ROWS, HEADS, *shape), jnp.bfloat16)] for shape in ((WIDTH, 1), (1, WIDTH)))
    after = commit(cache, keys, values, jnp.zeros((ROWS, 1), jnp.int32), jnp.ones(ROWS, jnp.int32))
    assert after.keys[0].dtype == after.values[0].dtype == jnp.float32
    assert after.max_length == LENGTH


def test_the_smallest_bucket_that_holds_is_taken() -> None:
    assert cache_bucket(1, 100) == CACHE_BUCKETS[0]
    for bucket, following in itertools.pairwise(CACHE_BUCKETS):
        assert cache_bucket(bucket, 10**6) == bucket
        assert cache_bucket(bucket + 1, 10**6) == following


def test_beyond_the_buckets_their_largest_is_the_step() -> None:
    last = CACHE_BUCKETS[-1]
    assert cache_bucket(last + 1, 131080) == cache_bucket(2 * last, 131080) == 2 * last
    assert 131080 <= cache_bucket(131080, 131080) < 131080 + last
    with pytest.raises(InputError, match=f"at most 9000.*found {last + 2000}"):
        cache_bucket(last + 2000, 9000)
