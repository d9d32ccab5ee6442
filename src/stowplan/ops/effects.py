"""Side effects of an op: random numbers, buffer updates, reads outside the graph."""

from enum import Flag, auto

from stowplan.ops import aten
from stowplan.ops.table import Site, Table


class Effect(Flag):
    """The reason why an op may not simply be recomputed."""

    NONE = 0
    RANDOM = auto()
    BUFFER_UPDATE = auto()
    OUTSIDE = auto()  # reads what the graph does not hold


def no_effect(site: Site) -> Effect:
    """The stated default: an op without a rule only computes its outputs.

    An op with unknown operands, as in a history of allocations, cannot be recomputed.
    """
    return Effect.OUTSIDE if site.attributes.get("operands") == "unknown" else Effect.NONE


FUSED = "stowplan.fused.default"  # a group of ops as one op, which a compiled kernel computes
UPDATE = "stowplan.update.default"  # of parameters, by an optimizer: they hold other values from then on

ONCE = Effect.BUFFER_UPDATE | Effect.OUTSIDE  # no way to run it a second time; random draws can be replayed

effect_of: Table[Effect] = Table("effects", default=no_effect)


@effect_of.entry("Dropout", "onnx.Dropout")
@effect_of.entry(*aten.RANDOM, "stowplan.draw.default")
def draws_random_numbers(_: Site) -> Effect:
    """A second run would draw another mask."""
    return Effect.RANDOM


@effect_of.entry("data")
def draws_another_batch(_: Site) -> Effect:
    """A second run would read the next batch."""
    return Effect.OUTSIDE


@effect_of.entry(*aten.ATTENTIONS)
def draws_for_dropout(site: Site) -> Effect:
    """Attention draws a mask only if it drops anything."""
    return Effect.RANDOM if site.attributes.get("dropout_p") else Effect.NONE


@effect_of.entry("stowplan.update_buffer")
def updates_a_buffer(_: Site) -> Effect:
    """Writes the new contents into a buffer: once a step."""
    return Effect.BUFFER_UPDATE


@effect_of.entry("update", UPDATE)
def updates_parameters(_: Site) -> Effect:
    """Changes a parameter in place: a second run would take the step twice."""
    return Effect.BUFFER_UPDATE


@effect_of.entry(
    *(f"stowplan.{name}.default" for name in ("exchange", "exchange_back", "total", "norm", "norm_back")),
    "stowplan.scatter_sum_in_order.default",
    *(
        f"stowplan.{name}.default"
        for name in ("first_token", "bring", "begin_sums", "end_sums", "scatter_sum", "gather_in_order")
    ),
)
def involves_other_workers(_: Site) -> Effect:
    """Other workers take part in it, once: a worker that repeated it would wait for them forever."""
    return Effect.OUTSIDE


def reads_for_values(_: Site) -> bool:
    """The stated default: the results of an op depend on the buffers it reads."""
    return False


only_updates_statistics: Table[bool] = Table("whether buffers are read only to update them", reads_for_values)


@only_updates_statistics.entry("aten._native_batch_norm_legit_functional.default")
def running_statistics(site: Site) -> bool:
    """In training, running statistics go into the new running statistics and nowhere else."""
    return site.attributes.get("training") is True


@only_updates_statistics.entry(FUSED)
def running_statistics_in_a_kernel(site: Site) -> bool:
    """Whoever fused the ops has asked each of them."""
    return site.attributes.get("statistics") is True
