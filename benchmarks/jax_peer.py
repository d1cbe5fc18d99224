"""JAX: a scan over the steps of a loop, on data that stays on the device; only the ids of the examples are fed."""

import jax
import jax.numpy as jnp

from benchmarks.workloads import means, shuffled_ids, timed

_BETA_1, _BETA_2, _EPSILON, _RATE = 0.9, 0.999, 1e-7, 1e-3  # those of Keras


def scan_loop(task):
    """Builds the loop: the same multi-layer perceptron and Adam, one compiled program of `steps_per_loop` steps."""
    x, y = (jnp.asarray(array.numpy()) for array in task.arrays)
    parameters = [jnp.array(weight.numpy()) for weight in task.model.trainable_variables]
    state = [parameters, *([jnp.zeros_like(p) for p in parameters] for _ in range(2)), jnp.zeros((), jnp.int32)]
    ids = shuffled_ids(task.examples)

    def run(steps):
        for _ in range(steps // task.steps_per_loop):
            batches = ids(task.steps_per_loop * task.workload.batch).reshape(task.steps_per_loop, -1)
            state[:], sums = _loop(state, x, y, batches)
            metrics = means(sums)
        return metrics

    first_x, first_y = (jnp.asarray(array.numpy()) for array in task.some_examples())
    return timed(run, lambda: float(_losses(state[0], first_x, first_y)[0].mean()))


def _losses(parameters, x, y):
    for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2]):
        x = jax.nn.relu(x @ weight + bias)
    logits = x @ parameters[-2] + parameters[-1]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)[:, 0]
    return losses, logits.argmax(1) == y


def _mean_loss(parameters, x, y):
    losses, right = _losses(parameters, x, y)
    return losses.mean(), jnp.stack([losses.sum(), right.sum(), jnp.float32(len(y))])


def _adam(gradient, parameter, first, second, step):
    first = first + (gradient - first) * (1 - _BETA_1)
    second = second + (gradient**2 - second) * (1 - _BETA_2)
    rate = _RATE * jnp.sqrt(1 - _BETA_2**step) / (1 - _BETA_1**step)
    return parameter - rate * first / (jnp.sqrt(second) + _EPSILON), first, second


def _loop(state, x, y, batches):
    def step(carry, ids):
        *lists, number = carry
        gradients, sums = jax.grad(_mean_loss, has_aux=True)(lists[0], x[ids], y[ids])
        new = [_adam(*values, (number + 1).astype(jnp.float32)) for values in zip(gradients, *lists)]
        return [*map(list, zip(*new)), number + 1], sums

    state, sums = jax.lax.scan(step, state, batches)
    return state, sums.sum(0)


_loop = jax.jit(_loop, donate_argnums=0)
