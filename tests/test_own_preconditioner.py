"""Custom preconditioners: `traceax.Preconditioner`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from kernels import Matern
from problems import as_array, is_x64

import traceax as tx
from traceax._linalg.whitening import whiten
from traceax.testing import check_preconditioner

N, COLUMNS = 60, 12
X = np.random.default_rng(0).random((N, 2))
PIVOTS = np.random.default_rng(1).permutation(N)[:COLUMNS]
POINT = 0.4, 0.05  # a length scale, and noise


def kernel(length=POINT[0]):
    x = as_array(X)
    lengths = jnp.full(2, length, x.dtype)
    return tx.KernelLinearOperator(Matern(lengths), x)


class Dense(tx.Preconditioner):
    matrix: jax.Array
    logdet: jax.Array
    lower: float | None = 1.0

    def apply(self, block):
        return self.matrix @ block

    def apply_adjoint(self, block):
        return self.matrix.T @ block


class Controlled(Dense):
    Q: jax.Array | None = None

    def inside(self, block):
        return self.Q.T @ block, jnp.sum(self.Q**2)


def from_pivots(K, noise):
    """The preconditioner from pivots, as dense matrices."""
    diagonal, noise = jnp.diagonal(K), jnp.full(N, noise, K.dtype)
    P = whiten(K[:, PIVOTS], diagonal, jnp.asarray(PIVOTS), noise)
    M = P.apply(jnp.eye(N, dtype=K.dtype))
    return Controlled(M, P.logdet, 1.0, P.basis @ P.root)


def cholesky_root(K, noise):
    """A differentiable root of the same preconditioner."""
    K_SS, identity = K[PIVOTS][:, PIVOTS], jnp.eye(N, dtype=K.dtype)
    interpolation = jnp.linalg.solve(K_SS + 1e-6 * jnp.eye(len(K_SS)), K[PIVOTS])
    L = jnp.linalg.cholesky(K[:, PIVOTS] @ interpolation + noise * identity)
    logdet = 2 * jnp.sum(jnp.log(jnp.diagonal(L)))
    return Dense(
        jax.scipy.linalg.solve_triangular(L, identity, lower=True), logdet, None
    )


def log_likelihood(key, make, parameters):
    length, noise = parameters
    K, y = kernel(length), as_array(np.sin(5 * X[:, 0]))
    P = make(K.as_matrix(), noise)
    return tx.gaussian_log_likelihood(key, K, y, 24, shift=noise, preconditioner=P)


def exact_log_likelihood(parameters):
    length, noise = parameters
    K, y = kernel(length).as_matrix(), as_array(np.sin(5 * X[:, 0]))
    K = K + noise * jnp.eye(N, dtype=K.dtype)
    value = y @ jnp.linalg.solve(K, y) + jnp.linalg.slogdet(K)[1]
    return -value / 2 - N / 2 * np.log(2 * np.pi)


def test_dense_pivots_give_the_same_answer(key):
    def results(make):
        @jax.jit
        def run(parameters):
            estimate = log_likelihood(key, make, parameters)
            return estimate.value, estimate.standard_error

        return jnp.hstack(run(as_array(POINT)))

    custom, pivots = (
        results(from_pivots),
        results(lambda *_: jnp.asarray(PIVOTS)),
    )
    assert_close(custom, pivots, rtol=1e-7 if is_x64() else 1e-3)


def test_preconditioners_may_be_fixed_or_differentiated(key):
    """Without the column control, intervals contain true values and slopes."""

    def fixed(K, noise):
        return jax.lax.stop_gradient(cholesky_root(K, noise))

    point = as_array(POINT)
    truth, slope = exact_log_likelihood(point), jax.grad(exact_log_likelihood)(point)

    def intervals(tangent, make):
        def fn(p):
            return log_likelihood(key, make, p)

        pair = tx.jvp(fn, (point,), (tangent,))
        return [x.confidence_interval(0.999) for x in pair]

    for make in (fixed, cholesky_root):
        run = jax.jit(jax.vmap(functools.partial(intervals, make=make)))
        bounds = run(jnp.eye(2, dtype=point.dtype))
        for (low, high), true in zip(bounds, (truth, slope), strict=True):
            assert jnp.all((low <= true) & (true <= high))


@pytest.mark.x64
@pytest.mark.parametrize(
    ("fault", "finds"),
    [
        (lambda M: M, None),
        (lambda M: eqx.tree_at(lambda x: x.logdet, M, M.logdet + 0.1), "logdet"),
        (lambda M: eqx.tree_at(lambda x: x.lower, M, 1.1), "lower"),
        (
            lambda M: eqx.tree_at(lambda x: x.matrix, M, M.matrix.at[0].set(0)),
            "invertible",
        ),
        (lambda M: OtherAdjoint(M.matrix, M.logdet), "adjoint"),
        (lambda M: Affine(M.matrix, M.logdet), "linear"),
    ],
)
def test_faults_are_found(fault, finds):
    M = fault(from_pivots(kernel().as_matrix(), POINT[1]))
    if finds is None:
        check_preconditioner(M, kernel(), shift=POINT[1])
        return
    with pytest.raises(AssertionError, match=f"checks:(\n- .*)*\n- {finds}"):
        check_preconditioner(M, kernel(), shift=POINT[1])


class OtherAdjoint(Dense):
    def apply_adjoint(self, block):
        return self.matrix @ block @ jnp.diag(jnp.arange(block.shape[1])).astype(float)


class Affine(Dense):
    def apply(self, block):
        return super().apply(block) + 1


class OnTheHost(Dense):
    def apply(self, block):
        return np.asarray(self.matrix) @ np.asarray(block)


class Halved(Dense):
    def apply(self, block):
        return super().apply(block).astype(jnp.float16)


@pytest.mark.x64
def test_wrong_preconditioners(key):
    M = from_pivots(kernel().as_matrix(), POINT[1])
    small = Dense(M.matrix[:50, :50], M.logdet)
    for preconditioner, error, message in (
        (small, TypeError, r"preconditioner.apply must keep the shape .*n = 60"),
        (Halved(M.matrix, M.logdet), ValueError, "preconditioner.apply must keep"),
        (OnTheHost(M.matrix, M.logdet), TypeError, "preconditioner.apply must keep"),
        (Dense(M.matrix, jnp.ones(2)), ValueError, "logdet must be a real scalar"),
        (Dense(M.matrix, M.logdet, jnp.ones(2)), ValueError, "lower must be a real"),
        (Dense, TypeError, "an instance of a traceax.Preconditioner"),
    ):
        with pytest.raises(error, match=message):
            tx.logdet(key, kernel(), 20, shift=POINT[1], preconditioner=preconditioner)
    with pytest.raises(TypeError, match=r"check_preconditioner: .*n = 60"):
        check_preconditioner(small, kernel(), shift=POINT[1])

    class NoLogdet(tx.Preconditioner):  # pyright: ignore
        lower: None = None

        def apply(self, block):
            return block

        apply_adjoint = apply

    with pytest.raises(TypeError, match="logdet"):
        NoLogdet()  # pyright: ignore


@pytest.mark.x64
def test_tolerances_apply_to_the_whole_log_determinant(key):
    # The estimated part is negative and the known part positive, so they cancel.
    M = Dense(jnp.eye(N) / 10, jnp.asarray(2 * N * np.log(10)), None)
    truth = jnp.linalg.slogdet(kernel().as_matrix() + POINT[1] * jnp.eye(N))[1]
    estimate = tx.logdet(
        key, kernel(), N - 1, shift=POINT[1], preconditioner=M, rtol=0.05
    )
    assert estimate.result == tx.RESULTS.successful
    low, high = estimate.confidence_interval()
    assert (high - low) / 2 <= 0.05 * abs(estimate.value) * (1 + 1e-6)
    assert abs(estimate.value - truth) < 0.1 * abs(truth)


class Scaled(tx.Preconditioner):
    """A diagonal, whose derivative is in `drift`, too."""

    diagonal: jax.Array
    lower: None = None

    def apply(self, block):
        return block / jnp.sqrt(self.diagonal)[:, None]

    apply_adjoint = apply

    def drift(self, block):
        fixed = jax.lax.stop_gradient(self.diagonal)
        return block * ((self.diagonal - fixed) / (2 * fixed))[:, None]

    @property
    def logdet(self):
        return jnp.sum(jnp.log(self.diagonal))


def test_a_drift_counts_once():
    def value(parameters):
        def make(K, noise):
            return Scaled((1.0 + X[:, 0]) * (1 + noise) * parameters[0])

        return log_likelihood(jax.random.key(0), make, parameters).value

    point = tuple(as_array(x) for x in POINT)
    gradient = jax.jit(jax.grad(value))(point)
    truth = jax.jit(jax.grad(exact_log_likelihood))(point)
    assert_close(jnp.stack(gradient), jnp.stack(truth), 0.02 if is_x64() else 0.05)
