"""The dataflow between modules of small models, against edges written by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_examples import examples
from models import SplitAndJoin, batch, rngs

import nnx_inspector as nni

D = 3
X = "float32[4,3]"


def linear() -> nnx.Linear:
    return nnx.Linear(D, D, rngs=rngs())


class Parts(nnx.Module):
    """Four layers, called by a test's function."""

    def __init__(self, call):
        self.a, self.b, self.c, self.d = (linear() for _ in range(4))
        self.call = call

    def __call__(self, *args):
        return self.call(self, *args)


def stack(n: int = 3) -> nnx.Linear:
    make = nnx.vmap(lambda r: nnx.Linear(D, D, rngs=r), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=n)(make)(rngs())


def flow(call, *args, shape: str = X) -> set[str]:
    """The edges in a short form: "a b", "a b loop"; all have the same shape."""
    trace = nni.trace(Parts(call), *(args or (batch(4, D),)))
    assert {edge.shape for edge in trace.edges} <= {shape}
    return {short(edge) for edge in trace.edges}


def short(edge) -> str:
    producer, consumer, _ = edge
    return f"{producer} {consumer}{' loop' * edge.loop}"


def test_a_chain():
    assert flow(lambda m, x: m.c(jnp.tanh(m.b(m.a(x))))) == {"a b", "b c"}


def test_a_residual_connection_reaches_past_the_module():
    def call(m, x):
        x = m.a(x)
        return m.c(x + m.b(x))

    assert flow(call) == {"a b", "a c", "b c"}


def test_a_skip_over_two():
    def call(m, x):
        x = m.a(x)
        return m.d(m.c(m.b(x)) + x)

    assert flow(call) == {"a b", "b c", "c d", "a d"}


def test_parallel_branches_that_are_joined():
    assert flow(lambda m, x: m.c(jnp.concatenate([m.a(x), m.b(x)])[:4])) == {"a c", "b c"}


def test_a_shared_module_called_twice():
    assert flow(lambda m, x: m.b(m.a(m.a(x)))) == {"a a", "a b"}


def test_calls_that_know_nothing_of_each_other():
    assert flow(lambda m, x: (m.a(x), m.b(x))) == set()


def test_a_mask_is_data():
    assert flow(lambda m, x: m.b(jnp.where(m.a(x) > 0, x, 0.0))) == {"a b"}


def test_an_encoder_and_a_decoder_with_two_inputs():
    class Encoder(nnx.Module):
        def __init__(self):
            self.layer = linear()

        def __call__(self, x):
            return self.layer(x)

    class Decoder(nnx.Module):
        def __init__(self):
            self.attend, self.out = linear(), linear()

        def __call__(self, y, memory):
            return self.out(y + self.attend(memory))

    class Model(nnx.Module):
        def __init__(self):
            self.encoder, self.decoder = Encoder(), Decoder()

        def __call__(self, x, y):
            return self.decoder(y, self.encoder(x))

    trace = nni.trace(Model(), batch(4, D), batch(4, D))
    assert {short(e) for e in trace.edges} == {"encoder decoder", "decoder/attend decoder/out"}
    assert {short(e) for e in trace.borders} == {
        " encoder", "encoder encoder/layer", "encoder/layer encoder",
        " decoder", "decoder decoder/attend", "decoder decoder/out", "decoder/out decoder",
        "decoder ",
    }  # fmt: skip


def test_a_call_with_several_outputs_and_inputs_of_other_shapes():
    edges = nni.trace(SplitAndJoin(), batch(4, D)).edges
    assert [tuple(e) for e in edges] == [
        ("split", "join", "float32[4,2]"),
        ("split", "join", "float32[4]"),
    ]


def test_a_scanned_stack_feeds_itself_and_what_follows():
    def call(m, x):
        run = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return m.b(run(m.stack, m.a(x)))

    model = Parts(call)
    model.stack = stack()
    trace = nni.trace(model, batch(4, D))
    assert {short(e) for e in trace.edges} == {"a stack", "stack stack loop", "stack b"}


def test_a_recurrent_network_feeds_its_cell():
    model = nnx.RNN(nnx.SimpleCell(D, D, rngs=rngs()))
    trace = nni.trace(model, batch(2, 5, D))
    assert {(*e, e.loop) for e in trace.edges} == {("cell", "cell", "float32[2,3]", True)}
    assert {short(e) for e in trace.borders} == {
        " cell", "cell ",
        "cell cell/dense_i", "cell cell/dense_h", "cell/dense_i cell", "cell/dense_h cell",
    }  # fmt: skip


def test_what_goes_round_a_loop_for_several_iterations():
    def call(m, x):
        def body(carry, _):
            newest, before, oldest = carry
            return (m.a(oldest), newest, before), None

        (out, _, _), _ = jax.lax.scan(body, (x, x, m.b(x)), None, length=5)
        return m.c(out)

    assert flow(call) == {"b a", "a a loop", "a c"}


def test_two_modules_in_one_loop():
    def call(m, x):
        def body(x, _):
            return m.b(m.a(x)), None

        return m.c(jax.lax.scan(body, x, None, length=2)[0])

    assert flow(call) == {"a b", "b a loop", "b c"}


def test_a_loop_in_a_loop_marks_what_each_carries():
    def call(m, x):
        def inner(x, _):
            return m.b(x), None

        def outer(x, _):
            return jax.lax.scan(inner, m.a(x), None, length=2)[0], None

        return m.c(jax.lax.scan(outer, x, None, length=3)[0])

    assert flow(call) == {"a b", "b b loop", "b a loop", "b c"}


def test_rows_of_a_scan_flow_on_and_its_carry_may_not():
    def call(m, x):
        def body(carry, row):
            return carry + 1, m.b(row)

        _, rows = jax.lax.scan(body, 0.0, m.a(x)[:, None])
        return m.c(rows[:, 0])

    trace = nni.trace(Parts(call), batch(4, D))
    assert {short(e) for e in trace.edges} == {"a b", "b c"}


def test_a_while_loop_may_not_run_at_all():
    def call(m, x):
        out = jax.lax.while_loop(lambda x: m.d(x).sum() < 9, m.b, m.a(x))
        return m.c(out)

    assert flow(call) == {"a b", "b b loop", "a c", "b c", "a d", "b d"}


@pytest.mark.parametrize(
    "wrap",
    [
        nnx.jit,
        nnx.remat,
        lambda f: nnx.jit(nnx.remat(f)),
        lambda f: nnx.vmap(f, in_axes=(None, 0)),
        lambda f: nnx.scan(lambda m, x: f(m, x), in_axes=(None, 0), out_axes=0),
    ],
)
def test_inner_transforms_change_nothing(wrap):
    def call(m, x):
        return m.d(wrap(lambda m, x: m.c(x + m.b(x)))(m, m.a(x)))

    shapes = {tuple(e)[2] for e in nni.trace(Parts(call), batch(4, D)).edges}
    trace = nni.trace(Parts(call), batch(4, D))
    assert {short(e) for e in trace.edges} == {"a b", "a c", "b c", "c d"}
    assert shapes <= {X, "float32[3]"}


def test_modules_in_the_branches_of_a_cond():
    def call(m, x):
        x = m.a(x)
        out = nnx.cond(x.sum() > 0, lambda m, x: m.b(x), lambda m, x: m.c(x), m, x)
        return m.d(out)

    assert flow(call) == {"a b", "a c", "b d", "c d"}


def test_a_branch_that_passes_its_input_on():
    def call(m, x):
        x = m.a(x)
        return m.d(nnx.cond(x.sum() > 0, lambda m, x: m.b(x), lambda m, x: x, m, x))

    assert flow(call) == {"a b", "b d", "a d"}


def test_custom_derivatives_are_gone_through():
    @jax.custom_vjp
    def twice(x):
        return 2 * x

    twice.defvjp(lambda x: (twice(x), None), lambda _, g: (2 * g,))

    @jax.custom_jvp
    def thrice(x):
        return 3 * x

    thrice.defjvp(lambda p, t: (thrice(*p), 3 * t[0]))
    assert flow(lambda m, x: m.c(thrice(m.b(twice(m.a(x)))))) == {"a b", "b c"}


def test_values_of_a_pair_are_kept_apart_through_a_jit():
    def call(m, x):
        left, right = jax.jit(lambda a, b: (a + 1, b + 1))(m.a(x), m.b(x))
        return m.c(left), m.d(right)

    assert flow(call) == {"a c", "b d"}


def test_what_a_module_leaves_in_a_variable_is_its_product():
    class Keeps(nnx.Module):
        def __init__(self):
            self.kept = nnx.Cache(jnp.zeros((4, D)))

        def __call__(self, x):
            self.kept[...] = x + 1
            return jnp.zeros(())

    class Model(nnx.Module):
        def __init__(self):
            self.keeps, self.reads = Keeps(), linear()

        def __call__(self, x):
            self.keeps(x)
            return self.reads(self.keeps.kept[...])

    assert [short(e) for e in nni.trace(Model(), batch(4, D)).edges] == ["keeps reads"]


def test_the_borders_of_a_residual_block_hold_the_way_past_its_modules():
    class Block(nnx.Module):
        def __init__(self):
            self.inside = linear()

        def __call__(self, x):
            return x + self.inside(x)

    trace = nni.trace(Block(), batch(4, D))
    assert trace.edges == ()
    assert [short(e) for e in trace.borders] == [" inside", " ", "inside "]


def test_an_edge_unpacks_into_three():
    producer, consumer, shape = nni.trace(Parts(lambda m, x: m.b(m.a(x))), batch(4, D)).edges[0]
    assert (producer, consumer, shape) == ("a", "b", X)


def test_the_backward_pass_of_a_rematerialised_call_is_no_second_call():
    def loss(model, x):
        return nnx.grad(lambda m: nnx.remat(lambda m, x: m.b(jnp.tanh(m.a(x))))(m, x).sum())(model)

    model = Parts(lambda m, x: x)
    trace = nni.trace(lambda m, x: jax.tree.leaves(loss(m, x)), model, batch(4, D))
    assert [c.site for c in trace.calls] == ["a", "b"]
    assert {short(e) for e in trace.edges} == {"a b"}


# ------------------------------------------------------------------ generated

AROUND = {
    "plain": lambda f: f,
    "jit": nnx.jit,
    "remat": nnx.remat,
    "vmap": lambda f: nnx.vmap(f, in_axes=(None, 0)),
}


class Layers(nnx.Module):
    def __init__(self, n, call):
        self.layers = nnx.List([linear() for _ in range(n)])
        self.call = call

    def __call__(self, x):
        return self.call(self.layers, x)


wirings = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        *(
            st.tuples(st.sets(st.integers(-1, i - 1)), st.sampled_from(sorted(AROUND)))
            for i in range(n)
        )
    )
)


@examples(10, of=100)
@given(wirings)
def test_any_wiring_is_found_as_it_was_made(wiring):
    """Layer i adds the outputs of some earlier layers (-1 is the input)."""

    def call(layers, x):
        values = {-1: x}
        for i, (sources, around) in enumerate(wiring):
            total = sum((jnp.tanh(values[s]) for s in sources), jnp.zeros_like(x))
            values[i] = AROUND[around](lambda m, x: m(x))(layers[i], total)
        return values

    trace = nni.trace(Layers(len(wiring), call), batch(4, D))
    expected = {(s, i) for i, (sources, _) in enumerate(wiring) for s in sources if s >= 0}
    assert {tuple(int(p.split("/")[1]) for p in (e.producer, e.consumer)) for e in trace.edges} == (
        expected
    )
    inputs = {e.consumer for e in trace.borders if e.producer == ""}
    fed = {f"layers/{i}" for i, (sources, _) in enumerate(wiring) if -1 in sources}
    assert inputs == fed | {""}  # which is returned unchanged


carries = st.integers(1, 4).flatmap(
    lambda n: st.lists(
        st.tuples(st.booleans(), st.integers(0, n - 1), st.integers(0, n - 1)),
        min_size=n,
        max_size=n,
    )
)


@examples(10, of=100)
@given(carries, st.sampled_from(["scan", "while"]))
def test_any_carry_of_a_loop_is_followed_round(carry, loop):
    """Slot i of the carry becomes layer i of two slots, or a copy of another slot."""

    def call(layers, x):
        def body(slots):
            return tuple(
                layers[i](slots[a] + slots[b]) if computed else slots[a]
                for i, (computed, a, b) in enumerate(carry)
            )

        init = (x,) * len(carry)
        if loop == "scan":
            return jax.lax.scan(lambda s, _: (body(s), None), init, None, length=9)[0]
        return jax.lax.while_loop(lambda s: s[0].sum() < 9, body, init)

    holds: list[set[int]] = [set() for _ in carry]
    for _ in range(len(carry) + 1):  # what a slot may hold after so many iterations
        held = [{i} if computed else holds[a] for i, (computed, a, _) in enumerate(carry)]
        holds = [old | new for old, new in zip(holds, held, strict=True)]
    expected = {
        (f"layers/{p}", f"layers/{i}")
        for i, (computed, a, b) in enumerate(carry)
        if computed
        for p in holds[a] | holds[b]
    }
    trace = nni.trace(Layers(len(carry), call), batch(4, D))
    assert {(e.producer, e.consumer) for e in trace.edges} == expected
    assert all(e.loop for e in trace.edges)
