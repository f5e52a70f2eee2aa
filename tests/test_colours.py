"""Colourings are valid, and coloured probes match their definition."""

import itertools

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    as_bcoo,
    assert_close,
    banded,
    coverage,
    many,
    z_score,
)
from jax.experimental import sparse
from problems import complex_dtype, float_dtype

import traceax as tx


def grid_pairs(*shape):
    """Edges of a grid with open ends."""
    nodes = np.arange(np.prod(shape)).reshape(shape)
    along = [
        (np.delete(nodes, -1, axis), np.delete(nodes, 0, axis))
        for axis in range(len(shape))
    ]
    return np.concatenate([np.stack([x.ravel(), y.ravel()], 1) for x, y in along])


#
# Colourings
#


@pytest.mark.x64
@pytest.mark.parametrize("distance", [1, 2, 3, 4])
@pytest.mark.parametrize("offsets", [(), (1, 10, 11), (1, 3, 7)])
def test_nodes_within_a_distance_differ(offsets, distance):
    rng = np.random.default_rng(distance)
    n = 150
    dense = rng.random((n, n)) < 0.01  # not symmetric
    if offsets:
        dense = sum(np.eye(n, k=k) for k in offsets) > 0
    colours = tx.colour(np.argwhere(dense), distance, size=n)
    step = dense | dense.T | np.eye(n, dtype=bool)
    near = np.linalg.matrix_power(step.astype(int), distance) > 0
    near &= ~np.eye(n, dtype=bool)
    same = colours.labels[:, None] == colours.labels[None, :]
    assert not (same & near).any()
    assert set(colours.labels) == set(range(colours.number))
    assert colours.number <= near.sum(axis=1).max() + 1
    assert colours.exact == (distance == 1)


@pytest.mark.x64
def test_every_kind_of_pattern_gives_the_same_colours():
    matrix = banded(40, (0, 1, -3))
    bcoo = as_bcoo(matrix)
    pad = jnp.full((2, 2), 40, bcoo.indices.dtype)  # as BCOO arrays are padded
    indices = jnp.concatenate([bcoo.indices, pad])
    padded = sparse.BCOO((jnp.ones(len(indices)), indices), shape=bcoo.shape)
    pairs = np.stack([matrix.row, matrix.col], axis=1)
    expected = tx.colour(pairs)
    bcsr = sparse.BCSR.from_bcoo(bcoo)
    for pattern in (bcoo, padded, bcsr, matrix, matrix.tocsr(), jnp.asarray(pairs)):
        colours = tx.colour(pattern)
        np.testing.assert_array_equal(colours.labels, expected.labels)
    assert tx.colour(np.zeros((0, 2), int), size=3).number == 1


@pytest.mark.x64
def test_colours_are_few():
    assert tx.colour(grid_pairs(20, 20)).number == 2
    # We list the numbers that perfect codes reach; first fit takes less than twice
    # these.
    for shape, distance, best in [
        ((30, 30), 2, 5),
        ((30, 31), 3, 8),
        ((20, 20, 20), 2, 7),
        ((12, 13, 14), 2, 7),
        ((20, 20, 20), 3, 12),
        ((8, 8, 8, 8), 2, 9),
    ]:
        number = tx.colour(grid_pairs(*shape), distance).number
        assert best <= number < 2 * best
    for offsets in [(1, 30, 900), (1, 2, 30, 31), (5, 17, 401)]:
        assert tx.colour(banded(2000, offsets)).number <= 2 * len(offsets) + 1


@pytest.mark.x64
@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("shape", [7, (10, 7), (9, 10, 11), (3, 20), (2, 2), (24, 16)])
def test_lattice_colours_are_apart(shape, periodic):
    sizes = shape if isinstance(shape, tuple) else (shape,)
    for distance in (1, 2, 3):
        colours = tx.lattice_colours(shape, distance, periodic)
        assert set(colours.labels) == set(range(colours.number))
        assert not colours.exact
        if periodic and all(size % (distance + 1) == 0 for size in sizes):
            assert colours.number == (distance + 1) ** len(sizes)
        points = list(itertools.product(*map(range, sizes)))
        points = np.asarray(points)
        apart = np.abs(points[:, None] - points[None])
        if periodic:
            apart = np.minimum(apart, np.asarray(sizes) - apart)
        near = (apart.max(axis=-1) <= distance) & ~np.eye(len(points), dtype=bool)
        same = colours.labels[:, None] == colours.labels[None, :]
        assert not (same & near).any()


#
# Samples
#


def dense(n, complex=False, decay=1.0):
    """A nonsymmetric matrix whose entries decay away from the diagonal."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(n, n))
    if complex:
        a = a + 1j * rng.normal(size=(n, n))
    distance = np.abs(np.arange(n)[:, None] - np.arange(n)[None, :])
    a = a * np.exp(-decay * distance) + np.diag(np.linspace(3, 9, n))
    return lx.MatrixLinearOperator(
        jnp.asarray(a, complex_dtype() if complex else float_dtype())
    )


SAMPLERS = {
    "signs": tx.ColouredSampler(np.arange(30) % 3),
    "normals": tx.ColouredSampler(np.arange(30) % 3, sampler=tx.NormalSampler()),
}


@pytest.mark.parametrize(("name", "complex"), [("signs", True), ("normals", False)])
def test_unbiased_for_any_operator(name, complex):
    operator = dense(30, complex, decay=0.0)
    values, errors = many(tx.HutchinsonEstimator(SAMPLERS[name]), operator, 18, 4000)
    assert z_score(values, np.trace(operator.matrix)) < 5
    ratio = np.sqrt(np.mean(errors**2)) / values.std()
    assert 0.9 < ratio < 1.1


@pytest.mark.parametrize("name", SAMPLERS)
def test_probes_form_rounds(name):
    sampler, n, p = SAMPLERS[name], 30, 3
    probes = np.asarray(sampler.sample(jr.key(0), n, 7, float_dtype()))
    assert probes.shape == (n, 7)
    vectors = np.asarray(sampler.sampler.sample(jr.key(0), n, 3, float_dtype()))
    for j in range(7):
        coloured = np.arange(n) % p == j % p
        expected = np.where(coloured, np.sqrt(p) * vectors[:, j // p], 0)
        np.testing.assert_allclose(probes[:, j], expected, rtol=1e-6)
    # The estimate is the probes' mean.
    operator = dense(n)
    quadratic = np.sum(probes[:, :6] * (operator.matrix @ probes[:, :6]), axis=0)
    estimate = tx.trace(jr.key(0), operator, 6, tx.HutchinsonEstimator(sampler))
    assert_close(estimate.value, quadratic.mean(), rtol=1e-5)


@pytest.mark.x64
@pytest.mark.parametrize("rounds", [2, 6])
def test_intervals_contain_the_truth(rounds):
    # The diagonal varies far more than the off-diagonal entries within a colour.
    operator = dense(120, decay=0.5)
    estimator = tx.HutchinsonEstimator(tx.ColouredSampler(np.arange(120) % 5))
    share = coverage(
        lambda key: tx.trace(key, operator, 5 * rounds, estimator, throw=False),
        np.trace(operator.matrix),
    )
    assert 0.93 < share < 0.99, share


def test_error_bars_need_two_rounds():
    operator = dense(30)
    estimator = tx.HutchinsonEstimator(SAMPLERS["signs"])
    one = tx.trace(jr.key(0), operator, 3, estimator)
    assert jnp.isnan(one.standard_error)
    two = tx.trace(jr.key(0), operator, 6, estimator)
    assert two.standard_error > 0
    assert two.stats["degrees_of_freedom"] == 1
    assert two.stats["samples"].shape == (2,)
    diagonal = tx.diagonal(jr.key(0), operator, 3, estimator)
    assert jnp.isnan(diagonal.standard_error).all()
    # Two rounds may agree by chance on the only entry within a colour. The error bar
    # must not be 0 then.
    pair = jnp.diag(jnp.arange(1.0, 13.0, dtype=float_dtype()))
    pair = lx.MatrixLinearOperator(pair.at[0, 4].set(1.0))
    sampler = tx.ColouredSampler(np.arange(12) % 4)
    _, errors = many(tx.HutchinsonEstimator(sampler), pair, 8, 20)
    assert errors.min() > 0.1


def test_resuming_and_chunks_change_nothing():
    operator = dense(30)
    whole = tx.HutchinsonEstimator(SAMPLERS["signs"])
    few = tx.HutchinsonEstimator(SAMPLERS["signs"], chunk_size=4)
    at_once = whole.estimate(whole.init(jr.key(0), operator), 18)
    for estimator in (whole, few):
        first = estimator.estimate(estimator.init(jr.key(0), operator), 6)
        more = estimator.estimate(first.state, 12)
        assert more.stats["num_matvecs"] == 18
        assert_close(more.value, at_once.value)

    def slope(estimator):
        def value(matrix):
            operator = lx.MatrixLinearOperator(matrix)
            return tx.trace(jr.key(0), operator, 18, estimator).value

        return jax.grad(value)(operator.matrix)

    assert_close(slope(few), slope(whole), atol=1e-6)
    probes = whole.sampler.sample(jr.key(0), 30, 18, float_dtype())
    same = np.arange(30)[:, None] % 3 == np.arange(30)[None, :] % 3
    assert_close(slope(whole), np.where(same, probes @ probes.T / 18, 0), atol=1e-5)


def test_tolerances_take_rounds():
    operator = dense(200, decay=2.0)
    estimator = tx.HutchinsonEstimator(tx.ColouredSampler(np.arange(200) % 4))
    estimate = tx.trace(jr.key(0), operator, 150, estimator, rtol=1e-2)
    used = int(estimate.stats["num_matvecs"])
    assert used % 4 == 0
    assert 8 <= used < 150
    low, high = estimate.confidence_interval()
    assert (high - low) / 2 <= 1e-2 * abs(estimate.value)


def test_colours_follow_the_flattened_order():
    a = dense(9).matrix
    structure = {
        "u": jax.ShapeDtypeStruct((3,), a.dtype),
        "w": jax.ShapeDtypeStruct((2, 3), a.dtype),
    }

    def product(v):
        flat = a @ jnp.concatenate([v["u"], v["w"].reshape(-1)])
        return {"u": flat[:3], "w": flat[3:].reshape(2, 3)}

    tree = lx.FunctionLinearOperator(product, structure)
    estimator = tx.HutchinsonEstimator(tx.ColouredSampler(np.arange(9) % 2))
    values = [
        tx.trace(jr.key(0), operator, 6, estimator).value
        for operator in (tree, lx.MatrixLinearOperator(a))
    ]
    assert_close(*values)


def test_differing_rounds_disprove_exactness():
    operator = dense(30, decay=0.5)
    estimators = [
        tx.HutchinsonEstimator(tx.ColouredSampler(np.arange(30) % 3, exact=exact))
        for exact in (True, False)
    ]
    for estimate in (tx.trace, tx.diagonal):
        claimed, doubtful = (estimate(jr.key(0), operator, 12, e) for e in estimators)
        assert_close(claimed.standard_error, doubtful.standard_error, rtol=1e-5)
    # We also notice with a single probe in memory.
    one = tx.HutchinsonEstimator(estimators[0].sampler, chunk_size=1)
    assert tx.trace(jr.key(0), operator, 12, one).standard_error > 1e-3


#
# Refusals
#


@pytest.mark.x64
@pytest.mark.wrong_types
def test_refusals_name_the_remedy():
    sampler, operator = SAMPLERS["signs"], dense(30)
    key, lanczos = jr.key(0), tx.LanczosQuadratureEstimator
    hutchinson = tx.HutchinsonEstimator(sampler)
    cases = [
        (lambda: tx.trace(key, operator, 10, hutchinson), "got 10; pass 9 or 12"),
        (lambda: tx.trace(key, operator, 2, hutchinson), "got 2; pass 3"),
        (lambda: tx.trace(key, operator, 2, hutchinson, rtol=0.1), "pass 3"),
        (lambda: tx.logdet(key, operator, 10, lanczos(3, sampler)), "pass 9 or 12"),
        (lambda: lanczos(4, sampler), "pass 3 for one round, or 6"),
        (lambda: tx.XTraceEstimator(sampler), "isotropic.*in rounds of 3"),
        (lambda: tx.XNysTraceEstimator(sampler), "isotropic"),
        (lambda: tx.HutchPlusPlusEstimator(sampler), "isotropic"),
        (lambda: tx.AdaptiveXTraceEstimator(sampler), "isotropic"),
        (lambda: tx.KrylovAwareEstimator(sampler=sampler), "isotropic"),
        (lambda: tx.ColouredSampler([0, 2]), "must occur, got colours from 0 to 2"),
        (lambda: tx.ColouredSampler([-1, 0]), "must occur"),
        (
            lambda: tx.ColouredSampler([0, 1], exact=True, sampler=tx.NormalSampler()),
            "sampler must draw signs",
        ),
        (
            lambda: tx.trace(key, dense(12), 3, hutchinson),
            "an entry for each of the operator's 12 unknowns, got .*size=n",
        ),
        (lambda: tx.colour(np.ones((1, 2), int), 0), "distance must be a positive"),
        (lambda: tx.colour(np.ones((1, 2), int), size=1), "between 0 and 0, got 1"),
        (lambda: tx.lattice_colours((4, 0), 1), "shape must be a positive"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in [
        (lambda: tx.colour("pattern"), "pattern must be a sparse matrix"),
        (lambda: tx.ColouredSampler([0.0, 1.0]), "an array of integers"),
        (lambda: tx.ColouredSampler([0, 1], exact=1), "exact must be"),  # pyright: ignore
        (lambda: jax.jit(tx.ColouredSampler)(jnp.arange(3)), "traced"),
        (lambda: tx.ColouredSampler([0, 1], sampler=sampler), "of single probes"),
    ]:
        with pytest.raises(TypeError, match=message):
            call()
