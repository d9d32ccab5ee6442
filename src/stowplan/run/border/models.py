"""The models and arguments that `fit` refuses before it captures anything: by name, and with a way out."""

import inspect
from collections.abc import Iterable, Mapping

from torch import Tensor, jit, nn
from torch.nn.parameter import is_lazy

from stowplan.capture.recording import positional_names
from stowplan.capture.stand_ins import unlike_plain, unopened
from stowplan.errors import BadUse
from stowplan.run.wrappers import overrides_call
from stowplan.torch_private import is_compiled


def refuse_model(model: nn.Module) -> None:
    """BadUse for the first module or tensor of a model that no plan can run."""
    if "_installed" in vars(model):
        raise BadUse(
            f"{type(model).__name__} has a plan in place: call remove() of what install returned, then fit"
        )
    for path, module in model.named_modules():
        _refuse_module(path, module)
        if path:
            _refuse_updating(path, module)
    without_data = {name: tensor.is_meta for name, tensor in model.named_parameters()}
    if len(set(without_data.values())) > 1:
        meta = next(name for name, is_meta in without_data.items() if is_meta)
        raise BadUse(
            f"{meta} is on the meta device, without data, and other parameters have data: call"
            " model.to_empty(device=...) and load or initialise its values, or put the whole model on meta"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise BadUse(
                f"{name} has no shape yet: its module is lazy; call the model once before fit, as in"
                " model(*args)"
            )
        if why := unlike_plain(tensor):
            raise BadUse(f"{name} {why}")


def _refuse_module(path: str, module: nn.Module) -> None:
    here = path or "the model"
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        wrapper = type(module).__name__
        raise BadUse(
            f"{here} is wrapped in {wrapper}, whose work cannot be done inside a planned step; fit the module"
            f" within, then wrap what fit returns: {wrapper}(fit(...))"
        )
    if is_compiled(module) and not path:
        raise BadUse(
            "the model is compiled by torch.compile, and a plan runs no code of Dynamo: fit the module"
            " inside,"
            ' model._orig_mod; with execution=Execution(kernels="compiled") the plan compiles its own kernels'
        )
    if isinstance(module, jit.ScriptModule):
        raise BadUse(
            f"{here} is TorchScript, whose modules capture cannot open: give fit the nn.Module that was"
            " scripted"
            " or traced"
        )


def _refuse_updating(path: str, module: nn.Module) -> None:
    """A fitted part is planned with the whole model, unless its backward updates parameters."""
    fitting = vars(module).get("_fitting")
    if fitting is not None and fitting.planner.iteration is not None:
        raise BadUse(
            f"{path} was fitted with an optimizer, which updates its parameters in its own backward: fit"
            " the whole"
            " model with optimizer= instead, and leave its parts as they are"
        )


def refuse_call(model: nn.Module, args: Iterable[object], kwargs: Mapping[str, object]) -> None:
    """BadUse if forward does not take these arguments, or a plan cannot read one of them."""
    given, forward = tuple(args), model.forward
    if overrides_call(type(model)):  # what forward is given shows when it is called
        return
    try:
        inspect.signature(forward).bind(*given, **kwargs)
    except TypeError as fault:
        raise BadUse(
            f"{type(model).__name__}.forward{inspect.signature(forward)} does not take the arguments given to"
            f" fit: {fault}; fit(model, (x, y), {{'mask': m}}, ...) is for model(x, y, mask=m)"
        ) from None
    except ValueError:  # a signature that Python cannot tell
        return
    for name, leaf in unopened(given, kwargs, positional_names(model, len(given))):
        if isinstance(leaf, Tensor) and (why := unlike_plain(leaf)):
            raise BadUse(f"argument {name!r} {why}")
