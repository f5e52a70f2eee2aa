"""The state of a spectral estimate: operator, function, and facts about eigenvalues."""

from typing import ClassVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, Key

from .._arguments import check_key, check_real_scalar
from .._error_bar import ErrorBar, add_known_error
from .._linalg.dense import hashed_signs, squares
from .._linalg.whitening import Preconditioner
from .._operators.check import checked_operator
from .._operators.entries import known_sizes
from .._operators.space import Space, space_of, state_space
from .._preconditioner import PreconditionedLinearOperator
from .._state import State, StoredKey
from .function import SpectralFunction, checked_lower, spectral_function


class SpectralState(State):
    """The state that estimators for spectral functions take.

    **Attributes:**

    - `key`: a typed key.
    - `operator`: a symmetric or Hermitian operator.
    - `function`: the function to apply to its eigenvalues.
    - `lower`: a number that no eigenvalue is below, or `None`.
    - `rhs`: right-hand sides b, or `None`. With a bracket we estimate `b^* A^-1 b`,
        too.
    - `preconditioner`: the preconditioner that the operator contains, or `None`.
    - `trace`: the operator's trace, if the caller knows it, or `None`.
    - `space`: the space that the operator maps to itself.
    """

    _key: StoredKey
    operator: lx.AbstractLinearOperator
    function: SpectralFunction
    lower: Float[Array, ""] | None
    rhs: Inexact[Array, "n q"] | None
    preconditioner: Preconditioner | None
    trace: Float[Array, ""] | None
    space: Space = eqx.field(static=True)
    grown: ClassVar[None] = None  # pyright: ignore
    is_linear: ClassVar[bool] = False

    def __init__(
        self,
        key: Key[Array, ""],
        operator: lx.AbstractLinearOperator,
        function: SpectralFunction,
        lower: Float[Array, ""] | None = None,
        rhs: Inexact[Array, "n q"] | None = None,
        preconditioner: Preconditioner | None = None,
        trace: Float[Array, ""] | None = None,
    ):
        self._key = StoredKey(key)
        self.operator = operator
        self.function = function
        self.lower = lower
        self.rhs = rhs
        self.preconditioner = preconditioner
        self.trace = jax.lax.stop_gradient(trace)
        self.space = state_space(operator)

    @property
    def num_rhs(self) -> int:
        """How many right-hand sides the state has."""
        return 0 if self.rhs is None else self.rhs.shape[1]

    @property
    def has_bracket(self) -> bool:
        """Whether the truncation error has bounds."""
        is_bounded = self.lower is not None or self.space.is_positive
        return self.function.monotone and is_bounded

    @property
    def magnitude(self) -> Float[Array, ""] | None:
        """Magnitude of the terms that cancel in a product, for rounding errors."""
        A, P, known = self.operator, self.preconditioner, None
        if P is not None:
            known, A = P.magnitude, cast(PreconditionedLinearOperator, A).operator
        sizes = known_sizes(A)
        if sizes is None or not sizes.size:
            return known
        if P is not None:
            # If M is diagonal, the squares are its effect on the sizes.
            signs = hashed_signs(1, len(sizes), self.space.compute_dtype, 0).T
            roots = jnp.sqrt(sizes)[:, None].astype(signs.dtype)
            sizes = squares(jax.lax.stop_gradient(P.apply(roots * signs)))
        largest = jnp.max(sizes)
        return largest if known is None else jnp.maximum(known, largest)

    @property
    def half(self) -> float:
        """The factor in log densities, 1/2 for real observations. For complex ones, which
        are circular and have two real parts, it is 1."""
        return 1.0 if self.space.is_complex else 0.5

    @property
    def treedef(self):
        return self.function.treedef(self.space.real_dtype)

    def bar(self, bars):
        return joint_bar(bars) if self.rhs is None else likelihood_bar(self.half, bars)

    def stats_of_exact(self, stats):
        # We pad with points that have weight 0.
        missing = self.space.size - stats["ritz_values"].shape[0]
        points = jnp.pad(stats["ritz_values"], (0, missing), mode="edge")
        weights = jnp.pad(stats["ritz_weights"], (0, missing))
        return {**stats, "ritz_values": points, "ritz_weights": weights}


def init_spectral_state(
    where: str,
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    fn: object,
    lower: ArrayLike | None,
    monotone: bool = False,
    trace: ArrayLike | None = None,
) -> SpectralState:
    """Checks key, operator and function, and puts them into a state."""
    operator = checked_operator(operator, where)
    key, real = check_key(key, where), space_of(operator).real_dtype
    if not isinstance(monotone, bool):
        raise TypeError(
            f"{where}: monotone must be True or False, got {monotone!r}; pass True if fn "
            "or minus fn is operator monotone, such as jnp.log or jnp.sqrt."
        )
    function = spectral_function(fn, real, where, monotone)
    lower = checked_lower(lower, real, where)
    if trace is not None:
        check_real_scalar(trace, "trace", where, "it is the operator's trace")
        trace = jnp.asarray(trace, real)
    return SpectralState(key, operator, function, lower, trace=trace)


def likelihood_bar(half: float, bars: list[ErrorBar]) -> ErrorBar:
    """The error bar for a Gaussian log likelihood, from `SpectralState.half` and the error
    bars for log-determinant and quadratic forms. Other terms are known exactly."""
    logdet, forms = bars
    q = forms.mean.shape[0]
    mean = -half * (q * logdet.mean + jnp.sum(forms.mean))
    error, freedom = half * q * logdet.standard_error, logdet.degrees_of_freedom
    bar = ErrorBar(mean, error, freedom)
    return add_known_error(bar, half * jnp.sum(forms.standard_error))


def joint_bar(bars: list[ErrorBar]) -> ErrorBar:
    """The error bars of several values in one, for a tolerance. Its `mean` holds moduli,
    because some values may be complex. A single value keeps its own error bar."""
    if len(bars) > 1:
        bars = [bar._replace(mean=jnp.abs(bar.mean)) for bar in bars]
        flat = [[jnp.ravel(x) for x in part] for part in zip(*bars, strict=True)]
        return ErrorBar(*map(jnp.concatenate, flat))
    (bar,) = bars
    freedom = jnp.asarray(bar.degrees_of_freedom, bar.standard_error.dtype)
    return bar._replace(degrees_of_freedom=freedom)
