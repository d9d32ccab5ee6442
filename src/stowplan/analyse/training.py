"""A forward graph completed to a training step: each op's adjoint, from the last op to the first.

`ops.adjoints` says what an adjoint saves and which gradients it makes. Only tensors that depend on a
parameter are differentiated; an op without a rule among them is refused.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from stowplan.errors import BadUse
from stowplan.ir import DType, Graph, Kind, Op, Phase, Role, Tensor, Use, bytes_of_shape
from stowplan.ops.adjoints import Adjoint, adjoint_of
from stowplan.ops.effects import aliasing_of
from stowplan.ops.table import Site, site_of

_FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


def training_step_of(graph: Graph) -> Graph:
    """`graph` with its backward half; gradients come in for its results."""
    if any(op.phase is not Phase.FORWARD for op in graph.ops):
        raise BadUse("the file already has a backward half: omit --training")
    return _Derivation(graph).run()


class _Derivation:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._tensors = dict(graph.tensors)
        self._trained = _trained(graph)
        self._readers = Counter(name for op in graph.ops for name in op.reads())
        self._masks: dict[str, str] = {}
        self._made: set[str] = set()

    def run(self) -> Graph:
        """Both halves; gradients of parameters are held."""
        backward = list(self._backward())
        if not backward:
            raise BadUse("nothing to train: no result depends on a parameter")
        forward = [self._with_mask(op) for op in self._graph.ops]
        found = {_gradient(name) for name, t in self._graph.tensors.items() if t.kind is Kind.PARAMETER}
        held = self._graph.held | (found & self._tensors.keys())
        return replace(self._graph, tensors=self._tensors, ops=(*forward, *backward), held=held)

    def _backward(self) -> Iterator[Op]:
        results = [name for name in self._results() if name in self._trained]
        if results:
            yield self._seed(results)
        for op in reversed(self._graph.ops):
            if any(_gradient(name) in self._made for name in op.writes()):
                yield self._adjoint(op)

    def _results(self) -> list[str]:
        """The results of the graph: held, and made by an op."""
        return [name for op in self._graph.ops for name in op.writes() if name in self._graph.held]

    def _seed(self, results: list[str]) -> Op:
        """The gradients that come in for the results."""
        inputs = tuple(Use(name, Role.SHAPE) for name in results)
        outputs = tuple(self._gradient_use(name) for name in results)
        return Op("loss.backward", "loss.backward", Phase.BACKWARD, inputs, outputs)

    def _adjoint(self, op: Op) -> Op:
        site = site_of(self._graph, op)
        rule = adjoint_of(site)
        incoming = [_gradient(name) for name in op.writes() if _gradient(name) in self._made]
        wanted = [site.inputs[at].id for at in rule.gradients if at < len(site.inputs)]
        outputs = tuple(self._gradient_use(name) for name in dict.fromkeys(wanted) if name in self._trained)
        self._share_views(site, incoming)
        return Op(
            f"{op.id}.backward",
            f"{op.type}.backward",
            Phase.BACKWARD,
            inputs=(*map(Use, incoming), *self._saved(site, rule)),
            outputs=outputs,
            attributes=op.attributes,
            adjoint_of=op.id,
            source=op.source,
        )

    def _saved(self, site: Site, rule: Adjoint) -> Iterator[Use]:
        inputs, outputs = site.inputs, site.outputs
        yield from (Use(inputs[at].id, Role.SAVED) for at in rule.saved_inputs if at < len(inputs))
        yield from (Use(outputs[at].id, Role.SAVED) for at in rule.saved_outputs)
        if rule.mask:
            yield Use(self._mask_of(site), Role.SAVED)

    def _mask_of(self, site: Site) -> str:
        """The mask that the op has among its outputs, or one that it gets."""
        if len(site.outputs) > 1:
            return site.outputs[1].id
        output = site.outputs[0]
        dtype = DType.BOOL if site.op.type.endswith("Dropout") else DType.INT64
        mask = Tensor(f"{output.id}.mask", Kind.MASK, output.shape, dtype)
        self._tensors[mask.id] = replace(mask, nbytes=bytes_of_shape(output.shape or (), dtype))
        self._masks[site.op.id] = mask.id
        return mask.id

    def _with_mask(self, op: Op) -> Op:
        mask = self._masks.get(op.id)
        return op if mask is None else replace(op, outputs=(*op.outputs, Use(mask)))

    def _gradient_use(self, name: str) -> Use:
        """The gradient of a tensor: made the first time, added into after that."""
        gradient = _gradient(name)
        if gradient in self._made:
            return Use(gradient, Role.ACCUMULATE)
        self._made.add(gradient)
        of = self._graph.tensors[name]
        nbytes = bytes_of_shape(of.shape or (), of.dtype or DType.FLOAT32)
        self._tensors[gradient] = Tensor(
            gradient, Kind.GRADIENT, of.shape, of.dtype, nbytes, gradient_of=name
        )
        return Use(gradient)

    def _share_views(self, site: Site, incoming: list[str]) -> None:
        """If a tensor has a single view and no other reader, its gradient is the view's gradient."""
        for output, source in aliasing_of(site).view_of.items():
            gradient, into = _gradient(site.outputs[output].id), _gradient(site.inputs[source].id)
            alone = (
                self._readers[site.inputs[source].id] == 1 and site.inputs[source].id not in self._graph.held
            )
            if gradient in incoming and into in self._made and alone:
                self._tensors[into] = replace(self._tensors[into], alias_of=gradient)


def _gradient(name: str) -> str:
    return f"{name}.gradient"


def _trained(graph: Graph) -> set[str]:
    """The tensors that depend on a parameter."""
    trained = {name for name, tensor in graph.tensors.items() if tensor.kind is Kind.PARAMETER}
    for op in graph.ops:
        if trained.intersection(op.reads()):
            trained.update(name for name in op.writes() if graph.tensors[name].dtype in _FLOATS)
    return trained
