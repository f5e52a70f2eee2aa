"""Exact traces from colours, and log-determinants of lattices."""

import equinox as eqx
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
    is_rounding,
)
from problems import float_dtype, is_x64

import traceax as tx

#
# Exact traces
#


def test_the_trace_of_a_sparse_matrix_is_exact():
    n = 100_000
    matrix = banded(n, (0, 1, -1, 30, -30, 900, -900))
    colours = tx.colour(matrix)
    assert colours.number <= 7
    operator = tx.as_operator(as_bcoo(matrix))
    estimator = tx.HutchinsonEstimator(tx.ColouredSampler(colours))
    estimate = tx.trace(jr.key(0), operator, colours.number, estimator)
    truth = matrix.diagonal().sum()
    sizes = np.abs(matrix.diagonal()).sum()
    assert abs(estimate.value - truth) < 4 * np.finfo(float_dtype()).eps * sizes
    assert estimate.stats["num_matvecs"] == colours.number
    assert 0 < estimate.standard_error < 1e-5 * sizes
    low, high = estimate.confidence_interval()
    assert low <= truth <= high
    diagonal = tx.diagonal(jr.key(0), operator, colours.number, estimator)
    assert_close(diagonal.value, matrix.diagonal(), rtol=1e-5, atol=1e-6)
    assert jnp.all(jnp.isfinite(diagonal.standard_error))
    # Bare labels carry no pattern, so we don't trust them to be exact.
    doubtful = tx.HutchinsonEstimator(tx.ColouredSampler(colours.labels))
    estimate = tx.trace(jr.key(0), operator, colours.number, doubtful)
    assert jnp.isnan(estimate.standard_error)


def hollow_field(scale, x, context):
    """Each point's velocity, from its position and a context without this position."""
    mixing = jnp.asarray([[0.5, -1.0, 0.2], [0.3, 0.7, 1.0], [-0.4, 0.1, 0.9]], x.dtype)
    return jnp.sin(x @ mixing + scale * context) * (1 + x**2)


def hollow_context(scale, x):
    total = jnp.sum(jnp.tanh(scale * x), axis=0)
    return jnp.cos(total[None, :] - jnp.tanh(scale * x))


def test_divergences_of_block_hollow_fields_are_exact():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(55, 3)), float_dtype())
    colours = tx.ColouredSampler(np.arange(165) % 3, exact=True)

    def coloured(scale, x):
        context = hollow_context(scale, x)
        field = lambda z: hollow_field(scale, z, context)  # noqa: E731
        return tx.divergence(jr.key(0), field, x, colours=colours)[1]

    def exact(scale, x):
        def whole(flat):
            x = flat.reshape(55, 3)
            return hollow_field(scale, x, hollow_context(scale, x)).reshape(-1)

        return jnp.trace(jax.jacfwd(whole)(x.reshape(-1)))

    derivatives = jax.jit(jax.value_and_grad(lambda *a: coloured(*a).value, (0, 1)))
    value, slopes = derivatives(0.7, x)
    truth, true_slopes = jax.jit(jax.value_and_grad(exact, (0, 1)))(0.7, x)
    tolerance = 1e-11 if is_x64() else 1e-4
    assert_close(value, truth, rtol=tolerance)
    jax.tree.map(
        lambda a, b: assert_close(a, b, tolerance, tolerance), slopes, true_slopes
    )
    estimate = coloured(0.7, x)
    assert estimate.stats["num_matvecs"] == 3
    assert is_rounding(estimate)


def test_a_divergence_takes_colours_of_all_kinds():
    x = jnp.arange(6, dtype=float_dtype()) / 6

    def field(x):
        return x**2 * jnp.roll(x, 1)

    truth = jnp.trace(jax.jacfwd(field)(x))
    nodes = np.arange(6)
    pattern = np.stack([nodes, np.roll(nodes, 1)], axis=1)
    for colours in (tx.colour(pattern), tx.ColouredSampler(nodes % 2, exact=True)):
        _, estimate = tx.divergence(jr.key(0), field, x, colours=colours)
        assert_close(estimate.value, truth, rtol=1e-5)
        assert is_rounding(estimate)
    _, estimate = tx.divergence(jr.key(0), field, x, colours=nodes % 2)
    assert jnp.isnan(estimate.standard_error)
    _, estimate = tx.divergence(jr.key(0), field, x, 4, colours=nodes % 2)
    assert_close(estimate.value, truth, rtol=1e-5)
    with pytest.raises(ValueError, match="estimator must be left out with colours"):
        tx.divergence(
            jr.key(0), field, x, 2, tx.HutchinsonEstimator(), colours=nodes % 2
        )


@pytest.mark.x64
def test_exact_colours_are_refused_for_inverses_and_functions():
    diagonal = tx.ColouredSampler(tx.colour(np.zeros((0, 2), int), size=30))
    estimator = tx.HutchinsonEstimator(diagonal)
    matrix = jnp.asarray(banded(30, (0, 1)).todense())
    operator = lx.MatrixLinearOperator(matrix)
    inverse = tx.InverseLinearOperator(operator, lx.LU())
    symmetric = lx.MatrixLinearOperator(matrix @ matrix.T, lx.positive_semidefinite_tag)
    root = tx.MatrixFunctionLinearOperator(symmetric, jnp.sqrt, 8)
    tagged = lx.TaggedLinearOperator(inverse, lx.symmetric_tag)
    for dense in (inverse, -inverse, 2.0 * inverse + operator, tagged, root):
        with pytest.raises(ValueError, match=r"got an inverse.*pass .*exact=False"):
            tx.trace(jr.key(0), dense, 1, estimator)


#
# Lattices
#


def lattice(shape, mass, periodic=True):
    """A lattice Laplacian plus a mass, and its log-determinant."""

    def product(x):
        out = (mass + 2 * len(shape)) * x
        for axis in range(len(shape)):
            # Beyond an open end, values are 0.
            pad = [(0, 0)] * axis + [(1, 1)] + [(0, 0)] * (len(shape) - axis - 1)
            wide = jnp.pad(x, pad, "wrap" if periodic else "constant")
            for start in (0, 2):
                out = out - jax.lax.slice_in_dim(
                    wide, start, start + shape[axis], axis=axis
                )
        return out

    structure = jax.ShapeDtypeStruct(shape, float_dtype())
    eigenvalues = np.asarray(mass, float)
    for size in shape:
        angles = 2 * np.arange(size) / size if periodic else np.arange(1, size + 1)
        angles = angles if periodic else angles / (size + 1)
        eigenvalues = np.add.outer(eigenvalues, 2 - 2 * np.cos(np.pi * angles))
    operator = lx.FunctionLinearOperator(
        product, structure, lx.positive_semidefinite_tag
    )
    return operator, np.log(eigenvalues).sum()


@pytest.mark.x64
def test_intervals_of_log_determinants_contain_the_truth():
    operator, truth = lattice((16, 16), 1.0, periodic=False)
    colours = tx.lattice_colours((16, 16), 1, periodic=False)
    estimator = tx.LanczosQuadratureEstimator(8, tx.ColouredSampler(colours))
    share = coverage(
        lambda key: tx.logdet(key, operator, 80, estimator, throw=False), truth, 1000
    )
    assert 0.93 < share <= 0.99, share


@pytest.mark.x64
@pytest.mark.parametrize(
    ("shape", "mass", "distance", "steps", "most", "periodic"),
    [
        ((128, 128), 1.0, 3, 12, 0.40, True),
        ((16, 16, 16), 0.5, 3, 14, 0.17, True),
        ((100, 70), 1.0, 3, 12, 0.30, False),
    ],
)
def test_log_determinants_of_lattices(shape, mass, distance, steps, most, periodic):
    operator, truth = lattice(shape, mass, periodic)
    colours = tx.lattice_colours(shape, distance, periodic)
    estimator = tx.LanczosQuadratureEstimator(
        colours.number, tx.ColouredSampler(colours)
    )

    @eqx.filter_jit
    def value(key):
        k = colours.number * steps
        return tx.logdet(key, operator, k, estimator, throw=False).value

    errors = [value(key) - truth for key in jr.split(jr.key(0), 4)]
    # In 95 % of cases, the root mean square of four normal errors is below 1.54
    # standard deviations.
    assert np.sqrt(np.mean(np.square(errors))) < 1.54 * most
