"""StandInDriver: the module cuda.bindings.driver on memory files, with the rules that a GPU's driver has.

Memory that is not mapped, or mapped without access, cannot be touched (the process dies of SIGSEGV); what
takes a thread's context fails without one; sizes are whole units; memory of a GPU without peer access is
refused. A call in `failing` fails.
"""

from __future__ import annotations

import ctypes
import enum
import inspect
import os
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kvcache.device_memory import DeviceMapping, DeviceMemory
from tests.support.cuda_record import recorded

GRANULARITY = 64 << 10
HERE, NEAR, FAR = (f"{number:032x}" for number in (0xA, 0xB, 0xF))
"""UUIDs of GPUs: two with peer access to each other, and one without."""

_PROT_NONE, _MAP_PRIVATE_ANONYMOUS = 0, 0x22
_READ_WRITE, _MAP_SHARED_FIXED, _MAP_PRIVATE_ANONYMOUS_FIXED = 3, 0x11, 0x32
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Failure(Exception):
    """A call fails with this result."""


class StandInDriver:
    """One process's driver. It sees the GPUs `devices`, by UUID; `lacking` has attributes that are 0."""

    def __init__(self, devices: Sequence[str] = (HERE, NEAR), lacking: Sequence[str] = ()) -> None:
        self._devices = list(devices)
        self._lacking = set(lacking)
        self._thread = threading.local()
        self._handles: dict[int, int] = {}  # handle -> memory file
        self._reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, str]] = {}  # address -> bytes, UUID of the GPU that has them
        self._reached_from: dict[int, int] = {}  # address -> ordinal of the GPU that has access
        self.failing: dict[str, str] = {}  # call -> name of the result
        self.calls: list[str] = []
        self._next = 1
        for name, members in recorded()["enums"].items():
            setattr(self, name, enum.IntEnum(name, members, start=0))

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            try:
                if name in self.failing:
                    raise _Failure(self.failing[name])
                value = found(*arguments)
            except _Failure as failure:
                return (self.CUresult[str(failure)], *([None] if name not in _VOID else []))
            return (self.CUresult.CUDA_SUCCESS, *([] if name in _VOID else [value]))

        return call

    @property
    def leftovers(self) -> int:
        """Handles, reservations and mappings that were not given back."""
        return len(self._handles) + len(self._reserved) + len(self.mapped)

    # -- structures --------------------------------------------------------------------------------

    def CUmemAllocationProp(self) -> Any:
        location, flags = _Structure("CUmemLocation"), SimpleNamespace()
        return _Structure("CUmemAllocationProp", location=location, allocFlags=flags)

    def CUmemAccessDesc(self) -> Any:
        return _Structure("CUmemAccessDesc", location=_Structure("CUmemLocation"))

    def CUDA_MEMCPY2D(self) -> Any:
        return _Structure("CUDA_MEMCPY2D")

    # -- devices and contexts ----------------------------------------------------------------------

    def cuInit(self, Flags: int) -> None:
        assert Flags == 0

    def cuDeviceGet(self, ordinal: int) -> int:
        if ordinal >= len(self._devices):
            raise _Failure("CUDA_ERROR_INVALID_DEVICE")
        return ordinal

    def cuDeviceGetCount(self) -> int:
        return len(self._devices)

    def cuDeviceGetAttribute(self, attrib: Any, dev: int) -> int:
        return int(attrib.name not in self._lacking)

    def cuDeviceGetUuid(self, dev: int) -> Any:
        return SimpleNamespace(bytes=bytes.fromhex(self._devices[dev]))

    def cuDeviceCanAccessPeer(self, dev: int, peerDev: int) -> int:
        assert dev != peerDev, "a GPU is no peer of itself"
        return int(FAR not in (self._devices[dev], self._devices[peerDev]))

    def cuDevicePrimaryCtxRetain(self, dev: int) -> str:
        return f"context of {dev}"

    def cuCtxSetCurrent(self, ctx: str) -> None:
        self._thread.context = ctx

    def cuCtxSynchronize(self) -> None:
        self._check_context()

    # -- memory ------------------------------------------------------------------------------------

    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        assert option.name == "CU_MEM_ALLOC_GRANULARITY_MINIMUM"
        self._check_location(prop.location)
        return GRANULARITY

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> int:
        self._check(flags == 0 and size > 0 and size % GRANULARITY == 0)
        self._check(prop.type.name == "CU_MEM_ALLOCATION_TYPE_PINNED")
        self._check(prop.requestedHandleTypes.name == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
        self._check_location(prop.location)
        fd = os.memfd_create(f"gpu-{self._devices[prop.location.id]}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return self._handle(fd)

    def cuMemRelease(self, handle: int) -> None:
        os.close(self._handles.pop(handle))

    def cuMemExportToShareableHandle(self, handle: int, handleType: Any, flags: int) -> int:
        self._check(flags == 0 and handleType.name == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
        fd = os.dup(self._handles[handle])
        os.set_inheritable(fd, True)  # CUDA does not say that it is not
        return fd

    def cuMemImportFromShareableHandle(self, osHandle: int, shHandleType: Any) -> int:
        self._check(shHandleType.name == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
        if _owner(osHandle) is None:
            raise _Failure("CUDA_ERROR_INVALID_VALUE")
        return self._handle(os.dup(osHandle))

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> int:
        self._check(size % GRANULARITY == 0 and (alignment, addr, flags) == (0, 0, 0))
        ptr = _mmap(None, size, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS, -1)
        self._reserved[ptr] = size
        return ptr

    def cuMemAddressFree(self, ptr: int, size: int) -> None:
        self._check(ptr not in self.mapped and self._reserved.pop(ptr, None) == size)
        assert _libc.munmap(ptr, size) == 0

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> None:
        fd = self._handles[handle]
        self._check(self._reserved.get(ptr) == size and (offset, flags) == (0, 0))
        self._check(size <= os.fstat(fd).st_size)
        _mmap(ptr, size, _PROT_NONE, _MAP_SHARED_FIXED, fd)
        self.mapped[ptr] = size, str(_owner(fd))

    def cuMemUnmap(self, ptr: int, size: int) -> None:
        self._check(self.mapped.pop(ptr, (0, ""))[0] == size)
        _mmap(ptr, size, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS_FIXED, -1)

    def cuMemSetAccess(self, ptr: int, size: int, desc: list[Any], count: int) -> None:
        self._check(self.mapped.get(ptr, (0, ""))[0] == size and count == len(desc) == 1)
        self._check(desc[0].flags.name == "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
        self._check_location(desc[0].location)
        mine, theirs = self._devices[desc[0].location.id], self.mapped[ptr][1]
        if mine != theirs and FAR in (mine, theirs):
            raise _Failure("CUDA_ERROR_INVALID_DEVICE")
        assert _libc.mprotect(ptr, size, _READ_WRITE) == 0
        self._reached_from[ptr] = desc[0].location.id

    def cuMemcpyAsync(self, dst: int, src: int, ByteCount: int, hStream: int) -> None:
        self._check_access(dst, src)
        ctypes.memmove(dst, src, ByteCount)

    def cuMemcpy2DAsync(self, pCopy: Any, hStream: int) -> None:
        self._check_access(pCopy.dstDevice, pCopy.srcDevice)
        types = {pCopy.dstMemoryType.name, pCopy.srcMemoryType.name}
        self._check(types == {"CU_MEMORYTYPE_UNIFIED"})
        self._check(0 < pCopy.WidthInBytes <= min(pCopy.dstPitch, pCopy.srcPitch))
        for row in range(pCopy.Height):
            target, source = pCopy.dstDevice + row * pCopy.dstPitch, pCopy.srcDevice + row * pCopy.srcPitch
            ctypes.memmove(target, source, pCopy.WidthInBytes)

    # -- rules -------------------------------------------------------------------------------------

    def _handle(self, fd: int) -> int:
        self._next += 1
        self._handles[self._next] = fd
        return self._next

    def _check(self, condition: bool) -> None:
        if not condition:
            raise _Failure("CUDA_ERROR_INVALID_VALUE")

    def _check_location(self, location: Any) -> None:
        self._check(location.type.name == "CU_MEM_LOCATION_TYPE_DEVICE" and location.id < len(self._devices))

    def _check_access(self, *pointers: int) -> None:
        """The thread's GPU may reach mapped memory only if access was set for it."""
        self._check_context()
        for pointer in pointers:
            for ptr, (size, _) in self.mapped.items():
                if ptr <= pointer < ptr + size:
                    self._check(self._thread.context == f"context of {self._reached_from.get(ptr)}")

    def _check_context(self) -> None:
        if getattr(self._thread, "context", None) is None:
            raise _Failure("CUDA_ERROR_INVALID_CONTEXT")


class HostDeviceMemory(DeviceMemory):
    """DeviceMemory over a StandInDriver: its tensors are the CPU's."""

    def tensor_at(self, mapping: DeviceMapping) -> torch.Tensor:
        array = (ctypes.c_uint8 * mapping.nbytes).from_address(mapping.ptr)
        array.mapping = mapping  # type: ignore[attr-defined]  # kept as long as the tensor
        return torch.frombuffer(array, dtype=torch.uint8)


def stand_in_memory(driver: StandInDriver | None = None, ordinal: int = 0) -> HostDeviceMemory:
    """The memory of one of a driver's GPUs."""
    return HostDeviceMemory(driver or StandInDriver(), torch.device("cuda", ordinal))


class _Structure:
    """Has only fields that the recorded structure has."""

    def __init__(self, name: str, **fields: Any) -> None:
        self.__dict__.update(fields, _fields=recorded()["structures"][name])

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in self._fields, f"there is no field {name}"
        self.__dict__[name] = value


def _owner(fd: int) -> str | None:
    """The UUID of the GPU that a memory file stands for; None: it is something else."""
    name = os.readlink(f"/proc/self/fd/{fd}")
    return name.partition("gpu-")[2].partition(" ")[0] or None


def _mmap(at: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    address = _libc.mmap(at, nbytes, protection, flags, fd, 0)
    assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(address)


_VOID = {
    name
    for name, function in inspect.getmembers(StandInDriver, inspect.isfunction)
    if name.startswith("cu") and function.__annotations__["return"] == "None"
}
