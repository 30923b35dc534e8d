"""Classifies exceptions of engines and decoders: too little memory, a lost device, or neither."""

from __future__ import annotations

import re

import torch

from ..errors import BrokenError

# Messages for too little memory, from torch 2.14 (CUDA, CPU), ONNX Runtime 1.31 (its arena, CUDA), TensorRT, OpenVINO,
# libjpeg and Pillow 13.
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|failed to allocate memory|bad_alloc|bad allocation"
    r"|insufficient memory|cudaErrorMemoryAllocation|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)

# CUDA errors after which every call of the process fails, by message, name and number. NVIDIA's documentation says "…
# the process must be terminated and relaunched" (CUDA Runtime API 13, cudaError_t).
_LOST = re.compile(
    r"illegal memory access|illegal address|device-side assert|device side assert|unspecified launch failure"
    r"|launch failed|misaligned address|illegal instruction|invalid program counter|invalid address space"
    r"|hardware stack error|ECC error|launch timed out|launch timeout|device is lost|NVLink error|GPU has fallen off"
    r"|context is destroyed|contained error|tensor memory leak"
    r"|cudaError(?:IllegalAddress|Assert|LaunchFailure|MisalignedAddress|IllegalInstruction|InvalidPc"
    r"|InvalidAddressSpace|HardwareStackError|ECCUncorrectable|LaunchTimeout|NvlinkUncorrectable|Contained"
    r"|ContextIsDestroyed)"
    r"|CUDA_ERROR_(?:ILLEGAL_ADDRESS|ASSERT|LAUNCH_FAILED|MISALIGNED_ADDRESS|ILLEGAL_INSTRUCTION|INVALID_PC"
    r"|INVALID_ADDRESS_SPACE|HARDWARE_STACK_ERROR|ECC_UNCORRECTABLE|LAUNCH_TIMEOUT|NVLINK_UNCORRECTABLE|CONTAINED"
    r"|CONTEXT_IS_DESTROYED)"
    r"|CUDA (?:error|failure):? ?(?:214|220|226|700|702|709|710|714|715|716|717|718|719|721)\b",
    re.IGNORECASE,
)
_OF_CUDA = re.compile(r"cuda|cudnn|cublas|nvinfer|tensorrt|\bgpu\b|device-side|NVLink|ECC", re.IGNORECASE)


def lacks_memory(error: BaseException) -> bool:
    """Whether the error means too little memory. The same call may work later, or with less to do at once."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return _NO_MEMORY.search(str(error)) is not None and not is_lost(error)


def is_lost(error: BaseException) -> bool:
    """Whether the error means that the process has lost its device. No further call can work."""
    if isinstance(error, BrokenError):
        return True
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return False
    said = str(error)
    return _OF_CUDA.search(said) is not None and _LOST.search(said) is not None


def device_answers(device: torch.device) -> bool:
    """Whether a device still works. Call it after a failure whose message does not say so."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - torch 2.14 raises AcceleratorError, before it RuntimeError
        return lacks_memory(error)
    return True
