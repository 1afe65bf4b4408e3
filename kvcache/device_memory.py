"""Memory of a GPU that another process of this host can map: a pool that peers copy into themselves.

The owner makes an allocation with CUDA's virtual memory calls and exports it as a descriptor. A process that
is sent the descriptor imports it and maps the same memory, on the same GPU or on a peer (NVLink, PCIe). So it
is the memfd of a GPU: whoever has no descriptor cannot open it, it contains nothing but the pool, and it
exists as long as anybody has the descriptor or a mapping. docs/decisions/0047-cuda-ipc.md says why
cudaIpcGetMemHandle is not used.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from kvcache.buffers import PoolBuffer
from kvcache.page_parts import RowsCopy

log = logging.getLogger(__name__)

_NEEDED = {
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "has no virtual memory management",
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "exports no memory as a descriptor",
}
_RDMA = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"
_MOST_BYTES = 1 << 47  # of an address space


class DeviceError(Exception):
    """The CUDA driver, or the GPU, does not do what it is asked for."""


class DeviceMemory:
    """One GPU as this process sees it. Safe to call from several threads."""

    def __init__(self, driver: Any, device: torch.device) -> None:
        """`driver` is the module cuda.bindings.driver; `device` has an index. Raises DeviceError when the GPU
        cannot share memory."""
        self._driver = driver
        self._torch_device = device
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", device.index)
        for attribute, lack in _NEEDED.items():
            if not self._attribute(attribute):
                raise DeviceError(f"{device} {lack}")
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.uuid = self._uuid_of(self._device)
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = device.index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._properties = self._allocation_properties(device.index)
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, least))

    def allocate(self, nbytes: int) -> ExportedBuffer:
        """Zeroed memory of this GPU that others can map. Raises DeviceError."""
        self._enter()
        handle = self._call("cuMemCreate", self._whole(nbytes), self._properties, 0)
        try:
            fd = int(self._call("cuMemExportToShareableHandle", handle, self._fd_type, 0))
            with ExitStack() as on_error:
                on_error.callback(os.close, fd)
                os.set_inheritable(fd, False)
                buffer = ExportedBuffer(self._map(handle, nbytes), fd)
                on_error.pop_all()
        finally:
            self._call("cuMemRelease", handle)  # the descriptor and the mapping keep the memory
        buffer.tensor.zero_()
        return buffer

    def open(self, fd: int, nbytes: int) -> DeviceMapping:
        """Map memory that another process has exported; `fd` stays the caller's. Raises DeviceError, also
        when it is shorter than `nbytes`, or on a GPU that this one does not reach."""
        if not 0 < nbytes < _MOST_BYTES:
            raise DeviceError(f"{nbytes} bytes are announced")
        self._enter()
        handle = self._call("cuMemImportFromShareableHandle", fd, self._fd_type)
        try:
            return self._map(handle, nbytes)
        finally:
            self._call("cuMemRelease", handle)

    def reaches(self, uuid: str) -> bool:
        """Whether this GPU can map the memory of the one with this UUID. True for one that is hidden from
        this process (CUDA_VISIBLE_DEVICES): only `open` can tell."""
        for ordinal in range(self._call("cuDeviceGetCount")):
            other = self._call("cuDeviceGet", ordinal)
            if self._uuid_of(other) == uuid:
                return uuid == self.uuid or bool(self._call("cuDeviceCanAccessPeer", self._device, other))
        return True

    def copy(self, copies: Iterable[RowsCopy], stream: int) -> None:
        """Queue copies on a raw stream handle. Raises DeviceError; then some may have been queued."""
        self._enter()
        for copy in copies:
            if copy.rows == 1:
                self._call("cuMemcpyAsync", copy.target, copy.source, copy.width, stream)
            else:
                self._call("cuMemcpy2DAsync", self._rows(copy), stream)

    def _rows(self, copy: RowsCopy) -> Any:
        rows = self._driver.CUDA_MEMCPY2D()
        rows.srcMemoryType = rows.dstMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        rows.srcDevice, rows.srcPitch = copy.source, copy.source_pitch
        rows.dstDevice, rows.dstPitch = copy.target, copy.target_pitch
        rows.WidthInBytes, rows.Height = copy.width, copy.rows
        return rows

    def unmap(self, ptr: int, nbytes: int) -> None:
        """Undo a mapping, after what is queued on this GPU: unlike cudaFree, cuMemUnmap does not always
        wait."""
        whole = self._whole(nbytes)
        try:
            self._enter()
            self._call("cuCtxSynchronize")
            self._call("cuMemUnmap", ptr, whole)
            self._call("cuMemAddressFree", ptr, whole)
        except DeviceError as error:  # nothing can be done about it, and nobody waits for it
            log.warning("%d bytes of %s stay mapped: %s", whole, self._torch_device, error)

    def tensor_at(self, mapping: DeviceMapping) -> torch.Tensor:
        """The mapped bytes as uint8 `[nbytes]`. It keeps the mapping. Raises DeviceError when torch does not
        take them."""
        try:
            tensor = torch.as_tensor(mapping, device=self._torch_device)
        except RuntimeError as error:
            raise DeviceError(f"torch makes no tensor of it: {error}") from None
        if tensor.data_ptr() != mapping.ptr:
            raise DeviceError("torch has copied it")
        return tensor

    def _map(self, handle: Any, nbytes: int) -> DeviceMapping:
        whole = self._whole(nbytes)
        with ExitStack() as on_error:
            ptr = int(self._call("cuMemAddressReserve", whole, 0, 0, 0))
            on_error.callback(self._call, "cuMemAddressFree", ptr, whole)
            self._call("cuMemMap", ptr, whole, 0, handle, 0)
            on_error.callback(self._call, "cuMemUnmap", ptr, whole)
            self._call("cuMemSetAccess", ptr, whole, [self._access], 1)
            on_error.pop_all()
        return DeviceMapping(self, ptr, nbytes)

    def _allocation_properties(self, ordinal: int) -> Any:
        properties = self._driver.CUmemAllocationProp()
        properties.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._fd_type
        properties.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        if self._attribute(_RDMA):
            properties.allocFlags.gpuDirectRDMACapable = 1  # Mooncake registers the same pool with a NIC
        return properties

    @property
    def _fd_type(self) -> Any:
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _whole(self, nbytes: int) -> int:
        """`nbytes` in whole units of what the driver maps."""
        return -(-nbytes // self._granularity) * self._granularity

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._driver.CUdevice_attribute, name)
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def _uuid_of(self, device: Any) -> str:
        return str(bytes(self._call("cuDeviceGetUuid", device).bytes).hex())

    def _enter(self) -> None:
        """Make the context that torch uses, too, this thread's."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{name}: {getattr(error, 'name', error)}")
        return values[0] if values else None


class DeviceMapping:
    """Memory of a GPU, this process's or another's, from `ptr` on. Unmapped by `close`, or with the last
    reference to it; the end of the process does it as well."""

    def __init__(self, memory: DeviceMemory, ptr: int, nbytes: int) -> None:
        self.memory = memory
        self.ptr = ptr
        self.nbytes = nbytes
        self._unmap = weakref.finalize(self, memory.unmap, ptr, nbytes)
        self._unmap.atexit = False  # the driver may be gone by then
        self.__cuda_array_interface__ = {  # of which torch makes a tensor, which keeps this object
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
            "version": 3,
        }

    def close(self) -> None:
        """Unmap it. Nothing may use it any more. Idempotent."""
        self._unmap()


class ExportedBuffer(PoolBuffer):
    """Memory of a GPU: a process that is sent `.fd` over a Unix socket can map the same bytes."""

    def __init__(self, mapping: DeviceMapping, fd: int) -> None:
        """Own `fd`. The mapping stays as long as a tensor over it."""
        super().__init__(mapping.memory.tensor_at(mapping), fd)


@cache
def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of a CUDA device, if processes can share it; else None, and the log says why."""
    try:
        from cuda.bindings import driver

        return DeviceMemory(driver, device)
    except (ImportError, RuntimeError, DeviceError) as error:  # RuntimeError: there is no libcuda
        log.info("memory of %s cannot be shared with other processes: %s", device, error)
        return None


def allocate_exported(device: torch.device, nbytes: int) -> ExportedBuffer | None:
    """Zeroed memory of a CUDA device that other processes can map; None, and the log says why, when it cannot
    be had."""
    memory = device_memory(device)
    if memory is None:
        return None
    torch.cuda.empty_cache()  # what torch's allocator keeps for later is not free to the driver
    try:
        return memory.allocate(nbytes)
    except DeviceError as error:
        log.warning("%d bytes of %s cannot be allocated to be shared: %s", nbytes, device, error)
        return None
