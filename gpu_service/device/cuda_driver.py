"""The few calls of CUDA's driver that torch does not offer; nothing here is imported without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from moebius.errors import UserError


class DriverError(RuntimeError):
    """A call of CUDA's driver failed; the message names the call and CUDA's reason."""


def checked(call: str, result: Any) -> Any:
    """Returns the values that follow a call's status. Raises DriverError unless it succeeded."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{call}: {status.name}")
    return values[0] if len(values) == 1 else None


class RegisteredMemory:
    """Host memory that the GPU reads and writes in place."""

    def __init__(self, address: int, nbytes: int, what: str) -> None:
        """Raises UserError with advice when CUDA refuses."""
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        try:
            checked("cuMemHostRegister", driver.cuMemHostRegister(address, nbytes, flags))
        except DriverError as error:
            raise UserError(
                f"CUDA refuses to register {what} ({nbytes / 2**20:.0f} MiB): {error}. Allow locked memory"
                " (ulimit -l unlimited; containers: --ulimit memlock=-1:-1), or take smaller mailbox_rows or"
                " mailbox_slots, or expert_transport: grpc"
            ) from error
        self.address = address
        self.device_address = int(
            checked("cuMemHostGetDevicePointer", driver.cuMemHostGetDevicePointer(address, 0))
        )

    def close(self) -> None:
        """No work that touches the memory may be under way."""
        checked("cuMemHostUnregister", driver.cuMemHostUnregister(self.address))


class Module:
    """Compiled kernels in the current context, loaded completely: a first launch has nothing to load."""

    def __init__(self, cubin: bytes) -> None:
        self._module = checked("cuModuleLoadData", driver.cuModuleLoadData(cubin))

    def kernel(self, name: str, *types: type[Any], shared: int = 0) -> Kernel:
        """Returns a kernel whose parameters have these ctypes types.

        `shared`: bytes of shared memory of a block, beside what the kernel declares itself.
        """
        function = checked(
            f"cuModuleGetFunction({name})", driver.cuModuleGetFunction(self._module, name.encode())
        )
        checked(f"cuFuncLoad({name})", driver.cuFuncLoad(function))
        if shared:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(f"cuFuncSetAttribute({name})", driver.cuFuncSetAttribute(function, limit, shared))
        return Kernel(name, function, types, shared)


class Kernel:
    """A kernel of a `Module`, loaded and ready to launch."""

    def __init__(self, name: str, function: Any, types: Sequence[type[Any]], shared: int) -> None:
        self._name, self._function, self._types, self._shared = name, function, types, shared

    def launch(
        self, stream: int, grid: int | tuple[int, int], block: int, *values: Any, overlaps: bool = False
    ) -> None:
        """Queues it; `values` in the order of its parameters, structures as they are, pointers as numbers.

        `overlaps`: it may begin before the last kernel ends, for whose results it waits by itself
        (programmatic dependent launch, CUDA programming guide).
        """
        columns, rows = grid if isinstance(grid, tuple) else (grid, 1)
        held = [
            value if isinstance(value, kind) else kind(value)
            for kind, value in zip(self._types, values, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = columns, rows, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = self._shared, stream
        if overlaps:
            config.attrs, config.numAttrs = [_may_overlap()], 1
        checked(self._name, driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))


def _may_overlap() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Queues a copy by the copy engine between registered host memory and GPU memory."""
    checked("cuMemcpyAsync", driver.cuMemcpyAsync(target, source, nbytes, stream))


def wait_until_equal(address: int, value: int, stream: int) -> None:
    """Queues a stream memory operation: later work waits until the 32-bit word has the value. No deadline."""
    flag = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    checked("cuStreamWaitValue32", driver.cuStreamWaitValue32(stream, address, value, int(flag)))


def call_on_host(function: int, argument: int, stream: int) -> None:
    """Queues a call of a C function by address, `void (*)(void*)`, on a thread of the driver's.

    Not by cuda.bindings: its wrapper frees its record in the first call, so a graph may not hold it.
    """
    pointers = (ctypes.c_void_p(stream), ctypes.c_void_p(function), ctypes.c_void_p(argument))
    status = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(*pointers)
    checked("cuLaunchHostFunc", (driver.CUresult(status),))
