"""First calls, steps and errors of whole jobs, compared with handwritten JAX code.

    taskset -c 1 python benchmarks/jobs.py       # the tables of benchmarks/jobs.md
    taskset -c 1 python benchmarks/jobs.py flow  # flow, score, pinn, hessian, layers, gp

A job's implementations run in turn, in this one process. Times are medians of one thread's CPU
time, and ratios are relative to the fastest handwritten code. A first call traces, compiles and
runs once, with empty caches. Errors are root mean squares over keys, for a gradient or a value,
relative to the truth. For the large Hessian, the error is the standard deviation relative to
the mean.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.scipy.stats import norm

import traceax as tx

try:
    import flax.linen as linen
    from flax import nnx
except ImportError:
    linen = nnx = None

PSD = lx.positive_semidefinite_tag


#
# Measuring
#


def cpu_time(fn, *args):
    start = time.process_time()
    jax.block_until_ready(fn(*args))
    return time.process_time() - start


def compare(title, methods, args, repetitions, error=None, first_calls=3):
    """Print a row for each method. `methods` maps names to functions of `*args` and a key.

    Handwritten code has a name that begins with "by hand".
    """
    first, steps, compiled = ({name: [] for name in methods} for _ in range(3))
    for _ in range(first_calls):
        for name, fn in methods.items():
            jax.clear_caches()
            compiled[name] = jax.jit(lambda *args, fn=fn: fn(*args))
            first[name].append(cpu_time(compiled[name], *args, jr.key(0)))
    for fn in compiled.values():
        jax.block_until_ready(fn(*args, jr.key(0)))
    for i in range(repetitions):
        for name, fn in compiled.items():
            steps[name].append(cpu_time(fn, *args, jr.key(i)))
    first, steps = (
        {name: statistics.median(seconds) for name, seconds in times.items()}
        for times in (first, steps)
    )
    best = min(
        (name for name in methods if name.startswith("by hand")),
        key=lambda name: steps[name],
    )
    for name, fn in compiled.items():
        cell = (
            "" if error is None else f"{error(lambda key, fn=fn: fn(*args, key)):.1e}"
        )
        print(
            f"| {title} | {name} | {first[name]:.2f} ({first[name] / first[best]:.2f}) "
            f"| {1e3 * steps[name]:.3g} ({steps[name] / steps[best]:.2f}) | {cell} |",
            flush=True,
        )
    return steps


def relative_error(exact, keys=20):
    """Return a function for the relative root mean square error in a method's last output."""

    def error(fn):
        truth = ravel_pytree(exact)[0]
        outputs = [ravel_pytree(fn(key)[-1])[0] for key in jr.split(jr.key(5), keys)]
        squares = [jnp.sum((out - truth) ** 2) for out in outputs]
        return float(jnp.sqrt(jnp.mean(jnp.stack(squares)) / jnp.sum(truth**2)))

    return error


def deviation(fn, keys=8):
    values = np.array([fn(key) for key in jr.split(jr.key(5), keys)])
    return float(values.std(ddof=1) / values.mean())


def mlp(inputs, outputs, width, depth):
    """A network's arrays, and its static part."""
    network = eqx.nn.MLP(inputs, outputs, width, depth, jnp.tanh, key=jr.key(0))
    return eqx.partition(network, eqx.is_inexact_array)


def signs(key, n):
    return jr.rademacher(key, (n,), jnp.float32)


#
# The jobs
#


def flow():
    """Maximum likelihood for a continuous normalising flow in the plane, with one probe."""
    params, static = mlp(3, 2, 64, 2)
    xs = jr.normal(jr.key(1), (256, 2)) * jnp.array([1.0, 0.3]) + 0.5

    def log_density(rates, x):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(rates),
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.1,
            (x, jnp.zeros(())),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
            max_steps=64,
        )
        end, log_volume = jax.tree.map(lambda y: y[-1], solution.ys)
        return jnp.sum(norm.logpdf(end)) + log_volume

    def ours(f, x, key, k=1):
        def rates(t, state, args):
            velocity, divergence = tx.divergence(key, lambda x: f(t, x), state[0], k)
            return velocity, divergence.value

        return log_density(rates, x)

    def by_hand(f, x, key):
        probe = signs(key, 2)

        def rates(t, state, args):
            velocity, product = jax.jvp(lambda x: f(t, x), (state[0],), (probe,))
            return velocity, probe @ product

        return log_density(rates, x)

    def forward(method):
        def fn(params, key):
            network = eqx.combine(params, static)

            def f(t, x):
                return network(jnp.append(x, t))

            values = jax.vmap(lambda x, key: method(f, x, key))(xs, jr.split(key, 256))
            return (-jnp.mean(values),)

        return fn

    def step(method):
        def fn(params, key):
            loss, gradient = jax.value_and_grad(lambda p: forward(method)(p, key)[0])(
                params
            )
            return optax.apply_updates(params, gradient), loss, gradient

        return fn

    methods = {"traceax": ours, "by hand, jvp": by_hand}
    exact = jax.jit(step(lambda *args: ours(*args, 2)))(params, jr.key(0))[-1]
    compare(
        "flow, forward",
        {n: forward(method) for n, method in methods.items()},
        (params,),
        20,
    )
    steps = {n: step(method) for n, method in methods.items()}
    compare("flow, training step", steps, (params,), 20, relative_error(exact))


def score():
    """Sliced score matching in 20 dimensions, with one probe per point."""
    params, static = mlp(20, 20, 128, 2)
    xs = jr.normal(jr.key(1), (256, 20))

    def ours(f, x, key, k=1):
        value, divergence = tx.divergence(key, f, x, k)
        return divergence.value + jnp.sum(value**2) / 2

    def by_hand(f, x, key):
        probe = signs(key, 20)
        value, product = jax.jvp(f, (x,), (probe,))
        return probe @ product + jnp.sum(value**2) / 2

    def step(method):
        def loss(params, key):
            f = eqx.combine(params, static)
            return jnp.mean(
                jax.vmap(lambda x, k: method(f, x, k))(xs, jr.split(key, 256))
            )

        return jax.value_and_grad(loss)

    exact = jax.jit(step(lambda *args: ours(*args, 20)))(params, jr.key(0))[-1]
    methods = {"traceax": step(ours), "by hand, jvp": step(by_hand)}
    compare("score matching, gradient", methods, (params,), 100, relative_error(exact))


def pinn():
    """Poisson's equation in 10 dimensions, with exact Laplacians."""
    params, static = mlp(10, "scalar", 64, 3)
    xs = jr.uniform(jr.key(1), (256, 10))

    def ours(u, x, key):
        return tx.laplacian(key, u, x, 10)[2].value

    def by_hand(u, x, key):
        _, product = jax.linearize(jax.grad(u), x)
        return jnp.trace(jax.vmap(product)(jnp.eye(10)))

    def dense(u, x, key):
        return jnp.trace(jax.hessian(u)(x))

    def step(method):
        def loss(params, key):
            u = eqx.combine(params, static)
            laplacians = jax.vmap(lambda x: method(u, x, key))(xs)
            return jnp.mean((laplacians + jnp.sum(jnp.sin(xs), axis=1)) ** 2)

        return jax.value_and_grad(loss)

    exact = jax.jit(step(dense))(params, jr.key(0))[-1]
    methods = {
        "traceax": ours,
        "by hand, linearize": by_hand,
        "by hand, hessian": dense,
    }
    methods = {name: step(method) for name, method in methods.items()}
    compare("PINN Laplacian, gradient", methods, (params,), 20, relative_error(exact))


def networks():
    """Networks with about 200,000 parameters: arrays, and a function of arrays and images."""
    params, static = mlp(784, 10, 200, 2)
    models = {"equinox": (params, lambda p, x: jax.vmap(eqx.combine(p, static))(x))}
    if linen is None:
        return models
    layers = (linen.Dense(200), jnp.tanh, linen.Dense(200), jnp.tanh, linen.Dense(10))
    model = linen.Sequential(layers)
    models["flax linen"] = (
        model.init(jr.key(0), jnp.zeros((1, 784))),
        model.apply,
    )

    class Network(nnx.Module):
        def __init__(self, rngs):
            sizes = ((784, 200), (200, 200), (200, 10))
            self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])

        def __call__(self, x):
            for layer in self.layers[:-1]:
                x = jnp.tanh(layer(x))
            return self.layers[-1](x)

    graph, state = nnx.split(Network(nnx.Rngs(0)))
    models["flax nnx"] = state, lambda p, x: nnx.merge(graph, p)(x)
    return models


def hessian(k=40):
    """The trace of a network's Hessian, from 40 products."""
    x = jr.normal(jr.key(1), (128, 784))
    labels = jr.randint(jr.key(2), (128,), 0, 10)
    for name, (params, apply) in networks().items():

        def loss(params, batch, apply=apply):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                apply(params, batch[0]), batch[1]
            )
            return jnp.mean(losses)

        def ours(params, x, labels, key, estimator=None, loss=loss):
            operator = tx.HessianLinearOperator(loss, params, (x, labels))
            return tx.trace(key, operator, k, estimator).value

        def hutchinson(*args, ours=ours):
            return ours(*args, tx.HutchinsonEstimator())

        def samples(params, x, labels, key, loss=loss):
            flat, unravel = ravel_pytree(params)
            gradient = jax.grad(lambda p: loss(unravel(p), (x, labels)))

            def sample(key):
                probe = signs(key, flat.size)
                return probe @ jax.jvp(gradient, (flat,), (probe,))[1]

            return sample, jr.split(key, k)

        def vmapped(*args, samples=samples):
            sample, keys = samples(*args)
            return jnp.mean(jax.vmap(sample)(keys))

        def mapped(*args, samples=samples):
            sample, keys = samples(*args)
            return jnp.mean(jax.lax.map(sample, keys))

        methods = {"traceax, Hutchinson": hutchinson, "traceax, default": ours}
        methods |= {"by hand, vmap": vmapped, "by hand, lax.map": mapped}
        error = deviation if name == "equinox" else None
        title, args = f"Hessian, {name}", (params, x, labels)
        compare(title, methods, args, 5, error, first_calls=1)


def layers(k=120):
    """Traces by leaf for a convolutional network at initialisation, at equal time."""

    class Network(eqx.Module):
        convolutions: list
        head: eqx.nn.Linear

        def __init__(self, key):
            keys, channels = jr.split(key, 4), (1, 8, 16, 16)
            self.convolutions = [
                eqx.nn.Conv2d(channels[i], channels[i + 1], 3, 2, 1, key=keys[i])
                for i in range(3)
            ]
            self.head = eqx.nn.Linear(64, 10, key=keys[3])

        def __call__(self, x):
            for layer in self.convolutions:
                x = jax.nn.relu(layer(x))
            return self.head(x.reshape(-1))

    params, static = eqx.partition(Network(jr.key(0)), eqx.is_inexact_array)
    batch = jr.normal(jr.key(1), (64, 1, 16, 16)), jr.randint(jr.key(2), (64,), 0, 10)

    def loss(params, batch):
        logits = jax.vmap(eqx.combine(params, static))(batch[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return jnp.mean(losses)

    def ours(k, probes="whole"):
        def fn(params, key):
            operator = tx.HessianLinearOperator(loss, params, batch)
            parts, total = tx.leaf_traces(key, operator, k, probes=probes)
            return parts.value, total.value

        return fn

    def by_hand(k):
        def fn(params, key):
            flat, unravel = ravel_pytree(params)
            gradient = jax.grad(lambda p: loss(unravel(p), batch))

            def sample(key):
                probe = signs(key, flat.size)
                return probe * jax.jvp(gradient, (flat,), (probe,))[1]

            diagonal = jnp.mean(jax.vmap(sample)(jr.split(key, k)), axis=0)
            return jax.tree.map(jnp.sum, unravel(diagonal)), jnp.sum(diagonal)

        return fn

    n = tx.HessianLinearOperator(loss, params, batch).in_size()
    parts, total = jax.jit(ours(n))(params, jr.key(0))

    def median_time(fn):
        jax.block_until_ready(fn(params, jr.key(0)))
        return statistics.median(cpu_time(fn, params, jr.key(i)) for i in range(9))

    blocks = jax.jit(ours(k, probes="blocks"))
    whole = {"whole, XTrace": ours, "by hand, Hutchinson, vmap": by_hand}
    print(
        f"\ntraces by leaf, convolutional network with {n} parameters at initialisation, equal time"
    )
    print(
        "| implementation | products | time (ms) | relative error of the total | "
        "relative error of leaves |"
    )
    print("|---|---|---|---|---|")
    rows = {"blocks": (blocks, k)}
    target_time = median_time(blocks)
    for name, make in whole.items():
        # We interpolate, because time is affine in the number of products.
        half_time, full_time = (median_time(jax.jit(make(i))) for i in (k // 2, k))
        number = int(k // 2 * (1 + (target_time - half_time) / (full_time - half_time)))
        number = min(max(number, 8), n - 1)
        rows[name] = jax.jit(make(number)), number
    for name, (fn, number) in rows.items():

        def leaf_traces(key, fn=fn):
            return (fn(params, key)[0],)

        def total_trace(key, fn=fn):
            return (fn(params, key)[1],)

        total_error, leaf_error = (
            relative_error(total)(total_trace),
            relative_error(parts)(leaf_traces),
        )
        milliseconds = 1e3 * median_time(fn)
        print(
            f"| {name} | {number} | {milliseconds:.3g} | {total_error:.1e} "
            f"| {leaf_error:.1e} |",
            flush=True,
        )


def gp(n=3000, k=100):
    """A kernel matrix's log-determinant and its gradient, in float64."""
    jax.config.update("jax_enable_x64", True)
    x = jr.uniform(jr.key(1), (n, 2))
    params = {"scales": jnp.log(jnp.full(2, 0.3)), "noise": jnp.log(0.1)}

    def kernel(params):
        scaled = x / jnp.exp(params["scales"])
        squares = jnp.sum(scaled**2, axis=1)
        return jnp.exp(scaled @ scaled.T - (squares[:, None] + squares[None]) / 2)

    def ours(params, key):
        S = tx.as_operator(kernel(params), tags=PSD)
        return tx.logdet(key, S, k, shift=jnp.exp(params["noise"])).value

    def cholesky(params, key):
        K = kernel(params) + jnp.exp(params["noise"]) * jnp.eye(n)
        return 2 * jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(K))))

    methods = {"traceax": ours, "by hand, Cholesky": cholesky}
    methods = {name: jax.value_and_grad(method) for name, method in methods.items()}
    exact = jax.jit(methods["by hand, Cholesky"])(params, jr.key(0))[-1]
    title, error = f"log-determinant, n = {n:,}", relative_error(exact, keys=3)
    compare(title, methods, (params,), 3, error, first_calls=1)


JOBS = {
    "flow": flow,
    "score": score,
    "pinn": pinn,
    "hessian": hessian,
    "layers": layers,
    "gp": gp,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", default=list(JOBS), metavar="JOB")
    jobs = parser.parse_args().jobs
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((8, 8))))
    print(
        "| job | implementation | first call (s), ratio | step (ms), ratio | "
        "relative error |"
    )
    print("|---|---|---|---|---|")
    for name in jobs:
        JOBS[name]()


if __name__ == "__main__":
    main()
