"""A jaxpr that is being edited, and what is done at its marks.

Invariant: without a perturbation, no equation that computes one of the program's own results is
changed. `rules` enters the equations that hold jaxprs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.native import fusion_barrier
from nnx_inspector._compat.sharding import to_current_mesh
from nnx_inspector.program.editing.context import GATE, PRESENT, SEED, WHERE, EditContext, Key
from nnx_inspector.program.editing.functions import (
    Partial,
    finish_all,
    is_stack_row,
    measure_if,
    row_of_device,
    samples_at_beginning,
    seed_with,
    summary_of,
    summary_of_change,
)
from nnx_inspector.program.editing.masks import (
    MaskLayout,
    broadcast_mask,
    keep_masked,
    masked_summary,
)
from nnx_inspector.program.editing.slots import AlwaysRuns, Output, Slot, is_slot
from nnx_inspector.program.editing.updates import ScannedValues
from nnx_inspector.program.marks import (
    BEGIN,
    CHANGE,
    GRADIENT,
    INPUT,
    OUTPUT,
    combine_masks,
    mask_vmaps,
)
from nnx_inspector.program.plan import KeptArray, Observation
from nnx_inspector.program.survey import Item, Mark, Survey
from nnx_inspector.stats.unreduced import is_unreduced
from nnx_inspector.typing import (
    Atom,
    Aval,
    DTypeLike,
    Equation,
    Function,
    Params,
    PyTree,
    Value,
    Var,
)


class JaxprEditor:
    """A jaxpr that is being edited.

    Attributes:
        inputs: the additional inputs, in front: what each is -> its variable, and at the outermost
            its value.
        equations: the new equations, and for each the number of the one that it was made for.
        seen: what its marks see, nested like the survey, with slots for arrays.
        home: the equation whose jaxpr it is; None for the whole program.
        fields: the additional outputs, each once.
    """

    def __init__(
        self,
        of: EditContext,
        found: Survey,
        around: tuple[tuple[Key, int], ...] = (),
        *,
        home: Equation | None = None,
    ):
        self.of, self.found, self.around, self.home = of, found, around, home
        self.inputs: dict[Key, tuple[Var, Value]] = {}
        self.known_inputs: dict[Key, Atom] = {}  # what it needs not to be given
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
        self._rows: ScannedValues | None = None

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

    def replace(self, variable: Var, atom: Atom) -> None:
        """Let an atom stand for a variable from now on."""
        self._instead[variable] = atom

    def add_input(self, key: Key, aval: Aval, value: object = None) -> Var:
        """The variable of an additional input."""
        if key in self.known_inputs:
            return self.known_inputs[key]
        if key[0] == WHERE and key[:2] in self.known_inputs:
            fit = Partial(broadcast_mask, *key[2:])
            own = self.insert(fit, [self.known_inputs[key[:2]]], self.home)
            return self.known_inputs.setdefault(key, own)
        if key not in self.inputs:
            self.inputs[key] = jaxprs.new_var(aval), value
        return self.inputs[key][0]

    def insert(self, f: Function, atoms: Sequence[Atom], like: Equation | None) -> PyTree:
        """Add what computes `f` of some atoms; returns its result, with atoms for arrays."""
        closed, tree = self.of.trace(f, atoms, like)
        bare, consts = jaxprs.open_jaxpr(closed)
        names: dict[Atom, Atom] = dict(zip(bare.invars, atoms, strict=True))
        for v, const in zip(bare.constvars, consts, strict=True):
            if np.ndim(const) or isinstance(const, jax.Array):
                # perhaps a tracer: the numbers of a perturbation
                names[v] = self.add_input(("const", id(const)), v.aval, const)
            else:
                names[v] = jaxprs.literal(np.asarray(const)[()])

        def read(x: Atom) -> Atom:
            return x if jaxprs.is_literal(x) else names[x]

        for equation in bare.eqns:
            for v in equation.outvars:  # a trace may be used again: new variables
                names[v] = v if jaxprs.is_dropped(v) else jaxprs.new_var(v.aval)
            self.add(
                equation.replace(
                    invars=[*map(read, equation.invars)],
                    outvars=[names[v] for v in equation.outvars],
                )
            )
        return jax.tree.unflatten(tree, map(read, bare.outvars))

    def measure(self, measure: Function, atoms: Sequence[Atom], like: Equation | None) -> PyTree:
        """What a function measures of some atoms, with atoms for arrays."""
        axes = self.of.axes
        if self.of.gated:
            measure, atoms = Partial(measure_if, measure), [self._gate(like), *atoms]
        if axes:
            measure = Partial(row_of_device, measure, axes, self.of.checked)
        found, tree = jax.tree.flatten(self.insert(measure, atoms, like))
        return jax.tree.unflatten(tree, self.to_own_mesh(found, like))

    def to_own_mesh(self, atoms: list[Value], like: Equation | None) -> list[Value]:
        """Small results of an equation, on the mesh of this body.

        Within `jax.sharding.auto_axes` types have another mesh than in the body around.
        """
        if not atoms or self.of.axes or self.of.mesh_of(like) == self.of.mesh_of(self.home):
            return atoms
        return self.insert(Partial(_to_current_mesh), atoms, self.home)

    def slot(self, atom: Atom) -> Slot:
        """An additional output."""
        number = self._field_of.setdefault(_atom_key(atom), len(self.fields))
        if number == len(self.fields):
            self.fields.append(atom)
        return Output(number)

    def finish(self, like: Equation | None) -> None:
        """Add up over all devices what each has found here and is still apart."""
        waiting: dict[int, Callable[[Value], PyTree]] = {}
        for one in jax.tree.leaves(self.seen, is_leaf=lambda x: is_unreduced(x) or is_slot(x)):
            if is_unreduced(one):
                waiting[one.words.number] = one.finish
        if not waiting:
            return
        fields, self.fields, self._field_of = self.fields, [], {}
        words = [fields[number] for number in waiting]
        whole = self.insert(Partial(finish_all, tuple(waiting.values())), words, like)
        done = dict(zip(waiting, jax.tree.map(self.slot, whole), strict=True))

        def moved(x: Value) -> PyTree:
            if is_unreduced(x):
                return done[x.words.number]
            return self.slot(fields[x.number]) if isinstance(x, Output) else x

        self.seen = jax.tree.map(moved, self.seen, is_leaf=lambda x: is_unreduced(x) or is_slot(x))

    # ---------------------------------------------------------------------- marks

    def mark(self, item: Item, equation: Equation, values: list[Value]) -> PyTree:
        marked, plan = item.mark, self.of.plan
        assert marked is not None
        count = len(marked.avals)
        masked = bool(equation.params.get("masked"))
        values, rest, mask = values[:count], values[count:], values[count : count + masked]
        if self.of.presence:
            return self._mask_mark(equation, values, mask, rest[masked:])
        if marked.part == BEGIN:
            return self._begin(marked, equation, [*values, *rest])
        if marked.part in (OUTPUT, INPUT) and plan.perturb is not None:
            values = self._perturb(plan.perturb, marked, values, equation)
        repeated = self.of.again and marked.part != GRADIENT
        measures = not repeated and marked.site not in plan.unmeasured
        keeps = measures and plan.keep.keeps(marked.site, marked.part)
        summarises = measures and plan.summarise
        axes = marked.member_axes or (None,) * len(values)
        if marked.part == OUTPUT and (summarises or keeps):
            known = self._summaries
            values = [x if _atom_key(x) in known else self._barrier(equation, x) for x in values]
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
            self._for_each(marked, axis, self.measure(keep, [x, *masks[n]], equation), equation)
            for n, (x, mapped, axis) in enumerate(zip(values, marked.mapped, axes, strict=True))
            for how in [MaskLayout.of(marked, equation.params, n, axis) if masks[n] else None]
            for keep in [Partial(keep_masked, plan.keep, marked.site, mapped, axis, how)]
            if keeps
        ]
        if marked.part == GRADIENT and summaries:
            # measured first: nothing else may read it, and what follows may change it in place
            once = self._barrier(equation, values[0], jax.tree.leaves(summaries[0])[0])
            self._summaries[_atom_key(once)] = self._summaries[_atom_key(values[0])]
            values = [once]
        if seeds:
            values = self._seed(marked, equation, values, masks)
        self._instead.update(zip(equation.outvars, [*values, *rest], strict=True))
        summaries, kept = jax.tree.map(self.slot, (summaries, kept))
        ticket = None
        if marked.part == GRADIENT and equation.params.get("ticket"):
            ticket = self.slot(self.measure(operator.pos, rest[-1:], equation))
        return Observation(summaries, AlwaysRuns(marked.rows(())), kept, ticket)

    def _begin(self, marked: Mark, equation: Equation, values: list[Atom]) -> Observation:
        """The first of the values ties the mark to the program."""
        self._instead.update(zip(equation.outvars, values, strict=True))
        if not self.of.plan.summarise or self.of.again:
            return Observation([], AlwaysRuns(()))
        begun, taken = marked.begun, values[1 : len(marked.avals)]
        kept = self.measure(
            Partial(samples_at_beginning, len(begun.paths), marked.mapped[1:]), taken, equation
        )
        self._rows, summaries = self._rows or ScannedValues(self.found.jaxpr), list[Value]()
        for path, x, own in zip(begun.paths, taken, equation.invars[1:], strict=False):
            if path in begun.weights:
                self.of.stacked |= {path} if (rows := self._rows.holds(own)) else set()
                measure = self._measure_of(0 if rows else None)
                summaries.append(self.measure(measure, [x], equation))
        return Observation(
            jax.tree.map(self.slot, summaries), AlwaysRuns(()), [KeptArray(self.slot(kept))]
        )

    def launch_input(self, equation: Equation) -> Var:
        """The atom of a value that is given to the program, at each run."""
        params, (result,) = equation.params, equation.outvars
        key = ("launch_input", params["place"], params.get("call"))
        atom, rows = self.add_input(key, result.aval), params.get("rows", ())
        around = self.around[self.of.depths.get(params.get("call"), 0) :]
        if len(rows) > len(around):
            self.of.outside.add(params["site"])
            return self.insert(Partial(jnp.zeros, (), np.dtype(np.bool_)), [], equation)
        if rows:
            number = self.type_of(np.int32, equation)
            here = around[: len(rows)]
            counters = [self.add_input(key, number) for key, _ in here]
            layer = Partial(is_stack_row, rows, tuple(length for _, length in here))
            return self.insert(layer, [atom, *counters], equation)
        return atom

    def _gate(self, like: Equation | None) -> PyTree:
        return self.add_input(GATE, self.type_of(np.bool_, like))

    def _mask(
        self, marked: Mark, equation: Equation, number: int, present: list[Value]
    ) -> list[Value]:
        """The mask beside a value of a mark, if it has one: of positions, of the examples that are
        present, or of both.
        """
        if marked.part == GRADIENT or not any(marked.counted[number : number + 1]):
            return present
        params, aval = equation.params, self.type_of(np.bool_, equation)
        mapped = params["mapped"][number] if "mapped" in params else ()
        sizes = mask_vmaps(params["where"], equation.invars[number].aval, mapped) or ()
        for length in reversed(shape := (*sizes, *params["where"])):
            aval = jaxprs.stacked_aval(aval, length)
        atom = self.add_input((WHERE, params["owner"], shape, len(sizes)), aval)
        if present:
            atom = self.insert(Partial(combine_masks), [atom, *present], equation)
        return [atom]

    def _mask_mark(
        self, equation: Equation, values: list[Value], mask: list[Value], ties: list[Value]
    ) -> list[Value]:
        """Add the mark, with a mask that says whether the example is there."""
        present = self.add_input(PRESENT, self.type_of(np.bool_, equation))
        if mask:
            present = self.insert(jnp.logical_and, [*mask, present], equation)
        count, end, params = len(values), len(values) + len(mask), equation.params
        mapped = params.get("mapped", ((),) * (end + len(ties)))
        of_mask = mapped[count:end] or ((),)
        results = equation.outvars
        self.add(
            equation.replace(
                invars=[*values, present, *ties],
                outvars=[*results[:count], jaxprs.new_var(present.aval), *results[end:]],
                params={
                    **params,
                    "masked": True,
                    "present": True,
                    "mapped": (*mapped[:count], *of_mask, *mapped[end:]),
                },
            )
        )
        return []

    def _barrier(self, equation: Equation, x: Atom, *after: Atom) -> Var:
        return self.insert(Partial(fusion_barrier), [x, *after], equation)

    def _summary(
        self, marked: Mark, equation: Equation, xs: list[Value], axis: int | None, number: int
    ) -> PyTree:
        if marked.part == CHANGE:
            measure = Partial(summary_of_change, self.of.plan.sample, axis)
            return self._for_each(marked, axis, self.measure(measure, xs, equation), equation)
        x, *mask = xs
        known, how = self._summaries.setdefault(_atom_key(x), {}), (*map(_atom_key, mask), axis)
        if how not in known:
            rows = marked.part == GRADIENT and marked.site in self.of.stacked
            measure = self._measure_of(0 if rows else axis)
            if mask:
                how_masked = MaskLayout.of(marked, equation.params, number, axis)
                measure = Partial(masked_summary, self.of.plan.sample, how_masked)
            known[how] = self.measure(measure, xs, equation)
        return self._for_each(marked, axis, known[how], equation)

    def _measure_of(self, axis: int | None) -> Partial:
        apart = self.of.apart and not self.of.axes
        return Partial(summary_of, self.of.plan.sample, axis, apart)

    def _for_each(self, marked: Mark, axis: int | None, found: object, like: Equation) -> PyTree:
        """What was found in an array, for each member, even if all share the array."""
        if axis is not None or not marked.members:
            return found
        atoms, tree = jax.tree.flatten(found)
        each = lambda *xs: [jnp.broadcast_to(x, (marked.members, *x.shape)) for x in xs]  # noqa: E731
        return jax.tree.unflatten(tree, self.insert(each, atoms, like))

    def _seed(
        self, marked: Mark, equation: Equation, values: list[Value], masks: list[list[Value]]
    ) -> list[Var]:
        """The values, each with a mark on what it will receive."""
        out = list(values)
        members = equation.params.get("members") if marked.members else None
        mapped = equation.params.get("mapped", ((),) * len(values))
        for leaf, (x, able) in enumerate(zip(values, marked.differentiable, strict=True)):
            if able:
                seed = self.add_input(SEED, self.type_of(np.float32, equation), np.float32(0))
                of_one = None if members is None else members.only(leaf)
                how = {"owner": GRADIENT, "site": marked.site, "of": (id(marked), leaf)}
                how |= {"mapped": (mapped[leaf],), "members": of_one, "ticket": self.of.tickets}
                if masks[leaf]:
                    how |= MaskLayout.of(marked, equation.params, leaf, None).params(
                        equation.params
                    )
                seeds = Partial(seed_with, tuple(how.items()))
                out[leaf] = self.insert(seeds, [x, seed, *masks[leaf]], equation)
        return out

    def type_of(self, dtype: DTypeLike, like: Equation | None) -> Aval:
        """The type of a number where an equation stands: within a shard_map it is another."""
        closed, _ = self.of.trace(Partial(jnp.zeros, (), np.dtype(dtype)), [], like)
        return jaxprs.open_jaxpr(closed)[0].outvars[0].aval

    def _perturb(
        self,
        perturb: Callable[..., list[Value]],
        marked: Mark,
        values: list[Value],
        equation: Equation,
    ) -> list[Var]:
        number = self.type_of(np.int32, equation)
        counters = [self.add_input(key, number) for key, _ in self.around]
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
                how = MaskLayout.of(marked, equation.params, n, axes[n] if axes else None)
                wheres[n] = how.align(xs[n], mask)[1]
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
        return self.insert(run, [*values, *counters, *given], equation)

    # ------------------------------------------------------------- bodies inside

    def body(self, found: Survey, home: Equation) -> JaxprEditor:
        """An edited jaxpr of one of its equations."""
        inner = JaxprEditor(self.of, found, self.around, home=home)
        inner.edit()
        return inner

    def operands_for(self, inner: JaxprEditor) -> list[Var]:
        """The operands for the additional inputs of a body."""
        return [self.add_input(key, v.aval, value) for key, (v, value) in inner.inputs.items()]

    def add_outputs(
        self,
        equation: Equation,
        operands: Sequence[Atom],
        params: Params,
        fields: Sequence[Aval],
        effects: object,
    ) -> list[Slot]:
        """Add an equation that returns more: a slot for each of these types."""
        new = list(map(jaxprs.new_var, fields))
        self.add(
            equation.replace(
                invars=list(operands),
                outvars=[*equation.outvars, *new],
                params=params,
                effects=effects,
            )
        )
        return list(map(self.slot, self.to_own_mesh(new, equation)))


def _to_current_mesh(*xs: jax.Array) -> list[jax.Array]:
    return to_current_mesh(list(xs))


def _atom_key(atom: Atom) -> Hashable:
    """What stands for an atom in a dict: jax's literals cannot be hashed."""
    return ("literal", id(atom)) if jaxprs.is_literal(atom) else atom
