/* Virtual memory management: reserved ranges, handles of memfd pages, mappings of one at the other. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define RESERVED_FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

typedef struct Handle {
    CUmemGenericAllocationHandle id; /* never used twice, so that a stale one is caught */
    int fd, device, references, mappings, type;
    uint64_t nbytes, key;
    struct Handle *next;
} Handle;

struct Mapping {
    uint64_t address, nbytes;
    char *alias;
    Handle *handle;
    int access[DEVICES_MAX]; /* what each device may do: CU_MEM_ACCESS_FLAGS */
    int copies;              /* under way */
    Mapping *next;
};

typedef struct Range {
    uint64_t address, nbytes;
    struct Range *next;
} Range;

static Handle *handles;
static Mapping *mappings;
static Range *reservations;
static CUmemGenericAllocationHandle next_id = 1000;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the lists */
static pthread_cond_t copied = PTHREAD_COND_INITIALIZER;

static uint64_t granularity(void)
{
    return environment_number("FAKE_CUDA_GRANULARITY_BYTES", 2 << 20);
}

/* The host cannot touch device addresses: what a real discrete device does to those who try. */
static int is_strict(void)
{
    return environment_number("FAKE_CUDA_STRICT", 0) != 0;
}

static int is_whole(uint64_t nbytes)
{
    return nbytes && nbytes % granularity() == 0;
}

static Handle *handle_of(CUmemGenericAllocationHandle id)
{
    for (Handle *handle = handles; handle; handle = handle->next)
        if (handle->id == id) return handle->references ? handle : NULL;
    return NULL;
}

static Mapping *mapping_at(uint64_t address)
{
    for (Mapping *mapping = mappings; mapping; mapping = mapping->next)
        if (address >= mapping->address && address - mapping->address < mapping->nbytes) return mapping;
    return NULL;
}

static Range *reservation_at(uint64_t address)
{
    for (Range *range = reservations; range; range = range->next)
        if (address >= range->address && address - range->address < range->nbytes) return range;
    return NULL;
}

static int add_reservation(uint64_t address, uint64_t nbytes)
{
    Range *range = malloc(sizeof *range);
    if (!range) return -1;
    *range = (Range){address, nbytes, reservations};
    reservations = range;
    return 0;
}

static int remove_reservation(uint64_t address, uint64_t nbytes)
{
    for (Range **link = &reservations; *link; link = &(*link)->next) {
        Range *range = *link;
        if (range->address != address || range->nbytes != nbytes) continue;
        *link = range->next;
        free(range);
        return 0;
    }
    return -1;
}

static void free_if_unused(Handle *unused)
{
    if (unused->references || unused->mappings) return;
    for (Handle **link = &handles; *link; link = &(*link)->next) {
        if (*link != unused) continue;
        *link = unused->next;
        close(unused->fd);
        free(unused);
        return;
    }
}

/* Whether mappings cover the range from end to end, and none reaches over an end. */
static int is_covered(uint64_t address, uint64_t nbytes)
{
    uint64_t end = address + nbytes;
    while (address < end) {
        Mapping *mapping = mapping_at(address);
        if (!mapping || mapping->address != address || mapping->nbytes > end - address) return 0;
        address += mapping->nbytes;
    }
    return nbytes != 0;
}

CUresult memory_pin(Device *device, CUdeviceptr address, uint64_t nbytes, int access, Span *span)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    Mapping *mapping = mapping_at(address);
    if (mapping && (mapping->access[device->ordinal] & access) == access) {
        uint64_t offset = address - mapping->address;
        uint64_t left = mapping->nbytes - offset;
        *span = (Span){mapping->alias + offset, nbytes < left ? nbytes : left, mapping};
        mapping->copies++;
    } else if (mapping || reservation_at(address)) {
        result = CUDA_ERROR_ILLEGAL_ADDRESS;
    } else {
        *span = (Span){(char *)(uintptr_t)address, nbytes, NULL};
    }
    pthread_mutex_unlock(&lock);
    return result;
}

void memory_unpin(const Span *span)
{
    if (!span->mapping) return;
    pthread_mutex_lock(&lock);
    span->mapping->copies--;
    pthread_cond_broadcast(&copied);
    pthread_mutex_unlock(&lock);
}

CUresult cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *prop, int option)
{
    ENTER(NEEDS_INIT);
    (void)option;
    if (!device_at(prop->location.id)) return CUDA_ERROR_INVALID_DEVICE;
    *nbytes = granularity();
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags)
{
    ENTER(NEEDS_INIT);
    (void)wish;
    if (alignment < granularity()) alignment = granularity();
    if (flags || !is_whole(nbytes) || alignment & (alignment - 1)) return CUDA_ERROR_INVALID_VALUE;
    char *start = mmap(NULL, nbytes + alignment, PROT_NONE, RESERVED_FLAGS, -1, 0);
    if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    uintptr_t aligned = ((uintptr_t)start + alignment - 1) & ~(uintptr_t)(alignment - 1);
    size_t before = aligned - (uintptr_t)start;
    if (before) munmap(start, before);
    munmap((char *)aligned + nbytes, alignment - before);
    pthread_mutex_lock(&lock);
    int failed = add_reservation(aligned, nbytes);
    pthread_mutex_unlock(&lock);
    if (failed) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = aligned;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes)
{
    ENTER(NEEDS_INIT);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int mapped = 0;
    for (Mapping *mapping = mappings; mapping; mapping = mapping->next)
        mapped |= mapping->address >= address && mapping->address < address + nbytes;
    if (!mapped && !remove_reservation(address, nbytes)) {
        munmap((void *)(uintptr_t)address, nbytes);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static CUmemGenericAllocationHandle add_handle(int fd, int device, int type, uint64_t nbytes, uint64_t key)
{
    Handle *handle = malloc(sizeof *handle);
    if (!handle) return 0;
    pthread_mutex_lock(&lock);
    *handle = (Handle){next_id++, fd, device, 1, 0, type, nbytes, key, handles};
    handles = handle;
    pthread_mutex_unlock(&lock);
    return handle->id;
}

static int exportable(int type)
{
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return environment_has("FAKE_CUDA_EXPORT", "fd", "fd");
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) return environment_has("FAKE_CUDA_EXPORT", "fabric", "fd");
    return type == CU_MEM_HANDLE_TYPE_NONE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *prop,
                     unsigned long long flags)
{
    ENTER(NEEDS_INIT);
    int device = prop->location.id;
    if (flags || !is_whole(nbytes) || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    int rdma = prop->allocFlags.gpuDirectRDMACapable && !environment_has("FAKE_CUDA_RDMA", "given", "none");
    if (rdma || !exportable(prop->requestedHandleTypes)) return CUDA_ERROR_NOT_SUPPORTED;
    uint64_t key;
    CUresult result = budget_charge(device, nbytes, &key);
    if (result) return result;
    char name[64];
    snprintf(name, sizeof name, "fake-cuda:%d:%llu", budget_physical(device), (unsigned long long)key);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)nbytes) ||
        !(*handle = add_handle(fd, device, prop->requestedHandleTypes, nbytes, key))) {
        if (fd >= 0) close(fd);
        budget_drop(key);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle id)
{
    ENTER(NEEDS_INIT);
    pthread_mutex_lock(&lock);
    Handle *handle = handle_of(id);
    if (handle) {
        handle->references--;
        budget_drop(handle->key);
        free_if_unused(handle);
    }
    pthread_mutex_unlock(&lock);
    return handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult map_locked(uint64_t address, uint64_t nbytes, Handle *handle)
{
    Mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping) return CUDA_ERROR_OUT_OF_MEMORY;
    char *alias = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, handle->fd, 0);
    CUresult result = alias == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : budget_hold(handle->device, nbytes, handle->key);
    void *here = (void *)(uintptr_t)address;
    if (!result && !is_strict() &&
        mmap(here, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, 0) == MAP_FAILED) {
        budget_drop(handle->key);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result) {
        if (alias != MAP_FAILED) munmap(alias, nbytes);
        free(mapping);
        return result;
    }
    *mapping = (Mapping){.address = address, .nbytes = nbytes, .alias = alias, .handle = handle, .next = mappings};
    mappings = mapping;
    handle->mappings++;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle id,
                  unsigned long long flags)
{
    ENTER(NEEDS_INIT);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Handle *handle = handle_of(id);
    Range *range = reservation_at(address);
    int fits = range && nbytes <= range->nbytes - (address - range->address);
    for (Mapping *mapping = mappings; mapping; mapping = mapping->next)
        fits &= address >= mapping->address + mapping->nbytes || mapping->address >= address + nbytes;
    if (handle && fits && !flags && !offset && is_whole(nbytes) && address % granularity() == 0 &&
        nbytes <= handle->nbytes)
        result = map_locked(address, nbytes, handle);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *wanted, size_t count)
{
    ENTER(NEEDS_INIT);
    pthread_mutex_lock(&lock);
    CUresult result = is_covered(address, nbytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count && !result; i++)
        if (wanted[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || !device_at(wanted[i].location.id))
            result = CUDA_ERROR_INVALID_DEVICE;
    for (uint64_t at = address; at < address + nbytes && !result; at += mapping_at(at)->nbytes) {
        Mapping *mapping = mapping_at(at);
        int any = 0;
        for (size_t i = 0; i < count; i++) mapping->access[wanted[i].location.id] = wanted[i].flags;
        for (int device = 0; device < DEVICES_MAX; device++) any |= mapping->access[device];
        int protection = any == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE : any ? PROT_READ : PROT_NONE;
        if (!is_strict() && mprotect((void *)(uintptr_t)at, mapping->nbytes, protection))
            result = CUDA_ERROR_OPERATING_SYSTEM;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* The range is reserved again. Memory that was released lives until here. */
static void unmap_locked(Mapping *gone)
{
    for (Mapping **link = &mappings; *link; link = &(*link)->next) {
        if (*link != gone) continue;
        *link = gone->next;
        break;
    }
    munmap(gone->alias, gone->nbytes);
    mmap((void *)(uintptr_t)gone->address, gone->nbytes, PROT_NONE, RESERVED_FLAGS | MAP_FIXED, -1, 0);
    gone->handle->mappings--;
    budget_drop(gone->handle->key);
    free_if_unused(gone->handle);
    free(gone);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes)
{
    ENTER(NEEDS_INIT);
    pthread_mutex_lock(&lock);
    CUresult result = is_covered(address, nbytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = address; at < address + nbytes && !result;) {
        Mapping *mapping = mapping_at(at);
        /* Unmapped under a copy: the copy faults and the context is lost, as on a device. */
        if (mapping->copies) break_device(device_at(mapping->handle->device), CUDA_ERROR_ILLEGAL_ADDRESS);
        while (mapping->copies) pthread_cond_wait(&copied, &lock);
        at += mapping->nbytes;
        unmap_locked(mapping);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemExportToShareableHandle(void *exported, CUmemGenericAllocationHandle id, int type,
                                      unsigned long long flags)
{
    ENTER(NEEDS_INIT);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Handle *handle = handle_of(id);
    if (handle && (type != handle->type || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) {
        result = CUDA_ERROR_NOT_SUPPORTED;
    } else if (handle) {
        /* Nothing is promised about close-on-exec: whoever needs it sets it. */
        int fd = fcntl(handle->fd, F_DUPFD, 0);
        result = fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
        if (!result) *(int *)exported = fd;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *exported, int type)
{
    ENTER(NEEDS_INIT);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    char path[64], name[128];
    int fd = fcntl((int)(intptr_t)exported, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(path, name, sizeof name - 1);
    name[length < 0 ? 0 : length] = 0;
    unsigned long long key;
    int device;
    struct stat status;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (sscanf(name, "/memfd:fake-cuda:%d:%llu", &device, &key) == 2 && (device = budget_ordinal(device)) >= 0 &&
        !fstat(fd, &status))
        result = budget_hold(device, (uint64_t)status.st_size, key);
    if (!result && (*handle = add_handle(fd, device, type, (uint64_t)status.st_size, key))) return CUDA_SUCCESS;
    close(fd);
    return result ? result : CUDA_ERROR_OUT_OF_MEMORY;
}

long memory_live(const char *kind)
{
    long live = 0;
    pthread_mutex_lock(&lock);
    if (!strcmp(kind, "handles"))
        for (Handle *handle = handles; handle; handle = handle->next) live += handle->references;
    else if (!strcmp(kind, "mappings"))
        for (Mapping *mapping = mappings; mapping; mapping = mapping->next) live++;
    else if (!strcmp(kind, "reservations"))
        for (Range *range = reservations; range; range = range->next) live++;
    else
        live = -1;
    pthread_mutex_unlock(&lock);
    return live;
}

void memory_reset(void)
{
    pthread_mutex_lock(&lock);
    while (mappings) unmap_locked(mappings);
    while (handles) {
        handles->references = 0;
        free_if_unused(handles);
    }
    while (reservations) {
        munmap((void *)(uintptr_t)reservations->address, reservations->nbytes);
        remove_reservation(reservations->address, reservations->nbytes);
    }
    pthread_mutex_unlock(&lock);
}
