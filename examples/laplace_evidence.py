"""The prior precision of a network, chosen by the Laplace evidence.

A network of 2,410 parameters learns to read digits. The Laplace approximation makes the
evidence of the data a function of the precision of the prior, through the
log-determinant of the Gauss-Newton operator plus the precision. The operator acts on
the network's PyTree and is only ever applied. The gradient of the evidence moves the
precision while the network is trained.

The gradient holds the weights fixed. They and the operator follow the precision, too,
so the evidence need not be largest in the last round: the best round is chosen.

Estimates are printed next to exact values, by a dense factorisation.

    python examples/laplace_evidence.py [figure.png]
"""

import sys
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import traceax as tx

BUDGET = 150  # products with the operator, for every log-determinant
ROUNDS = 14
STEPS = 100  # of the network in a round
EVIDENCE_STEPS = 5  # of the precision in a round
CHECKED = (0, 4, ROUNDS)


class Data(NamedTuple):
    x: Float[Array, "n 64"]
    labels: Int[Array, " n"]


def digits() -> tuple[Data, Data]:
    """300 images to learn from, and the others."""
    x, labels = load_digits(return_X_y=True)
    x, labels = jnp.asarray(x / 16, jnp.float32), jnp.asarray(labels)
    order = jax.random.permutation(jax.random.key(0), len(labels))
    train, test = order[:300], order[300:]
    return Data(x[train], labels[train]), Data(x[test], labels[test])


class Network(eqx.Module):
    """The parameters: a PyTree of four leaves."""

    weights_1: Float[Array, "32 64"]
    biases_1: Float[Array, " 32"]
    weights_2: Float[Array, "10 32"]
    biases_2: Float[Array, " 10"]

    def logits(self, x: Float[Array, "n 64"]) -> Float[Array, "n 10"]:
        hidden = jnp.tanh(x @ self.weights_1.T + self.biases_1[None, :])
        return hidden @ self.weights_2.T + self.biases_2[None, :]


def initial_network(key: Key[Array, ""]) -> Network:
    keys = jax.random.split(key)
    return Network(
        jax.random.normal(keys[0], (32, 64)) / 8,
        jnp.zeros(32),
        jax.random.normal(keys[1], (10, 32)) / jnp.sqrt(32.0),
        jnp.zeros(10),
    )


def negative_log_likelihood(network: Network, data: Data) -> Float[Array, ""]:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        network.logits(data.x), data.labels
    )
    return jnp.sum(losses)


def squared_norm(network: Network) -> Float[Array, ""]:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(network))


def num_parameters(network: Network) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(network))


def map_loss(
    network: Network, log_precision: Float[Array, ""], data: Data
) -> Float[Array, ""]:
    penalty = jnp.exp(log_precision) * squared_norm(network) / 2
    return negative_log_likelihood(network, data) + penalty


#
# The evidence
#


# --8<-- [start:operator]
def gauss_newton(
    network: Network, x: Float[Array, "n 64"]
) -> lx.AbstractLinearOperator:
    """`J^T H J`, J the Jacobian of the logits and H the Hessian of the loss in them."""
    logits, jacobian = jax.linearize(lambda network: network.logits(x), network)
    transpose = jax.linear_transpose(jacobian, network)
    p = jax.nn.softmax(logits)

    def product(v: Network) -> Network:
        u = jacobian(v)
        # On CPUs, XLA of jaxlib 0.10.2 gets a sum of `p * u` wrong for many v at once.
        means = jnp.einsum("nc,nc->n", p, u)
        (w,) = transpose(p * (u - means[:, None]))
        return w

    return lx.FunctionLinearOperator(
        product, jax.eval_shape(lambda: network), lx.positive_semidefinite_tag
    )


# --8<-- [end:operator]


# --8<-- [start:evidence]
def negative_log_evidence(
    log_precision: Float[Array, ""], network: Network, data: Data, key: Key[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """By the Laplace approximation at a trained network, and its standard error."""
    operator = gauss_newton(network, data.x)
    logdet = tx.logdet(key, operator, BUDGET, shift=jnp.exp(log_precision))
    of_prior = num_parameters(network) * log_precision
    value = map_loss(network, log_precision, data) + (logdet.value - of_prior) / 2
    return value, logdet.standard_error / 2


estimated_evidence = jax.jit(jax.value_and_grad(negative_log_evidence, has_aux=True))


# --8<-- [end:evidence]


@jax.jit
def dense_gauss_newton(
    network: Network, x: Float[Array, "n 64"]
) -> Float[Array, "p p"]:
    return gauss_newton(network, x).as_matrix()


def exact_evidence(
    log_precision: Float[Array, ""], network: Network, data: Data
) -> tuple[float, float]:
    """The value and its derivative, by a factorisation in double precision."""
    n, precision = num_parameters(network), float(jnp.exp(log_precision))
    matrix = np.asarray(dense_gauss_newton(network, data.x), np.float64)
    factor = np.linalg.cholesky(matrix + precision * np.eye(n))
    logdet = 2 * np.sum(np.log(np.diag(factor)))
    value = float(map_loss(network, log_precision, data))
    value += (logdet - n * float(log_precision)) / 2
    trace = np.sum(np.linalg.inv(factor) ** 2)
    slope = precision * (float(squared_norm(network)) + trace) - n
    return value, slope / 2


#
# Training
#


@jax.jit
def train_network(
    network: Network, log_precision: Float[Array, ""], data: Data
) -> Network:
    optimiser = optax.adam(1e-2)

    def step(carry, _):
        network, state = carry
        gradient = jax.grad(map_loss)(network, log_precision, data)
        updates, state = optimiser.update(gradient, state)
        return (optax.apply_updates(network, updates), state), None

    carry = (network, optimiser.init(network))
    (network, _), _ = jax.lax.scan(step, carry, length=STEPS)
    return network


@jax.jit
def score(network: Network, data: Data) -> tuple[Float[Array, ""], Float[Array, ""]]:
    hits = jnp.argmax(network.logits(data.x), axis=1) == data.labels
    loss = negative_log_likelihood(network, data) / len(data.labels)
    return loss, jnp.mean(hits)


class Row(NamedTuple):
    """One round: the evidence and its derivative, estimated and perhaps exact."""

    step: int
    precision: float
    value: float
    standard_error: float
    slope: float
    exact: tuple[float, float] | None
    test_loss: float
    test_accuracy: float


# --8<-- [start:rounds]
def train(key: Key[Array, ""]) -> list[Row]:
    data, test = digits()
    network_key, key = jax.random.split(key)
    network = initial_network(network_key)
    log_precision = jnp.log(jnp.array(0.01))
    optimiser = optax.adam(0.2)
    state = optimiser.init(log_precision)
    rows = []
    for step in range(ROUNDS + 1):
        network = train_network(network, log_precision, data)
        keys = jax.random.split(jax.random.fold_in(key, step), EVIDENCE_STEPS)
        for i in range(EVIDENCE_STEPS):
            estimate = estimated_evidence(log_precision, network, data, keys[i])
            if i == 0:
                rows.append(
                    make_row(step, log_precision, network, data, test, estimate)
                )
            updates, state = optimiser.update(estimate[1], state)
            log_precision = optax.apply_updates(log_precision, updates)
    return rows


# --8<-- [end:rounds]


def make_row(
    step: int,
    log_precision: Float[Array, ""],
    network: Network,
    data: Data,
    test: Data,
    estimate,
) -> Row:
    (value, error), slope = estimate
    exact = exact_evidence(log_precision, network, data) if step in CHECKED else None
    numbers = (jnp.exp(log_precision), value, error, slope)
    precision, *rest = (float(x) for x in numbers)
    loss, accuracy = score(network, test)
    return Row(step, precision, *rest, exact, float(loss), float(accuracy))


#
# What is shown
#


def print_rows(rows: list[Row]) -> None:
    print(
        f"{'':<6}{'':>9}{'negative log evidence':>33}  {'its derivative':>20}"
        f"  {'test images':>16}\n"
        f"{'round':<6}{'precision':>9}{'estimate':>11}   {'s.e.':<8}{'exact':>11}"
        f"  {'estimate':>10}{'exact':>10}  {'loss':>7}{'correct':>9}"
    )
    for row in rows:
        exact = "".join(f"{x:.2f}," for x in row.exact or ()) or ",,"
        value, slope, _ = exact.split(",")
        print(
            f"{row.step:<6}{row.precision:>9.3f}{row.value:>11.2f} ± "
            f"{row.standard_error:<8.2f}{value:>11}  {row.slope:>10.2f}{slope:>10}"
            f"  {row.test_loss:>7.3f}{row.test_accuracy:>9.1%}"
        )


def save_figure(path: str, rows: list[Row]) -> None:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    steps = [row.step for row in rows]
    checked = [row for row in rows if row.exact is not None]
    left.plot(steps, [row.value for row in rows], label=f"{BUDGET} products")
    exact = [row.exact[0] for row in checked]
    left.plot([row.step for row in checked], exact, "ko", label="Cholesky")
    left.set_title("negative log evidence")
    left.legend()
    middle.semilogy(steps, [row.precision for row in rows])
    middle.set_title("prior precision")
    right.plot(steps, [row.test_loss for row in rows])
    right.set_title("test loss")
    for axes in (left, middle, right):
        axes.set_xlabel("round")
        axes.set_xticks(steps[::2])
    figure.savefig(path, dpi=150)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "laplace_evidence.png"
    rows = train(jax.random.key(0))
    print_rows(rows)
    best = min(rows, key=lambda row: row.value)
    print(f"\nThe evidence is largest in round {best.step}.")
    save_figure(path, rows)
    print(f"saved {path}")
    for row in rows:
        if row.exact is not None:
            value, slope = row.exact
            assert abs(row.value - value) < 0.02 * abs(value)
            assert abs(row.slope - slope) < 3 + 0.1 * abs(slope)
    assert best.value < rows[0].value / 2
    assert best.test_loss < rows[0].test_loss


if __name__ == "__main__":
    # Threads of LAPACK wait for each other on a busy machine.
    with threadpool_limits(1, user_api="blas"):
        main()
