"""XNysTrace: leave-one-out Nystrom approximations of a semidefinite operator."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Key

from .._base import TraceEstimator
from .._basis import counted_basis, extend_at_once
from .._estimate import RESULTS
from .._kept import Counted, Kept, kept_parts
from .._leave_one_out import (
    CountedStandIn,
    floor_diagonal,
    leave_one_out,
    stand_in,
)
from .._leave_one_out_nystrom import nystrom_traces, orthonormalising
from .._operator import (
    apply_block,
    extend_products,
    is_negative_semidefinite,
    is_positive_semidefinite,
    space_of,
)
from .._orthogonal import (
    column_dots,
    combine,
    inner,
    orthonormalise,
    products_to_check,
    there,
)
from .._product_cost import reads_large_matrix
from .._samplers import NormalSampler, Sampler, check_sampler, draw_probes, laid_out
from .._sharding import laid_out_like
from .._small_matrices import inverse_conjugate_transpose, matmul
from .._standard_error import ErrorBar, leave_one_out_samples
from .._state import StoredKey, described, init_state
from .._stream import ProbeStream, counted_chunk
from .._tolerance import empty_rows, phases, put, unknown_error, until

# So many entries a probe for each probe: uniform directions then have a condition below 4,
# and products find an orthonormal basis of them at once.
_WELL_CONDITIONED = 3


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
        (Y,) = extend_products(operator, (probes, _of_probes(state, length)))
        # Barriers, so that the same is compiled for products that were known before. Of
        # blocks as they are in memory.
        U, AU = (x.T for x in jax.lax.optimization_barrier((probes.T, Y.T)))
        T = W = None
        if self._by_products(n, k):
            W = orthonormalising(U)
        else:
            U, T, AU = _orthonormalised(U, AU)
            U, T, AU = jax.lax.optimization_barrier((U.T, T, AU.T))
            U, T, AU = U.T, T * length, AU.T
        bar, result = self._error_bar(state, U, T, AU, W, k)

        # The derivative's blocks need probes with independent columns. Those of U are
        # orthogonal to each other.
        Q, R = orthonormalise(Y)
        loo = _left_out(Omega, Q, R * length, resphere=self.resphere)
        stats = {
            "num_matvecs": k,
            "degrees_of_freedom": bar.degrees_of_freedom,
            "result": result,
            "largest_product": products_to_check(Y),
            "kept": [Y, None, None],
        }
        return bar.mean, bar.standard_error, stats, stand_in(Omega, Q, loo)

    def passes(self, state, k):
        """What each pass of a [`traceax.StreamedMean`][] multiplies."""

        def probes():
            Omega, length = self._probes(state, k)
            return Omega / length

        return [probes], lambda Y: [Y, None, None]

    def _probes(self, state, k):
        space = space_of(state.operator)
        Omega = draw_probes(self.sampler, state.key, k, space)
        return Omega, _length(space.size)

    def _error_bar(self, state, U, T, AU, W, count, active=None):
        """And whether the operator is what its tag says."""
        n = len(U)
        samples, pairs, shift, magnitude, wrong, scale = nystrom_traces(
            U, T, AU, _sign(state), W=W, resphere=self.resphere, active=active
        )
        if active is not None:
            count = count.astype(scale.dtype)
        mean, standard_error, freedom = leave_one_out_samples(
            samples,
            pairs,
            magnitude,
            n - count + 2 if self.resphere else None,
            active=active,
        )
        value = scale * (mean - n * shift)
        result = RESULTS.where(wrong, RESULTS.not_semidefinite, RESULTS.successful)
        return ErrorBar(value, jnp.abs(scale) * standard_error, freedom), result

    def _by_products(self, n, k):
        """Whether probes need not be orthonormalised."""
        return self.resphere and n >= _WELL_CONDITIONED * k

    def loop_goes_on(self, state):
        """Whether an estimate to a tolerance can use what is kept."""
        del state
        return True

    def compute_until(self, state, k, tolerance, meter):
        operator = state.operator
        space = space_of(operator)
        n, dtype = space.size, space.compute_dtype
        sampler = laid_out(self.sampler, space)
        draw = ProbeStream(state.key, sampler, n, k, k, dtype).source()
        wide = reads_large_matrix(operator)
        # As in `compute`.
        by_products = self._by_products(n, k)
        length = _length(n) if by_products else 1

        def step(carry, count, phase):
            rows, T = carry
            Omega = (draw(count, phase.width) / length).T
            new = [laid_out_like(Omega, rows[0])]
            if not by_products:
                U, columns = extend_at_once(rows[1][: phase.end], new[0], count)
                T = jax.lax.dynamic_update_slice(T, columns, (0 * count, count))
                new.append(U)
            AU = apply_block(operator, new[-1].T)
            return put(rows, [*new, AU.T], count), T

        def look(carry, found, count, phase):
            del found
            rows, T = carry
            U, AU = (x[: phase.end].T for x in rows[-2:])
            T = None if by_products else T[: phase.end, : phase.end]
            active = there(count, phase.end)
            W = orthonormalising(U, active) if by_products else None
            return self._error_bar(state, U, T, AU, W, count, active)

        begun, T, done = [], None, 0
        if state.kept is not None:
            done = state.kept.parts[0].shape[1]
            begun, T = _begun(state, draw(0, done), by_products=by_products)
        rows = [empty_rows(k, operator, draw)] * (2 if by_products else 3)
        if done:
            rows = put(rows, [x.T for x in begun], 0)
        if not by_products:
            zeros = jnp.zeros((k, k), dtype)
            T = zeros if T is None else zeros.at[:done, :done].set(T)
        reached = until(
            tolerance,
            meter,
            phases(k, wide=wide, done=done),
            (rows, T),
            RESULTS.successful,
            step,
            look,
            unknown_error(space, real=True),
            done=done,
        )
        rows, T = reached.carry
        kept = [Counted(rows[-1], as_columns=True), None, None]
        if not by_products:
            kept[1:] = Counted(rows[1], as_columns=True), Counted(T, 2)
        Omega, *_, AU = (x.T for x in rows)
        active = there(reached.taken, k)
        size = counted_chunk(n, k, wide=wide, columns=2)
        Q, R = counted_basis(AU, reached.taken, size)
        R = R if by_products else matmul(R, T)
        loo = _left_out(Omega, Q, R, resphere=self.resphere, active=active)
        stats = {
            "num_matvecs": reached.taken,
            "degrees_of_freedom": reached.bar.degrees_of_freedom,
            "result": reached.found,
            "largest_product": products_to_check(AU),
            "kept": Kept(1, kept, described(self), reached.taken),
        }
        blocks = CountedStandIn(Omega, Q, loo, reached.taken, size)
        return reached.bar.mean, reached.bar.standard_error, stats, blocks


def _of_probes(state, length):
    """The products of probes, divided by a length, that a state keeps."""
    AU, _, T = kept_parts(state, 3)
    return AU if T is None else combine(AU, T) / length


def _orthonormalised(probes, Y):
    """U and T with `probes = U T`, and `A U` from `Y = A probes`."""
    U, T = orthonormalise(probes)
    inverse = inverse_conjugate_transpose(floor_diagonal(T)).conj().T
    return U, T, combine(Y, inverse)


def _begun(state, Omega, *, by_products: bool):
    """The blocks that a loop begins with, of the probes of which a state keeps products,
    and the factor of these."""
    length = _length(len(Omega))
    AU, U, T = kept_parts(state, 3)
    if by_products:
        return [Omega / length, _of_probes(state, length)], None
    if U is None:
        U, T, AU = _orthonormalised(Omega / length, AU)
        T = T * length
    return [Omega, U, AU], T


def _length(n: int) -> float:
    # Probes divided by it are of length 1, about: solvers inside an operator have
    # absolute tolerances.
    return 2.0 ** round(math.log2(n) / 2)


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
