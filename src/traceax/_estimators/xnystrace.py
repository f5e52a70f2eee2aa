"""XNysTrace: leave-one-out Nystrom approximations of a semidefinite operator."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Bool, Float, Inexact, Key

from .._base import TraceEstimator
from .._basis import extend_at_once
from .._estimate import RESULTS
from .._leave_one_out import (
    floor_diagonal,
    leave_one_out,
    left_out_of_dependent,
    stand_in,
)
from .._operator import (
    apply_block,
    extend_products,
    is_negative_semidefinite,
    is_positive_semidefinite,
    reads_large_matrix,
    space_of,
)
from .._orthogonal import (
    column_dots,
    combine,
    diagonal,
    frobenius,
    inner,
    inverse_conjugate_transpose,
    inverse_root,
    largest_entry,
    matmul,
    orthonormalise,
    power_of_two_scale,
)
from .._samplers import NormalSampler, Sampler, check_sampler, draw_probes, laid_out
from .._standard_error import ErrorBar, leave_one_out_samples
from .._state import Kept, StoredKey, init_state, kept_parts
from .._stream import ProbeStream, counted_halves
from .._tolerance import phases, put, there, unknown_error, until

# So many entries a probe for each probe: uniform directions then have a condition below 3,
# and products find an orthonormal basis of them at once.
_WELL_CONDITIONED = 8


class XNysTraceState(eqx.Module):
    """As `TraceState`, and whether the operator is negative semidefinite."""

    _key: StoredKey
    operator: lx.AbstractLinearOperator
    negative: bool = eqx.field(static=True)
    kept: Kept | None = None

    @property
    def key(self) -> Key[Array, ""]:
        return self._key.typed


class XNysTraceEstimator(TraceEstimator):
    r"""XNysTrace, for positive or negative semidefinite operators.

    Applies the operator to k orthonormalised probes U, builds the Nystrom
    approximation of A from all of them but one, and tests what it misses on the one
    left out, for each in turn:

        tr_i = tr A_(i) + (n - k + 1) u_i^* (A - A_(i)) u_i,    value = mean of tr_i

    *Use when* the operator is known to be semidefinite: a covariance, a Gauss-Newton
    or Fisher matrix, a Hessian at a minimum. The most accurate estimator per product.

    | | |
    |---|---|
    | operator | tagged positive or negative semidefinite, any dtype, PyTrees |
    | products | k, all used |
    | beyond the products | O(n k^2) time, three n x k blocks; the derivative holds seven |
    | bias | none, but for rounding |
    | standard error | from leaving out pairs of probes, so that correlations count; NaN for k = 1 |
    | derivative | `<Z, dA V>` with the leave-one-out blocks of the range of `A Omega`, 2k products with dA; unbiased for any dA |

    **Arguments:**

    - `sampler`: of the probes. Rotation invariant if `resphere`.
    - `resphere`: whether to use that probes are uniform in direction, given the
        others. Without it the probes themselves are left out and tested, of factor 1.

    **Raises:**

    - `ValueError` for `resphere=True` with a sampler that isn't rotation invariant, and
        from `init` for an operator that isn't tagged semidefinite.

    **Reference:** Epperly, Tropp and Webber, "XTrace: Making the Most of Every Sample
    in Stochastic Trace Estimation", SIAM J. Matrix Anal. Appl. 45 (2024),
    doi:10.1137/23M1548323, arXiv:2301.07825, section 2.3.
    """

    sampler: Sampler = NormalSampler()
    resphere: bool = eqx.field(default=True, static=True)

    def __check_init__(self):
        check_sampler(
            self.sampler,
            type(self).__name__,
            resphere=self.resphere,
            independent=True,
        )

    def init(self, key, operator):
        state = init_state(key, operator, "XNysTraceEstimator.init")
        negative = is_negative_semidefinite(operator)
        if not negative and not is_positive_semidefinite(operator):
            raise ValueError(
                "XNysTraceEstimator.init: operator must be tagged positive or negative "
                f"semidefinite, got a {type(operator).__name__} that is neither; if it "
                "is, wrap it as lineax.TaggedLinearOperator(operator, "
                "lineax.positive_semidefinite_tag), else use traceax.XTraceEstimator."
            )
        # Zero is both.
        negative = negative and not is_positive_semidefinite(operator)
        return XNysTraceState(StoredKey(state.key), operator, negative)

    def compute(self, state, k):
        operator = state.operator
        n = space_of(operator).size
        # Products of the probes themselves, which a later estimate can use again. Random
        # probes are well conditioned, so that those of U are as good as taken directly.
        Omega, length = self._probes(state, k)
        probes = Omega / length
        (known_Y,) = kept_parts(state, 1)
        (Y,) = extend_products(operator, (probes, known_Y))
        # Barriers, so that the same is compiled for products that were known before. Of
        # blocks as they are in memory.
        U, AU = (x.T for x in jax.lax.optimization_barrier((probes.T, Y.T)))
        T = W = None
        if self.resphere and n >= _WELL_CONDITIONED * k:
            W = _orthonormalising(U)
        else:
            U, T = orthonormalise(U)
            inverse = inverse_conjugate_transpose(floor_diagonal(T)).conj().T
            U, T, AU = jax.lax.optimization_barrier((U.T, T, combine(AU, inverse).T))
            U, T, AU = U.T, T * length, AU.T
        scale = power_of_two_scale(AU)
        sign = _sign(state)
        samples, pairs, shift, magnitude, result = _leave_one_out_traces(
            U, T, AU, (sign / scale).astype(AU.dtype), W=W, resphere=self.resphere
        )
        mean, standard_error, freedom = leave_one_out_samples(
            samples, pairs, magnitude, n - k + 2 if self.resphere else None
        )
        value = sign * scale * (mean - n * shift)
        standard_error = scale * standard_error

        # The derivative's blocks need probes with independent columns. Those of U are
        # orthogonal to each other.
        Q, R = orthonormalise(Y)
        loo = _left_out(Omega, Q, R * length, resphere=self.resphere)
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": freedom,
            "result": result,
            "largest_product": largest_entry(Y),
            "kept": [Y],
        }
        return value, standard_error, stats, stand_in(Omega, Q, loo)

    def passes(self, state, k):
        """What each pass of a [`traceax.StreamedMean`][] multiplies."""

        def probes():
            Omega, length = self._probes(state, k)
            return Omega / length

        return [probes], lambda Y: [Y]

    def _probes(self, state, k):
        # Of length 1, about, once divided: solvers inside an operator have absolute
        # tolerances.
        space = space_of(state.operator)
        Omega = draw_probes(self.sampler, state.key, k, space)
        return Omega, 2.0 ** round(math.log2(space.size) / 2)

    def compute_until(self, state, k, tolerance, meter):
        operator = state.operator
        space = space_of(operator)
        n, dtype = space.size, space.compute_dtype
        sampler = laid_out(self.sampler, space)
        draw = ProbeStream(state.key, sampler, n, k, k, dtype).source()
        sign = _sign(state)

        def step(carry, count, phase):
            rows, T = carry
            Omega = draw(count, phase.width)
            U, columns = extend_at_once(rows[1][: phase.end], Omega.T, count)
            AU = apply_block(operator, U.T)
            rows = put(rows, [Omega.T, U, AU.T], count)
            T = jax.lax.dynamic_update_slice(T, columns, (0 * count, count))
            return rows, T

        def look(carry, found, count, phase):
            del found
            rows, T = carry
            _, U, AU = (x[: phase.end].T for x in rows)
            scale = power_of_two_scale(AU)
            active = there(count, phase.end)
            samples, pairs, shift, magnitude, result = _leave_one_out_traces(
                U,
                T[: phase.end, : phase.end],
                AU,
                (sign / scale).astype(AU.dtype),
                resphere=self.resphere,
                active=active,
            )
            dimension = n - count.astype(scale.dtype) + 2 if self.resphere else None
            mean, error, freedom = leave_one_out_samples(
                samples, pairs, magnitude, dimension, active=active
            )
            bar = ErrorBar(sign * scale * (mean - n * shift), scale * error, freedom)
            return bar, result

        carry = [jnp.zeros((k, n), dtype)] * 3, jnp.zeros((k, k), dtype)
        reached = until(
            tolerance,
            meter,
            phases(k, wide=reads_large_matrix(operator)),
            carry,
            RESULTS.successful,
            step,
            look,
            unknown_error(space, real=True),
        )
        rows, T = reached.carry
        Omega, _, AU = (x.T for x in rows)
        active = there(reached.taken, k)
        Q, R = orthonormalise(AU)
        Q = jnp.where(active[None, :], Q, 0)  # not what it was filled with
        loo = _left_out(Omega, Q, matmul(R, T), resphere=self.resphere, active=active)
        stats = {
            "num_matvecs": reached.taken,
            "degrees_of_freedom": reached.bar.degrees_of_freedom,
            "result": reached.found,
            "largest_product": largest_entry(AU),
        }
        blocks = counted_halves(*stand_in(Omega, Q, loo, active), reached.taken)
        return reached.bar.mean, reached.bar.standard_error, stats, blocks


def _left_out(Omega, Q, R, *, resphere, active=None):
    squares = jnp.real(column_dots(Omega, Omega))
    return leave_one_out(
        inner(Q, Omega), squares, R, len(Q), resphere=resphere, active=active
    )


def _sign(state) -> int:
    if not hasattr(state, "negative"):
        raise TypeError(
            "XNysTraceEstimator.estimate: state must be that of its init, got a "
            f"{type(state).__name__}; begin with XNysTraceEstimator().init(key, "
            "operator), of an operator that is tagged semidefinite."
        )
    return -1 if state.negative else 1


def _orthonormalising(block: Inexact[Array, "n k"]) -> Inexact[Array, "k k"]:
    """`W` with `block W` orthonormal, for columns of any length in uniform directions."""
    gram = inner(block, block)
    lengths = jnp.sqrt(jnp.real(diagonal(gram)))
    lengths = jnp.where(lengths == 0, 1, lengths).astype(gram.dtype)
    correlations = gram / (lengths[:, None] * lengths[None, :])
    real = jnp.finfo(gram.dtype)
    W, _ = inverse_root(correlations, jnp.asarray(real.eps, real.dtype))
    return W / lengths[:, None]


def _leave_one_out_traces(
    U: Inexact[Array, "n k"],
    T: Inexact[Array, "k k"] | None,
    Y: Inexact[Array, "n k"],
    unit: Inexact[Array, ""],
    *,
    W: Inexact[Array, "k k"] | None = None,
    resphere: bool,
    active: Bool[Array, " k"] | None = None,
) -> tuple[
    Float[Array, " k"], Float[Array, "k k"], Float[Array, ""], Float[Array, ""], RESULTS
]:
    r"""Leave-one-out traces `t_i`, `t_ij` of `A + mu I`, from `Y = A U`, and `mu`.

    Also, after `mu`, the magnitude of what is added up to a sample. All of `unit A`,
    which is of order 1, and positive.

    With the shifted `Y_mu = Y + mu U` and `H = U^* Y_mu`, of order k, the Nystrom
    approximation from all columns is `F F^*` with `F = Y_mu H^{-1/2}`. Without column
    i it is `F (I - q_i q_i^*) F^*`, where the unit vector `q_i` is along
    `H^{-1/2} e_i`: its range is orthogonal to `H^{1/2} e_j` for every other j. And

        u_i^* (A + mu I - F (I - q_i q_i^*) F^*) u_i = 1 / |H^{-1/2} e_i|^2 .

    Given the other columns, `u_i` is uniform on the unit sphere of their complement,
    of dimension n - k + 1, outside which the remainder vanishes: hence

        tr_i = |F|^2 - |F q_i|^2 + (n - k + 1) / |H^{-1/2} e_i|^2 .

    *Leaving out j as well*, for `t_ij`: the pair `q_i`, `q_j` spans what is lost, with
    `c = q_i^* q_j`, and `|H^{-1/2} e_i|^2` shrinks by `1 - |c|^2` (a Schur complement).
    All of this holds for any `B` with `B B^* = H^-1`, and `B^* e_i` for `H^{-1/2} e_i`.

    U is orthonormal, or `U W` is. Where U isn't, `U W` and `Y W` are never needed.

    Without resphering, column `i` of `Omega = U T` is left out instead: `T^-* e_i`
    takes the place of `e_i`, and 1 that of n - k + 1.

    Departures from the source (its Algorithm 4 factors `Omega^* Y` by Cholesky): the
    basis is orthonormal, so that `H` has no eigenvalue below `mu` but for rounding. That
    moves the eigenvalues of `H` by up to about `eps |Y|_F`; products from an iterative
    solver move them by more, which shows in `H` not being Hermitian: `mu` is
    `|H - H^*|_F` where that is more than rounding. A floor of `mu` itself under the
    eigenvalues would lift half of those that should equal `mu`, and bias the value by a
    multiple of `mu n`; a floor of `mu / 2` does not.
    """
    n, k = U.shape
    identity = jnp.eye(k, dtype=Y.dtype)
    count, outside = k, jnp.zeros_like(identity)
    if active is not None:
        count = jnp.sum(active).astype(jnp.finfo(Y.dtype).dtype)
        outside = jnp.where(active[:, None], 0, identity)
    if resphere:
        left_out, dimension = identity, n - count + 1
    else:
        assert T is not None
        left_out, basis = left_out_of_dependent(T + outside)
        U, Y, dimension = combine(U, basis), combine(Y, basis), 1
    weights = jnp.ones(k, Y.dtype)
    if W is not None:
        # At least the norm of Y W, about.
        rows = W.conj().T
        weights = jnp.sqrt(jnp.real(diagonal(inner(rows, rows)))).astype(Y.dtype)
    norm = jnp.linalg.norm(Y.T * (unit * weights)[:, None])
    nonzero = norm != 0
    norm = jnp.where(nonzero, norm, 1)
    eps = jnp.finfo(Y.dtype).eps
    H = inner(U, Y) * unit
    if W is not None:
        H = matmul(W.conj().T, matmul(H, W))
    noise = frobenius(H - H.conj().T)
    mu = eps * norm
    mu = jnp.where(noise > count**0.5 * mu, noise, mu)
    Y_mu = (Y.T * unit + mu.astype(Y.dtype) * U.T).T
    H_mu = (H + H.conj().T) / 2 + mu.astype(Y.dtype) * identity
    if active is not None:
        # Columns that there are not take no part: eigenvalues of order 1 of their own.
        H_mu = H_mu + outside * norm.astype(Y.dtype)
    root, least = inverse_root(H_mu, mu / 2)
    # A tag can be wrong: neither noise nor rounding does this.
    limit = jnp.maximum(jnp.sqrt(eps) * norm, 10 * noise)
    wrong = (least < -limit) | (noise > 0.3 * frobenius(H))
    result = RESULTS.where(wrong, RESULTS.not_semidefinite, RESULTS.successful)
    F = combine(Y_mu, root if W is None else matmul(W, root))
    halves = root.conj().T if resphere else matmul(root.conj().T, left_out)
    squared, products = inner(F, F), inner(halves, halves)
    squares = jnp.real(diagonal(products))
    # A probe that the others span has nothing left to test.
    remainders = jnp.where(squares == 0, 0, 1 / jnp.where(squares == 0, 1, squares))
    all_columns = jnp.sum(jnp.real(diagonal(squared)))
    # Those of q_i and q_j, once divided by the lengths of both.
    lost = matmul(halves.conj().T, matmul(squared, halves))
    lost_by_one = jnp.real(diagonal(lost)) * remainders
    samples = all_columns - lost_by_one + dimension * remainders

    of_two = remainders[:, None] * remainders[None, :]
    sine_squared = jnp.maximum(1 - jnp.abs(products) ** 2 * of_two, eps)
    lost_by_two = lost_by_one[:, None] + lost_by_one[None, :]
    lost_by_two = lost_by_two - 2 * jnp.real(products.conj() * lost) * of_two
    dimension = dimension + 1 if resphere else 1
    pairs = all_columns + (dimension * remainders[:, None] - lost_by_two) / sine_squared
    # Where all is explained, n mu is added and subtracted again; it has the rounding of
    # eigenvalues that should equal mu: at most a few times `mu sqrt(n)`, measured.
    magnitude = all_columns + mu * math.sqrt(n) / eps
    parts = jtu.tree_map(lambda x: jnp.where(nonzero, x, 0), (samples, pairs, mu))
    return *parts, jnp.where(nonzero, magnitude, 0), result
