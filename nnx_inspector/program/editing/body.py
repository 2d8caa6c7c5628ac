"""A jaxpr that is being edited, and what is done at its marks.

Invariant: without a perturbation, no equation that computes one of the program's own results is
changed. `bodies` enters the equations that hold jaxprs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.sharding import on_this_mesh
from nnx_inspector.program.editing.editor import (
    GATE,
    PRESENT,
    SEED,
    WHERE,
    Editor,
    Key,
)
from nnx_inspector.program.editing.functions import (
    Partial,
    finished_by,
    gated,
    is_in_layer,
    once,
    row_of_device,
    samples_at_beginning,
    seeded_by,
    summary_of,
    summary_of_change,
)
from nnx_inspector.program.editing.masks import Masked, fitted, kept_of, summary_where
from nnx_inspector.program.editing.slots import Always, Output, Slot, is_slot
from nnx_inspector.program.editing.updates import Rows
from nnx_inspector.program.marks import BEGIN, CHANGE, GRADIENT, INPUT, OUTPUT, both, outside
from nnx_inspector.program.plan import Kept, Seen
from nnx_inspector.program.survey import Item, Marked, Survey
from nnx_inspector.stats.apart import is_apart
from nnx_inspector.typing import (
    Atom,
    Aval,
    DTypeLike,
    Equation,
    Function,
    Params,
    PyTree,
    Treedef,
    Value,
    Var,
)


class Body:
    """A jaxpr that is being edited.

    Attributes:
        places: the additional inputs, in front: what each is -> its variable, and at the outermost
            its value.
        equations: the new equations, and for each the number of the one that it was made for.
        seen: what its marks see, nested like the survey, with slots for arrays.
        home: the equation whose jaxpr it is; None for the whole program.
        fields: the additional outputs, each once.
    """

    def __init__(
        self,
        of: Editor,
        found: Survey,
        around: tuple[tuple[Key, int], ...] = (),
        *,
        home: Equation | None = None,
    ):
        self.of, self.found, self.around, self.home = of, found, around, home
        self.places: dict[Key, tuple[Var, Value]] = {}
        self.own: dict[Key, Atom] = {}  # what it needs not to be given
        self.equations: list[Equation] = []
        self.numbers: list[int] = []
        self.seen: list[PyTree] = []
        self.fields: list[Atom] = []
        self._field_of: dict[Hashable, int] = {}
        self._instead: dict[Atom, Atom] = {}
        self._summaries: dict[
            Hashable, dict[Hashable, PyTree]
        ] = {}  # of each value, by mask and axis
        self._number = 0
        self._rows: Rows | None = None

    @property
    def outputs(self) -> list[Value]:
        return [*self.read(self.found.jaxpr.outvars), *self.fields]

    def edit(self) -> None:
        for number, equation in enumerate(self.found.jaxpr.eqns):
            self._number = number
            operands = self.read(equation.invars)
            item = self.found.items.get(number)
            if item is None:
                same = all(a is b for a, b in zip(operands, equation.invars, strict=True))
                self.add(equation if same else equation.replace(invars=operands))
            else:
                self.seen.append(self.of.enter[item.kind](self, item, equation, operands))

    def add(self, equation: Equation) -> None:
        self.equations.append(equation)
        self.numbers.append(self._number)

    def read(self, atoms: Sequence[Atom]) -> list[Atom]:
        return [x if jaxprs.is_literal(x) else self._instead.get(x, x) for x in atoms]

    def put(self, variable: Var, atom: Atom) -> None:
        """Let an atom stand for a variable from now on."""
        self._instead[variable] = atom

    def place(self, key: Key, aval: Aval, value: object = None) -> Var:
        """The variable of an additional input."""
        if key in self.own:
            return self.own[key]
        if key[0] == WHERE and key[:2] in self.own:
            (own,), _ = self.traced(Partial(fitted, *key[2:]), [self.own[key[:2]]], self.home)
            return self.own.setdefault(key, own)
        if key not in self.places:
            self.places[key] = jaxprs.variable(aval), value
        return self.places[key][0]

    def traced(
        self, f: Function, atoms: Sequence[Atom], like: Equation | None
    ) -> tuple[list[Atom], Treedef]:
        """Add what computes `f` of some atoms; returns its results' atoms, and their tree."""
        closed, tree = self.of.trace(f, atoms, like)
        bare, consts = jaxprs.open_jaxpr(closed)
        names: dict[Atom, Atom] = dict(zip(bare.invars, atoms, strict=True))
        for v, const in zip(bare.constvars, consts, strict=True):
            if np.ndim(const) or isinstance(const, jax.Array):
                # perhaps a tracer: the numbers of a perturbation
                names[v] = self.place(("const", id(const)), v.aval, const)
            else:
                names[v] = jaxprs.literal(np.asarray(const)[()])

        def read(x: Atom) -> Atom:
            return x if jaxprs.is_literal(x) else names[x]

        for equation in bare.eqns:
            for v in equation.outvars:  # a trace may be used again: new variables
                names[v] = v if jaxprs.is_dropped(v) else jaxprs.variable(v.aval)
            self.add(
                equation.replace(
                    invars=[*map(read, equation.invars)],
                    outvars=[names[v] for v in equation.outvars],
                )
            )
        return [read(v) for v in bare.outvars], tree

    def measured(self, measure: Function, atoms: Sequence[Atom], like: Equation | None) -> PyTree:
        """What a function measures of some atoms, with atoms for arrays."""
        axes = self.of.axes
        if self.of.gated:
            measure, atoms = Partial(gated, measure), [self._gate(like), *atoms]
        if axes:
            measure = Partial(row_of_device, measure, axes, self.of.checked)
        found, tree = self.traced(measure, atoms, like)
        return jax.tree.unflatten(tree, self.at_home(found, like))

    def at_home(self, atoms: list[Value], like: Equation | None) -> list[Value]:
        """Small results of an equation, on the mesh of this body.

        Within `jax.sharding.auto_axes` types have another mesh than in the body around.
        """
        if not atoms or self.of.axes or self.of.mesh_of(like) == self.of.mesh_of(self.home):
            return atoms
        return self.traced(Partial(_on_this_mesh), atoms, self.home)[0]

    def slot(self, atom: Atom) -> Slot:
        """An additional output."""
        number = self._field_of.setdefault(_named(atom), len(self.fields))
        if number == len(self.fields):
            self.fields.append(atom)
        return Output(number)

    def finish(self, like: Equation | None) -> None:
        """Add up over all devices what each has found here and is still apart."""
        waiting: dict[int, Callable[[Value], PyTree]] = {}
        for one in jax.tree.leaves(self.seen, is_leaf=lambda x: is_apart(x) or is_slot(x)):
            if is_apart(one):
                waiting[one.words.number] = one.finish
        if not waiting:
            return
        fields, self.fields, self._field_of = self.fields, [], {}
        words = [fields[number] for number in waiting]
        found, tree = self.traced(Partial(finished_by, tuple(waiting.values())), words, like)
        whole = jax.tree.unflatten(tree, list(map(self.slot, found)))
        done = dict(zip(waiting, whole, strict=True))

        def moved(x: Value) -> PyTree:
            if is_apart(x):
                return done[x.words.number]
            return self.slot(fields[x.number]) if isinstance(x, Output) else x

        self.seen = jax.tree.map(moved, self.seen, is_leaf=lambda x: is_apart(x) or is_slot(x))

    # ---------------------------------------------------------------------- marks

    def mark(self, item: Item, equation: Equation, values: list[Value]) -> PyTree:
        marked, plan = item.mark, self.of.plan
        assert marked is not None
        count = len(marked.avals)
        masked = bool(equation.params.get("masked"))
        values, rest, mask = values[:count], values[count:], values[count : count + masked]
        if self.of.presence:
            return self._with_presence(equation, values, mask, rest[masked:])
        if marked.part == BEGIN:
            return self._begun(marked, equation, [*values, *rest])
        if marked.part in (OUTPUT, INPUT) and plan.perturb is not None:
            values = self._perturbed(plan.perturb, marked, values, equation)
        repeated = self.of.again and marked.part != GRADIENT
        measures = not repeated and marked.site not in plan.unmeasured
        keeps = measures and plan.keep.keeps(marked.site, marked.part)
        summarises = measures and plan.summarise
        axes = marked.member_axes or (None,) * len(values)
        if marked.part == OUTPUT and (summarises or keeps):
            known = self._summaries
            values = [x if _named(x) in known else self._once(equation, x) for x in values]
        if masked and equation.params.get("present", True):
            keeps = False  # what is kept does not add up over examples
        seeds = marked.part == OUTPUT and self.of.seeds is not None and self.of.seeds(marked)
        masks = [mask] * len(values)
        if summarises or keeps or seeds:
            masks = [self._mask(marked, equation, n, mask) for n in range(len(values))]
        operands = [values[:2]] if marked.part == CHANGE else [[x] for x in values]
        summaries = [
            self._summary(marked, equation, [*xs, *masks[number]], axis, number)
            for number, (xs, axis) in enumerate(zip(operands, axes, strict=False))
            if summarises
        ]
        kept = [
            self._for_each(marked, axis, self.measured(keep, [x, *masks[n]], equation), equation)
            for n, (x, mapped, axis) in enumerate(zip(values, marked.mapped, axes, strict=True))
            for how in [Masked.of(marked, equation.params, n, axis) if masks[n] else None]
            for keep in [Partial(kept_of, plan.keep, marked.site, mapped, axis, how)]
            if keeps
        ]
        if marked.part == GRADIENT and summaries:
            # measured first: nothing else may read it, and what follows may change it in place
            once = self._once(equation, values[0], jax.tree.leaves(summaries[0])[0])
            self._summaries[_named(once)] = self._summaries[_named(values[0])]
            values = [once]
        if seeds:
            values = self._seeded(marked, equation, values, masks)
        self._instead.update(zip(equation.outvars, [*values, *rest], strict=True))
        summaries, kept = jax.tree.map(self.slot, (summaries, kept))
        ticket = None
        if marked.part == GRADIENT and equation.params.get("ticket"):
            ticket = self.slot(self.measured(operator.pos, rest[-1:], equation))
        return Seen(summaries, Always(marked.rows(())), kept, ticket)

    def _begun(self, marked: Marked, equation: Equation, values: list[Atom]) -> Seen:
        """The first of the values ties the mark to the program."""
        self._instead.update(zip(equation.outvars, values, strict=True))
        if not self.of.plan.summarise or self.of.again:
            return Seen([], Always(()))
        begun, taken = marked.begun, values[1 : len(marked.avals)]
        kept = self.measured(
            Partial(samples_at_beginning, len(begun.paths), marked.mapped[1:]), taken, equation
        )
        self._rows, summaries = self._rows or Rows(self.found.jaxpr), list[Value]()
        for path, x, own in zip(begun.paths, taken, equation.invars[1:], strict=False):
            if path in begun.weights:
                self.of.stacked |= {path} if (rows := self._rows.holds(own)) else set()
                measure = self._summarises(0 if rows else None)
                summaries.append(self.measured(measure, [x], equation))
        return Seen(jax.tree.map(self.slot, summaries), Always(()), [Kept(self.slot(kept))])

    def given(self, equation: Equation) -> Var:
        """The atom of a value that is given to the program, at each run."""
        params, (result,) = equation.params, equation.outvars
        key = ("given", params["place"], params.get("call"))
        atom, rows = self.place(key, result.aval), params.get("rows", ())
        around = self.around[self.of.depths.get(params.get("call"), 0) :]
        if len(rows) > len(around):
            self.of.outside.add(params["site"])
            return self.traced(Partial(jnp.zeros, (), np.dtype(np.bool_)), [], equation)[0][0]
        if rows:
            number = self.type_of(np.int32, equation)
            here = around[: len(rows)]
            counters = [self.place(key, number) for key, _ in here]
            layer = Partial(is_in_layer, rows, tuple(length for _, length in here))
            ((atom,), _) = self.traced(layer, [atom, *counters], equation)
        return atom

    def _gate(self, like: Equation | None) -> PyTree:
        return self.place(GATE, self.type_of(np.bool_, like))

    def _mask(
        self, marked: Marked, equation: Equation, number: int, present: list[Value]
    ) -> list[Value]:
        """The mask beside a value of a mark, if it has one: of positions, of the examples that are
        present, or of both.
        """
        if marked.part == GRADIENT or not any(marked.counted[number : number + 1]):
            return present
        params, aval = equation.params, self.type_of(np.bool_, equation)
        mapped = params["mapped"][number] if "mapped" in params else ()
        sizes = outside(params["where"], equation.invars[number].aval, mapped) or ()
        for length in reversed(shape := (*sizes, *params["where"])):
            aval = jaxprs.stacked(aval, length)
        atom = self.place((WHERE, params["owner"], shape, len(sizes)), aval)
        return self.traced(Partial(both), [atom, *present], equation)[0] if present else [atom]

    def _with_presence(
        self, equation: Equation, values: list[Value], mask: list[Value], ties: list[Value]
    ) -> list[Value]:
        """Add the mark, with a mask that says whether the example is there."""
        present = self.place(PRESENT, self.type_of(np.bool_, equation))
        if mask:
            (present,), _ = self.traced(jnp.logical_and, [*mask, present], equation)
        count, end, params = len(values), len(values) + len(mask), equation.params
        mapped = params.get("mapped", ((),) * (end + len(ties)))
        of_mask = mapped[count:end] or ((),)
        results = equation.outvars
        self.add(
            equation.replace(
                invars=[*values, present, *ties],
                outvars=[*results[:count], jaxprs.variable(present.aval), *results[end:]],
                params={
                    **params,
                    "masked": True,
                    "present": True,
                    "mapped": (*mapped[:count], *of_mask, *mapped[end:]),
                },
            )
        )
        return []

    def _once(self, equation: Equation, x: Atom, *after: Atom) -> Var:
        return self.traced(Partial(once), [x, *after], equation)[0][0]

    def _summary(
        self, marked: Marked, equation: Equation, xs: list[Value], axis: int | None, number: int
    ) -> PyTree:
        if marked.part == CHANGE:
            measure = Partial(summary_of_change, self.of.plan.sample, axis)
            return self._for_each(marked, axis, self.measured(measure, xs, equation), equation)
        x, *mask = xs
        known, how = self._summaries.setdefault(_named(x), {}), (*map(_named, mask), axis)
        if how not in known:
            rows = marked.part == GRADIENT and marked.site in self.of.stacked
            measure = self._summarises(0 if rows else axis)
            if mask:
                how_masked = Masked.of(marked, equation.params, number, axis)
                measure = Partial(summary_where, self.of.plan.sample, how_masked)
            known[how] = self.measured(measure, xs, equation)
        return self._for_each(marked, axis, known[how], equation)

    def _summarises(self, axis: int | None) -> Partial:
        apart = self.of.apart and not self.of.axes
        return Partial(summary_of, self.of.plan.sample, axis, apart)

    def _for_each(self, marked: Marked, axis: int | None, found: object, like: Equation) -> PyTree:
        """What was found in an array, for each member, even if all share the array."""
        if axis is not None or not marked.members:
            return found
        atoms, tree = jax.tree.flatten(found)
        each = lambda *xs: [jnp.broadcast_to(x, (marked.members, *x.shape)) for x in xs]  # noqa: E731
        return jax.tree.unflatten(tree, self.traced(each, atoms, like)[0])

    def _seeded(
        self, marked: Marked, equation: Equation, values: list[Value], masks: list[list[Value]]
    ) -> list[Var]:
        """The values, each with a mark on what it will receive."""
        out = list(values)
        members = equation.params.get("members") if marked.members else None
        mapped = equation.params.get("mapped", ((),) * len(values))
        for leaf, (x, able) in enumerate(zip(values, marked.differentiable, strict=True)):
            if able:
                seed = self.place(SEED, self.type_of(np.float32, equation), np.float32(0))
                of_one = None if members is None else members.only(leaf)
                how = {"owner": GRADIENT, "site": marked.site, "of": (id(marked), leaf)}
                how |= {"mapped": (mapped[leaf],), "members": of_one, "ticket": self.of.tickets}
                if masks[leaf]:
                    how |= Masked.of(marked, equation.params, leaf, None).params(equation.params)
                seeds = Partial(seeded_by, tuple(how.items()))
                (out[leaf],), _ = self.traced(seeds, [x, seed, *masks[leaf]], equation)
        return out

    def type_of(self, dtype: DTypeLike, like: Equation | None) -> Aval:
        """The type of a number where an equation stands: within a shard_map it is another."""
        closed, _ = self.of.trace(Partial(jnp.zeros, (), np.dtype(dtype)), [], like)
        return jaxprs.open_jaxpr(closed)[0].outvars[0].aval

    def _perturbed(
        self,
        perturb: Callable[..., list[Value]],
        marked: Marked,
        values: list[Value],
        equation: Equation,
    ) -> list[Var]:
        number = self.type_of(np.int32, equation)
        counters = [self.place(key, number) for key, _ in self.around]
        lengths = [length for _, length in self.around]
        count, axes = len(values), list(marked.member_axes)
        masks = [[]] * count
        if self.of.plan.positions:
            masks = [self._mask(marked, equation, n, []) for n in range(count)]
        at = [n for n, mask in enumerate(masks) if mask]

        def run(*xs: Value) -> list[Value]:
            rows = tuple(zip(xs[count : count + len(counters)], lengths, strict=True))
            if not self.of.plan.positions:
                return of_values(list(xs[:count]), rows)
            wheres: list[Value] = [None] * count
            for n, mask in zip(at, xs[count + len(counters) :], strict=True):
                how = Masked.of(marked, equation.params, n, axes[n] if axes else None)
                wheres[n] = how.beside(xs[n], mask)[1]
            return of_values(list(xs[:count]), rows, wheres)

        def of_values(
            xs: list[Value], rows: Sequence[tuple[Value, int]], *wheres: Value
        ) -> list[Value]:
            if not marked.members:
                return perturb(marked, xs, rows, *wheres)

            def of_member(xs: list[Value], number: Value, *wheres: Value) -> list[Value]:
                return perturb(marked, xs, (*rows, (number, marked.members)), *wheres)

            first = [None if axis is None else 0 for axis in axes]
            each = jax.vmap(of_member, (axes, 0, *[first] * len(wheres)), axes)
            return each(xs, jnp.arange(marked.members), *wheres)

        given = [mask for n in at for mask in masks[n]]
        return self.traced(run, [*values, *counters, *given], equation)[0]

    # ------------------------------------------------------------- bodies inside

    def body(self, found: Survey, home: Equation) -> Body:
        """An edited jaxpr of one of its equations."""
        inner = Body(self.of, found, self.around, home=home)
        inner.edit()
        return inner

    def given_to(self, inner: Body) -> list[Var]:
        """The operands for the additional inputs of a body."""
        return [self.place(key, v.aval, value) for key, (v, value) in inner.places.items()]

    def take(
        self,
        equation: Equation,
        operands: Sequence[Atom],
        params: Params,
        fields: Sequence[Aval],
        effects: object,
    ) -> list[Slot]:
        """Add an equation that returns more: a slot for each of these types."""
        new = list(map(jaxprs.variable, fields))
        self.add(
            equation.replace(
                invars=list(operands),
                outvars=[*equation.outvars, *new],
                params=params,
                effects=effects,
            )
        )
        return list(map(self.slot, self.at_home(new, equation)))


def _on_this_mesh(*xs: jax.Array) -> list[jax.Array]:
    return on_this_mesh(list(xs))


def _named(atom: Atom) -> Hashable:
    """What stands for an atom in a dict: jax's literals cannot be hashed."""
    return ("literal", id(atom)) if jaxprs.is_literal(atom) else atom
