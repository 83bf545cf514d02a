/* Devices, primary contexts, and which context is current in which thread. */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CONTEXTS_NESTED_MAX 16

static Device devices[DEVICES_MAX];
static uint64_t context_keys[DEVICES_MAX]; /* what the primary contexts take of their devices, in the budget */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t initialized_by; /* like the real driver, of no use after a fork */
static __thread Device *stack[CONTEXTS_NESTED_MAX];
static __thread int depth;

int is_initialized(void)
{
    return initialized_by == getpid();
}

int device_count(void)
{
    return budget_devices();
}

Device *device_at(int ordinal)
{
    return ordinal >= 0 && ordinal < device_count() ? &devices[ordinal] : NULL;
}

Device *current_device(void)
{
    return depth ? stack[depth - 1] : NULL;
}

/* The first error stays: later ones are its consequences. */
void break_device(Device *device, CUresult error)
{
    pthread_mutex_lock(&lock);
    if (!device->sticky) device->sticky = error;
    pthread_mutex_unlock(&lock);
}

CUresult sticky_of(Device *device)
{
    pthread_mutex_lock(&lock);
    CUresult sticky = device->sticky;
    pthread_mutex_unlock(&lock);
    return sticky;
}

long contexts_live(void)
{
    long live = 0;
    for (int i = 0; i < DEVICES_MAX; i++) live += devices[i].retained > 0;
    return live;
}

void devices_reset(void)
{
    memset(devices, 0, sizeof devices);
    memset(context_keys, 0, sizeof context_keys);
    initialized_by = 0;
    depth = 0; /* of this thread; others are expected to have restored theirs */
}

CUresult cuInit(unsigned flags)
{
    ENTER(ANYTIME);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (initialized_by && !is_initialized()) return CUDA_ERROR_NOT_INITIALIZED;
    if (budget_open() || !device_count()) return CUDA_ERROR_NO_DEVICE;
    for (int i = 0; i < DEVICES_MAX; i++) devices[i].ordinal = i;
    initialized_by = getpid();
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
    ENTER(ANYTIME);
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    ENTER(NEEDS_INIT);
    *count = device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER(NEEDS_INIT);
    if (!device_at(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    ENTER(NEEDS_INIT);
    if (!device_at(device) || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    memset(name, 0, (size_t)length);
    snprintf(name, (size_t)length, budget_is_slice(device) ? "Fake GPU MIG %d" : "Fake GPU %d", budget_physical(device));
    return CUDA_SUCCESS;
}

/* 66616b65-2d67-7075-0000-00000000000N */
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    ENTER(NEEDS_INIT);
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    *uuid = (CUuuid){"fake-gpu"};
    uuid->bytes[15] = (unsigned char)budget_physical(device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice device)
{
    ENTER(NEEDS_INIT);
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    *nbytes = budget_capacity_bytes(device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    ENTER(NEEDS_INIT);
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    *value = 0;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = (int)environment_number("FAKE_CUDA_INTEGRATED", 0); break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        *value = environment_has("FAKE_CUDA_EXPORT", "fd", "fd");
        break;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
        *value = environment_has("FAKE_CUDA_EXPORT", "fabric", "fd");
        break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
        *value = environment_has("FAKE_CUDA_RDMA", "promised", "none");
        break;
    default: break;
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER(NEEDS_INIT);
    Device *found = device_at(device);
    if (!found) return CUDA_ERROR_INVALID_DEVICE;
    uint64_t nbytes = environment_number("FAKE_CUDA_CONTEXT_BYTES", 0);
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!found->retained && nbytes) result = budget_charge(device, nbytes, &context_keys[device]);
    if (!result) found->retained++;
    pthread_mutex_unlock(&lock);
    *context = found;
    return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER(NEEDS_INIT);
    Device *found = device_at(device);
    if (!found) return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    CUresult result = found->retained ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (found->retained && !--found->retained && context_keys[device]) {
        budget_drop(context_keys[device]);
        context_keys[device] = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    ENTER(NEEDS_INIT);
    Device *found = device_at(device);
    if (!found) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = found->retained > 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER(NEEDS_INIT);
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == CONTEXTS_NESTED_MAX) return CUDA_ERROR_OUT_OF_MEMORY;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER(NEEDS_INIT);
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER(NEEDS_INIT);
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER(NEEDS_INIT);
    *context = current_device();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER(NEEDS_CONTEXT);
    *device = current_device()->ordinal;
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    ENTER(NEEDS_CONTEXT);
    int device = current_device()->ordinal;
    *free_bytes = budget_free_bytes(device);
    *total_bytes = budget_capacity_bytes(device);
    return CUDA_SUCCESS;
}
