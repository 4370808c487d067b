"""Runs warp-specialised Gluon kernels (those for sm_100 above all) on the CPU: roles are threads, a seed says who goes next.

The source of a kernel is executed as it stands, with the language replaced by the few parts of it that these kernels use.
Numbers are torch tensors, barriers count arrivals and bytes in phases of a parity, copies land at any time after they were
started, products run in the order in which they were issued, at any time after. Nobody left to go is a deadlock. Told as
errors: memory that is read while a copy or a product into it is under way, or overwritten while one still has to read it;
a store to shared memory that a copy reads without a fence between; tensor memory read as another dtype than it was written
in. What is not here: registers, layouts, how fast anything is, and whether a warp may do what it is asked to.
"""

import random
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

ROWS = 1 << 30


class Machine:
    """One program of a grid: roles that take turns, and what they have started."""

    def __init__(self, seed: int, program: int, programs: int) -> None:
        self.random = random.Random(seed)
        self.program, self.programs = program, programs
        self.roles: list[Role] = []
        self.haste: dict[Any, float] = {}  # how likely each goes next: some are slow for a whole run
        self.products: list[tuple[Callable[[], None], set[Any], set[Any]]] = []  # in order: run, cells read, cells written
        self.copies: list[Callable[[], None]] = []  # in any order

    def run(self) -> None:
        for role in self.roles:
            role.thread.start()
            role.stopped.acquire()
        try:
            while any(r.waits is not None for r in self.roles) or self.products or self.copies:
                self.turn()
        finally:
            for role in self.roles:
                role.cancel()

    def turn(self) -> None:
        choices: list[Any] = [r for r in self.roles if r.waits is not None and r.waits()]
        choices += ["product"] * bool(self.products) + ["copy"] * bool(self.copies)
        if not choices:
            raise AssertionError(f"deadlock: {[r.name for r in self.roles if r.waits is not None]} wait")
        weights = [self.haste.setdefault(c, 100 ** -self.random.random()) for c in choices]
        (choice,) = self.random.choices(choices, weights)
        if choice == "product":
            self.products.pop(0)[0]()
        elif choice == "copy":
            self.copies.pop(self.random.randrange(len(self.copies)))()
        else:
            choice.go()

    def busy(self, cell: Any, reads: bool, writes: bool) -> bool:
        """Whether a product that has not run yet reads (or writes) the cell."""
        return any((reads and cell in r) or (writes and cell in w) for _, r, w in self.products)


class Role:
    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self.name, self.error, self.cancelled = name, None, False
        self.waits: Callable[[], bool] | None = lambda: True
        self.stores = 0  # copies from shared memory that have not read it yet
        self.unfenced: list[Cell] = []
        self.started, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, args=(body,), daemon=True)

    def _main(self, body: Callable[[], None]) -> None:
        current.role = self
        try:
            self.pause()
            body()
        except BaseException as error:
            self.error = error
        self.waits = None
        self.stopped.release()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        self.waits = until
        self.stopped.release()
        self.started.acquire()
        if self.cancelled:
            raise SystemExit

    def go(self) -> None:
        self.started.release()
        self.stopped.acquire()
        if self.error is not None:
            raise AssertionError(f"in {self.name}") from self.error

    def cancel(self) -> None:
        self.cancelled = True
        if self.waits is not None:
            self.started.release()
            self.stopped.acquire()


current = threading.local()  # the role of a thread
machine: Machine  # the one that runs


def pause(until: Callable[[], bool] = lambda: True) -> None:
    current.role.pause(until)


class Value(Tensor):
    """A tensor with the attribute that names its layout."""

    type = property(lambda self: types.SimpleNamespace(layout=None))  # type: ignore[assignment]


def value(x: Tensor) -> Tensor:
    return x.as_subclass(Value)


class Scalar(int):
    """An integer with the one method that kernels call on theirs."""

    def to(self, dtype: Any) -> "Scalar":
        return self


def _stays(name: str) -> None:
    plain = getattr(int, name)

    def method(a: int, b: Any) -> Any:
        c = plain(a, b)
        return c if c is NotImplemented else Scalar(c)

    setattr(Scalar, name, method)


for _operator in ("add", "sub", "mul", "floordiv", "mod", "and", "xor"):
    _stays(f"__{_operator}__")
    _stays(f"__r{_operator}__")


def scalars(*ends: int) -> Any:
    return map(Scalar, range(*ends))


class Cell:
    """A piece of shared or tensor memory that is written as a whole."""

    def __init__(self) -> None:
        self.data: Tensor | None = None
        self.arriving = 0
        self.leaving = 0
        self.fenced = True

    def read(self) -> Tensor:
        assert self.arriving == 0, "read while a copy into it is under way"
        assert self.data is not None, "read before anything was written"
        return self.data


class Barrier:
    def __init__(self) -> None:
        self.count = self.arrived = self.bytes = self.phase = 0

    def arrive(self, count: int = 1) -> None:
        assert self.count, "arrival before init"
        self.arrived += count
        assert self.arrived <= self.count, "more arrivals than a phase has"
        self.settle()

    def settle(self) -> None:
        if self.arrived == self.count and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0


class Shared:
    """Shared memory; `index` gives the pieces."""

    def __init__(self, dtype: Any, shape: Any, layout: Any = None, cells: Any = None) -> None:
        self.dtype, self.shape = dtype, [int(n) for n in shape]
        self.cells = cells if cells is not None else [Cell() for _ in range(self.shape[0])]
        self.turned = False

    def _piece(self, shape: list[int], cell: Any) -> "Shared":
        return Shared(self.dtype, shape, cells=[cell])

    def index(self, i: Any) -> "Shared":
        return self._piece(self.shape[1:], self.cells[int(i)])

    def reshape(self, shape: list[int]) -> "Shared":
        return self._piece(shape, self.cells[0])

    def permute(self, order: list[int]) -> "Shared":
        turned = self._piece(self.shape[::-1], self.cells[0])
        turned.turned = not self.turned
        return turned

    def load(self, layout: Any = None) -> Tensor:
        assert not machine.busy(self.cells[0], False, True)
        return value(self.cells[0].read().reshape(self.shape).clone())

    def store(self, x: Tensor) -> None:
        cell = self.cells[0]
        assert list(x.shape) == self.shape and x.dtype == self.dtype
        assert not cell.leaving and not cell.arriving and not machine.busy(cell, True, True), "overwritten while in use"
        cell.data, cell.fenced = x.as_subclass(Tensor).clone(), False
        current.role.unfenced.append(cell)

    def matrix(self) -> Tensor:
        cell = self.cells[0]
        assert cell.fenced, "a product reads what no fence has made visible"
        x = cell.read().reshape(self.shape[::-1] if self.turned else self.shape)
        return x.T if self.turned else x


class TensorMemory:
    def __init__(self, dtype: Any, shape: Any, layout: Any = None, cells: Any = None, first: int = 0) -> None:
        self.dtype, self.shape, self.first = dtype, [int(n) for n in shape], first
        self.cells = cells if cells is not None else [Cell() for _ in range(self.shape[0])]

    def index(self, i: Any) -> "TensorMemory":
        return TensorMemory(self.dtype, self.shape[1:], cells=[self.cells[int(i)]])

    def slice(self, first: int, length: int) -> "TensorMemory":
        return TensorMemory(self.dtype, [self.shape[0], length], cells=self.cells, first=self.first + first)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "TensorMemory":
        return TensorMemory(dtype, shape, cells=self.cells)

    def load(self, layout: Any) -> Tensor:
        assert not machine.busy(self.cells[0], False, True), "read before the product into it has run"
        return value(self.matrix().clone())

    def store(self, x: Tensor) -> None:
        cell = self.cells[0]
        assert list(x.shape) == self.shape and x.dtype == self.dtype
        assert not machine.busy(cell, True, True), "overwritten while a product uses it"
        self.write(x.as_subclass(Tensor))

    def write(self, x: Tensor) -> None:
        cell, end = self.cells[0], self.first + self.shape[1]
        if cell.data is None or cell.data.dtype != self.dtype or cell.data.shape[1] < end:
            assert self.first == 0, "a part of what was not written as a whole"
            cell.data = torch.empty(self.shape[0], end, dtype=self.dtype)
        cell.data[:, self.first : end] = x

    def matrix(self) -> Tensor:
        data = self.cells[0].read()
        assert data.dtype == self.dtype, "read as another dtype than written"
        return data[:, self.first : self.first + self.shape[1]]


class Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def at(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Offsets, and which of them count."""
        flat = self.memory.reshape(-1)
        keep = torch.as_tensor(True if mask is None else mask).as_subclass(Tensor)
        offset = torch.as_tensor(self.offset).as_subclass(Tensor).long()
        assert ((offset >= 0) & (offset < flat.numel()) | ~keep).all(), "outside of the tensor"
        return torch.where(keep, offset, 0), keep


class Descriptor:
    """A ragged descriptor: boxes of `[rows, columns]` of x, bounded by the end of a sequence."""

    def __init__(self, real: Any) -> None:
        x, (_, _, rows, columns) = real.base, real.block_shape
        self.memory = x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))
        self.dtype, self.layout = x.dtype, None
        self.block_type = types.SimpleNamespace(shape=[1, 1, rows, columns], nbytes=rows * columns * x.element_size())

    def window(self, coordinates: list[Any]) -> tuple[slice, slice, int]:
        """Rows and columns of the tensor that a box at these coordinates has, the number of rows first."""
        far, end, below, column = (int(c) for c in coordinates)
        _, _, rows, columns = self.block_type.shape
        row, count = end + below - far, max(0, min(rows, ROWS - below))
        assert far == ROWS and row >= 0 and column >= 0 and column + columns <= self.memory.shape[1]
        return slice(row, row + count), slice(column, column + columns), count


class language(types.SimpleNamespace):
    """`gl` of the kernels."""

    float32, int32, int64, bfloat16, float16 = torch.float32, torch.int32, torch.int64, torch.bfloat16, torch.float16

    constexpr = staticmethod(lambda x: x)
    allocate_shared_memory = Shared
    SliceLayout = BlockedLayout = SwizzledSharedLayout = staticmethod(lambda *unused: None)
    exp2, log2 = torch.exp2, torch.log2
    zeros_like, full_like = torch.zeros_like, torch.full_like
    convert_layout = staticmethod(lambda x, layout: x)
    static_range = range
    num_warps = staticmethod(lambda: 4)
    program_id = staticmethod(lambda axis: Scalar(machine.program))
    num_programs = staticmethod(lambda axis: machine.programs)
    minimum = staticmethod(lambda a, b: Scalar(min(a, b)) if isinstance(a, int) else a.clamp(max=b))
    maximum = staticmethod(lambda a, b: Scalar(max(a, b)) if isinstance(a, int) else a.clamp(min=b))
    sum = staticmethod(lambda x, axis: x.sum(axis))
    max = staticmethod(lambda x, axis: x.amax(axis))
    arange = staticmethod(lambda first, end, layout=None: value(torch.arange(first, end)))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, bool):
            return Scalar(a if condition else b)
        return torch.where(condition, a, b)

    @staticmethod
    def full(shape: Any, x: float, dtype: Any, layout: Any = None) -> Tensor:
        return value(torch.full([int(n) for n in shape], x, dtype=dtype))

    @staticmethod
    def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
        return language.full(shape, 0.0, dtype)

    @staticmethod
    def static_assert(condition: Any, message: str = "") -> None:
        assert condition, message

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: float = 0) -> Any:
        flat = pointer.memory.reshape(-1)
        if isinstance(pointer.offset, int):
            return Scalar(flat[pointer.offset].item())
        offset, keep = pointer.at(mask)
        return value(torch.where(keep, flat[offset], torch.as_tensor(other, dtype=flat.dtype)))

    @staticmethod
    def store(pointer: Pointer, x: Tensor, mask: Any = None) -> None:
        offset, keep = pointer.at(mask)
        x = torch.as_tensor(x, dtype=pointer.memory.dtype).as_subclass(Tensor)
        pointer.memory.view(-1)[offset[keep]] = x[keep]

    @staticmethod
    def atomic_add(pointer: Pointer, x: int, sem: str = "") -> Scalar:
        pause()
        flat = pointer.memory.view(-1)
        old = Scalar(flat[pointer.offset].item())
        flat[pointer.offset] += x
        return old

    @staticmethod
    def warp_specialize(roles: list[Any], warps: list[int], registers: list[int]) -> None:
        for i, (function, args) in enumerate(roles):
            machine.roles.append(Role(f"{i} {function.__name__}", lambda f=function, a=args: f(*a)))  # type: ignore[misc]


class mbarrier:
    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def _of(bar: Shared) -> Any:
        if not isinstance(bar.cells[0].data, Barrier):
            bar.cells[0].data = Barrier()  # type: ignore[assignment]
        return bar.cells[0].data

    @staticmethod
    def init(bar: Shared, count: int) -> None:
        mbarrier._of(bar).count = int(count)

    @staticmethod
    def wait(bar: Shared, parity: Any) -> None:
        barrier, parity = mbarrier._of(bar), int(parity)
        pause(lambda: barrier.phase & 1 != parity)

    @staticmethod
    def arrive(bar: Shared, count: int = 1, pred: Any = True) -> None:
        pause()
        if pred:
            mbarrier._of(bar).arrive(count)

    @staticmethod
    def expect(bar: Shared, nbytes: int) -> None:
        barrier = mbarrier._of(bar)
        barrier.bytes += nbytes
        barrier.arrive()


class tma:
    @staticmethod
    def async_copy_global_to_shared(desc: Descriptor, coordinates: list[Any], bar: Shared, box: Shared) -> None:
        pause()
        cell, barrier = box.cells[0], mbarrier._of(bar)
        assert not cell.leaving and not cell.arriving and not machine.busy(cell, True, True), "overwritten while in use"
        rows, columns, count = desc.window(coordinates)
        cell.arriving += 1

        def land() -> None:
            cell.data = torch.zeros(desc.block_type.shape[2:], dtype=desc.dtype)
            cell.data[:count] = desc.memory[rows, columns]
            cell.arriving, cell.fenced = 0, True
            barrier.bytes -= desc.block_type.nbytes
            barrier.settle()

        machine.copies.append(land)

    @staticmethod
    def async_copy_shared_to_global(desc: Descriptor, coordinates: list[Any], box: Shared) -> None:
        pause()
        role, cell = current.role, box.cells[0]
        assert cell.fenced, "a copy reads what no fence has made visible"
        rows, columns, count = desc.window(coordinates)
        cell.leaving += 1
        role.stores += 1

        def leave() -> None:
            desc.memory[rows, columns] = cell.read().reshape(desc.block_type.shape[2:])[:count]
            cell.leaving -= 1
            role.stores -= 1

        machine.copies.append(leave)

    @staticmethod
    def store_wait(pendings: int) -> None:
        role = current.role
        pause(lambda: role.stores <= pendings)


def fence_async_shared() -> None:
    role = getattr(current, "role", None)
    if role is not None:
        for cell in role.unfenced:
            cell.fenced = True
        role.unfenced.clear()


def tcgen05_mma(
    a: Any, b: Shared, acc: TensorMemory, *, use_acc: Any = True, mbarriers: Any = (), mbarrier_preds: Any = None
) -> None:
    pause()
    add = bool(use_acc)

    def product() -> None:
        # Not `@`: small as these are, it would wake its threads.
        c = (a.matrix().float()[:, :, None] * b.matrix().float()).sum(1)
        acc.write(acc.matrix() + c if add else c)

    assert a.shape[1] == b.shape[0] and acc.shape == [a.shape[0], b.shape[1]]
    machine.products.append((product, {a.cells[0], b.cells[0]}, {acc.cells[0]}))
    for bar, wanted in zip(mbarriers, mbarrier_preds or [True] * len(mbarriers), strict=True):
        if wanted:
            tcgen05_commit(bar)


def tcgen05_commit(bar: Shared) -> None:
    pause()
    machine.products.append((mbarrier._of(bar).arrive, set(), set()))


REPLACED = {
    "gl": language,
    "mbarrier": mbarrier,
    "tma": tma,
    "fence_async_shared": fence_async_shared,
    "tcgen05_mma": tcgen05_mma,
    "tcgen05_commit": tcgen05_commit,
    "allocate_tensor_memory": TensorMemory,
    "TensorMemoryLayout": lambda *unused: None,
    "get_tmem_reg_layout": lambda *unused: None,
    "fast_tanh": torch.tanh,
    "range": scalars,
}


class Plain:
    """Kernels as Python functions; `constants` replaces module constants by their names."""

    def __init__(self, **constants: Any) -> None:
        self.constants = constants
        self.made: dict[Any, Any] = {}

    def __call__(self, x: Any) -> Any:
        """A kernel, or anything that one refers to."""
        if isinstance(x, triton.language.constexpr):
            return x.value
        if not (isinstance(x, triton.runtime.jit.JITCallable) or getattr(x, "__triton_aggregate__", False)):
            return x
        if x not in self.made:
            self.made[x] = self._type(x) if isinstance(x, type) else self._function(x.fn)
        return self.made[x]

    def _function(self, f: types.FunctionType) -> Callable[..., Any]:
        names = dict(REPLACED)
        made = types.FunctionType(f.__code__, names, f.__name__, f.__defaults__, f.__closure__)
        for name in self._names(f.__code__):
            if name not in names and name in f.__globals__:
                names[name] = self.constants.get(name, self(f.__globals__[name]))
        return made

    def _names(self, code: types.CodeType) -> set[str]:
        return set(code.co_names).union(*(self._names(c) for c in code.co_consts if isinstance(c, types.CodeType)))

    def _type(self, kind: Any) -> type:
        first, *_ = kind.hash_attrs
        members = {n: self(x) for n, x in vars(kind).items() if isinstance(x, triton.runtime.jit.JITCallable)}
        return type(kind.__name__, (), {"__init__": self._function(first.fn), **members})


def launch(kernel: Callable[..., Any], arguments: dict[str, Any], programs: int, seed: int) -> None:
    """Run a kernel, made by `Plain`, with the arguments of a launch; one program after the other."""
    global machine
    given = {name: _argument(x) for name, x in arguments.items()}
    for program in range(programs):
        machine = Machine(seed * 1000 + program, program, programs)
        kernel(**given)
        machine.run()


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(x)
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    return Scalar(x) if isinstance(x, int) and not isinstance(x, bool) else x
