"""What `_compat` relies on in flax and jax: one test per function, which fails if it moves."""

from __future__ import annotations

import functools
import operator
import pathlib
import pickle
import types

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from compilations import Compilations
from flax import linen, nnx
from flax.errors import TraceContextError
from flax.nnx import graphlib
from jax.interpreters import ad
from models import batch, rngs

from nnx_inspector._compat import eqn_params, flax_graphs, interpreter, jaxprs, jit, sources

MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def equation(f, *args, name):
    (found,) = [e for e in jax.make_jaxpr(f)(*args).eqns if e.primitive.name == name]
    return found


# ---------------------------------------------------------- tags in graphdefs


def nodes_of(model):
    return vars(model)[flax_graphs.NODES]


def test_every_module_lists_its_nodes_in_a_hashable_mapping():
    assert isinstance(nodes_of(models.MLP(rngs())), graphlib.HashableMapping)


def test_tagged_nodes_are_equal_by_tag_in_a_cache_while_a_region_is_open(monkeypatch):
    plain = nodes_of(models.MLP(rngs()))
    tagged = flax_graphs.TaggedNodes(plain, "a")
    same, other = (flax_graphs.TaggedNodes(plain, tag) for tag in ("a", "b"))
    assert operator.eq(tagged, plain)
    assert operator.eq(plain, tagged)
    assert hash(plain) == hash(tagged) == hash(same)
    monkeypatch.setattr(flax_graphs.TaggedNodes, "strict", lambda: True)
    assert operator.eq(tagged, same)
    assert not operator.eq(tagged, other)
    assert not operator.eq(tagged, plain)
    assert not operator.eq(plain, tagged)
    assert {tagged: 1}.get(other) is None
    assert tagged.plain is plain


def test_tagged_nodes_are_equal_in_a_comparison_that_code_writes_out(monkeypatch):
    plain = nodes_of(models.MLP(rngs()))
    tagged = flax_graphs.TaggedNodes(plain, "a")
    other = flax_graphs.TaggedNodes(plain, "b")
    monkeypatch.setattr(flax_graphs.TaggedNodes, "strict", lambda: True)
    assert tagged == other
    assert not tagged != plain  # noqa: SIM202
    assert (1, tagged) == (1, plain)


def test_tagged_nodes_are_pickled_as_what_they_stand_for():
    tagged = flax_graphs.TaggedNodes(nodes_of(models.MLP(rngs())), ("token", ("a",)))
    again = pickle.loads(pickle.dumps(tagged))
    assert again == tagged
    assert type(again) is graphlib.HashableMapping


@pytest.fixture
def patched():
    """(arrived, undo) with every object of MLP tagged "tag"."""
    arrived, undo = [], []
    flax_graphs.patch_graph_node(
        models.MLP, lambda node: "tag", lambda node, tag: arrived.append((node, tag)), undo.append
    )
    yield arrived, undo[0]
    undo[0]()


def test_a_module_is_tagged_by_the_same_object_each_time(patched):
    model = models.MLP(rngs())
    flatten = graphlib.GRAPH_REGISTRY[models.MLP].flatten
    one, again = (dict(flatten(model)[0])[flax_graphs.NODES].value for _ in range(2))
    assert isinstance(one, flax_graphs.TaggedNodes)
    assert one is again
    assert nodes_of(nnx.merge(*nnx.split(model))) is nodes_of(model)


def test_a_tag_travels_through_split_and_merge(patched):
    model = models.MLP(rngs())
    merged = nnx.merge(*nnx.split(model))
    assert patched[0] == [(merged, "tag")]


def test_a_tag_travels_into_jit(patched):
    nnx.jit(lambda m, x: m(x))(models.MLP(rngs()), batch(4, 3))
    assert "tag" in [tag for _, tag in patched[0]]


def test_objects_filled_from_a_tagged_graphdef_are_plain(patched):
    model = models.MLP(rngs())
    merged = nnx.merge(*nnx.split(model))
    assert type(nodes_of(merged)) is graphlib.HashableMapping
    assert jax.tree.structure(merged) == jax.tree.structure(model)


def test_jax_tree_functions_do_not_see_the_tag(patched):
    model = models.MLP(rngs())
    tagged = jax.tree.structure(model)
    patched[1]()
    assert jax.tree.structure(model) == tagged


def test_the_registry_is_as_before_after_the_undo(patched):
    patched[1]()
    graphdef = nnx.graphdef(models.MLP(rngs()))
    again = []
    flax_graphs.patch_graph_node(
        models.MLP, lambda node: None, lambda node, tag: None, again.append
    )
    assert nnx.graphdef(models.MLP(rngs())) == graphdef
    again[0]()
    assert isinstance(graphlib.GRAPH_REGISTRY[models.MLP], graphlib.GraphNodeImpl)


class NeverEqual:
    """Its `==` raises, as the truth of a comparison of two tables does."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        raise ValueError("the truth value is ambiguous")


def test_the_structure_of_a_graphdef_is_compared_without_the_users_equality():
    def structure(**attributes):
        module = nnx.Linear(2, 2, rngs=rngs())
        vars(module).update(attributes)
        return flax_graphs.comparable_structure(nnx.split(module, graph=True)[0])

    odd, nan = NeverEqual(), float("nan")
    assert structure(odd=odd, fill=nan) == structure(odd=odd, fill=nan)
    assert structure(fill=1.0) != structure(fill=2.0)
    assert structure(fill=1.0) != structure(full=1.0)


def test_a_variable_holds_a_value_within_a_trace_that_it_does_not_belong_to():
    variable, seen = nnx.Param(jnp.ones(2)), []
    before = variable.get_raw_value()

    def doubled(x):
        with pytest.raises(TraceContextError):
            variable.set_raw_value(x)
        flax_graphs.set_raw_value(variable, before * x)
        seen.append(variable[...] + x)
        flax_graphs.set_raw_value(variable, before)
        return seen[0]

    np.testing.assert_array_equal(jax.vmap(doubled)(jnp.asarray([2.0, 3.0])), [[4, 4], [6, 6]])
    assert variable.get_raw_value() is before


def test_a_class_that_is_no_graph_node_is_left_alone():
    undo = []
    flax_graphs.patch_graph_node(int, lambda node: "tag", lambda node, tag: None, undo.append)
    assert undo == []
    assert int not in graphlib.GRAPH_REGISTRY


# --------------------------------------------------------------------- jax


def test_the_trace_state_is_equal_exactly_within_one_trace():
    outside = jit.trace_state()
    inside = []

    @jax.jit
    def f(x):
        inside.extend([jit.trace_state(), jit.trace_state()])
        return x

    f(1.0)
    assert outside == jit.trace_state()
    assert inside[0] == inside[1]
    assert inside[0] != outside


def test_tracers_are_told_from_arrays():
    seen = []
    jax.jit(lambda x: seen.append(jit.is_tracer(x)))(1.0)
    assert seen == [True]
    assert not jit.is_tracer(jnp.ones(1))


def test_open_jaxpr_gives_equations_and_constants():
    constant = np.arange(3.0)
    closed = jax.make_jaxpr(lambda x: x + jnp.asarray(constant))(jnp.ones(3))
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    assert [e.primitive.name for e in jaxpr.eqns][-1] == "add"
    assert len(consts) == len(jaxpr.constvars)


LOOP = {"cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"}


@pytest.mark.parametrize(
    ("name", "f", "count", "params"),
    [
        ("scan", lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=2), 1,
         {"length", "reverse", "unroll"}),
        ("while", lambda x: jax.lax.while_loop(lambda c: c < 3.0, lambda c: c + 1, x), 2, LOOP),
        ("cond", lambda x: jax.lax.cond(x > 0, lambda x: x, lambda x: -x, x), 2, {"branches"}),
        ("jit", lambda x: jax.jit(lambda x: x + 1)(x), 1, {"jaxpr"}),
        ("remat2", jax.checkpoint(jnp.sin), 1, {"prevent_cse", "policy"}),
        ("add", lambda x: x + x, 0, set()),
    ],
)  # fmt: skip
def test_sub_jaxprs_finds_every_jaxpr_and_the_parameters_are_those_that_are_read(
    name, f, count, params
):
    one = equation(f, 1.0, name=name)
    found = list(jaxprs.sub_jaxprs(one))
    assert len(found) == count
    assert all(jaxprs.open_jaxpr(j)[0].invars for j in found)
    assert params <= one.params.keys()


def test_no_tangent_is_the_zero_of_a_value_that_nothing_differentiates():
    for x, dtype in [(jnp.ones(3), jnp.float32), (jnp.arange(3), jax.dtypes.float0)]:
        zero = jaxprs.zero_tangent(x)
        assert type(zero) is ad.Zero
        assert (zero.aval.shape, zero.aval.dtype) == ((3,), dtype)


def test_literals_are_told_from_variables():
    add = equation(lambda x: x + 1.0, 1.0, name="add")
    assert [jaxprs.is_literal(atom) for atom in add.invars] == [False, True]


def test_bind_does_what_the_equation_does():
    found = equation(lambda x, y: jax.lax.dot(x, y), jnp.ones((2, 3)), jnp.ones((3, 2)),
                     name="dot_general")  # fmt: skip
    (out,) = jaxprs.bind(found, [2 * jnp.ones((2, 3)), jnp.ones((3, 2))])
    np.testing.assert_array_equal(out, np.full((2, 2), 6.0))


def test_bind_works_for_an_equation_with_a_custom_rule():
    (found,) = jax.make_jaxpr(jax.nn.relu)(jnp.ones(2)).eqns  # custom_jvp_call, maybe in a jit
    np.testing.assert_array_equal(jaxprs.bind(found, [jnp.array([-1.0, 1.0])])[0], [0.0, 1.0])


def test_bind_keeps_the_users_name_scope():
    def f(x):
        with jax.named_scope("mine"):
            return jnp.sin(x)

    found = equation(f, 1.0, name="sin")
    again = jax.make_jaxpr(lambda x: jaxprs.bind(found, [x])[0])(1.0)
    assert "mine" in str(again.eqns[0].source_info.name_stack)


def test_scan_parts_are_constants_carry_and_rows():
    constant = jnp.float32(2.0)

    def f(constant, carry, rows):
        return jax.lax.scan(lambda c, x: (c * constant + x, c), carry, rows)

    found = equation(f, constant, jnp.float32(3.0), jnp.ones(4), name="scan")
    consts, carry, xs = eqn_params.scan_parts(found.params, ["constant", "carry", "rows"])
    assert (consts, carry, xs) == (["constant"], ["carry"], ["rows"])


def line_of(comment):
    """`file:line` of the one line of this file that ends with a comment."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"  # {comment}")]
    return f"{__file__}:{number}"


def as_if_in(module, function):
    """The same function, as if its code were in another file."""
    code = function.__code__.replace(co_filename=module.__file__)
    return types.FunctionType(code, globals(), closure=function.__closure__)


def test_the_source_of_a_caller_is_the_nearest_line_of_the_user():
    found = []

    def look(x):
        found.append(sources.source_of_caller())
        return x

    for module in (jax, nnx, linen, sources, functools):
        as_if_in(module, look)(1)  # looks
    assert found == [(line_of("looks"), False)] * 5
    assert sources.source_of_caller()[0].startswith(f"{__file__}:")


def test_the_source_of_a_caller_says_whether_the_tracing_of_a_function_lies_between():
    found = []

    def look(x):
        found.append(sources.source_of_caller())
        return x

    inside = as_if_in(jax, look)
    jax.jit(inside)(1.0)  # jits
    jax.lax.scan(lambda c, x: (inside(c), x), 1.0, jnp.ones(2))  # scans
    jax.vmap(inside)(jnp.ones(2))  # vmaps
    assert found == [
        (line_of("jits"), True),
        (line_of("scans"), False),  # the lambda's own line
        (line_of("vmaps"), False),
    ]


def test_the_source_of_an_equation_is_within_the_function_that_was_traced():
    def inner(x):
        return jnp.sin(x)  # sine

    outer = jax.make_jaxpr(lambda x: jax.jit(inner)(x))(1.0)  # calls inner
    call = outer.eqns[0]
    (sine,) = next(jaxprs.sub_jaxprs(call)).eqns
    assert sources.source_of_equation(call) == line_of("calls inner")
    assert sources.source_of_equation(sine) == line_of("sine")
    internal = jax.make_jaxpr(jax.jit(as_if_in(jax, inner)))(1.0).eqns[0]
    (sine,) = next(jaxprs.sub_jaxprs(internal)).eqns
    assert sources.source_of_equation(sine) == ""


def test_only_the_second_pass_of_a_remat_is_a_recomputation():
    def f(x):
        return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x)

    forward = equation(f, 1.0, name="remat2")
    assert forward.primitive.name in jaxprs.REMAT
    assert not eqn_params.is_recomputation(forward)
    assert eqn_params.is_recomputation(equation(jax.grad(f), 1.0, name="remat2"))


def test_the_devices_of_a_shard_map_are_those_of_its_axes():
    spec = jax.sharding.PartitionSpec("data")
    f = jax.shard_map(jnp.sin, mesh=MESH, in_specs=spec, out_specs=spec)
    found = equation(f, jnp.ones(4), name="shard_map")
    assert eqn_params.device_count(found) == 1
    wide = types.SimpleNamespace(shape={"data": 4, "model": 2})
    assert (
        eqn_params.device_count(types.SimpleNamespace(params={**found.params, "mesh": wide})) == 4
    )


@pytest.mark.parametrize("axes", [("data",), ("model",), ("data", "model")])
def test_the_manual_axes_of_a_shard_map_are_in_the_order_of_the_mesh(axes):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec()
    f = jax.shard_map(jnp.sin, mesh=mesh, axis_names={*axes[::-1]}, in_specs=spec, out_specs=spec)
    assert eqn_params.manual_axes(equation(f, jnp.ones(4), name="shard_map")) == axes


def test_the_axes_along_which_an_array_varies_are_known_within_shard_map():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec, seen = jax.sharding.PartitionSpec("data"), []

    def f(x):
        seen.append(jaxprs.varying_axes(x))
        seen.append(jaxprs.varying_axes(jax.eval_shape(jnp.sin, x)))
        seen.append(jaxprs.varying_axes(jnp.zeros(2)))
        return x

    jax.make_jaxpr(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(4))
    assert seen == [{"data"}, {"data"}, set()]
    assert jaxprs.varying_axes(jax.ShapeDtypeStruct((2,), jnp.float32)) == set()


def test_the_shardings_of_a_jit_are_those_that_were_given():
    at = jax.NamedSharding(MESH, jax.sharding.PartitionSpec("data"))
    f = jax.jit(lambda x, y: (x, y), in_shardings=(at, None), out_shardings=(None, at))
    found = equation(f, jnp.ones(4), jnp.ones(4), name="jit")
    assert eqn_params.jit_shardings(found) == ([at, None], [None, at])


def test_the_context_of_an_equation_has_the_mesh_that_it_was_traced_in():
    with jax.set_mesh(MESH):
        found = equation(jnp.sin, 1.0, name="sin")
    assert jax.sharding.get_abstract_mesh().empty
    with jaxprs.context_of(found):
        assert jax.sharding.get_abstract_mesh() == MESH.abstract_mesh
    assert jax.sharding.get_abstract_mesh().empty


def test_compilations_are_told_until_the_undo():
    with Compilations() as events:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(5)).block_until_ready()
    assert {"trace", "compile"} <= set(events.kinds)
    count = len(events.kinds)
    jax.jit(lambda x: x * 5 + 1)(jnp.ones(5)).block_until_ready()
    assert len(events.kinds) == count


# ----------------------------------------------------------------------- Linen


def test_linen_applies_are_counted_through_nesting_and_lifting():
    counts = []

    class Inner(linen.Module):
        @linen.compact
        def __call__(self, x):
            counts.append(flax_graphs.linen_depth())
            return linen.Dense(2)(x)

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            counts.append(flax_graphs.linen_depth())
            other = Inner(parent=None)
            other.apply(other.init(jax.random.key(0), x), x)
            return linen.remat(Inner)()(x)

    x = jnp.ones((1, 2))
    assert flax_graphs.linen_depth() == 0
    variables = Outer().init(jax.random.key(0), x)
    counts.clear()
    Outer().apply(variables, x)
    assert counts == [1, 2, 2, 1]
    assert flax_graphs.linen_depth() == 0


def test_linens_dry_run_of_a_lifted_modules_setup_is_told_from_the_real_one():
    found = []

    class Inner(linen.Module):
        def setup(self):
            found.append(flax_graphs.is_linen_dry_run(self))

        def __call__(self, x):
            return x

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.remat(Inner)()(x)

    Outer().apply({}, jnp.ones(2))
    assert True in found
    assert found[-1] is False


def test_a_linen_interceptor_can_be_put_around_those_that_are_open():
    order = []

    def note(name):
        def interceptor(next_fun, args, kwargs, context):
            order.append(name)
            return next_fun(*args, **kwargs)

        return interceptor

    dense, x = linen.Dense(2), jnp.ones((1, 2))
    variables = dense.init(jax.random.key(0), x)
    with linen.intercept_methods(note("user's")):
        with flax_graphs.outermost_linen_interceptor(note("ours")):
            dense.apply(variables, x)
        assert order == ["ours", "user's"]
        dense.apply(variables, x)
    assert order == ["ours", "user's", "user's"]
    dense.apply(variables, x)
    assert len(order) == 3


def test_linens_jit_keeps_programs_apart_by_what_is_added_to_its_key():
    traced = []

    class Traced(linen.Module):
        @linen.jit
        @linen.compact
        def __call__(self, x):
            traced.append(self.name)
            return linen.Dense(2)(x)

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Traced(name="b")(Traced(name="a")(x))

    x = jnp.ones((1, 2))
    variables = Outer().init(jax.random.key(0), x)
    traced.clear()
    Outer().apply(variables, x)
    assert traced == ["a"]  # the reason for this function
    undo = []
    flax_graphs.patch_linen_jit_key(lambda module: module.scope.path, undo.append)
    try:
        traced.clear()
        Outer().apply(variables, x)
        Outer().apply(variables, x)
        assert traced == ["a", "b"]
    finally:
        undo[0]()
    traced.clear()
    Outer().apply(variables, x)
    assert traced == []


def test_writes_are_found_in_the_program_and_what_is_inside_it():
    def adds(x):
        reference = jax.new_ref(x)

        @jax.jit
        def inner(reference):
            reference[...] += 1.0

        inner(reference)
        return reference[...]

    assert jaxprs.state_writes(jax.make_jaxpr(adds)(1.0)) == {"ref"}
    assert jaxprs.state_writes(jax.make_jaxpr(lambda x: jax.new_ref(x)[...])(1.0)) == set()


def test_a_shard_map_is_interpreted_with_its_jaxpr():
    spec = jax.P("data")
    of_a_device = jax.shard_map(jnp.sin, mesh=MESH, in_specs=spec, out_specs=spec)
    seen = []

    def rule(primitive, values, params, bind):
        if primitive.name == "shard_map":
            (jaxpr,) = jaxprs.sub_jaxprs(types.SimpleNamespace(params=params))
            seen.append([one.primitive.name for one in jaxprs.open_jaxpr(jaxpr)[0].eqns])
            return [3 * x for x in values] if replaced else bind()
        return bind()

    def run(x):
        with interpreter.interpret(rule):
            return of_a_device(x)

    x = jnp.arange(3.0)
    for call in (run, jax.jit(run), lambda x: jax.vjp(run, x)[0]):
        for replaced in (False, True):
            np.testing.assert_allclose(call(x), 3 * x if replaced else jnp.sin(x), rtol=1e-6)
            jax.clear_caches()
    assert all("sin" in names for names in seen)
    assert len(seen) == 6


def test_code_within_a_custom_derivative_knows_that_it_is_kept_apart():
    found = []

    @jax.custom_jvp
    def f(x):
        found.append(interpreter.opaque_primitive())
        return 2 * x

    f.defjvp(lambda xs, ts: (f(*xs), 2 * ts[0]))

    def run(x):
        with interpreter.interpret(lambda primitive, values, params, bind: bind()):
            return f(x)

    jax.jit(run)(1.0)
    assert found == ["custom_jvp_call"]
    assert interpreter.opaque_primitive() == ""


def test_the_vmaps_around_a_call_and_those_that_map_a_value():
    here, of = [], []

    def inside(x, y):
        here.append(len(jit.current_vmaps()))
        of.append(([size for _, size in jit.vmaps_of(x)], [size for _, size in jit.vmaps_of(y)]))
        return (x * y).sum()

    x, y = jnp.ones((2, 4)), jnp.ones(4)
    each = jax.vmap(inside, (None, 0))
    both = jax.vmap(each, (0, None))
    both(x, y)
    jax.jit(both)(x, y)
    jax.vmap(jax.grad(inside), (0, None))(x, y)
    jax.vmap(jax.jit(inside), (0, None))(x, y)
    assert here == [2, 2, 1, 0]
    assert of == [([2], [4]), ([2], [4]), ([2], []), ([], [])]


def test_the_outermost_program_and_the_identity_of_a_value_within_transforms():
    traces, values = [], []

    @jax.jit
    def program(x, y):
        def inner(x):
            traces.append(jit.outermost_program())
            values.append(id(jit.outer_value(x).value))
            return x.sum()

        inner(x)
        jax.grad(inner)(x)
        jax.vmap(inner)(x)
        jax.jit(lambda x: traces.append(jit.outermost_program()))(x)
        values.append(id(jit.outer_value(y).value))

    program(jnp.ones((2, 2)), jnp.ones((2, 2)))
    assert len(set(map(id, traces))) == 1
    assert len(traces) == 4
    assert len(set(values[:3])) == 1
    assert values[3] != values[0]
    assert jit.outermost_program() is None


def test_where_a_value_comes_from():
    given, found, programs = {}, {}, []
    constant = jnp.ones(2)

    @jax.jit
    def program(x):
        def note(name, value):
            origin = jit.outer_value(value)
            found[name] = origin.given, origin.program == jit.outer_value(x).program
            given[name] = origin.value is jit.outer_value(x).value

        note("itself", x)
        jax.grad(lambda x: (note("in grad", x), x.sum())[1])(x)
        jax.vmap(lambda x: note("in vmap", x))(x)
        jax.vmap(jax.grad(lambda x: (note("in both", x), x)[1]))(x)
        jax.jit(lambda x: note("in jit", x))(x)
        note("computed", x + 1)
        assert jit.outer_value(constant).program is None
        jax.grad(lambda x: (programs.append(jit.outermost_program()), x.sum())[1])(x)
        programs.append(jit.outermost_program())

    program(jnp.ones(3))
    followed = {"itself", "in grad", "in vmap", "in both"}
    assert {name for name, same in given.items() if same} == followed
    assert {name for name, (is_given, _) in found.items() if is_given} == followed | {"in jit"}
    assert {name for name, (_, here) in found.items() if here} == followed | {"computed"}
    jax.grad(lambda x: (programs.append(jit.outermost_program()), x)[1])(1.0)
    jax.grad(jax.jit(lambda x: (programs.append(jit.outermost_program()), x)[1]))(1.0)
    assert programs[0] is programs[1] is not None
    assert programs[2] is None
    assert programs[3] is not None


def test_primitives_are_interpreted_where_python_runs_them():
    names = []

    def rule(primitive, values, params, bind):
        names.append(primitive.name)
        return 2 * values[0] if primitive.name == "sin" else bind()

    @jax.jit
    def inner(x):
        return jnp.cos(x)

    def run(x):
        with interpreter.interpret(rule):
            y = jax.vmap(jax.lax.sin)(x)
            assert isinstance(y, jax.Array)
            return inner(y) if interpreter.is_concrete(y.sum()) and y.sum() > 1 else y

    np.testing.assert_allclose(run(jnp.ones(3)), np.cos(2 * np.ones(3)), rtol=1e-6)
    assert names.count("sin") == 1
    assert "cos" not in names  # it is part of the jitted function
    assert "jit" in names
    grad = jax.grad(lambda x: run(x).sum())(jnp.ones(3))
    np.testing.assert_allclose(grad, -2 * np.sin(2 * np.ones(3)), rtol=1e-6)
    names.clear()
    jnp.sin(jnp.ones(3))
    assert names == []


def test_what_is_concrete_is_told_from_what_is_not():
    found = []
    jax.grad(lambda x: found.append(interpreter.is_concrete(x)) or x)(1.0)
    jax.jit(lambda x: found.append(interpreter.is_concrete(x)) or x)(1.0)
    assert found == [True, False]
    assert interpreter.is_concrete(np.ones(2))


def test_which_inputs_the_first_outputs_need():
    from nnx_inspector.program.marks import mark  # of which each output is its own input

    def program(x, y, z):
        a, b = jax.lax.optimization_barrier((2 * x, 2 * y))
        return a, b, z

    jaxpr = jax.make_jaxpr(program)(1.0, 2.0, 3.0)
    assert jaxprs.needed_inputs(jaxpr, 3, mark) == [True, True, True]
    (barrier,) = {one.primitive for one in jaxpr.eqns if len(one.outvars) == 2}
    assert jaxprs.needed_inputs(jaxpr, 1, barrier) == [True, False, False]
    assert jaxprs.needed_inputs(jaxpr, 1, mark) == [True, True, False]


def test_settings_of_a_thread_are_held_in_another_and_put_back():
    with jax.numpy_rank_promotion("raise"), jax.default_device(jax.devices()[0]):
        local = jit.local_settings()
    values = {getattr(state, "name", ""): value for state, value in local}
    assert values["jax_numpy_rank_promotion"] == "raise"
    assert values["jax_default_device"] == jax.devices()[0]
    with jit.with_local_settings(local):
        assert jax.config.jax_numpy_rank_promotion == "raise"
        assert jit.local_settings() == local
    assert jit.local_settings() == ()


def test_the_context_of_a_trace_tells_settings_and_layers_apart():
    plain = jit.trace_context()
    assert jit.trace_context() == plain
    for context in (jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), KEY("open")):
        with context:
            assert jit.trace_context() != plain
    assert hash(jit.trace_context()) == hash(plain)


KEY = jax.make_user_context(default_value=None)


class Sharing(nnx.Module):
    """A module, a Variable, a list and a dict that are reached by several paths."""

    def __init__(self):
        self.a = self.b = nnx.Linear(2, 2, rngs=rngs())
        self.list = self.same = nnx.List([self.a, nnx.Linear(2, 2, rngs=rngs())])
        self.held = nnx.data(
            {"x": [self.a, nnx.BatchNorm(2, rngs=rngs())], "y": (nnx.Dropout(0.1),)}
        )
        self.again = nnx.data(self.held)
        self.kernel = self.a.kernel


def test_nodes_are_those_of_nnx():
    model, found = Sharing(), {}
    for path, node, again in flax_graphs.graph_nodes(model):
        found.setdefault(id(node), []).append(path)
        assert again == (len(found[id(node)]) > 1)
    theirs = dict(nnx.iter_graph(model, graph=True)).items()
    nodes = {p: id(x) for p, x in theirs if isinstance(x, nnx.Pytree | nnx.Variable)}
    assert {paths[0]: number for number, paths in found.items()} == nodes
    several = [paths for paths in found.values() if len(paths) > 1]
    assert sorted(several, key=str) == sorted(nnx.find_duplicates(model), key=str)


def test_links_tell_every_change_of_a_models_objects_and_no_step_of_training():
    model = Sharing()
    links = functools.partial(flax_graphs.module_links, model)
    nodes = {id(node) for _, node, _ in flax_graphs.graph_nodes(model) if node is not model}
    variables = {
        id(node) for _, node in nnx.iter_graph(model, graph=True) if isinstance(node, nnx.Variable)
    }
    assert {inner for *_, inner in links()} == nodes - variables

    before = links()
    nnx.jit(lambda model: nnx.update(model, nnx.state(model)))(model)
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))
    model.held["y"][0].set_attributes(deterministic=True)
    model.held["y"][0].rngs = nnx.Rngs(1)
    assert links() == before

    def swap():
        model.list[0], model.list[1] = model.list[1], model.list[0]

    changes = [
        lambda: setattr(model, "a", nnx.Linear(2, 2, rngs=rngs())),
        lambda: setattr(model, "c", model.a),
        lambda: delattr(model, "b"),
        swap,
        lambda: model.list.append(model.a),
        lambda: model.held["x"].pop(),
    ]
    for change in changes:
        before = links()
        change()
        assert links() != before
