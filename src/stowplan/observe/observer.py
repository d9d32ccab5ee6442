"""The observer in a script's process: hooks that tell it the loop, and a window in which memory is followed.

It starts when the script has imported torch. Until the first call with gradients it costs a hook per module
call; from there to the end of the second iteration that is alike, `Memory` sees every op. Then all hooks are
removed, and the script runs as if nothing had been there. No hook changes a value, draws a number or raises:
whatever goes wrong in here ends observing and nothing else.
"""

import atexit
import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from threading import get_ident
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stowplan.observe import describe
from stowplan.observe.awaiting import after_import
from stowplan.observe.blocks import (
    BACKWARD,
    BEFORE,
    BETWEEN,
    EVALUATING,
    FORWARD,
    LOSS,
    STEP,
    BlockOrigin,
)
from stowplan.observe.compiling import concerns_the_script
from stowplan.observe.frames import hide_own_frames
from stowplan.observe.launch import LaunchSettings, script_name
from stowplan.observe.loop import Loop, Token, described, in_order
from stowplan.observe.memory import ObservedMemory, caller
from stowplan.observe.record import BUFFERS, GRADIENTS, INPUTS, PARAMETERS, STATE, WatchRecord
from stowplan.run.instances import instances_of, with_subclasses
from stowplan.torch_private import FakeTensor, dispatch_modes, gradient_of, pytree, remove_hook_of_all

_MARK = "stowplan.observe"
_MOST_NODES = 50_000  # of a graph that are looked at for the calls it is of
_MOST_BLOCKS = 2_000_000
_OUT = ("can't allocate memory", "out of memory", "not enough memory")

Result = TypeVar("Result")


def begin(settings: LaunchSettings) -> None:
    """Observe this process from now on."""
    Observer(settings).begin()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error means that memory ended."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT)


class Observer:
    """Follows one script."""

    def __init__(self, settings: LaunchSettings) -> None:
        self.settings, self.loop = settings, Loop()
        self.record = WatchRecord(
            script=script_name(), rank=os.environ.get("RANK", ""), torch=torch.__version__
        )
        self.memory = ObservedMemory(self, settings.limit_bytes)
        self.names: dict[int, str] = {}  # paths of modules
        self.roots: list[ref[nn.Module]] = []
        self.optimizers: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self.optimizer_names: list[str] = []
        self.call_lines: dict[int, BlockOrigin] = {}
        self.call_phases: dict[int, int] = {}  # the number of the phase that a call begins
        self.steps = 0  # of optimizers
        self._thread, self._process = get_ident(), os.getpid()
        self._stack: list[nn.Module] = []
        self._call, self._calls, self._call_phase = -1, 0, BETWEEN
        self._is_training_call = self._is_after_forward = False
        self._backward_depth = self._step_depth = self._depth_before = 0
        self._nodes: dict[int, BlockOrigin] = {}
        self._hooks: list[Any] = []
        self._last_hooks: list[Any] = []
        self._put_back: list[Callable[[], None]] = []
        self._is_over = False

    # Beginning and end

    def begin(self) -> None:
        """Install the hooks."""
        self._hooks = [register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)]
        self._last_hooks = [
            register_module_forward_pre_hook(self._enter),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        self._replace(torch.autograd, "backward", self._around("B"))
        self._replace(torch.autograd, "grad", self._around("g"))
        self._replace(torch, "compile", self._compiling)
        self._put_back.append(hide_own_frames())
        self._replace(torch.autograd.profiler.profile, "__init__", self._profiling)
        if "stowplan.run.fit" not in sys.modules:  # it imports torch, and so comes later in a script
            after_import("stowplan.run.fit", self.plans)
        if self.settings.iterations is not None:
            register_optimizer_step_post_hook(self._count)
        atexit.register(self.exit)
        os.register_at_fork(after_in_child=self._forked)
        if self.settings.limit_bytes is not None:
            self._start()

    def _replace(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Any]) -> None:
        own = getattr(owner, name)
        stand_in = wraps(own)(around(own))
        setattr(owner, name, stand_in)

        def put_back() -> None:
            if getattr(owner, name) is stand_in:
                setattr(owner, name, own)

        self._put_back.append(put_back)

    def _forked(self) -> None:
        """A forked worker is not observed."""
        if not self._is_over:
            self._is_over = True
            self._remove()
            if get_ident() == self._thread:
                self.memory.stop()

    def end(self, told: str = "") -> None:
        """Observe no more, and write what was seen."""
        if self._is_over:
            return
        self._is_over = True
        self._remove()
        if self.settings.limit_bytes is None:
            self.memory.stop()
        self.record.told, self.record.so_far = told, None
        self._describe()
        self.record.write(self.settings.folder)
        self.memory.blocks.keeps = False
        self.memory.blocks.all, self.memory.blocks.workspaces = [], []
        self._nodes.clear()
        self._stack.clear()
        if self.settings.limit_bytes is None:
            self.memory.forget()

    def _remove(self) -> None:
        for hook in self._hooks:
            remove_hook_of_all(hook)
        for put_back in self._put_back:
            put_back()
        self._hooks, self._put_back = [], []

    def remove_last_hooks(self) -> None:
        """Remove the hooks that stay until no optimizer steps and no other mode is around ours."""
        if self.settings.limit_bytes is None:
            self.memory.stop()
            if self.memory.is_entered and get_ident() == self._thread:
                return
        for hook in self._last_hooks:
            hook.remove()
        self._last_hooks = []

    def _describe(self) -> None:
        try:
            describe.describe(self)
        except Exception as error:
            self.record.notes.append(f"what was seen could not be described: {error!r}")

    def exit(self) -> None:
        """The script ends: write what there is, also if memory ended after the observed iterations."""
        if os.getpid() != self._process:
            return
        error = getattr(sys, "last_value", None)
        try:
            if is_out_of_memory(error) and self.record.failure is None:
                describe.describe_failure(self, error, "")
            if not self._is_over:
                told = "no period was found" if self.loop.segments else "no training step was seen"
                self.end("memory ended before an iteration came twice" if self.record.failure else told)
            self.record.resident_bytes = _most_resident()
            self.record.write(self.settings.folder)
        except (Exception, MemoryError) as fault:
            print(f"stowplan watch: nothing could be written: {fault!r}", file=sys.stderr)

    def _survive(self, work: Callable[[], Result]) -> Result | None:
        """Do some observing; an error in it ends observing alone."""
        try:
            return work()
        except Exception as error:
            try:
                self.end(f"observing ended with an error of its own: {error!r}")
            except Exception:
                self._is_over = True
            return None

    def _is_ours(self) -> bool:
        return not self._is_over and get_ident() == self._thread and not torch.compiler.is_compiling()

    # Hooks

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._is_over:  # hooks of steps cannot be removed in a step, and most end there
            self.remove_last_hooks()
        if self._is_ours():
            self._survive(lambda: self._entered(module, args))
        if self._is_over and self.settings.iterations is not None and not self.optimizer_names:
            raise SystemExit(0)  # a loop without an optimizer

    def _entered(self, module: nn.Module, args: Any) -> None:
        if not self._stack:
            self._begin_call(module)
            if self._is_over:
                return
            if self.memory.is_on and self._backward_depth == 0 and self._is_training_call:
                self._note_inputs(args)
        self._stack.append(module)
        self._tell_phase()

    def _begin_call(self, module: nn.Module) -> None:
        self._is_training_call = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        if id(module) not in self.names:
            self._name(module)
        if self._is_training_call:
            self._call_phase = FORWARD
        elif torch.is_grad_enabled() and next(module.parameters(), None) is None:  # a loss
            self._call_phase = LOSS if self._is_after_forward else BETWEEN
        else:
            self._call_phase = EVALUATING
        if self._backward_depth:
            return
        if self._is_training_call:
            if not self.memory.is_on:
                self._start(module)
            self._calls += 1
            self._call = self._calls
            file, line = self.memory.line(caller(0))
            self.call_lines[self._call] = BlockOrigin(FORWARD, self.names[id(module)], file, line, self._call)
            self.call_phases[self._call] = len(self.memory.blocks.phases)
            self._take(Token(f"F {self.names[id(module)]}", self.memory.blocks.clock, self._call))
            self._note_gradients()
        elif not torch.is_grad_enabled() and next(module.parameters(), None) is not None:
            self.record.evaluations += 1

    def _name(self, module: nn.Module) -> None:
        name = type(module).__name__
        others = sum(1 for known in self.roots if type(known()) is type(module))
        self.roots.append(ref(module))
        root = name if not others else f"{name} #{others + 1}"
        for path, part in module.named_modules():
            self.names.setdefault(id(part), f"{root}.{path}".rstrip("."))
        if self.memory.is_on:
            self._note_module(module)

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:  # noqa: ARG002
        if torch.compiler.is_compiling() or not self._is_ours():
            return
        self._survive(lambda: self._left(rest))

    def _left(self, rest: tuple[Any, ...]) -> None:
        """`rest` is (kwargs, output), or the output alone if forward raised."""
        if self._stack:
            self._stack.pop()
        if not self._stack and self._backward_depth == 0:
            if self._is_training_call:
                self._mark(rest[-1])
                self._is_after_forward = True
                if self.memory.is_on and len(rest) == 2:
                    self._note_inputs(rest[0])
            self._call = -1
        self._tell_phase()

    def _mark(self, output: Any) -> None:
        """Write into the graph which call an output is of; that keeps nothing alive."""
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                notes: Any = tensor.grad_fn.metadata  # which the stubs call a method
                notes[_MARK] = self._call

    def _around(self, token: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """torch.autograd.backward or grad, with a word before and after."""

        def stand_in(own: Callable[..., Any]) -> Callable[..., Any]:
            def differentiate(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling() or not self._is_ours():
                    return own(*args, **kwargs)
                tensors = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
                self._survive(lambda: self._backward_begins(tensors, token))
                try:
                    return own(*args, **kwargs)
                finally:
                    self._survive(self._backward_ends)

            return differentiate

        return stand_in

    def _backward_begins(self, tensors: Any, token: str) -> None:
        self._backward_depth += 1
        if self._backward_depth > 1:
            return
        self._depth_before = len(self._stack)
        roots = [tensor for tensor in pytree.tree_leaves(tensors) if isinstance(tensor, Tensor)]
        if not any(isinstance(root, FakeTensor) for root in roots):
            self._find_calls(roots)
            self._take(Token(token, self.memory.blocks.clock))
        self._tell_phase()

    def _backward_ends(self) -> None:
        self._backward_depth -= 1
        if self._backward_depth == 0:
            del self._stack[self._depth_before :]  # a recomputation may end in the middle
            self._is_after_forward = False
            self._note_gradients()
            self._tell_phase()

    def _find_calls(self, roots: Iterable[Tensor]) -> None:
        """Which calls of this segment the differentiated tensors come from."""
        wanted, seen = self.loop.waiting(), set[Any]()
        todo = [root.grad_fn for root in roots if root.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            notes: Any = node.metadata
            if (call := notes.get(_MARK)) is not None:
                self.loop.use({call})
                wanted.discard(call)
            if len(seen) > _MOST_NODES:
                self.loop.use(wanted)  # they may be
                return
            if wanted:
                todo += [inner for inner, _ in node.next_functions if inner is not None]

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if self._is_ours():
            self._step_depth += 1
            self._survive(self._tell_phase)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if self._is_ours():
            self._step_depth -= 1
            self._survive(lambda: self._stepped(optimizer))

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._step_depth:
            return
        if self.memory.is_on:
            for tensor in pytree.tree_leaves(list(optimizer.state.values())):
                if isinstance(tensor, Tensor):
                    self.memory.note(tensor, STATE)
        self._is_after_forward = False
        self._tell_phase()
        self._take(Token(self.token_of(optimizer), self.memory.blocks.clock))

    def token_of(self, optimizer: Optimizer) -> str:
        """The token of its steps."""
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = f"S {len(self.optimizer_names)}"
            self.optimizer_names.append(type(optimizer).__name__)
        return self.optimizers[optimizer]

    def _compiling(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The script compiles: ops below compiled code are not to be seen one by one."""

        def compile_(*args: Any, **kwargs: Any) -> Any:
            if not concerns_the_script(args, kwargs, sys._getframe(1)):
                return own(*args, **kwargs)
            told = "the script calls torch.compile, and a compiled step is not measured yet: run it without"
            self._survive(lambda: self.end(told))
            self.remove_last_hooks()
            return own(*args, **kwargs)

        return compile_

    def _profiling(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The script profiles itself: PyTorch's other profiler may not run beside that."""

        def initialise(*args: Any, **kwargs: Any) -> Any:
            self.memory.counts_kernels = False
            return own(*args, **kwargs)

        return initialise

    def plans(self) -> None:
        """The script plans: `fit` refuses hooks for all modules."""
        self._survive(lambda: self.end("the script plans with stowplan itself"))
        self.remove_last_hooks()

    # The loop

    def _take(self, token: Token) -> None:
        if not self.loop.add(token):
            return
        period = self.loop.period(())
        if period:  # it may be another once all optimizers are asked for, for which all objects are read
            period = self.loop.period([self.token_of(optimizer) for optimizer in self._all_optimizers()])
        if period:
            self.record.period = period
            self.end()
        elif self.loop.is_over:
            self.end(f"no period was found in {len(self.loop.segments)} steps")
        elif len(self.memory.blocks.all) > _MOST_BLOCKS:
            self.end(f"no period was found before {_MOST_BLOCKS:,} tensors were allocated")

    def _all_optimizers(self) -> list[Optimizer]:
        """Those that step, or train a called module and have not stepped yet; a wrapper is none."""
        stepped = list(self.optimizers)
        trained = {id(parameter) for optimizer in stepped for parameter in _parameters_of(optimizer)}
        called = (module for known in self.roots if (module := known()) is not None)
        awaited = {id(parameter) for module in called for parameter in module.parameters()} - trained
        found = instances_of(with_subclasses(Optimizer))
        return [*stepped, *(each for each in found if not awaited.isdisjoint(map(id, _parameters_of(each))))]

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        """End the script after the iterations that were asked for, once observing has ended."""
        if get_ident() == self._thread and os.getpid() == self._process and not self._step_depth:
            self.steps += 1
            wanted = (self.settings.iterations or 0) * max(1, self.record.period)
            if self._is_over and self.steps >= wanted:
                raise SystemExit(0)

    # Memory

    def _start(self, module: nn.Module | None = None) -> None:
        """Follow memory from now on: what is there already, and what ops allocate."""
        if dispatch_modes():
            self.end("the script runs under a dispatch mode of its own")
            return
        parameter = None if module is None else next(module.parameters(), None)
        if parameter is not None:
            self.memory.device = parameter.device.type
        elif (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
            self.memory.device = accelerator.type
        for known in self.roots:
            if (root := known()) is not None:
                self._note_module(root)
        for optimizer in instances_of(with_subclasses(Optimizer)):
            for tensor in pytree.tree_leaves(list(optimizer.state.values())):
                if isinstance(tensor, Tensor):
                    self.memory.note(tensor, STATE)
        for tensor in instances_of([Tensor, nn.Parameter, nn.Buffer]):
            self.memory.note(tensor, PARAMETERS if isinstance(tensor, nn.Parameter) else "")
        self.memory.start(self.memory.device)

    def _note_module(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            self.memory.note(parameter, PARAMETERS)
        for buffer in module.buffers():
            self.memory.note(buffer, BUFFERS)

    def parameters(self) -> list[Tensor]:
        """All that are trained, of outermost modules and optimizers."""
        found: dict[int, Tensor] = {}
        for known in self.roots:
            if (module := known()) is not None:
                found |= {id(p): p for p in module.parameters()}
        for optimizer in list(self.optimizers):
            found |= {id(p): p for p in _parameters_of(optimizer)}
        return list(found.values())

    def _note_gradients(self) -> None:
        if self.memory.is_on:
            for parameter in self.parameters():
                gradient = gradient_of(parameter) if parameter.is_leaf else None
                if gradient is not None:
                    self.memory.note(gradient, GRADIENTS)

    def _note_inputs(self, arguments: Any) -> None:
        for tensor in pytree.tree_leaves(arguments):
            if isinstance(tensor, Tensor) and tensor.grad_fn is None:
                block = self.memory.note(tensor)
                if (
                    block is not None
                    and not block.kind
                    and block.origin.phase in (BEFORE.phase, BETWEEN, LOSS)
                ):
                    block.kind = INPUTS

    def _tell_phase(self) -> None:
        if self.memory.is_on:
            self.memory.blocks.enter(self.phase())

    def phase(self) -> str:
        """Where the loop is."""
        if self._backward_depth:
            return BACKWARD
        if self._stack:
            return self._call_phase
        if self._step_depth:
            return STEP
        return LOSS if self._is_after_forward else BETWEEN

    def origin(self) -> BlockOrigin:
        """Where something is allocated or freed now."""
        module = self.names.get(id(self._stack[-1]), "") if self._stack else ""
        file, line = self.memory.line(caller(0), len(self._stack))
        return BlockOrigin(self.phase(), module, file, line, self._call)

    def node_origin(self, number: int) -> BlockOrigin | None:
        """The line and module of the op that an autograd node differentiates."""
        inside = self._backward_depth and len(self._stack) > self._depth_before  # a recomputation
        found = None if inside else self._nodes.get(number)
        return None if found is None else found._replace(phase=BACKWARD)

    def note_nodes(self, since: int, until: int, origin: BlockOrigin) -> None:
        """Autograd nodes that were made by an op."""
        if not self._is_over:
            for number in range(since, until):
                self._nodes.setdefault(number, origin)  # an op without a node comes after another one's

    def fails(self, error: BaseException, op: str) -> None:
        """Write what is alive, if memory has ended."""
        if is_out_of_memory(error) and self.record.failure is None:
            self.record.so_far = None
            self._survive(lambda: describe.describe_failure(self, error, op))
            self._survive(lambda: self.record.write(self.settings.folder))

    def grows(self) -> None:
        """Write what is alive, while it grows, for a process may be killed without another word."""
        if not self._is_over:
            self._survive(lambda: describe.describe_so_far(self))
            self._survive(lambda: self.record.write(self.settings.folder))

    def loop_text(self) -> str:
        """One iteration in words."""
        period = self.record.period
        return described(in_order(self.loop.raw, period), self.optimizer_names) if period else ""


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _most_resident() -> int:
    """The most memory that the process had, with all that is outside PyTorch."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
