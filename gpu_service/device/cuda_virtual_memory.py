"""`VirtualMemory` of a GPU, by the CUDA driver's virtual memory management (CUDA Driver API)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver

from gpu_service.device.virtual_memory import VirtualMemory, VirtualMemoryUnavailable


class CudaVirtualMemory(VirtualMemory):
    """The virtual memory of one GPU, in the context that torch uses there."""

    def __init__(self, device: torch.device) -> None:
        """Raises VirtualMemoryUnavailable for a GPU or a driver without it."""
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        # The context exists from here on.
        torch.zeros(1, device=self.device)
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        number = _call(driver.cuDeviceGet, self.device.index)
        if not _call(driver.cuDeviceGetAttribute, attribute, number):
            raise VirtualMemoryUnavailable("the GPU does not support virtual memory management")
        place = driver.CUmemLocation()
        place.type, place.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, self.device.index
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = place
        self._access = driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(_call(driver.cuMemGetAllocationGranularity, self._kind, least))

    def create(self, nbytes: int) -> Any:
        return _call(driver.cuMemCreate, nbytes, self._kind, 0)

    def release(self, handle: Any) -> None:
        _call(driver.cuMemRelease, handle)

    def reserve(self, nbytes: int) -> int:
        return int(_call(driver.cuMemAddressReserve, nbytes, 0, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        _call(driver.cuMemAddressFree, address, nbytes)

    def map(self, address: int, nbytes: int, handles: Sequence[Any]) -> None:
        for number, handle in enumerate(handles):
            _call(driver.cuMemMap, address + number * nbytes, nbytes, 0, handle, 0)
        # Once for all of them: it takes longer than mapping one.
        _call(driver.cuMemSetAccess, address, nbytes * len(handles), [self._access], 1)

    def unmap(self, address: int, nbytes: int, count: int) -> None:
        for number in range(count):
            _call(driver.cuMemUnmap, address + number * nbytes, nbytes)

    def tensor(self, address: int, nbytes: int, keeps: object) -> torch.Tensor:
        return torch.as_tensor(_Bytes(address, nbytes, keeps), device=self.device)


class _Bytes:
    """Memory as torch takes it over without a copy; it holds the object as long as a tensor lives."""

    def __init__(self, address: int, nbytes: int, keeps: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
        self._keeps = keeps


def _call(function: Any, *arguments: Any) -> Any:
    """Returns what the function returns. Raises VirtualMemoryUnavailable naming function and error."""
    status, *found = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise VirtualMemoryUnavailable(f"{function.__name__}: {status.name}")
    return found[0] if found else None
