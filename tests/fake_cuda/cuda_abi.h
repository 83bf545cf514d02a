/* The part of the CUDA driver's binary interface that the fake speaks, in the driver's own names.
 * Declared here, so that no CUDA headers need to be present. Sizes and numbers are those of CUDA 12 and 13. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct Device *CUcontext;
typedef struct Stream *CUstream;
typedef struct Event *CUevent;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_ECC_UNCORRECTABLE = 214,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
};

enum {
    CU_DEVICE_ATTRIBUTE_INTEGRATED = 18,
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
};

enum { CU_MEM_HANDLE_TYPE_NONE = 0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1, CU_MEM_HANDLE_TYPE_FABRIC = 8 };
enum { CU_MEM_ACCESS_FLAGS_PROT_NONE = 0, CU_MEM_ACCESS_FLAGS_PROT_READ = 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1, CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum { CU_GET_PROC_ADDRESS_SUCCESS = 0, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1 };

typedef struct {
    unsigned char bytes[16];
} CUuuid;

typedef struct {
    int type;
    int id;
} CUmemLocation;

typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

#define API __attribute__((visibility("default")))

API CUresult cuInit(unsigned flags);
API CUresult cuDriverGetVersion(int *version);
API CUresult cuGetErrorName(CUresult error, const char **name);
API CUresult cuGetErrorString(CUresult error, const char **text);
API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);
API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);

API CUresult cuDeviceGetCount(int *count);
API CUresult cuDeviceGet(CUdevice *device, int ordinal);
API CUresult cuDeviceGetName(char *name, int length, CUdevice device);
API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device);
API CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice device);
API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active);
API CUresult cuCtxSetCurrent(CUcontext context);
API CUresult cuCtxGetCurrent(CUcontext *context);
API CUresult cuCtxPushCurrent_v2(CUcontext context);
API CUresult cuCtxPopCurrent_v2(CUcontext *context);
API CUresult cuCtxGetDevice(CUdevice *device);
API CUresult cuCtxSynchronize(void);

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes);
API CUresult cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *prop, int option);
API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment, CUdeviceptr wish,
                                 unsigned long long flags);
API CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes);
API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *prop,
                         unsigned long long flags);
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
API CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags);
API CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *wanted, size_t count);
API CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes);
API CUresult cuMemExportToShareableHandle(void *exported, CUmemGenericAllocationHandle handle, int type,
                                          unsigned long long flags);
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *exported, int type);
API CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags);
API CUresult cuMemHostUnregister(void *address);

API CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t nbytes, CUstream stream);
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, const void *source, size_t nbytes, CUstream stream);
API CUresult cuMemcpyDtoHAsync_v2(void *destination, CUdeviceptr source, size_t nbytes, CUstream stream);
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source, size_t nbytes, CUstream stream);
API CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t nbytes, CUstream stream);
API CUresult cuStreamCreate(CUstream *stream, unsigned flags);
API CUresult cuStreamDestroy_v2(CUstream stream);
API CUresult cuStreamSynchronize(CUstream stream);
API CUresult cuStreamQuery(CUstream stream);
API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
API CUresult cuEventCreate(CUevent *event, unsigned flags);
API CUresult cuEventRecord(CUevent event, CUstream stream);
API CUresult cuEventQuery(CUevent event);
API CUresult cuEventSynchronize(CUevent event);
API CUresult cuEventDestroy_v2(CUevent event);

typedef struct {
    unsigned timeoutMs, reserved0; /* 0: no time-out */
    uint64_t reserved1[7];
} CUcheckpointLockArgs;

API CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args);
API CUresult cuCheckpointProcessCheckpoint(int pid, void *args);
API CUresult cuCheckpointProcessRestore(int pid, void *args);
API CUresult cuCheckpointProcessUnlock(int pid, void *args);
API CUresult cuCheckpointProcessGetState(int pid, int *state);
API CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid);
