"""Diagonals, traces by leaf and Frobenius norms, compared with dense matrices."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import is_rounding

import traceax as tx

PSD = lx.positive_semidefinite_tag
N, K = 40, 14
NUM_KEYS = 3000
SIGNS = tx.RademacherSampler()

ESTIMATORS = {
    "default": None,
    "Hutchinson": tx.HutchinsonEstimator(chunk_size=4),
    "Hutch++": tx.HutchPlusPlusEstimator(),
    "XTrace": tx.XTraceEstimator(),
    "XTrace, signs": tx.XTraceEstimator(SIGNS, resphere=False),
    "XNysTrace": tx.XNysTraceEstimator(),
    "XNysTrace, signs": tx.XNysTraceEstimator(SIGNS, resphere=False),
}


def matrix(decay, *, complex=False, semidefinite=True, seed=0):
    rng = np.random.default_rng(seed)

    def orthogonal():
        x = rng.normal(size=(N, N)) + (1j * rng.normal(size=(N, N)) if complex else 0)
        return np.linalg.qr(x)[0]

    U = orthogonal()
    V = U if semidefinite else orthogonal()
    return jnp.asarray((U * decay(np.arange(1, N + 1.0))) @ V.conj().T)


def z_score(samples, truth):
    deviation = np.mean(samples, axis=0) - truth
    spread = (
        np.std(samples, axis=0) / np.sqrt(len(samples)) + 1e-7 * np.abs(truth).max()
    )
    return max(
        np.max(np.abs(deviation.real) / spread), np.max(np.abs(deviation.imag) / spread)
    )


def over_keys(function, number=NUM_KEYS):
    keys = jr.split(jr.key(7), number)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(function))(keys))


@pytest.mark.x64
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("default", "complex"),
        ("Hutchinson", "real"),
        ("Hutch++", "complex"),
        ("XTrace, signs", "complex"),
        ("XNysTrace", "real"),
    ],
)
def test_entries_and_derivatives_are_unbiased(name, kind):
    is_complex, estimator = kind == "complex", ESTIMATORS[name]
    A = matrix(lambda i: i**-1.0, complex=is_complex)
    B = matrix(lambda i: i**-0.5, complex=is_complex, seed=1)

    def run_once(key):
        def value_at(t):
            operator = lx.MatrixLinearOperator(A + t * B, PSD)
            estimate = tx.diagonal(key, operator, K, estimator, throw=False)
            return estimate.value, estimate

        value, slope, estimate = jax.jvp(value_at, (0.0,), (1.0,), has_aux=True)
        low, high = estimate.confidence_interval()
        is_contained = (low <= jnp.diag(A).real) & (jnp.diag(A).real <= high)
        return value, slope, estimate.standard_error, is_contained

    value, slope, error, is_contained = over_keys(run_once)
    assert value.dtype == jnp.zeros(()).dtype  # real for a semidefinite operator
    truth = np.diag(A).real
    assert z_score(value, truth) < 4.5
    assert z_score(slope, np.diag(B).real) < 4.5
    assert z_score(1.02 * value, truth) > 4.5 or name == "Hutchinson"
    deviation = np.sqrt(np.mean((value - truth) ** 2, axis=0))
    ratio = np.sqrt(np.mean(error**2, axis=0)) / deviation
    assert 0.8 < ratio.min() <= ratio.max() < 1.6
    assert 0.88 < np.mean(is_contained) < 0.995


def test_nonsymmetric():
    A = matrix(lambda i: i**-1.0, semidefinite=False)

    def run_once(key):
        operator = lx.MatrixLinearOperator(A)
        return tx.diagonal(key, operator, K, throw=False).value

    assert z_score(over_keys(run_once, 2000), np.diag(A)) < 4.5


def test_sums_to_the_trace():
    A = matrix(lambda i: i**-2.0)
    operator = lx.MatrixLinearOperator(A, PSD)
    for name in ("Hutch++", "XTrace, signs"):
        estimator = ESTIMATORS[name]
        entries = tx.diagonal(jr.key(1), operator, K, estimator)
        trace = tx.trace(jr.key(1), operator, K, estimator)
        assert int(entries.stats["num_matvecs"]) == int(trace.stats["num_matvecs"])
        # Without resphering, both sums are the same.
        np.testing.assert_allclose(entries.value.sum(), trace.value, rtol=2e-5)


def test_low_rank_diagonals_are_exact_up_to_rounding():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)))
    for name in ("XTrace", "XTrace, signs", "XNysTrace, signs"):
        estimator = ESTIMATORS[name]

        @jax.jit
        def run(A, estimator=estimator):
            operator = lx.MatrixLinearOperator(A, PSD)
            estimate = tx.diagonal(jr.key(0), operator, K, estimator)
            return estimate.value, estimate.standard_error

        for scale in (1.0, 1e-20, 1e15):
            A = x @ x.T * scale
            value, error = run(A)
            truth = jnp.diag(A) / scale
            np.testing.assert_allclose(value / scale, truth, atol=3e-4)
            assert (error < 1e-3 * scale).all()
        assert (run(jnp.zeros((N, N)))[0] == 0).all()


def test_exact_parts_and_structure():
    A = matrix(lambda i: i**-1.0)
    structure = {"a": jax.ShapeDtypeStruct((5, 4), A.dtype), "b": [A[:20, 0]]}
    structure["b"] = [jax.ShapeDtypeStruct((20,), A.dtype)]

    def mv(v):
        flat = A @ jnp.concatenate([v["a"].ravel(), v["b"][0]])
        return {"a": flat[:20].reshape(5, 4), "b": [flat[20:]]}

    operator = lx.FunctionLinearOperator(mv, structure, PSD)
    estimate = tx.diagonal(jr.key(0), operator, N)
    assert is_rounding(estimate)
    np.testing.assert_allclose(estimate.value["a"].ravel(), jnp.diag(A)[:20], rtol=1e-5)
    low, _ = tx.diagonal(jr.key(0), operator, K).confidence_interval()
    assert low["b"][0].shape == (20,)

    d = jnp.linspace(1.0, 2.0, N)
    estimate = tx.diagonal(jr.key(0), lx.DiagonalLinearOperator(d), 1)
    assert (estimate.value == d).all()
    assert (estimate.standard_error == 0).all()
    total = lx.MatrixLinearOperator(A, PSD) + lx.DiagonalLinearOperator(d)
    shifted = tx.diagonal(jr.key(0), total, K).value
    plain = tx.diagonal(jr.key(0), lx.MatrixLinearOperator(A, PSD), K).value
    np.testing.assert_allclose(shifted, plain + d, rtol=1e-5)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("norm", "estimator", "rtol"),
    [("root mean square", tx.HutchinsonEstimator(), 2.0), ("largest", None, 0.1)],
)
def test_tolerance(norm, estimator, rtol):
    A = matrix(lambda i: i**-2.0)
    operator = lx.MatrixLinearOperator(A, PSD)
    measure = (lambda x: np.sqrt(np.mean(x**2))) if norm.startswith("root") else np.max
    estimate = tx.diagonal(jr.key(0), operator, N - 1, estimator, rtol=rtol, norm=norm)
    assert 8 <= int(estimate.stats["num_matvecs"]) < N - 1
    value = np.abs(np.asarray(estimate.value))
    assert measure(value - np.diag(A)) < 1.5 * rtol * measure(value)
    low, high = estimate.confidence_interval()
    assert measure(np.asarray(high - low) / 2) <= rtol * measure(value)


@pytest.mark.x64
def test_second_derivative_and_reverse_mode():
    A = matrix(lambda i: i**-1.0)
    B = matrix(lambda i: i**-1.0, seed=2)

    def value(t, key):
        M = A + t * B + t**2 * A
        return tx.diagonal(key, lx.MatrixLinearOperator(M, PSD), K, throw=False).value

    def run_once(key):
        forward = jax.jacfwd(value)(0.1, key)
        reverse = jax.grad(lambda t: weights @ value(t, key))(0.1)
        return forward, reverse, jax.hessian(lambda t: value(t, key)[0])(0.1)

    weights = np.linspace(-1.0, 2.0, N)
    forward, reverse, second = over_keys(run_once, 1000)
    np.testing.assert_allclose(forward @ weights, reverse, rtol=1e-9, atol=1e-9)
    assert z_score(forward, np.diag(B + 0.2 * A)) < 4.5
    assert z_score(second[:, None], 2 * np.diag(A)[:1]) < 4.5


@pytest.mark.wrong_types
def test_wrong_arguments():
    operator = lx.MatrixLinearOperator(jnp.eye(N))
    with pytest.raises(TypeError, match="estimator must support diagonals"):
        tx.diagonal(jr.key(0), operator, K, tx.AdaptiveXTraceEstimator())
    with pytest.raises(
        ValueError, match="norm must be 'root mean square' or 'largest'"
    ):
        tx.diagonal(jr.key(0), operator, K, norm="l2")  # pyright: ignore
    with pytest.raises(ValueError, match=r"XTraceEstimator.estimate: k must be"):
        tx.diagonal(jr.key(0), operator, 2, tx.XTraceEstimator())


#
# Traces by leaf
#

SIZES = (16, 12, 7, 5)


def by_leaf(A):
    ends = np.cumsum(SIZES)[:-1]
    structure = [jax.ShapeDtypeStruct((n,), A.dtype) for n in SIZES]

    def mv(leaves):
        return jnp.split(A @ jnp.concatenate(leaves), ends)

    return lx.FunctionLinearOperator(mv, structure, PSD)


@pytest.mark.x64
@pytest.mark.parametrize("probes", ["whole", "blocks"])
def test_leaf_traces(probes):
    scales = np.repeat([1.0, 3.0, 0.3, 0.1], SIZES)
    A = matrix(lambda i: i**-0.5) * np.outer(scales, scales)
    B = matrix(lambda i: i**-0.5, seed=1)

    def truth(matrix):
        parts = np.split(np.diag(matrix), np.cumsum(SIZES)[:-1])
        return np.array([*(x.sum() for x in parts), np.trace(matrix)])

    def run_once(key):
        def values_at(t):
            leaves, total = tx.leaf_traces(
                key, by_leaf(A + t * B), 32, probes=probes, throw=False
            )
            return jnp.stack([*leaves.value, total.value]), (leaves, total)

        value, slope, (leaves, total) = jax.jvp(values_at, (0.0,), (1.0,), has_aux=True)
        reverse = jax.grad(lambda t: values_at(t)[0][-1])(0.0)
        error = jnp.stack([*leaves.standard_error, total.standard_error])
        return value, slope, reverse, error, total.stats["num_matvecs"]

    value, slope, reverse, error, used = over_keys(run_once, 2000)
    assert 30 <= used.min() <= used.max() <= 32
    assert z_score(value, truth(A)) < 4.5
    assert z_score(slope, truth(B)) < 4.5
    np.testing.assert_allclose(slope[:, -1], reverse, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(value[:, :-1].sum(1), value[:, -1], rtol=1e-4)
    deviation = np.sqrt(np.mean((value - truth(A)) ** 2, axis=0))
    # Blocks with 5 and 7 entries need fewer products than their share, so they are
    # exact.
    estimated = deviation > 1e-8
    assert list(estimated) == [True, True, *[probes == "whole"] * 2, True]
    ratio = np.sqrt(np.mean(error[:, estimated] ** 2, axis=0)) / deviation[estimated]
    assert 0.8 < ratio.min() <= ratio.max() < 1.6


@pytest.mark.x64
@pytest.mark.parametrize("probes", ["whole", "blocks"])
def test_groups_of_leaves(probes):
    A = matrix(lambda i: i**-0.5)
    parts = np.split(np.diag(A), np.cumsum(SIZES)[:-1])
    truth = {"a": parts[0].sum() + parts[3].sum(), "b": parts[1].sum() + parts[2].sum()}
    groups = ["a", "b", "b", "a"]

    def run_once(key):
        sums, total = tx.leaf_traces(
            key, by_leaf(A), 24, probes=probes, groups=groups, throw=False
        )
        low, high = sums.confidence_interval()
        inside = [(low[x] <= truth[x]) & (truth[x] <= high[x]) for x in "ab"]
        added = sums.value["a"] + sums.value["b"] - total.value
        value, error = (
            jnp.stack([*x.values()]) for x in (sums.value, sums.standard_error)
        )
        return value, error, jnp.stack(inside), added

    value, error, inside, added = over_keys(run_once, 2000)
    assert z_score(value, np.array([*truth.values()])) < 4.5
    assert np.all(inside.mean(axis=0) > 0.93)
    deviation = np.sqrt(np.mean((value - np.array([*truth.values()])) ** 2, axis=0))
    ratio = np.sqrt(np.mean(error**2, axis=0)) / deviation
    assert 0.8 < ratio.min() <= ratio.max() < 1.4
    np.testing.assert_allclose(added, 0, atol=1e-10)


def test_groups_may_be_a_prefix():
    structure = {
        "a": [jax.ShapeDtypeStruct((3,), jnp.float32)] * 2,
        "b": jax.ShapeDtypeStruct((4,), jnp.float32),
    }
    operator = lx.IdentityLinearOperator(structure)
    sums, _ = tx.leaf_traces(
        jr.key(0), operator, 10, groups={"a": "first", "b": "last"}
    )
    assert sums.value == {"first": 6, "last": 4}
    with pytest.raises(ValueError, match="groups must be a prefix"):
        tx.leaf_traces(jr.key(0), operator, 10, groups={"a": 1})
    for labels in (("a", 1), (True, 1), (0.5, 1), (np.ones(2), 1)):
        groups = dict(zip("ab", labels, strict=True))
        with pytest.raises(TypeError, match="groups must have labels of one kind"):
            tx.leaf_traces(jr.key(0), operator, 10, groups=groups)


@pytest.mark.x64
def test_small_blocks_leave_products_to_the_others():
    # Two products answer the block with 2 entries exactly, so the others get 14 each.
    sizes = (20, 2, 18)
    structure = [jax.ShapeDtypeStruct((size,), jnp.float64) for size in sizes]
    rng = np.random.default_rng(0)
    A = jnp.asarray(rng.normal(size=(N, N)))

    def mv(leaves):
        return jnp.split(A @ jnp.concatenate(leaves), [20, 22])

    operator = lx.FunctionLinearOperator(mv, structure)
    blocks = (
        np.asarray(A[:20, :20]),
        np.asarray(A[20:22, 20:22]),
        np.asarray(A[22:, 22:]),
    )

    def run_once(key):
        leaves, total = tx.leaf_traces(key, operator, 30, probes="blocks", throw=False)
        return jnp.stack([*leaves.value, total.value]), total.stats["num_matvecs"]

    value, used = over_keys(run_once, 2000)
    assert np.all(used == 30)
    deviation = value - np.array([*(np.trace(x) for x in blocks), np.trace(A)])
    symmetric = [(x + x.T) / 2 * (1 - np.eye(len(x))) for x in blocks]
    variances = [2 * np.sum(x**2) / 14 for x in symmetric]
    variances[1] = 0
    expected = [*variances, sum(variances)]
    np.testing.assert_allclose(
        np.mean(deviation**2, axis=0), expected, rtol=0.15, atol=1e-20
    )


@pytest.mark.x64
def test_blocks_in_dictionaries():
    structure = {name: jax.ShapeDtypeStruct((9,), jnp.float32) for name in "ab"}
    operator = lx.FunctionLinearOperator(
        lambda x: {"a": 2 * x["a"] + x["b"], "b": 3 * x["b"]}, structure
    )
    leaves, total = tx.leaf_traces(jr.key(0), operator, 12, probes="blocks")
    assert leaves.value == {"a": 18, "b": 27}
    assert total.value == 45


def test_small_leaves_are_exact_up_to_rounding():
    structure = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (2, 60)]
    x = np.random.default_rng(0).normal(size=(62, 62))
    A = jnp.asarray(x @ x.T, jnp.float32)

    def mv(leaves):
        return jnp.split(A @ jnp.concatenate(leaves), [2])

    operator = lx.FunctionLinearOperator(mv, structure)
    leaves, _ = tx.leaf_traces(jr.key(0), operator, 40, probes="blocks", throw=False)
    value, error = float(leaves.value[0]), float(leaves.standard_error[0])
    rounding = float(jnp.finfo(jnp.float32).eps) * value
    assert abs(value - np.trace(np.asarray(A, float)[:2, :2])) <= 2 * error
    assert rounding <= error <= 8 * rounding
    assert "exact" not in str(leaves).splitlines()[0]


@pytest.mark.wrong_types
def test_wrong_leaf_arguments():
    operator = by_leaf(jnp.eye(N))
    with pytest.raises(
        ValueError, match="k must be at least 12, three products for each"
    ):
        tx.leaf_traces(jr.key(0), operator, 11, probes="blocks")
    with pytest.raises(ValueError, match="leaf_traces: estimator must be None"):
        tx.leaf_traces(
            jr.key(0), operator, 20, tx.HutchinsonEstimator(), probes="blocks"
        )
    with pytest.raises(ValueError, match="probes must be 'whole' or 'blocks'"):
        tx.leaf_traces(jr.key(0), operator, 20, probes="leaf")  # pyright: ignore


#
# Frobenius norms
#


@pytest.mark.x64
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_frobenius_norm(kind):
    rng = np.random.default_rng(0)
    A = rng.normal(size=(25, N)) + (1j * rng.normal(size=(25, N)) * (kind == "complex"))
    A = jnp.asarray(A * np.arange(1, N + 1.0) ** -1)
    truth = float(np.sum(np.abs(A) ** 2))

    def run_once(key):
        def value_at(scale):
            operator = lx.MatrixLinearOperator(scale * A)
            estimate = tx.frobenius_norm_squared(key, operator, 13, throw=False)
            return estimate.value, estimate

        slope, estimate = jax.grad(value_at, has_aux=True)(1.0)
        used = estimate.stats["num_matvecs"]
        return estimate.value, slope, estimate.standard_error, used

    value, slope, error, used = over_keys(run_once, 2000)
    assert value.dtype == jnp.zeros(()).dtype
    assert used.max() == 13
    assert z_score(value[:, None], np.array([truth])) < 4.5
    assert z_score(slope[:, None], np.array([2 * truth])) < 4.5
    deviation = np.sqrt(np.mean((value - truth) ** 2))
    assert 0.8 < np.sqrt(np.mean(error**2)) / deviation < 1.6
    tiny = tx.frobenius_norm_squared(jr.key(0), lx.MatrixLinearOperator(A * 1e-30), 13)
    same = tx.frobenius_norm_squared(jr.key(0), lx.MatrixLinearOperator(A), 13)
    np.testing.assert_allclose(tiny.value, 1e-60 * same.value, rtol=1e-3)
    exact = tx.frobenius_norm_squared(jr.key(0), lx.MatrixLinearOperator(A), N)
    np.testing.assert_allclose(exact.value, truth, rtol=1e-5)
    assert is_rounding(exact)
    assert exact.stats["num_matvecs"] == N
    with pytest.raises(ValueError, match="k must be at least 2, got 1"):
        tx.frobenius_norm_squared(jr.key(0), lx.MatrixLinearOperator(A), 1)


@pytest.mark.x64
def test_frobenius_norm_between_pytrees():
    x = {"a": jnp.asarray([1.0, 2.0, 3.0]), "b": jnp.ones(2)}
    jacobian = lx.JacobianLinearOperator(lambda x, _: jnp.sum(x["a"]) * x["b"], x)
    norm = tx.frobenius_norm_squared(jr.key(0), jacobian, 5)
    np.testing.assert_allclose(norm.value, 2 * 3 + 2 * 6**2)


def test_signs_that_agree_by_chance_do_not_look_exact():
    # Every sample for this leaf is 20 + 2 or 20 - 2, so three agree in a quarter of all
    # runs.
    block = jnp.array([[10.0, 1.0], [1.0, 10.0]])
    structure = {"a": jnp.zeros(2), "b": jnp.zeros(3)}

    def mv(v):
        return {"a": block @ v["a"], "b": v["b"]}

    operator = lx.FunctionLinearOperator(mv, jax.eval_shape(lambda: structure))

    @jax.jit
    @jax.vmap
    def run(key):
        leaves, _ = tx.leaf_traces(key, operator, 3, tx.HutchinsonEstimator())
        return leaves.value, leaves.standard_error

    values, errors = run(jr.split(jr.key(0), 300))
    assert jnp.all(errors["a"] > 0.1)
    assert jnp.all(jnp.abs(values["b"] - 3) < 1e-5)
    assert jnp.all(errors["b"] < 1e-4)
