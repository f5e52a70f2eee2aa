"""Moments of the probe distributions, and the quality of the generator below them."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
    complex_dtype,
    draw,
    float_dtype,
    many,
    matrix,
    z_score,
)

import traceax as tx
from traceax._hash import normals, probe_streams, signs, words, words_at

SAMPLERS = [
    tx.RademacherSampler(),
    tx.NormalSampler(),
    tx.SphereSampler(),
    tx.RademacherSampler("jax.random"),
    tx.NormalSampler("jax.random"),
    tx.OrthogonalSampler(),
]
ids = [f"{type(s).__name__}-{getattr(s, 'generator', '')}" for s in SAMPLERS]


@pytest.mark.parametrize("complex", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=ids)
@pytest.mark.parametrize("n", [1, 40])
def test_isotropic(sampler, complex, n):
    dtype = complex_dtype() if complex else float_dtype()
    if sampler.independent:
        probes = np.asarray(draw(sampler, jr.key(1), n, 4000, dtype))
    else:
        # The last of a few, which depends on all of them.
        k = min(n, 3)
        last = jax.jit(jax.vmap(lambda key: sampler.sample(key, n, k, dtype)[:, -1]))
        probes = np.asarray(last(jr.split(jr.key(1), 4000))).T
    assert probes.dtype == dtype
    assert probes.shape == (n, 4000)
    outer = probes.T[:, :, None] * probes.T[:, None, :].conj()
    assert z_score(outer, np.eye(n), 1e-6) < 5
    assert z_score(probes.T, np.zeros(n), 1e-6) < 5
    if complex:
        # Circular: no correlation with the conjugate.
        assert z_score((probes**2).T, np.zeros(n), 1e-6) < 5


@pytest.mark.parametrize("complex", [False, True])
def test_lengths(complex):
    dtype = complex_dtype() if complex else float_dtype()
    signs = draw(tx.RademacherSampler(), jr.key(0), 70, 9, dtype)
    np.testing.assert_allclose(np.abs(signs), 1.0, rtol=1e-6)
    sphere = draw(tx.SphereSampler(), jr.key(0), 70, 9, dtype)
    np.testing.assert_allclose(np.sum(np.abs(sphere) ** 2, axis=0), 70, rtol=1e-5)
    orthogonal = np.asarray(draw(tx.OrthogonalSampler(), jr.key(0), 300, 9, dtype))
    np.testing.assert_allclose(
        orthogonal.conj().T @ orthogonal / 300, np.eye(9), atol=1e-5
    )


@pytest.mark.parametrize("sampler", SAMPLERS, ids=ids)
def test_more_probes_extend_the_sequence(sampler):
    few = sampler.sample(jr.key(2), 300, 5, float_dtype())
    more = draw(sampler, jr.key(2), 300, 12, float_dtype())
    assert_close(more[:, :5], few, rtol=1e-4, atol=1e-5)
    if isinstance(sampler, tx.IndexedSampler):
        part = jax.jit(lambda i: sampler.probes(jr.key(2), i, 300, 3, more.dtype))(4)
        assert_close(part, more[:, 4:7], rtol=1e-6)


def test_long_probes_are_the_same_whichever_way_they_are_drawn():
    # From this length on one after the other.
    n = 2**16
    for sampler in SAMPLERS[:3]:
        long = draw(sampler, jr.key(2), n, 2, jnp.float32)
        batched = jax.vmap(lambda key, s=sampler: draw(s, key, n, 1, jnp.float32))(
            jnp.stack([jr.key(2), jr.key(3)])
        )
        assert_close(batched[0, :, 0], long[:, 0], rtol=1e-6)


def test_orthogonal_probes_have_less_variance():
    n, k = 30, 24
    a = matrix("signed", n)
    op = lx.MatrixLinearOperator(jnp.asarray(a, float_dtype()))
    spread = {}
    for sampler in (tx.SphereSampler(), tx.OrthogonalSampler()):
        values, errors = many(tx.HutchinsonEstimator(sampler), op, k, 3000)
        assert z_score(values, np.trace(a)) < 4
        spread[sampler] = values.std()
        assert 0.95 < np.sqrt(np.mean(errors**2)) / values.std() < 1.1
    ratio = spread[tx.OrthogonalSampler()] / spread[tx.SphereSampler()]
    assert abs(ratio - np.sqrt((n - k) / (n - 1))) < 0.03


def test_samplers_are_equal_and_hashable():
    for sampler in SAMPLERS[:3]:
        twin = type(sampler)()
        assert twin == sampler
        assert hash(twin) == hash(sampler)
        assert jax.tree.leaves(sampler) == []
    for kind in (tx.XTraceEstimator, tx.HutchinsonEstimator):
        assert hash(kind()) == hash(kind())
        assert jax.tree.leaves(kind()) == []


#
# The hash. Tests of a generator: each statistic has a known distribution.
#


def _streams(keys):
    """The first stream of the first probe of every key."""
    return jax.vmap(lambda key: probe_streams(jr.key_data(key), 0, 1, 1)[0][0])(keys)


def _words(keys, n, start=0):
    key_words = _streams(keys)
    return np.asarray(words(key_words, n, start))


def _chi_squared(counts, expected):
    # As a z-score: for many degrees of freedom a chi^2 variable is nearly normal.
    freedom = counts.size - 1
    return (np.sum((counts - expected) ** 2 / expected) - freedom) / np.sqrt(
        2 * freedom
    )


def _neighbouring_keys():
    # Keys a user has: small seeds, their neighbours, and probes of one key.
    seeds = [jr.key(i) for i in range(20)]
    probes = [jr.fold_in(jr.key(0), i) for i in range(20)]
    return jnp.stack([*seeds, *probes])


@pytest.mark.x64
def test_every_byte_is_uniform():
    drawn = _words(_neighbouring_keys(), 2**15)
    for shift in (0, 5, 8, 16, 24):
        counts = np.bincount(((drawn >> shift) & 255).reshape(-1), minlength=256)
        assert abs(_chi_squared(counts, drawn.size / 256)) < 4.5
    # Each stream by itself.
    for stream in drawn:
        counts = np.bincount(stream >> 24, minlength=256)
        assert abs(_chi_squared(counts, stream.size / 256)) < 5


@pytest.mark.x64
@pytest.mark.parametrize("lag", [1, 2, 3, 32, 1000, 2**16])
def test_pairs_of_entries_are_independent(lag):
    drawn = _words(_neighbouring_keys()[:8], 2**17 + lag)
    first, second = drawn[:, :-lag] >> 26, drawn[:, lag:] >> 26
    counts = np.bincount((first * 64 + second).reshape(-1), minlength=4096)
    assert abs(_chi_squared(counts, first.size / 4096)) < 4.5
    first, second = drawn[:, :-lag] & 63, drawn[:, lag:] >> 13 & 63
    counts = np.bincount((first * 64 + second).reshape(-1), minlength=4096)
    assert abs(_chi_squared(counts, first.size / 4096)) < 4.5


@pytest.mark.x64
def test_streams_are_uncorrelated():
    # Bit by bit: every bit of a stream with every bit of every other.
    n = 2**14
    drawn = _words(_neighbouring_keys(), n)
    bits = (drawn[:, None, :] >> np.arange(32)[None, :, None]) & 1
    signs = 1.0 - 2.0 * bits.reshape(-1, n)
    gram = signs @ signs.T / np.sqrt(n)
    off = gram[~np.eye(len(gram), dtype=bool)]
    # 1.6 million standard normal numbers, each twice.
    assert np.max(np.abs(off)) < 6
    assert abs(np.mean(off**2) - 1) < 6 / np.sqrt(off.size)
    assert np.max(np.abs(signs.sum(1))) < 6 * np.sqrt(n)


def test_probes_and_their_streams_are_uncorrelated():
    # Of one key: probes, real and imaginary parts, high and low words.
    n = 2**14
    streams = probe_streams(jr.key_data(jr.key(0)), 0, 300, 4)
    drawn = np.concatenate([np.asarray(words(x, n)) for x in streams])
    for shift in (31, 0):
        signs = 1.0 - 2.0 * ((drawn >> shift) & 1)
        off = (signs @ signs.T / np.sqrt(n))[np.triu_indices(len(signs), 1)]
        assert np.max(np.abs(off)) < 6
        assert abs(np.mean(off**2) - 1) < 5 * np.sqrt(2 / off.size)
        assert abs(np.mean(off)) < 5 / np.sqrt(off.size)


def test_key_words_are_those_of_their_key_and_probe():
    many_keys = jnp.stack([jnp.arange(4000), jnp.zeros(4000, int)], axis=1)
    many_keys = jnp.concatenate([many_keys, many_keys[:, ::-1]]).astype(jnp.uint32)
    drawn = jax.vmap(lambda data: probe_streams(data, 0, 2, 2)[1][1])(many_keys)
    drawn = np.unique(np.asarray(drawn), axis=0)
    assert len(drawn) == 2 * 4000 - 1  # key 0 is there twice
    for shift in (0, 8, 16, 24):
        counts = np.bincount(((drawn >> shift) & 255).reshape(-1), minlength=256)
        assert abs(_chi_squared(counts, drawn.size / 256)) < 4.5
    # A range of probes is a part of all of them.
    whole = probe_streams(many_keys[3], 0, 9, 2)
    part = probe_streams(many_keys[3], 4, 3, 2)
    np.testing.assert_array_equal(part[1], whole[1][4:7])


@pytest.mark.x64
def test_words_repeat_as_often_as_by_chance():
    # A bijection of the index would never repeat a word: 2^18 draws of 2^32 repeat
    # 8 times on average.
    drawn = _words(_neighbouring_keys(), 2**18)
    repeats = sum(stream.size - np.unique(stream).size for stream in drawn)
    expected = len(drawn) * 2.0**36 / 2**33
    assert abs(repeats - expected) < 4 * np.sqrt(expected)


@pytest.mark.x64
@pytest.mark.parametrize("seam", [2**16, 2**31, 2**32, 3 * 2**31])
def test_no_seam(seam):
    # Around an index where a word runs over, and against the beginning.
    keys, half = _neighbouring_keys(), 2**12
    key_words = _streams(keys)
    before, after = (
        1.0 - 2.0 * (np.asarray(_indexed(key_words, start, half)) >> 31)
        for start in (seam - half, seam)
    )
    beginning = 1.0 - 2.0 * (np.asarray(words(key_words, half)) >> 31)
    for x, y in ((before, after), (after, beginning), (before, beginning)):
        assert np.max(np.abs(np.sum(x * y, axis=1))) < 5 * np.sqrt(half)
        assert abs(np.sum(x * y)) < 5 * np.sqrt(x.size)
        assert abs(np.sum(x)) < 5 * np.sqrt(x.size)


def _indexed(key_words, start, size):
    # `words` would hold all entries from the segment's beginning.
    from_start = np.arange(start, start + size, dtype=np.uint64)
    low = jnp.asarray((from_start & 0xFFFFFFFF).astype(np.uint32))
    high = (from_start >> 32).astype(np.uint32)
    return words_at(key_words, low, jnp.asarray(high) if high.any() else None)


def test_a_part_of_a_stream_is_that_of_the_whole():
    keys = _neighbouring_keys()[:3]
    whole = _words(keys, 3000)
    np.testing.assert_array_equal(_words(keys, 1000, 2000), whole[:, 2000:])


def test_signs_are_the_bits_of_words():
    # Drawn in words or entry by entry, the same; and every bit of a word is used.
    keys = _neighbouring_keys()
    key_words = _streams(keys)
    drawn = np.asarray(signs(key_words, 1000, jnp.float32))
    entries = jnp.arange(1000, dtype=jnp.uint32)
    packed = np.asarray(words_at(key_words, entries >> 5, None))
    bits = (packed >> np.asarray(entries & 31)) & 1
    np.testing.assert_array_equal(drawn, 1.0 - 2.0 * bits)
    long = np.asarray(signs(key_words, 2**15, jnp.float32)).reshape(-1, 32)
    correlations = long.T @ long / len(long)
    assert np.max(np.abs(correlations - np.eye(32))) < 5.5 / np.sqrt(len(long))


def test_normal_numbers():
    drawn = normals(jnp.asarray(_words(_neighbouring_keys(), 2**18)))
    x = np.asarray(drawn, np.float64).reshape(-1)
    root = np.sqrt(x.size)
    # Moments of a standard normal variable, in their standard errors.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(x**power) - mean) * root / np.sqrt(variance) < 4.5
    # The distribution function, also far out.
    for level in (-4, -2.5, -1, -0.1, 0, 0.5, 2, 3.5):
        p = float(jax.scipy.stats.norm.cdf(level))
        assert abs(np.mean(x < level) - p) * root / np.sqrt(p * (1 - p)) < 4.5
    # Each is the quantile of its word, which is exact in float32.
    word = np.concatenate([np.arange(0, 2**32, 2**20), np.arange(2**31, 2**31 + 2**14)])
    uniform = (word.astype(np.uint32).view(np.int32) // 2**8 + 0.5) / 2**23
    lower = [-NormalDist().inv_cdf((1 - abs(x)) / 2) for x in uniform]
    drawn = np.asarray(normals(jnp.asarray(word.astype(np.uint32))), np.float64)
    assert np.max(np.abs(drawn / (np.sign(uniform) * lower) - 1)) < 5e-7
    # Largest and smallest word.
    ends = normals(jnp.asarray([2**31 - 1, 2**31, 0, 2**32 - 1], jnp.uint32))
    assert np.all(np.isfinite(ends))
    assert_close(ends[0], -ends[1], rtol=1e-6)
    assert 0 < ends[2] < 1e-6
    assert_close(ends[2], -ends[3], rtol=1e-6)


def test_short_probes_are_drawn_once(key):
    # The compiler would else hash them again for each of a network's data.
    x = jr.normal(key, (50, 6))

    def loss(p):
        first, second = p[:96].reshape(16, 6), p[96:].reshape(16, 1)
        return jnp.mean(jax.vmap(lambda x: jnp.tanh(first @ x) @ second)(x) ** 2)

    def product(v):
        return jax.jvp(jax.grad(loss), (jnp.ones(112, x.dtype),), (v,))[1]

    def hashed(read):
        def program(key):
            return read(tx.RademacherSampler().sample(key, 112, 32, x.dtype))

        text = jax.jit(program).lower(key).compile().as_text()
        return text.count("shift-right-logical(")

    assert hashed(jax.vmap(product, 1)) == hashed(lambda block: block) > 0
