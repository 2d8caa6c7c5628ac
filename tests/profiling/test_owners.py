"""Whose an operation is, on programs that are written by hand as XLA writes them."""

import pytest

from nnx_inspector.profiling import hlo
from nnx_inspector.profiling.owners import has_derivative, owners_of, phase_in


def op(text: str, name: str = "") -> str:
    return f'  {text}, metadata={{op_name="{name}"}}' if name else f"  {text}"


def program(*lines: str, more: str = "") -> hlo.Module:
    return hlo.parse(
        "\n".join(["HloModule m", more, "ENTRY %main (p: f32[]) -> f32[] {", *lines, "}"])
    )


STEP = program(
    op("%x = f32[8,4] parameter(0)"),
    op("%w = f32[4,4] parameter(1)"),
    op("%v = f32[4,2] parameter(2)"),
    op("%layout = f32[8,4] copy(%x)"),
    op("%h = f32[8,4] dot(%layout, %w)", "jit(step)/jvp([.])/[a]/dot_general"),
    op("%y = f32[8,2] dot(%h, %v)", "jit(step)/jvp([.])/[b]/dot_general"),
    op("%loss = f32[] reduce(%y)", "jit(step)/jvp()/reduce_sum"),
    op("%dy = f32[8,2] multiply(%y, %y)", "jit(step)/transpose(jvp())/mul"),
    op("%turned = f32[2,8] transpose(%dy)"),
    op("%dv = f32[4,2] dot(%h, %turned)", "jit(step)/transpose(jvp([.]))/[b]/dot_general"),
    op("%dh = f32[8,4] dot(%dy, %v)", "jit(step)/transpose(jvp([.]))/[b]/dot_general"),
    op("%dw = f32[4,4] dot(%x, %dh)", "jit(step)/transpose(jvp([.]))/[a]/dot_general"),
    op("%n1 = f32[] reduce(%dv)", "jit(step)/reduce_sum"),
    op("%n2 = f32[] reduce(%dw)", "jit(step)/reduce_sum"),
    op("%norm = f32[] add(%n1, %n2)", "jit(step)/add"),
    op("%spread = f32[4,4] broadcast(%norm)", "jit(step)/mul"),
    op("%clipped = f32[4,4] multiply(%dw, %spread)", "jit(step)/mul"),
    op("%new_w = f32[4,4] subtract(%w, %clipped)", "jit(step)/sub"),
    op("%decayed = f32[4,2] multiply(%v, %v)", "jit(step)/mul"),
    op("%moment = f32[4,2] add(%decayed, %dv)", "jit(step)/add"),
    op("%new_v = f32[4,2] subtract(%v, %moment)", "jit(step)/sub"),
    op("%batch = f32[8] reduce(%x)", "jit(step)/reduce_sum"),
)


OWNERS = {
    "h": ("a", "forward"),
    "y": ("b", "forward"),
    "loss": (None, "forward"),
    "dy": (None, "backward"),
    "dv": ("b", "backward"),
    "dw": ("a", "backward"),
    "norm": (None, "update"),  # of both
    "n1": ("b", "update"),
    "clipped": ("a", "update"),  # the norm that scales it is of both, the gradient of one
    "decayed": ("b", "update"),  # read by the update alone
    "new_w": ("a", "update"),
    "new_v": ("b", "update"),
    "layout": ("a", "forward"),  # made by XLA for what reads it
    "turned": (None, "backward"),  # made by XLA of what it reads
    "batch": (None, "forward"),
}


def test_an_operation_belongs_to_the_module_and_part_that_its_name_and_its_operands_say():
    found = owners_of(STEP)
    assert {name: found[name] for name in OWNERS} == {n: {one: 1.0} for n, one in OWNERS.items()}


FUSED = """
%fused (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8] parameter(0)
  %b = f32[8,8] parameter(1)
  %t = f32[8,8] tanh(%a), metadata={op_name="jit(f)/[first]/tanh"}
  %m = f32[8,8] multiply(%t, %b), metadata={op_name="jit(f)/[second]/mul"}
  ROOT %s = f32[8,8] add(%m, %m), metadata={op_name="jit(f)/[second]/add"}
}
"""


def test_a_fusion_is_divided_by_the_arithmetic_of_its_parts():
    module = program(
        op("%p = f32[8,8] parameter(0)"),
        op("%fusion = f32[8,8] fusion(%p, %p), kind=kLoop, calls=%fused", "jit(f)/[second]/add"),
        more=FUSED,
    )
    parts = owners_of(module)["fusion"]
    assert sum(parts.values()) == pytest.approx(1)
    assert parts == {("first", "forward"): 0.8, ("second", "forward"): 0.2}  # 8 of a tanh to 1 + 1


UPDATES = """
%two (g: f32[4], h: f32[4], w: f32[4], v: f32[4]) -> (f32[4], f32[4]) {
  %g = f32[4] parameter(0)
  %h = f32[4] parameter(1)
  %w = f32[4] parameter(2)
  %v = f32[4] parameter(3)
  %a = f32[4] subtract(%w, %g), metadata={op_name="jit(f)/sub"}
  %b = f32[4] subtract(%v, %h), metadata={op_name="jit(f)/sub"}
  ROOT %t = (f32[4], f32[4]) tuple(%a, %b)
}
"""


def test_an_update_that_xla_fuses_for_two_parameters_is_divided_between_their_modules():
    module = program(
        op("%p = f32[4] parameter(0)"),
        op("%g = f32[4] negate(%p)", "jit(f)/transpose(jvp([a]))/neg"),
        op("%h = f32[4] negate(%p)", "jit(f)/transpose(jvp([b]))/neg"),
        op("%u = (f32[4], f32[4]) fusion(%g, %h, %p, %p), kind=kLoop, calls=%two", "jit(f)/sub"),
        op("%ua = f32[4] get-tuple-element(%u), index=0"),
        op("%norm = f32[] reduce(%ua)", "jit(f)/reduce_sum"),
        more=UPDATES,
    )
    found = owners_of(module)
    assert found["u"] == {("a", "update"): 0.5, ("b", "update"): 0.5}
    assert found["norm"] == {("a", "update"): 1.0}


LOOP = """
%body (c: (s32[], f32[4])) -> (s32[], f32[4]) {
  %c = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[4] get-tuple-element(%c), index=1
  %y = f32[4] tanh(%x), metadata={op_name="jit(f)/while/body/[layers]/tanh"}
  %d = f32[4] negate(%y), metadata={op_name="jit(f)/while/body/transpose(jvp([layers]))/neg"}
  %u = f32[4] subtract(%x, %d), metadata={op_name="jit(f)/while/body/sub"}
  ROOT %r = (s32[], f32[4]) tuple(%i, %u)
}

%test (c: (s32[], f32[4])) -> pred[] {
  %c.1 = (s32[], f32[4]) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  ROOT %lt = pred[] compare(%i.1, %i.1), metadata={op_name="jit(f)/while/cond/lt"}
}
"""


def test_the_body_of_a_loop_is_followed():
    module = program(
        op("%p = f32[4] parameter(0)"),
        op("%i0 = s32[] constant(0)"),
        op("%t = (s32[], f32[4]) tuple(%i0, %p)"),
        op("%loop = (s32[], f32[4]) while(%t), condition=%test, body=%body", "jit(f)/while"),
        more=LOOP,
    )
    found = owners_of(module)
    assert found["y"] == {("layers", "forward"): 1.0}
    assert found["d"] == {("layers", "backward"): 1.0}
    assert found["u"] == {("layers", "update"): 1.0}


def test_names_say_which_part_of_a_step_it_is():
    assert phase_in("jit(f)/transpose(jvp([a]))/mul") == "backward"
    assert phase_in("jit(f)/jvp()/mul") == "forward"
    assert phase_in("jit(f)/[a]/mul") == "forward"
    assert phase_in("jit(f)/mul") is None
    assert phase_in("") is None


def test_a_program_of_an_optimizer_alone_has_no_derivative():
    assert has_derivative(STEP)
    assert not has_derivative(
        program(op("%p = f32[4] parameter(0)"), op("%a = f32[4] add(%p, %p)", "jit(add)/add"))
    )
