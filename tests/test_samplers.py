"""Probe distributions: moments and lengths; probe j depends on the key and j only."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
    draw,
    many,
    z_score,
)
from problems import complex_dtype, float_dtype, matrix

import traceax as tx

INDEXED = [tx.RademacherSampler(), tx.NormalSampler(), tx.SphereSampler()]
SAMPLERS = [*INDEXED, tx.OrthogonalSampler()]


def named(samplers):
    ids = [type(sampler).__name__ for sampler in samplers]
    return pytest.mark.parametrize("sampler", samplers, ids=ids)


@pytest.mark.parametrize(("n", "complex"), [(1, True), (40, False), (40, True)])
@named(SAMPLERS)
def test_isotropic(sampler, complex, n):
    dtype = complex_dtype() if complex else float_dtype()
    if sampler.independent:
        probes = np.asarray(draw(sampler, jr.key(1), n, 4000, dtype))
    else:
        # We take the last probe, which depends on all others.
        k = min(n, 3)
        last = jax.jit(jax.vmap(lambda key: sampler.sample(key, n, k, dtype)[:, -1]))
        probes = np.asarray(last(jr.split(jr.key(1), 4000))).T
    assert probes.dtype == dtype
    assert probes.shape == (n, 4000)
    outer = probes.T[:, :, None] * probes.T[:, None, :].conj()
    assert z_score(outer, np.eye(n), 1e-6) < 5
    assert z_score(probes.T, np.zeros(n), 1e-6) < 5
    if complex:
        # Complex probes are circular: they don't correlate with their conjugates.
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


@pytest.mark.parametrize("complex", [False, True])
def test_entries_of_signs_are_independent(complex):
    # We use all bits in a random word, so we compare entries within a probe and across
    # neighbours.
    dtype = complex_dtype() if complex else float_dtype()
    drawn = np.asarray(draw(tx.RademacherSampler(), jr.key(0), 2**12, 40, dtype)).T
    parts = np.concatenate([drawn.real, drawn.imag]) if complex else drawn
    signs = parts / np.abs(parts)
    for rows in (signs, signs.reshape(-1, 32).T):
        gram = rows @ rows.T / np.sqrt(rows.shape[1])
        off_diagonal = gram[np.triu_indices(len(rows), 1)]
        assert np.max(np.abs(off_diagonal)) < 5
        assert abs(np.mean(off_diagonal**2) - 1) < 5 * np.sqrt(2 / off_diagonal.size)


@named(SAMPLERS)
def test_more_probes_extend_the_sequence(sampler):
    few = sampler.sample(jr.key(2), 300, 5, float_dtype())
    more = draw(sampler, jr.key(2), 300, 12, float_dtype())
    assert_close(more[:, :5], few, rtol=1e-4, atol=1e-5)
    other = draw(sampler, jr.key(3), 300, 12, float_dtype())
    assert np.max(np.abs(np.corrcoef(np.hstack([more, other]).T) - np.eye(24))) < 0.4


@named(INDEXED)
def test_any_range_can_be_drawn(sampler):
    n, dtype = 300, float_dtype()
    all_probes = draw(sampler, jr.key(2), n, 12, dtype)
    part = jax.jit(lambda i: sampler.probes(jr.key(2), i, n, 3, dtype))
    for start in (0, 4, 9):
        drawn = all_probes[:, start : start + 3]
        assert_close(part(start), drawn, rtol=1e-5, atol=1e-6)
    # Under vmap, every key draws the same probes as alone.
    over_keys = jax.vmap(lambda key: sampler.sample(key, n, 12, dtype))
    drawn = over_keys(jnp.stack([jr.key(2), jr.key(3)]))[0]
    assert_close(drawn, all_probes, rtol=1e-5, atol=1e-6)


@pytest.mark.x64
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


@pytest.mark.x64
def test_orthogonal_probes_are_at_most_n():
    with pytest.raises(ValueError, match="k must be at most n = 3"):
        tx.OrthogonalSampler().sample(jr.key(0), 3, 4, float_dtype())


@pytest.mark.x64
def test_samplers_are_equal_and_hashable():
    for sampler in SAMPLERS:
        twin = type(sampler)()
        assert twin == sampler
        assert hash(twin) == hash(sampler)
        assert jax.tree.leaves(sampler) == []
    for kind in (tx.XTraceEstimator, tx.HutchinsonEstimator):
        assert hash(kind()) == hash(kind())
        assert jax.tree.leaves(kind()) == []
