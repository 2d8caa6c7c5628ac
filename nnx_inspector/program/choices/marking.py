"""Puts a mark beside each softmax of a traced program that chooses.

Invariant: the program computes what it computed before, and a program without such a softmax is
returned as it is. Equations of a backward pass are left out, and so is what a loop of unknown
length computes.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.sources import is_backward, named_scopes_of
from nnx_inspector.hooks.operations.attention import FIXED, PATTERN, Trail, Trails, pattern_in
from nnx_inspector.hooks.operations.named_scopes import site_in
from nnx_inspector.program.choices.attentions import Softmaxes, common_frame, heads_of
from nnx_inspector.program.choices.capacity import place_in_expert
from nnx_inspector.program.choices.frames import Frame
from nnx_inspector.program.choices.routers import CHOOSES, router_at
from nnx_inspector.program.marks import BEGIN, CHOICE, OUTPUT, equation_program, mark
from nnx_inspector.stats.choices.rows import EXPERTS
from nnx_inspector.typing import Equation, Jaxpr, OpenJaxpr, Owner, Value

_OURS = ("apply", "link", "parameter", "mark", "seeded")
_IDENTITIES = frozenset(f"nnx_inspector_{name}" for name in _OURS)
"""What we put into a program: it returns what it gets, or, with a perturbation, as many values."""
_NEEDED = frozenset(["exp", "exp2", *CHOOSES])
_NONE: Mapping[str, Sequence[int]] = {}

_exponentials: weakref.WeakKeyDictionary[OpenJaxpr, bool] = weakref.WeakKeyDictionary()


def mark_choices(
    jaxpr: Jaxpr,
    owner: object,
    *,
    weights: Collection[int] = (),
    shapes: Mapping[str, Sequence[int]] = _NONE,
    finished: bool = False,
) -> Jaxpr:
    """The program with a mark beside the softmaxes that choose, within an owner's sites.

    Args:
        weights: the numbers of the inputs that are parameters of the model. Those of a finished
            program are also known by the marks where calls begin.
        shapes: the path of each parameter -> its shape, in the same way.
        finished: see `survey`.
    """
    if not _has_exponential(jaxpr):
        return jaxpr
    return _Search(jaxpr, owner, weights, shapes, finished=finished).found()


def _has_exponential(jaxpr: object) -> bool:
    """Whether a program has an exponential, or a choice, at all."""
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    if bare not in _exponentials:
        _exponentials[bare] = any(
            one.primitive.name in _NEEDED or any(map(_has_exponential, jaxprs.sub_jaxprs(one)))
            for one in bare.eqns
        )
    return _exponentials[bare]


class _Search:
    def __init__(
        self,
        jaxpr: Jaxpr,
        owner: Owner,
        weights: Collection[int],
        shapes: Mapping[str, Sequence[int]],
        *,
        finished: bool,
    ):
        self.owner, self.finished = owner, finished
        self.shapes = dict(shapes)
        self.routers: list[tuple[Frame, Equation, Trail]] = []
        self.trails = Trails()
        self.softmaxes = Softmaxes(self.trails)
        self.counts = Counter[tuple[str, str]]()
        self.whole = Frame(jaxpr)
        for number, variable in enumerate(self.whole.bare.invars):
            if number in weights:
                self.trails.put(variable, FIXED)
        self.look(self.whole)
        self.counts.clear()
        for router in self.routers:  # only now it is known what becomes of the choice
            self._router(*router)

    def found(self) -> Jaxpr:
        return self.whole.rebuilt()

    def look(self, frame: Frame) -> None:
        for number, equation in enumerate(frame.bare.eqns):
            name = equation.primitive.name
            if name in _IDENTITIES:
                self._pass_on(equation)
            elif not is_backward(equation):
                inner = frame.functions(number, equation, finished=self.finished)
                if inner:
                    for one in inner:
                        self._enter(one)
                    continue
                self._attention(frame, equation)
                if name in CHOOSES and (trail := self.trails.of(equation.invars[0])) is not None:
                    self.routers.append((frame, equation, trail))
                self.trails.follow(name, equation.params, equation.invars, equation.outvars)

    def _pass_on(self, equation: Equation) -> None:
        params = equation.params
        if equation.primitive is mark and params["part"] == BEGIN and "begun" in params:
            paths = params["begun"].paths
            for path, v in zip(paths, equation.invars[1:], strict=False):
                if not jaxprs.is_literal(v):
                    self.shapes[path] = v.aval.shape
                    self.trails.put(v, FIXED)
        if equation.primitive is mark and params["part"] == OUTPUT:
            self.counts.pop(
                (params["site"], PATTERN), None
            )  # another call of it begins with the first again
        for given, received in zip(equation.invars, equation.outvars, strict=False):
            self.trails.put(received, self.trails.of(given))

    def _enter(self, frame: Frame) -> None:
        body, equation = frame.body, frame.equation
        assert body is not None
        assert body.operands is not None
        assert body.results is not None
        for v, number, part in zip(frame.bare.invars, body.operands, body.taken, strict=True):
            trail = self.trails.of(equation.invars[number])
            self.trails.put(v, trail if part is None or trail is FIXED else None)
        self.look(frame)
        for atom, number, part in zip(frame.bare.outvars, body.results, body.given, strict=True):
            if number is not None and part is None:
                self.trails.put(equation.outvars[number], self.trails.of(atom))

    def _attention(self, frame: Frame, equation: Equation) -> None:
        found = pattern_in(equation.primitive.name, equation.params, equation.invars, self.trails)
        if found is None:
            return
        made = self.softmaxes.probabilities(frame, equation.invars[found.operand])
        logits = None if made is None else self.softmaxes.logits(*made)
        if made is None or logits is None:
            return
        within, operand, exact, base = logits
        both = common_frame(made, (within, operand))
        trail = self.trails.of(made[1])
        how = None if trail is None else heads_of(found, trail, base, exact=exact)
        if both is None or how is None:
            return
        (here, *operands), maker = both, both[0].made.get(both[1])
        if maker is not None and operands[0].aval.shape == operands[1].aval.shape:
            self._put(here, maker[1], operands, how, PATTERN)

    def _router(self, frame: Frame, equation: Equation, trail: Trail) -> None:
        site = self._site_of(frame, equation)
        if site is not None and frame.enters:
            how = router_at(frame, equation, site, self.shapes, trail)
            if how is None:
                return
            (values,), chosen = equation.invars, equation.outvars[-1]
            found = place_in_expert(frame, equation, values.aval.shape[how.axis])
            if found is None:
                self._put(frame, equation, [values, chosen], how, EXPERTS)
            else:
                how = dataclasses.replace(how, kept=found.kept)
                self._put(frame, found.equation, [values, chosen, found.value], how, EXPERTS)

    def _site_of(self, frame: Frame, equation: Equation) -> str | None:
        return site_in(self.owner, (*frame.scopes, *named_scopes_of(equation)))

    def _put(
        self, frame: Frame, equation: Equation, operands: list[Value], how: object, name: str
    ) -> None:
        """Put a mark on these values behind an equation."""
        site = self._site_of(frame, equation)
        if site is None:
            return
        count = self.counts[site, name]
        self.counts[site, name] += 1
        key = f"{site}@{name}" + f"[{count}]" * bool(count)
        params = {"owner": self.owner, "site": key, "part": CHOICE, "structure": None}
        one = equation_program(
            mark, tuple({**params, "choice": how}.items()), tuple(v.aval for v in operands)
        )
        (new,) = jaxprs.open_jaxpr(one)[0].eqns
        results = [jaxprs.new_var(v.aval) for v in operands]
        number = next(n for n, one in enumerate(frame.bare.eqns) if one is equation)
        frame.more.setdefault(number, []).append(
            new.replace(
                invars=operands, outvars=results, ctx=equation.ctx, source_info=equation.source_info
            )
        )
