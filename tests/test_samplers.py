"""Moments of the probe distributions."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import complex_dtype, float_dtype, z_score

import traceax as tx

SAMPLERS = [tx.RademacherSampler(), tx.NormalSampler(), tx.SphereSampler()]
ids = [type(s).__name__ for s in SAMPLERS]


@pytest.mark.parametrize("complex", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=ids)
@pytest.mark.parametrize("n", [1, 5, 40])
def test_isotropic(sampler, complex, n):
    dtype = complex_dtype() if complex else float_dtype()
    probes = np.asarray(sampler.sample(jr.key(1), n, 4000, dtype))
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
    signs = tx.RademacherSampler().sample(jr.key(0), 70, 9, dtype)
    np.testing.assert_allclose(np.abs(signs), 1.0, rtol=1e-6)
    sphere = tx.SphereSampler().sample(jr.key(0), 70, 9, dtype)
    np.testing.assert_allclose(np.sum(np.abs(sphere) ** 2, axis=0), 70, rtol=1e-5)


def test_signs_of_a_word_are_independent():
    # 64 entries of a probe come from two random words.
    signs = np.asarray(tx.RademacherSampler().sample(jr.key(3), 64, 20000, jnp.float32))
    correlations = signs @ signs.T / 20000
    assert np.max(np.abs(correlations - np.eye(64))) < 6 / np.sqrt(20000)


def test_samplers_are_equal_and_hashable():
    for sampler in SAMPLERS:
        twin = type(sampler)()
        assert twin == sampler
        assert hash(twin) == hash(sampler)
        assert jax.tree.leaves(sampler) == []
    for kind in (tx.XTraceEstimator, tx.HutchinsonEstimator):
        assert hash(kind()) == hash(kind())
        assert jax.tree.leaves(kind()) == []
