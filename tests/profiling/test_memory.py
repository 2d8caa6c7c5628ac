"""Who holds the peak: on schedules that are written by hand, and beside XLA's own sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nnx_inspector.profiling import hlo
from nnx_inspector.profiling.memory import live_at_peak


def held(*lines: str, head: str = "", more: str = "") -> dict[str, int]:
    top = f"HloModule m, is_scheduled=true{head}"
    entry = "ENTRY %main (p: f32[4]) -> f32[4] {"
    return live_at_peak(hlo.parse("\n".join([top, more, entry, *(f"  {x}" for x in lines), "}"])))


def test_the_holders_are_those_of_the_moment_when_most_is_there():
    found = held(
        "%p = f32[100] parameter(0)",
        "%a = f32[100] tanh(%p)",  # 400 bytes
        "%b = f32[20] slice(%a)",  # the last that reads a
        "%c = f32[110] concatenate(%b, %b)",  # 80 + 440
        "%d = f32[10] slice(%c)",  # and 40 are most
        "ROOT %e = f32[20] concatenate(%d, %b)",
    )
    assert found == {"b": 80, "c": 440, "d": 40}


def test_views_and_tuples_hold_nothing_of_their_own():
    found = held(
        "%p = f32[100] parameter(0)",
        "%a = f32[100] tanh(%p)",
        "%v = f32[10,10] bitcast(%a)",
        "%b = f32[5] slice(%v)",
        "%t = (f32[10,10], f32[5]) tuple(%v, %b)",
        "%g = f32[10,10] get-tuple-element(%t), index=0",
        "ROOT %s = f32[100] add(%g, %g)",
    )
    assert found == {"a": 400, "s": 400}  # b is read by the tuple, and by nobody after it


def test_a_result_in_the_place_of_a_donated_argument_holds_nothing():
    lines = (
        "%p = f32[100] parameter(0)",
        "%a = f32[100] tanh(%p)",
        "ROOT %t = (f32[100]) tuple(%a)",
    )
    assert held(*lines) == {"a": 400}
    head = ", input_output_alias={ {0}: (0, {}, may-alias) }, entry_computation_layout={}"
    assert held(*lines, head=head) == {}


BODY = """
%update (u: f32[8,100], x: f32[1,100], i: s32[]) -> f32[8,100] {
  %u = f32[8,100] parameter(0)
  %x = f32[1,100] parameter(1)
  %i = s32[] parameter(2)
  ROOT %dus = f32[8,100] dynamic-update-slice(%u, %x, %i, %i)
}

%body (c: (s32[], f32[8,100], f32[1,100])) -> (s32[], f32[8,100], f32[1,100]) {
  %c = (s32[], f32[8,100], f32[1,100]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %stack = f32[8,100] get-tuple-element(%c), index=1
  %x = f32[1,100] get-tuple-element(%c), index=2
  %y = f32[1,100] tanh(%x)
  %next = f32[8,100] fusion(%stack, %y, %i), kind=kLoop, calls=%update
  ROOT %r = (s32[], f32[8,100], f32[1,100]) tuple(%i, %next, %y)
}

%test (c: (s32[], f32[8,100], f32[1,100])) -> pred[] {
  %c.1 = (s32[], f32[8,100], f32[1,100]) parameter(0)
  ROOT %lt = pred[] constant(true)
}
"""


def test_a_loop_holds_what_it_stacks_once_and_what_one_iteration_needs():
    found = held(
        "%p = f32[1,100] parameter(0)",
        "%zero = s32[] constant(0)",
        "%stack = f32[8,100] broadcast(%zero)",
        "%copy = f32[1,100] copy(%p)",
        "%t = (s32[], f32[8,100], f32[1,100]) tuple(%zero, %stack, %copy)",
        "%loop = (s32[], f32[8,100], f32[1,100]) while(%t), condition=%test, body=%body",
        "ROOT %out = f32[8,100] get-tuple-element(%loop), index=1",
        more=BODY,
    )
    assert found == {"stack": 3200, "copy": 400, "y": 400}


def mlp(x: jax.Array) -> jax.Array:
    y = jnp.tanh(x @ x)
    z = jnp.sin(y @ x)
    return (jnp.cos(z @ y) @ y @ z).sum()


def scanned(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.sin(jnp.tanh(c @ x)), None), x, None, length=6)[0].sum()


@pytest.mark.parametrize("f", [jax.grad(mlp), jax.grad(scanned), mlp])
def test_what_is_held_is_about_what_xla_says_that_it_needs(f: Any):
    compiled = jax.jit(f).lower(jnp.ones((128, 128))).compile()
    plan: Any = compiled.memory_analysis()
    needed = plan.temp_size_in_bytes + plan.output_size_in_bytes
    found = sum(live_at_peak(hlo.parse(compiled.as_text() or "")).values())
    assert 0.6 * needed <= found <= 1.2 * needed  # between buffers XLA loses some
