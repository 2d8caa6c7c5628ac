"""The text of compiled programs, as XLA writes it."""

import jax
import jax.numpy as jnp

from nnx_inspector.profiling import hlo

TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->(f32[8,4]{1,0})}

%fused (param_0: f32[8,4]) -> f32[8,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %c = f32[] constant(2)
  %b = f32[8,4]{1,0} broadcast(%c), dimensions={}
  ROOT %mul = f32[8,4]{1,0} multiply(%param_0, %b), metadata={op_name="jit(step)/[a]/mul" stack_frame_id=3}
}

ENTRY %main.5 (x: f32[8,4]) -> (f32[8,4], /*index=1*/bf16[3]) {
  %x = f32[8,4]{1,0} parameter(0), metadata={op_name="x"}
  %fusion.1 = f32[8,4]{1,0:T(8,128)} fusion(f32[8,4]{1,0} %x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/[a]/mul"}
  %w = (s32[], f32[8,4]{1,0}) while(%fusion.1), condition=%cond.2, body=%body.3
  %g = f32[8,4]{1,0} get-tuple-element(%w), index=1
  ROOT %t = (f32[8,4]{1,0}, /*index=1*/bf16[3]{0}) tuple(%g, %fusion.1)
}
"""  # noqa: E501


def test_a_program_is_read_by_computation():
    module = hlo.parse(TEXT)
    assert module.name == "jit_step"
    assert module.entry == "main.5"
    assert list(module.computations) == ["fused", "main.5"]
    fusion = module.computations["main.5"][1]
    assert (fusion.name, fusion.opcode, fusion.operands) == ("fusion.1", "fusion", ("x",))
    assert fusion.called == ("fused",)
    assert fusion.op_name == "jit(step)/[a]/mul"
    assert fusion.elements == 32
    assert fusion.sizes == (128,)


def test_loops_tuples_and_their_parts_are_read():
    _, _, loop, part, root = hlo.parse(TEXT).computations["main.5"]
    assert loop.called == ("cond.2", "body.3")
    assert (loop.elements, loop.sizes) == (33, (4, 128))
    assert part.index == 1
    assert root.root
    assert root.operands == ("g", "fusion.1")
    assert root.sizes == (128, 6)


def test_what_is_no_instruction_is_left_out():
    broken = TEXT.replace("%c = f32[] constant(2)", "something else")
    names = [one.name for one in hlo.parse(broken).computations["fused"]]
    assert names == ["param_0", "b", "mul"]
    assert hlo.parse("").computations == {}


def test_the_branches_of_a_condition_are_called():
    line = "  %c = f32[] conditional(%p, %a, %b), branch_computations={%left, %right}"
    text = f"HloModule m\n\nENTRY %e (p: s32[]) -> f32[] {{\n{line}\n}}\n"
    (one,) = hlo.parse(text).computations["e"]
    assert one.called == ("left", "right")


def test_what_jax_compiles_here_is_read_whole():
    def f(x: jax.Array) -> jax.Array:
        with jax.named_scope('say "hi"'):
            y = jnp.tanh(x @ x.T)
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y @ y), y).sum()

    text = jax.jit(f).lower(jnp.ones((8, 8))).compile().as_text() or ""
    module = hlo.parse(text)
    count = sum(" = " in line and line.startswith("  ") for line in text.splitlines())
    assert sum(map(len, module.computations.values())) == count
    every = {one.name: one for those in module.computations.values() for one in those}
    assert any(one.op_name.startswith('jit(f)/say "hi"/') for one in every.values())
    called = {name for one in every.values() for name in one.called}
    assert called <= module.computations.keys()
    for those in module.computations.values():
        before: set[str] = set()
        for one in those:
            assert set(one.operands) <= before, one
            before.add(one.name)
