/* What every call begins with, how cuda-python finds the functions, and the words of the tests: fake_cuda_*. */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAULTS_MAX 64
#define NAME_BYTES 64

/* Each function by the name that cuGetProcAddress is asked for; the symbol may carry a newer version's suffix. */
#define FUNCTIONS(F)                                                                                                   \
    F(cuInit, cuInit)                                                                                                  \
    F(cuDriverGetVersion, cuDriverGetVersion)                                                                          \
    F(cuGetErrorName, cuGetErrorName)                                                                                  \
    F(cuGetErrorString, cuGetErrorString)                                                                              \
    F(cuDeviceGetCount, cuDeviceGetCount)                                                                              \
    F(cuDeviceGet, cuDeviceGet)                                                                                        \
    F(cuDeviceGetName, cuDeviceGetName)                                                                                \
    F(cuDeviceGetUuid, cuDeviceGetUuid_v2)                                                                             \
    F(cuDeviceTotalMem, cuDeviceTotalMem_v2)                                                                           \
    F(cuDeviceGetAttribute, cuDeviceGetAttribute)                                                                      \
    F(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                                                              \
    F(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2)                                                         \
    F(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState)                                                          \
    F(cuCtxSetCurrent, cuCtxSetCurrent)                                                                                \
    F(cuCtxGetCurrent, cuCtxGetCurrent)                                                                                \
    F(cuCtxPushCurrent, cuCtxPushCurrent_v2)                                                                           \
    F(cuCtxPopCurrent, cuCtxPopCurrent_v2)                                                                             \
    F(cuCtxGetDevice, cuCtxGetDevice)                                                                                  \
    F(cuCtxSynchronize, cuCtxSynchronize)                                                                              \
    F(cuMemGetInfo, cuMemGetInfo_v2)                                                                                   \
    F(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity)                                                    \
    F(cuMemAddressReserve, cuMemAddressReserve)                                                                        \
    F(cuMemAddressFree, cuMemAddressFree)                                                                              \
    F(cuMemCreate, cuMemCreate)                                                                                        \
    F(cuMemRelease, cuMemRelease)                                                                                      \
    F(cuMemMap, cuMemMap)                                                                                              \
    F(cuMemSetAccess, cuMemSetAccess)                                                                                  \
    F(cuMemUnmap, cuMemUnmap)                                                                                          \
    F(cuMemExportToShareableHandle, cuMemExportToShareableHandle)                                                      \
    F(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle)                                                  \
    F(cuMemHostRegister, cuMemHostRegister_v2)                                                                         \
    F(cuMemHostUnregister, cuMemHostUnregister)                                                                        \
    F(cuMemcpyAsync, cuMemcpyAsync)                                                                                    \
    F(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2)                                                                         \
    F(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2)                                                                         \
    F(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2)                                                                         \
    F(cuMemsetD8Async, cuMemsetD8Async)                                                                                \
    F(cuStreamCreate, cuStreamCreate)                                                                                  \
    F(cuStreamDestroy, cuStreamDestroy_v2)                                                                             \
    F(cuStreamSynchronize, cuStreamSynchronize)                                                                        \
    F(cuStreamQuery, cuStreamQuery)                                                                                    \
    F(cuStreamWaitEvent, cuStreamWaitEvent)                                                                            \
    F(cuEventCreate, cuEventCreate)                                                                                    \
    F(cuEventRecord, cuEventRecord)                                                                                    \
    F(cuEventQuery, cuEventQuery)                                                                                      \
    F(cuEventSynchronize, cuEventSynchronize)                                                                          \
    F(cuEventDestroy, cuEventDestroy_v2)                                                                               \
    F(cuCheckpointProcessLock, cuCheckpointProcessLock)                                                                \
    F(cuCheckpointProcessCheckpoint, cuCheckpointProcessCheckpoint)                                                    \
    F(cuCheckpointProcessRestore, cuCheckpointProcessRestore)                                                          \
    F(cuCheckpointProcessUnlock, cuCheckpointProcessUnlock)                                                            \
    F(cuCheckpointProcessGetState, cuCheckpointProcessGetState)                                                        \
    F(cuCheckpointProcessGetRestoreThreadId, cuCheckpointProcessGetRestoreThreadId)                                    \
    F(cuGetProcAddress, cuGetProcAddress_v2)

typedef struct {
    const char *name;   /* also what tests count and inject by */
    const char *symbol; /* what __func__ says */
    void *function;
    unsigned long calls;
} Function;

static Function functions[] = {
#define ROW(base, versioned) {#base, #versioned, (void *)versioned, 0},
    FUNCTIONS(ROW)
#undef ROW
    /* Not functions, but what a stream does later: errors there come out of a synchronisation. */
    {"stream:copy", "stream:copy", NULL, 0},
    {"stream:set", "stream:set", NULL, 0},
};
#define FUNCTIONS_COUNT (sizeof functions / sizeof *functions)

typedef struct {
    char name[NAME_BYTES]; /* "*": any function */
    unsigned long calls_left;
    CUresult error;
} Fault;

static Fault faults[FAULTS_MAX];
static int faults_count;
static int environment_read;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

uint64_t environment_number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

/* Whether a comma-separated list holds the word. */
int environment_has(const char *name, const char *word, const char *otherwise)
{
    const char *text = getenv(name);
    size_t length = strlen(word);
    for (text = text ? text : otherwise; text; text = strchr(text, ',') ? strchr(text, ',') + 1 : NULL)
        if (strncmp(text, word, length) == 0 && (text[length] == ',' || !text[length])) return 1;
    return 0;
}

static Function *function_called(const char *name)
{
    for (Function *function = functions; function < functions + FUNCTIONS_COUNT; function++)
        if (!strcmp(function->symbol, name) || !strcmp(function->name, name)) return function;
    return NULL;
}

static int add_fault_locked(const char *name, unsigned long nth_call, CUresult error)
{
    if (faults_count == FAULTS_MAX || !nth_call || strlen(name) >= NAME_BYTES) return -1;
    if (strcmp(name, "*") && !function_called(name)) return -1;
    Fault *fault = &faults[faults_count++];
    snprintf(fault->name, sizeof fault->name, "%s", name);
    fault->calls_left = nth_call;
    fault->error = error;
    return 0;
}

/* FAKE_CUDA_FAIL=name:nth_call:error,... for processes that no test can reach into. */
static void read_environment_locked(void)
{
    environment_read = 1;
    const char *text = getenv("FAKE_CUDA_FAIL");
    while (text && *text) {
        char name[NAME_BYTES];
        unsigned long nth_call;
        int error, used = 0;
        /* The last colon-separated numbers; a name may hold a colon itself. */
        if (sscanf(text, "stream:%48[a-z]:%lu:%d%n", name, &nth_call, &error, &used) == 3) {
            char full[NAME_BYTES];
            snprintf(full, sizeof full, "stream:%.48s", name);
            snprintf(name, sizeof name, "%s", full);
        } else if (sscanf(text, "%63[A-Za-z0-9*]:%lu:%d%n", name, &nth_call, &error, &used) != 3) {
            used = 0;
        }
        if (!used || add_fault_locked(name, nth_call, error)) {
            fprintf(stderr, "fake libcuda: FAKE_CUDA_FAIL is wrong at %s\n", text);
            abort(); /* a test that injects nothing would pass for nothing */
        }
        text += used;
        if (*text == ',') text++;
    }
}

/* Counts the call; what is due at it, else success. */
CUresult injected(const char *name)
{
    CUresult error = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!environment_read) read_environment_locked();
    Function *function = function_called(name);
    function->calls++;
    for (int i = 0; i < faults_count; i++) {
        Fault *fault = &faults[i];
        int any = !strcmp(fault->name, "*") && function->function;
        if (!fault->calls_left || (!any && strcmp(fault->name, function->name))) continue;
        if (--fault->calls_left == 0 && !error) error = fault->error;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static int is_sticky(CUresult error)
{
    return error == CUDA_ERROR_ECC_UNCORRECTABLE || (error >= CUDA_ERROR_ILLEGAL_ADDRESS && error < CUDA_ERROR_NOT_PERMITTED &&
                                                     error != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED &&
                                                     error != CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

CUresult enter(const char *name, Needs needs)
{
    /* Before any lock: after a fork, a thread that is not here may hold it. */
    if (needs != ANYTIME && !is_initialized()) return CUDA_ERROR_NOT_INITIALIZED;
    if (needs != ANYTIME) checkpoint_gate(needs == NEEDS_CONTEXT);
    CUresult error = injected(name);
    Device *device = current_device();
    for (int i = 0; error && is_sticky(error) && i < device_count(); i++) {
        if (device && device != device_at(i)) continue;
        break_device(device_at(i), error);
        streams_stop(device_at(i));
    }
    if (error || needs != NEEDS_CONTEXT) return error;
    if (!device) return CUDA_ERROR_INVALID_CONTEXT;
    if (!device->retained) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return sticky_of(device);
}

void control_reset(void)
{
    pthread_mutex_lock(&lock);
    for (Function *function = functions; function < functions + FUNCTIONS_COUNT; function++) function->calls = 0;
    faults_count = 0;
    environment_read = 0;
    pthread_mutex_unlock(&lock);
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    (void)version;
    (void)flags;
    Function *found = function_called(name);
    *function = found ? found->function : NULL;
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* cuda-python knows the names by itself; this is for callers in C. */
CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = error == CUDA_SUCCESS                 ? "CUDA_SUCCESS"
            : error == CUDA_ERROR_INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"
            : error == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
            : error == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                                  : "an error of the fake driver";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    return cuGetErrorName(error, text);
}

/* -- the words of the tests */

/* The nth call of the function from now returns the error and does nothing else. "*" is any function, "stream:copy"
 * and "stream:set" are what a stream does later. -1: there is no such function. */
API int fake_cuda_fail(const char *name, unsigned long nth_call, int error);
API void fake_cuda_forget_faults(void);
/* How often the function was called since the last reset; "*" is all of them. */
API unsigned long fake_cuda_calls(const char *name);
/* How many there are of contexts, handles, mappings, reservations, registrations, streams, events. -1: no such kind. */
API long fake_cuda_live(const char *kind);
/* As if the process began anew: everything it held is gone, the environment is read again. */
API void fake_cuda_reset(void);

int fake_cuda_fail(const char *name, unsigned long nth_call, int error)
{
    pthread_mutex_lock(&lock);
    int result = add_fault_locked(name, nth_call, error);
    pthread_mutex_unlock(&lock);
    return result;
}

void fake_cuda_forget_faults(void)
{
    pthread_mutex_lock(&lock);
    faults_count = 0;
    pthread_mutex_unlock(&lock);
}

unsigned long fake_cuda_calls(const char *name)
{
    unsigned long calls = 0;
    pthread_mutex_lock(&lock);
    for (Function *function = functions; function < functions + FUNCTIONS_COUNT; function++)
        if (!strcmp(function->name, name) || (!strcmp(name, "*") && function->function)) calls += function->calls;
    pthread_mutex_unlock(&lock);
    return calls;
}

long fake_cuda_live(const char *kind)
{
    if (!strcmp(kind, "contexts")) return contexts_live();
    if (!strcmp(kind, "registrations")) return registrations_live();
    long live = memory_live(kind);
    return live >= 0 ? live : streams_live(kind);
}

void fake_cuda_reset(void)
{
    streams_reset();
    memory_reset();
    registrations_reset();
    devices_reset();
    checkpoint_reset();
    budget_close();
    control_reset();
}
