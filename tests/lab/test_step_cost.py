"""Step costs of a small random model on this CPU: counts that must be exact, times that must add up; HLO and tables."""


import jax
import jax.numpy as jnp
import pytest
from tiny_models import TINY

from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import Fixed, Off
from atlas_jax.lab.forced import ForcedAcceptance, ForcedError
from atlas_jax.lab.hlo import Launches, count_launches
from atlas_jax.lab.step_cost import COMMAND_BUFFERS, measure_steps, random_requests
from atlas_jax.lab.text_table import text_table
from atlas_jax.presets import random_params

HLO = """
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %exp = f32[4]{0} exponential(%p)
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4]{0} get-tuple-element(%t), index=1
  %next = s32[] fusion(%i), kind=kLoop, calls=%fused
  %y = f32[4]{0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %out = (s32[], /*index=1*/f32[4]{0}) tuple(%next, %y)
}

%cond (t: (s32[], f32[4])) -> pred[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] fusion(%t), kind=kLoop, calls=%fused
}

ENTRY %main (a: f32[4], b: s32[]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %b = s32[] parameter(1)
  %start = (f32[4]{0}, f32[4]{0:S(5)}, u32[]) copy-start(%a)
  %copied = f32[4]{0:S(5)} copy-done(%start)
  %init = (s32[], f32[4]{0}) tuple(%b, %copied)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body
  ROOT %last = f32[4]{0} fusion(%loop), kind=kLoop, calls=%fused
}
"""


def test_launches_are_counted_where_they_run():
    """A copy in two halves, the loop's condition and its two kernels, the last fusion; nothing inside a fusion."""
    assert count_launches(HLO) == Launches(launches=5, loops=1)
    with pytest.raises(ValueError, match="no entry"):
        count_launches("HloModule empty")


def test_a_compiled_program_has_at_least_the_launches_it_cannot_do_without():
    def program(x, turns):
        return jax.lax.fori_loop(0, turns, lambda i, y: y @ y, x @ x)

    found = count_launches(jax.jit(program).lower(jnp.ones((64, 64)), 3).compile().as_text())
    assert found.loops == 1 and 3 <= found.launches < 20


@pytest.fixture(scope="module")
def cells():
    params = random_params(TINY, 0, jnp.float32)
    heard = []
    found = measure_steps(
        params,
        TINY,
        (1, 2),
        [Fixed(2)],
        ForcedAcceptance((0.8, 0.7)),
        dtype=jnp.float32,
        prompt_tokens=5,
        max_new_tokens=40,
        repetitions=2,
        say=heard.append,
    )
    assert len(heard) == 4 and "xla" in heard[0] and "compiled" in heard[1]
    return found


@pytest.mark.slow
def test_costs_of_every_policy_and_width(cells):
    assert [(c.n, c.policy, c.k, c.rows) for c in cells] == [
        *((1, "plain", 1, 1), (1, "fixed2", 3, 3)),
        *((2, "plain", 1, 2), (2, "fixed2", 3, 6)),
    ]
    for cell in cells:
        assert cell.command_buffers == "-"  # there are none on a CPU, and none are claimed
        assert 0 < cell.step_ms_low <= cell.step_ms <= cell.step_ms_high
        # A step's parts are each within it, so their medians are within its median, whatever the noise: an overlap
        # of the parts, or time of the drafter's left in them, would show as a part below zero or above the whole.
        assert all(0 < part <= cell.step_ms for part in (cell.dispatch_ms, cell.wait_ms, cell.host_ms))
        assert cell.device_ms > 0
        assert cell.off_script == 0
    for plain, fixed in (cells[:2], cells[2:]):
        assert (plain.steps, plain.cost, plain.speedup, plain.tok_step, plain.p1) == (2 * 39, 1, 1, 1, None)
        assert fixed.launches > plain.launches and fixed.steps < plain.steps
        assert fixed.tok_step_asked == pytest.approx(1 + 0.8 + 0.56) and fixed.p3_cond is None
        assert fixed.tok_step == pytest.approx(fixed.tok_step_asked, rel=0.25)
        assert 0.5 < fixed.p1 <= 1 and fixed.cost == pytest.approx(fixed.step_ms / plain.step_ms)
        assert fixed.speedup == pytest.approx(fixed.tok_step_asked / fixed.cost)


def test_what_would_not_be_a_measurement_is_refused():
    asked = {"dtype": jnp.float32, "forced": ForcedAcceptance((0.8,))}
    with pytest.raises(ForcedError, match="up to 2 drafts"):
        measure_steps({}, TINY, (1,), [Fixed(2)], **asked)
    with pytest.raises(ForcedError, match="8 new ones"):
        measure_steps({}, TINY, (1,), [Off()], **asked, max_new_tokens=4)


def test_command_buffer_options_are_known_to_the_compiler():
    """A misspelt option would be an error on the one machine where it matters."""
    for options in COMMAND_BUFFERS.values():
        jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=options)
    with pytest.raises(Exception, match="xla_gpu_enable_command_bufferz"):
        jax.jit(lambda x: x + 2).lower(1.0).compile(compiler_options={"xla_gpu_enable_command_bufferz": ""})


def test_random_requests_repeat_by_seed():
    first, again, other = (random_requests(TINY, 3, 6, 9, seed) for seed in (0, 0, 1))
    assert first == again != other and len({r.prompt for r in first}) == 3
    assert all(len(r.prompt) == 6 and r.ignore_eos and r.max_new_tokens == 9 for r in first)
    assert first[0].sampling == Sampling()


def test_text_tables_align():
    assert text_table(("name", "us"), [("copy", 1.5), ("step", None), ("x", 12345.0)]).splitlines() == [
        "name      us",
        "----  ------",
        "copy   1.500",
        "step       -",
        "x     12,345",
    ]
