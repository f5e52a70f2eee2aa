"""A network's prior precision, chosen by the Laplace evidence.

A network with 2,410 parameters learns to read 300 of scikit-learn's digits. The Laplace
approximation gives the evidence for a prior precision, through the log-determinant of the
Gauss-Newton matrix plus the precision. The evidence's gradient moves the precision while the
network trains. We print estimates next to exact values.

    python examples/laplace_evidence.py [figure.png]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import traceax as tx

BUDGET = 200  # products with the Gauss-Newton matrix, per log-determinant
ROUNDS, STEPS, EVIDENCE_STEPS = 14, 100, 5  # steps per round: network, then precision
CHECKED = (0, 4, ROUNDS)


def initial_network(key):
    keys = jax.random.split(key)
    return {
        "w": jax.random.normal(keys[0], (64, 32)) / 8,
        "b": jnp.zeros(32),
        "v": jax.random.normal(keys[1], (32, 10)) / 32**0.5,
        "c": jnp.zeros(10),
    }


# --8<-- [start:evidence]
def logits(network, data):
    hidden = jnp.tanh(data[0] @ network["w"] + network["b"])
    return hidden @ network["v"] + network["c"]


def negative_log_likelihood(logits, data):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, data[1])
    return jnp.sum(losses)


def map_loss(network, log_precision, data):
    penalty = jnp.exp(log_precision) * optax.tree.norm(network, squared=True) / 2
    return negative_log_likelihood(logits(network, data), data) + penalty


@jax.jit
def negative_log_evidence(log_precision, network, data, key):
    """The Laplace approximation at a trained network, and its standard error."""
    G = tx.GaussNewtonLinearOperator(logits, negative_log_likelihood, network, data)
    logdet = tx.logdet(key, G, BUDGET, shift=jnp.exp(log_precision))
    prior_logdet = G.in_size() * log_precision
    value = map_loss(network, log_precision, data) + (logdet.value - prior_logdet) / 2
    return value, logdet.standard_error / 2


estimated_evidence = jax.jit(jax.value_and_grad(negative_log_evidence, has_aux=True))
# --8<-- [end:evidence]


def exact_evidence(log_precision, network, data):
    """The value and its derivative, from a factorisation in double precision."""
    R, precision = square_root(network, data), float(jnp.exp(log_precision))
    n = R.shape[1]
    matrix = R.T @ R + precision * np.eye(n)
    logdet = np.linalg.slogdet(matrix).logabsdet - n * float(log_precision)
    value = float(map_loss(network, log_precision, data)) + logdet / 2
    norm = float(optax.tree.norm(network, squared=True))
    slope = precision * (norm + np.trace(np.linalg.inv(matrix))) - n
    return value, slope / 2


def square_root(network, data):
    """A matrix R with `R^T R = G`. An image has the rows `sqrt(p_c) (J_c - sum_c p_c J_c)`."""
    p = np.asarray(jax.nn.softmax(logits(network, data)), np.float64)
    parts = jax.tree.leaves(jax.jit(jax.jacrev(logits))(network, data))
    jacobian = np.concatenate([x.reshape(*p.shape, -1) for x in parts], axis=-1)
    centred = jacobian - np.einsum("nc,ncj->nj", p, jacobian)[:, None]
    return (np.sqrt(p)[..., None] * centred).reshape(p.size, -1)


@jax.jit
def train_network(network, log_precision, data):
    optimiser = optax.adam(1e-2)

    def step(carry, _):
        network, state = carry
        gradient = jax.grad(map_loss)(network, log_precision, data)
        updates, state = optimiser.update(gradient, state)
        return (optax.apply_updates(network, updates), state), None

    carry = network, optimiser.init(network)
    return jax.lax.scan(step, carry, length=STEPS)[0][0]


def main(path):
    x, labels = load_digits(return_X_y=True)
    x, labels = jnp.asarray(x / 16, jnp.float32), jnp.asarray(labels)
    order = jax.random.permutation(jax.random.key(0), len(labels))
    data, test = ((x[part], labels[part]) for part in (order[:300], order[300:]))

    network_key, key = jax.random.split(jax.random.key(0))
    network, log_precision = initial_network(network_key), jnp.log(jnp.array(0.01))
    optimiser = optax.adam(0.2)
    state, rows = optimiser.init(log_precision), []
    print("round precision  evidence     error    exact    slope    exact  test loss")
    for step in range(ROUNDS + 1):
        network = train_network(network, log_precision, data)
        loss = negative_log_likelihood(logits(network, test), test) / len(test[1])
        for i in range(EVIDENCE_STEPS):
            probes = jax.random.fold_in(key, EVIDENCE_STEPS * step + i)
            arguments = log_precision, network, data, probes
            (value, error), slope = estimated_evidence(*arguments)
            precision = float(jnp.exp(log_precision))
            if i == 0:
                rows.append((precision, float(value), float(loss)))
            if i == 0 and step in CHECKED:
                truth, exact = exact_evidence(log_precision, network, data)
                print(
                    f"{step:>5} {precision:>9.3f} {-value:>9.1f} ± {error:>7.1f} "
                    f"{-truth:>8.1f} {slope:>8.1f} {exact:>8.1f} {loss:>10.3f}"
                )
                assert abs(value - truth) < 3 * error
                assert abs(slope - exact) < 3 + 0.1 * abs(exact)
            updates, state = optimiser.update(slope, state)
            log_precision = optax.apply_updates(log_precision, updates)
    _, values, losses = np.array(rows).T
    best = int(np.argmin(values))
    print(f"the evidence is largest in round {best}, at test loss {losses[best]:.3f}")
    assert values[best] < values[0] / 2

    figure = Figure(figsize=(10, 3.5), layout="constrained")
    titles = ("prior precision", "negative log evidence", "test loss")
    for i, (axes, title) in enumerate(zip(figure.subplots(1, 3), titles, strict=True)):
        axes.plot([row[i] for row in rows])
        axes.set(title=title, xlabel="round")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    # We use one thread: on a busy machine, LAPACK's threads wait for each other.
    with threadpool_limits(1, user_api="blas"):
        main(sys.argv[1] if len(sys.argv) > 1 else "laplace_evidence.png")
