"""The abstract class of trace estimators, the contract for writing one."""

import abc
from typing import Any, ClassVar

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, Key, PyTree

from ._accuracy.error_bar import exact_bar
from ._arguments import require
from ._drive import Estimator
from ._operators.block import has_real_trace, space_of
from ._operators.entries import entry_of, map_columns
from ._operators.inverse import errors_of_solves, solve_of_column
from ._primitive import Blocks, Identity, StandIn, make_outcome
from ._state import functional_of, init_state


class TraceEstimator(Estimator):
    r"""Abstract base class of trace estimators.

    A concrete estimator is a frozen module whose fields are configuration, so that
    equal estimators compile once. It writes `compute`, and `init` where it needs set-up,
    in plain JAX; it gets `estimate` from here, and with it exact answers for `k >= n`,
    failure reporting, and the derivative rule: the value's derivative is `<Z, dA V>`,
    whatever `compute` does inside. `compute` itself is never differentiated.

    **Attributes:**

    - `gives_diagonals`: a class variable, whether `compute` sums as `state.functional`
        says, which [`traceax.diagonal`][] asks for, of a [`traceax.TraceState`][]. `False`
        by default.
    """

    gives_diagonals: ClassVar[bool] = False
    _plain_exact: ClassVar[bool] = True

    def init(self, key: Key[Array, ""], operator: lx.AbstractLinearOperator) -> Any:
        """Checks, and set-up that doesn't depend on the budget. Optional to write.

        **Arguments:**

        - `key`: as for `jax.random`; a typed key or a legacy `uint32` key.
        - `operator`: a square lineax operator.

        **Returns:**

        A state: a PyTree with at least the attributes `.key` and `.operator`, of which
        only `.operator` is differentiable. By default a [`traceax.TraceState`][]; one of
        your own begins with `traceax.init_state(key, operator)`, which checks both.
        """
        where = f"{type(self).__name__}.init"
        state = init_state(key, operator, where)
        self.check(state.operator, where)
        return state

    def check(self, operator: lx.AbstractLinearOperator, where: str) -> None:
        """Refuses operators that the estimator can't take. Optional."""

    @abc.abstractmethod
    def compute(
        self, state: Any, k: int
    ) -> tuple[
        Inexact[Array, ""],
        Float[Array, ""],
        dict[str, PyTree],
        tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]] | Any,
    ]:
        r"""The algorithm. Called with `1 <= k < n`.

        **Arguments:**

        - `state`: as `init` returned it.
        - `k`: a Python int, the most products that may be used. Use all but at most
            two.

        **Returns:**

        A tuple `(value, standard_error, stats, (V, Z))`:

        - the estimate and its standard error (NaN where it cannot be known);
        - a dictionary with at least `"num_matvecs"`. `"degrees_of_freedom"` of the
            standard error makes the interval a Student t interval; a
            [`traceax.RESULTS`][] item under `"result"` reports a failure. Arrays under
            `"kept"` are handed to a later estimate that goes on from this one, as
            `state.grown.buffers`, and `k` is then the sum of both budgets;
        - blocks of shape `(n, p)`, in the order of the operator's flattened structure,
            with `E[V Z^*] = I`.
        """

    def _exact(self, state):
        space, functional = space_of(state.operator), functional_of(state)
        operator = state.operator

        def entry(column, j):
            return entry_of(column, j), solve_of_column(operator, column, j)

        entries, solves = map_columns(operator, entry)
        sizes = space.rounding * functional.sum(jnp.abs(entries))
        bar = exact_bar(functional.sum(entries), sizes)
        if solves is not None:
            # As good as the products. Their errors may all be of one sign.
            more = functional.sum(errors_of_solves(solves).diagonal)
            bar = bar._replace(standard_error=bar.standard_error + more)
        return *bar[:2], {"num_matvecs": space.size}, Identity(operator)

    def _finish(self, state, computed):
        value, error, stats, blocks = computed
        space, where = space_of(state.operator), f"{type(self).__name__}.compute"
        what, hint = '"num_matvecs" must be among stats', "see TraceEstimator.compute"
        require("num_matvecs" in stats, where, what, f"{[*stats]}", hint)
        if not isinstance(blocks, StandIn):
            V, Z = map(jnp.shape, blocks)
            what = f"blocks V and Z must be of one shape ({space.size}, p)"
            right = V == Z and V[:-1] == (space.size,)
            require(right, where, what, f"{V} and {Z}", hint)
            blocks = Blocks([blocks])
        dtype, real = space.compute_dtype, has_real_trace(state.operator)
        return make_outcome(value, error, stats, dtype, real=real), blocks
