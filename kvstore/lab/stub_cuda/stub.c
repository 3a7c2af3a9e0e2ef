/* A CUDA driver without a device: every call fails, except the one that says so.
 *
 * kvikio loads libcuda.so.1 before its first I/O of whatever kind, and takes a pointer that the driver does not know for host
 * memory. With this library loaded under that name it therefore reads into host memory on a machine without a GPU.
 * Never load it into a process that has, or wants, a real driver.
 *
 * With -DWITH_DEVICE it has one device, which device.h imagines.
 */
#define FAILS(name) \
    int name(void) { return 3; } /* CUDA_ERROR_NOT_INITIALIZED */

int cuDriverGetVersion(int *version) { /* kvikio waits for ever in its start-up where this fails */
    *version = 12090;
    return 0;
}

FAILS(cuCtxCreate)
FAILS(cuCtxCreate_v2)
FAILS(cuCtxDestroy)
FAILS(cuCtxDestroy_v2)
FAILS(cuCtxPopCurrent)
FAILS(cuCtxPushCurrent)
FAILS(cuDeviceGetAttribute)
FAILS(cuDeviceGetPCIBusId)
FAILS(cuDeviceGetUuid)
FAILS(cuDevicePrimaryCtxGetState)
FAILS(cuDevicePrimaryCtxRelease)
FAILS(cuEventDestroy)
FAILS(cuGetErrorName)
FAILS(cuGetErrorString)
FAILS(cuGetProcAddress)
FAILS(cuGetProcAddress_v2)
FAILS(cuMemAlloc)
FAILS(cuMemFree)
FAILS(cuMemGetAddressRange)
FAILS(cuMemHostRegister)
FAILS(cuMemHostRegister_v2)
FAILS(cuMemHostUnregister)
FAILS(cuMemcpyAsync)
FAILS(cuMemcpyBatchAsync)
FAILS(cuMemcpyBatchAsync_v2)
FAILS(cuMemcpyDtoH)
FAILS(cuMemcpyDtoHAsync)
FAILS(cuMemcpyHtoD)
FAILS(cuMemcpyHtoDAsync)
FAILS(cuMemcpy3DBatchAsync)
FAILS(cuPointerGetAttributes)
FAILS(cuStreamCreateWithPriority)
FAILS(cuStreamDestroy)

#ifdef WITH_DEVICE
#include "device.h"
#else
FAILS(cuInit)
FAILS(cuCtxGetCurrent)
FAILS(cuCtxGetDevice)
FAILS(cuCtxPopCurrent_v2)
FAILS(cuCtxPushCurrent_v2)
FAILS(cuCtxSetCurrent)
FAILS(cuCtxSynchronize)
FAILS(cuDeviceGet)
FAILS(cuDeviceGetCount)
FAILS(cuDeviceGetName)
FAILS(cuDeviceTotalMem_v2)
FAILS(cuDevicePrimaryCtxRelease_v2)
FAILS(cuDevicePrimaryCtxRetain)
FAILS(cuEventCreate)
FAILS(cuEventDestroy_v2)
FAILS(cuEventQuery)
FAILS(cuEventRecord)
FAILS(cuEventSynchronize)
FAILS(cuLaunchHostFunc)
FAILS(cuMemAlloc_v2)
FAILS(cuMemFree_v2)
FAILS(cuMemFreeHost)
FAILS(cuMemGetAddressRange_v2)
FAILS(cuMemHostAlloc)
FAILS(cuMemcpyDtoH_v2)
FAILS(cuMemcpyDtoHAsync_v2)
FAILS(cuMemcpyHtoD_v2)
FAILS(cuMemcpyHtoDAsync_v2)
FAILS(cuPointerGetAttribute)
FAILS(cuStreamCreate)
FAILS(cuStreamDestroy_v2)
FAILS(cuStreamQuery)
FAILS(cuStreamSynchronize)
FAILS(cuStreamWaitEvent)
#endif
