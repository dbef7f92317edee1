"""The clockwork of the kernel bench, with a clock made up here: what is counted, waited for and handed on."""

import jax
import jax.numpy as jnp
import pytest

from atlas_jax.lab.fla_kernels import FlaMissing, load
from atlas_jax.lab.timing import chained, copy_rate, measure, nominal_bandwidth


class Device:
    """A device on which a launch costs `cost(i)` seconds, due when somebody waits."""

    def __init__(self, cost):
        self.cost, self.now, self.queue, self.launches, self.waits = cost, 0.0, 0.0, 0, 0

    def run(self, carry):
        self.queue += self.cost(self.launches)
        self.launches += 1
        return carry + 1

    def wait(self, carry):
        assert carry == self.launches  # the state is handed from launch to launch
        self.now, self.queue, self.waits = self.now + self.queue, 0.0, self.waits + 1

    def measure(self, **options):
        return measure(self.run, 0, wait=self.wait, clock=lambda: self.now, **options)


def test_time_per_call_is_exact_and_waiting_is_rare():
    device = Device(lambda i: 3e-5)
    timing, carry = device.measure(calls=10, repetitions=5, seconds=0.02)
    assert (timing.us, timing.low, timing.high) == pytest.approx((3.0, 3.0, 3.0)) and timing.spread < 1e-9
    assert carry == device.launches and timing.calls >= 5 * 10 * 0.02 / 3e-5
    assert device.waits < 5 + 25 and device.launches > 100 * device.waits


def test_the_first_launch_which_compiles_is_not_timed():
    timing, _ = Device(lambda i: 10.0 if i == 0 else 1e-3).measure(repetitions=3)
    assert timing.us == pytest.approx(1000)


def test_one_slow_repetition_moves_the_spread_and_not_the_median():
    launches_per_repetition = 40  # of 1 ms, to reach the 0.04 s asked for: found by the device below
    slow = Device(lambda i: 1e-3)
    slow.measure(repetitions=1, seconds=0.04)
    start = slow.launches - launches_per_repetition
    device = Device(lambda i: 2e-3 if start <= i < start + launches_per_repetition else 1e-3)
    timing, _ = device.measure(repetitions=5, seconds=0.04)
    assert timing.us == pytest.approx(1000, rel=0.01) and timing.high >= timing.us


def test_a_chain_runs_every_call_of_every_turn():
    """Each unrolled call sees its own index, none is merged with another, none is moved out of the loop."""

    def call(carry, i):
        total, seen = carry
        return total + 1, seen.at[i].add(jnp.sin(total))

    total, seen = chained(call, unroll=3, turns=5)((jnp.zeros(()), jnp.zeros(4)))
    assert int(total) == 15 and float(seen[3]) == 0
    steps = jnp.arange(15.0).reshape(5, 3)
    assert jnp.allclose(seen[:3], jnp.sin(steps).sum(0), atol=1e-5)


def test_a_chain_is_measured_per_call():
    run = chained(lambda x, i: x @ x / 64, unroll=2, turns=3)
    timing, x = measure(run, jnp.ones((64, 64)), calls=6, repetitions=3, seconds=0.001)
    assert timing.us > 0 and timing.low <= timing.us <= timing.high and timing.calls % 18 == 0
    assert jnp.isfinite(x).all()


def test_copy_rate_is_that_of_a_computer():
    assert 1e8 < copy_rate(1 << 24, repetitions=3, seconds=0.001) < 1e13


@pytest.mark.parametrize(
    ("kind", "rate"),
    [("NVIDIA H200", 4.8e12), ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H100 PCIe", 2.0e12), ("cpu", None)],
)
def test_nominal_bandwidth_by_the_longest_name(kind, rate):
    assert nominal_bandwidth(kind) == rate


def test_without_fla_the_reason_is_given():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine may have it")
    with pytest.raises(FlaMissing, match=r"torch|fla|GPU"):
        load()
