"""The default log-determinant of a sparse matrix: quadratures with its pattern's colours."""

import functools as ft

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Int

from ._colours import ColouredSampler, Colours, colour
from ._estimator import outcome_of
from ._exact.diagonals import Known
from ._functional import TRACE
from ._operators.convert import SparseLinearOperator
from ._operators.entries import diagonal_of, terms
from ._operators.space import is_known, space_of
from ._outcome import Outcome
from ._plan import Plan
from ._spectral.lanczos_quadrature import LanczosQuadratureEstimator
from ._spectral.state import SpectralState

# Products without a budget; the fewest rounds, the fewest steps from each probe, and
# steps from which on we take more rounds. With a unit diagonal 9 steps are enough for
# values with condition numbers up to 100; slopes converge later.
_PRODUCTS, _ROUNDS, _STEPS, _STEPS_BEFORE_ROUNDS = 400, 2, 9, 14
# Two colours gained nothing over the Krylov space with a known trace, nor did any number
# over a Krylov space that was a large part of the whole space.
_FEWEST_COLOURS, _LARGEST_SHARE = 4, 0.25


def coloured_quadrature(
    operator: lx.AbstractLinearOperator, k: int | None
) -> tuple[LanczosQuadratureEstimator, int] | None:
    """An estimator, and its budget, for the logarithm of a sparse matrix.

    Colours repeat at the farthest distance for which the budget has two rounds. `None` if
    the pattern isn't known, or colours don't pay.
    """
    k, n, chosen = _PRODUCTS if k is None else k, operator.in_size(), None
    # The scaled matrix would round to 16 bits twice more.
    if k > _LARGEST_SHARE * n or space_of(operator).rounding > 1:
        return None
    pairs = _pattern(operator)
    if pairs is None:
        return None
    for colours in _all_colours(pairs, n, k // (_ROUNDS * _STEPS)):
        chosen = colours
    if chosen is None or chosen.number < _FEWEST_COLOURS:
        return None
    p = chosen.number
    m = p * max(k // (p * _STEPS_BEFORE_ROUNDS), _ROUNDS)
    sampler = ColouredSampler(chosen, exact=False)
    return LanczosQuadratureEstimator(m, sampler), k // m * m


def _pattern(operator: lx.AbstractLinearOperator) -> Int[np.ndarray, "m 2"] | None:
    """The off-diagonal entries of a sparse matrix, or `None` for other operators."""
    found = []
    for _, part in terms(operator):
        if isinstance(part, SparseLinearOperator):
            found.append((part.rows, part.columns))
        elif not is_known(part, lx.is_diagonal):
            return None
    indices = [x for pair in found for x in pair]
    if not found or any(isinstance(x, jax.core.Tracer) for x in indices):
        return None
    rows, columns = np.concatenate(found, axis=1)
    n = operator.in_size()
    inside = (rows != columns) & (rows < n) & (columns < n)
    return np.stack([rows, columns], axis=1)[inside]


@ft.lru_cache(maxsize=4)
def _colourings(pairs: bytes, dtype: str, n: int) -> list[Colours]:
    """A list to keep the colours for a pattern, at distances 1, 2, ..."""
    return []


def _all_colours(pairs: Int[np.ndarray, "m 2"], n: int, most: int):
    """The colours at distances 1, 2, ..., until a distance takes more than `most`."""
    if len(pairs) > most * n:
        return
    known = _colourings(pairs.tobytes(), pairs.dtype.str, n)
    # At distance 2, a node and its neighbours all differ.
    degree = np.bincount(pairs[:, 0], minlength=1).max()
    for distance in range(1, most + 2):
        if len(known) < distance:
            if distance > 1 and degree >= most:
                return
            known.append(colour(pairs, distance, size=n))
        colours = known[distance - 1]
        # A graph with small components has no more colours at larger distances.
        if colours.number > most:
            return
        yield colours


def scaled_outcome(plan: Plan, state: SpectralState) -> Outcome:
    """The outcome for the logarithm, from the plan for a matrix with unit diagonal."""
    scaled, known = _unit_diagonal(state)
    (outcome, _), (bar, evidence) = outcome_of(plan, scaled), known.sum(TRACE)
    # Ritz values belong to the scaled matrix, so we drop them.
    dropped = "ritz_values", "ritz_weights", "bottom"
    stats = {x: y for x, y in outcome.stats.items() if x not in dropped}
    if "bracket" in stats:
        stats["bracket"] = jtu.tree_map(lambda x: x + bar.mean, stats["bracket"])
    return outcome._replace(stats=stats).plus(bar, evidence)


def _unit_diagonal(state: SpectralState) -> tuple[SpectralState, Known]:
    """The state for `D^-1/2 A D^-1/2`, D the diagonal of A, and `sum log d_i`.

    Its eigenvalues are closer together. Derivatives take D as fixed: then that sum has
    none, and the matrix has the derivatives of `log det A`.
    """
    A = state.operator
    d = jax.lax.stop_gradient(jnp.real(diagonal_of(A)))
    d = jnp.where(d > 0, d, 1)  # A isn't positive definite, which its eigenvalues show
    D = lx.DiagonalLinearOperator((d**-0.5).astype(A.in_structure().dtype))
    operator = D @ A @ D
    if state.space.is_positive:
        operator = lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)
    lower = None if state.lower is None else state.lower / jnp.max(d)
    scaled = SpectralState(state.key, operator, state.function, lower)
    return scaled, Known([jnp.log(d)], jnp.zeros_like(d))
