"""Nothing of the user's is changed by a fit: pictures before and after, compared by the byte.

`audit` wraps `fit`, and the planning of calls that come later, for a whole run of the tests. Whether planning
succeeds, refuses or fails, these are as before: parameters, buffers and arguments (objects, storages, layout,
contents, versions, `.grad`, hooks), the containers that arguments come in, the attributes and hooks of every
module, the optimizer's groups and state, the generators of PyTorch, Python and NumPy, and global settings.

What `fit` states that it changes is listed in `_declared` and nowhere else:

- values that forward sets at its first call (`Writes`), each owner and key by itself;
- with `parameters="shard"` or "choose", what parameters hold: each worker keeps its rows;
- the flags of Hugging Face's checkpointing, which `fit` switches off and says so;
- with `optimizer=`, state where there was none.
"""

import functools
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import scipy.sparse  # noqa: F401  its import adds a filter of warnings, as it would without us
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

_WHOLE_BYTES = 1 << 16  # larger tensors are compared by a sample
_SAMPLES = 1 << 10
_MOST_PARTS = 4096  # of one container, all within it counted
_CHECKPOINTING = (
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hook",
    "_require_grads_hooks",
    "_forward_hooks",  # of the embedding, which made its output require a gradient
)
_CLOSED = ("torch", "stowplan", "threading", "_thread", "logging")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(slots=True)
class Picture:
    """Facts by label. `held` keeps every object alive whose identity is a fact."""

    facts: dict[str, object] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)  # of items of dicts, by label: the dict's identity
    keys: dict[str, object] = field(default_factory=dict)  # and the item's key
    held: list[object] = field(default_factory=list)
    _parts: int = 0

    def same(self, value: object) -> int:
        """The identity of a value, which cannot be another's as long as this picture exists."""
        self.held.append(value)
        return id(value)

    def add_tensor(self, label: str, tensor: Tensor, *, contents: bool = True) -> None:
        """All of one tensor, and of its gradient."""
        self.facts[label] = self.same(tensor)
        self.facts[f"type of {label}"] = type(tensor)
        self.facts[f"requires_grad of {label}"] = (
            tensor.requires_grad,
            self.same(tensor.grad_fn),
        )
        self.facts[f"hooks of {label}"] = _hooks_of(tensor)
        lazy = nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer
        if isinstance(tensor, lazy) or tensor.is_nested:  # which have no shape
            return
        if contents:
            self.facts[f"look of {label}"] = tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout
            self.facts[f"contents of {label}"] = _contents_of(tensor)
            if not tensor.is_inference():
                self.facts[f"version of {label}"] = tensor._version
            if tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                place = storage.data_ptr(), storage.nbytes(), tensor.storage_offset(), tensor.stride()
                self.facts[f"storage of {label}"] = place
        gradient = tensor.grad if tensor.is_leaf else None
        self.facts[f"gradient of {label}"] = None if gradient is None else self.same(gradient)
        if gradient is not None:
            self.facts[f"contents of the gradient of {label}"] = _contents_of(gradient)

    def add_value(self, label: str, value: object, *, depth: int = 6) -> None:
        """A value and what is in it: containers and plain objects are opened, everything else is itself."""
        self._parts += 1
        if isinstance(value, Tensor):
            self.add_tensor(label, value)
            return
        self.facts[label] = value if isinstance(value, _PLAIN) and value == value else self.same(value)
        if depth and self._parts < _MOST_PARTS:
            for key, item in _items_of(value):
                inner = f"{label}[{key!r}]" if isinstance(key, (str, int)) else f"{label}[key {id(key)}]"
                owner = value if isinstance(value, dict) else getattr(value, "__dict__", value)
                self.owners[inner] = id(owner)
                self.keys[inner] = key
                self.add_value(inner, item, depth=depth - 1)

    def add_module(self, model: nn.Module, *, contents: bool) -> None:
        """Parameters, buffers, hooks and all other attributes, of every module."""
        for path, module in model.named_modules(remove_duplicate=True):
            name, self._parts = path or "the model", 0
            for table in (module._parameters, module._buffers):
                self.facts[f"names in {name}, {id(table)}"] = tuple(table)
                for key, tensor in table.items():
                    if tensor is not None:
                        self.add_tensor(f"{path}.{key}", tensor, contents=contents)
            for key, value in vars(module).items():
                label = f"attribute {key!r} of {name}"
                self.owners[label], self.keys[label] = id(vars(module)), key
                if key not in ("_parameters", "_buffers"):
                    self.add_value(label, value, depth=0 if key == "_fitting" else 2)

    def add_optimizer(self, optimizer: Any) -> None:
        """Groups and what state there is."""
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                self.add_value(f"group {number} of the optimizer, {key!r}", value, depth=1)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                self.add_value(f"state of the optimizer for {id(parameter)}, {key!r}", value, depth=2)

    def add_surroundings(self) -> None:
        """Generators and settings of the process, which other threads may change meanwhile."""
        self.facts["PyTorch's generator"] = torch.default_generator.get_state().numpy().tobytes()
        self.facts["Python's generator"] = random.getstate()
        self.facts["NumPy's generator"] = repr(np.random.get_state(legacy=False))
        self.facts |= {f"setting {name}": setting() for name, setting in _SETTINGS.items()}


_SETTINGS: Mapping[str, Callable[[], object]] = {
    "gradients enabled": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "autocast cache": torch.is_autocast_cache_enabled,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "threads": torch.get_num_threads,
    "anomaly detection": torch.is_anomaly_enabled,
    "checks of distributions": lambda: torch.distributions.Distribution._validate_args,
    "filters of warnings": lambda: tuple(map(repr, _own_filters())),
    "function modes": lambda: tuple(map(id, _get_current_function_mode_stack())),  # type: ignore[no-untyped-call]
    "dispatch modes": lambda: tuple(map(id, _get_current_dispatch_mode_stack())),
    "class attributes of modules": lambda: tuple(vars(nn.Module)),
    "hooks of all modules": lambda: tuple(map(tuple, _global_hooks())),
    "profile function": sys.getprofile,
    "trace function": sys.gettrace,
    "generator of torch.random": lambda: id(vars(torch.random)["default_generator"]),
}


def _own_filters() -> list[object]:
    """Without those of sympy and scipy, which are imported when they are first needed."""
    return [each for each in warnings.filters if not {"sympy", "scipy"} & set(re.findall(r"\w+", repr(each)))]


def _global_hooks() -> Iterator[Mapping[int, object]]:
    module = nn.modules.module
    yield from (module._global_forward_hooks, module._global_forward_pre_hooks, module._global_backward_hooks)


def _hooks_of(tensor: Tensor) -> tuple[object, ...]:
    hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    return tuple(None if table is None else tuple(map(id, table.values())) for table in hooks)


def _items_of(value: object) -> list[tuple[object, object]]:
    if isinstance(value, dict):
        return list(dict.items(value))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, (nn.Module, type, FunctionType)) or not hasattr(value, "__dict__"):
        return []
    return [] if type(value).__module__.partition(".")[0] in _CLOSED else list(vars(value).items())


def _contents_of(tensor: Tensor) -> bytes:
    """The bytes of a small tensor, and a sample of those of a large one."""
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return b""
    if tensor.layout is not torch.strided:
        return repr(tensor.detach()).encode()
    flat = tensor.detach()
    if tensor.nbytes > _WHOLE_BYTES:
        if not tensor.is_contiguous():
            return b""
        flat = flat.view(-1)[:: max(1, tensor.numel() // _SAMPLES)]
    flat = flat.cpu().reshape(-1).resolve_conj().resolve_neg().contiguous()
    return flat.view(torch.uint8).clone().numpy().tobytes()  # NumPy's view would fix the size of a storage


@dataclass(slots=True)
class _Declared:
    """What the planning in progress has stated that it changes."""

    written: set[tuple[int, object]] = field(default_factory=set)
    checkpointing: bool = False


_active = threading.local()


@contextmanager
def untouched(
    model: object, args: object, kwargs: object, optimizer: object = None, *, sharded: bool = False
) -> Iterator[None]:
    """Within, something is planned; afterwards everything that these hold is as it was."""
    if getattr(_active, "declared", None) is not None:  # the outer one sees it too
        yield
        return
    _active.declared = declared = _Declared()
    alone = threading.active_count() == 1
    before = _pictured(model, args, kwargs, optimizer, sharded=sharded, alone=alone)
    fault: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        fault = raised
        raise
    finally:
        _active.declared = None
        alone = alone and threading.active_count() == 1
        after = _pictured(model, args, kwargs, optimizer, sharded=sharded, alone=alone)
        changes = list(_changes(before, after, declared, alone=alone))
        if changes:
            listed = "\n  ".join(changes[:10])
            raise AssertionError(f"planning changed what is the user's:\n  {listed}") from fault


def _pictured(
    model: object, args: object, kwargs: object, optimizer: object, *, sharded: bool, alone: bool
) -> Picture:
    found = Picture()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        if isinstance(model, nn.Module):
            found.add_module(model, contents=not sharded)
        found.add_value("arguments", args)
        found.add_value("keyword arguments", kwargs)
        if isinstance(optimizer, torch.optim.Optimizer):
            found.add_optimizer(optimizer)
    if alone:
        found.add_surroundings()
    return found


def _changes(before: Picture, after: Picture, declared: _Declared, *, alone: bool) -> Iterator[str]:
    for label in dict.fromkeys((*before.facts, *after.facts)):
        was, now = before.facts.get(label), after.facts.get(label)
        if was == now and (label in before.facts) == (label in after.facts):
            continue
        if not alone and label not in after.facts:  # a thread began meanwhile: surroundings are not compared
            continue
        if not _is_declared(label, before, after, declared):
            yield f"{label}: {_short(was)} -> {_short(now)}"


def _is_declared(label: str, before: Picture, after: Picture, declared: _Declared) -> bool:
    if label.startswith("state of the optimizer for "):
        return not any(known.startswith(label.partition(",")[0]) for known in before.facts)
    owners = before.owners | after.owners
    written = (place for place, owner in owners.items() if (owner, after.keys.get(place)) in declared.written)
    if any(label == place or label.startswith(f"{place}[") for place in written):
        return True
    return declared.checkpointing and any(f"attribute {name!r} of" in label for name in _CHECKPOINTING)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:60]}... ({len(text)})"


@functools.cache
def audit() -> None:
    """From now on, every `fit` that tests call, and every plan that a call makes, is compared."""
    from stowplan.run import call_planner
    from stowplan.run import fit as fit_module
    from stowplan.run.border.guard import Writes

    original, plan, repeat = fit_module.fit, call_planner.CallPlanner.plan, Writes.repeat
    switch_off = vars(fit_module)["switch_checkpointing_off"]

    @functools.wraps(original)
    def fit(model: Any, args: Any, kwargs: Any = None, **settings: Any) -> Any:
        sharded = settings.get("parameters", "replicate") != "replicate"
        with untouched(model, args, kwargs, settings.get("optimizer"), sharded=sharded):
            return original(model, args, kwargs, **settings)

    def plan_of_call(self: Any, call: Any, given: Any = None) -> Any:
        optimizer = self.iteration.optimizer if self.iteration else None
        with untouched(call.model, call.args, call.kwargs, optimizer):
            return plan(self, call, given)

    def told_repeat(self: Writes, instead: Mapping[int, dict[str, Any]] | None = None) -> None:
        if (declared := getattr(_active, "declared", None)) is not None:
            owners = [((instead or {}).get(id(owner), owner), key) for owner, key, _ in self.places]
            declared.written.update((id(owner), key) for owner, key in owners)
        repeat(self, instead)

    def told_switch_off(model: nn.Module) -> Callable[[], None]:
        if (declared := getattr(_active, "declared", None)) is not None:
            declared.checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        undo: Callable[[], None] = switch_off(model)
        return undo

    patch = pytest.MonkeyPatch()  # for good
    patch.setattr(call_planner.CallPlanner, "plan", plan_of_call)
    patch.setattr(Writes, "repeat", told_repeat)
    patch.setattr(fit_module, "switch_checkpointing_off", told_switch_off)
    for module in list(sys.modules.values()):
        if vars(module).get("fit") is original:
            patch.setattr(module, "fit", fit)
