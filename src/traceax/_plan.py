"""Plans: how a call is answered, decided once, without side effects."""

import functools as ft
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
from jaxtyping import PyTree

from ._arguments import most_products, resolve_budget
from ._outcome import Outcome
from ._rule import StandIn
from ._state import State
from ._tolerance import (
    EXACT_SIZE,
    NO_PROGRESS_METER,
    Depth,
    ProgressMeter,
    Stop,
    loop_products,
)


class ExactAnswer(NamedTuple):
    """An exact answer that takes fewer than n products: its name and function."""

    name: str
    answer: Callable[[PyTree], Outcome]


@ft.singledispatch
def from_all_products(state: State, estimator: PyTree) -> tuple[Outcome, StandIn]:
    """The exact answer from n products, and its stand-in. `_exact/` registers one for
    every kind of state. Its `stats` have the keys of the estimator's."""
    raise NotImplementedError(type(state))


class Plan(eqx.Module):
    """How a call is answered. `str(plan)` says it in a sentence.

    - `estimator`: takes the products.
    - `exact`: the exact answer from structure or entries, if it is used.
    - `size`: n.
    - `products`: the most products in all, including those in a state; n for an exact
        answer from all products.
    - `stop`: what ends a loop; `None` for a fixed budget. A tolerance also judges exact
        answers.
    - `falls_back`: whether n more products give the exact answer if a loop fails.
    """

    estimator: PyTree
    exact: ExactAnswer | None = eqx.field(static=True)
    size: int = eqx.field(static=True)
    products: int = eqx.field(static=True)
    stop: Stop | Depth | None
    falls_back: bool = eqx.field(static=True, default=False)

    @property
    def takes_all(self) -> bool:
        """Whether the answer is exact, from products with all unit vectors."""
        return self.exact is None and self.products == self.size

    @property
    def by(self) -> tuple[str, int]:
        """The estimator's name, and how many products make an answer exact."""
        if self.exact is not None:
            return "", 0
        return type(self.estimator).__name__, self.size

    def __str__(self):
        if self.exact is not None:
            return f"exact by {self.exact.name}"
        if self.takes_all:
            return f"exact by all {self.size} products"
        name = self.by[0].removesuffix("Estimator")
        if self.stop is None:
            return f"{self.products} products by {name}"
        goal = "to a tolerance" if isinstance(self.stop, Stop) else "to convergence"
        end = f", else exact by all {self.size}" if self.falls_back else ""
        return f"{goal} by {name}, at most {self.products} products{end}"


def make_plan(
    estimator: PyTree,
    state: State,
    k: int | None,
    stop: Stop | None,
    meter: ProgressMeter = NO_PROGRESS_METER,
    where: str = "",
    exact: ExactAnswer | None = None,
) -> Plan:
    """Decides between `exact`, all products, a budget of k more products, and a loop.

    Without k and tolerance, a loop ends with the truncation error if the estimator knows
    its `depth`, after fewer than n products, and if n is small the answer is exact.
    """
    size = state.space.size
    if exact is not None:
        return Plan(estimator, exact, size, 0, stop)
    end = stop
    depth = estimator.depth(state, meter) if k is None and stop is None else None
    if depth is not None:
        k = size
        if size > EXACT_SIZE:
            k, end = min(size - 1, most_products(size)), depth
    loop = k = resolve_budget(k, stop, size, where, monotone=not state.is_linear)
    if stop is not None:
        # We reserve n products for the exact answer, in case the loop fails.
        loop = loop_products(k, size, estimator.least_loop_products(state))
    if not 0 < loop < size:
        return Plan(estimator, None, size, size, end)
    spent = 0 if state.grown is None else state.grown.budget
    most = min(spent + loop, size - 1)
    estimator.check_budget(k if end is None else most, at_most=end is not None)
    falls_back = stop is not None and size <= k
    return Plan(estimator, None, size, most, end, falls_back)
