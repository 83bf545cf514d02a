/* What torch's CUDAPluggableAllocator calls: memory by CUDA's virtual memory management, made and freed in C alone.
 *
 * Torch calls with the GIL held or not, as it likes, and other threads may hold our mutex while they wait for the GIL
 * or hold the GIL while they wait for our mutex. So nothing here ever wants the GIL: a callback into Python deadlocks
 * there sooner or later. The mutex guards tables only and is never held over a driver call.
 *
 * A group is one Python pool's device. A space is a tag and mode of it; each thread says in which space it allocates.
 * Before a transition the pool freezes its group: allocations are refused, what torch frees is put off until the thaw,
 * and everything that is live is taken over by the pool (`adopted`), which says afterwards where each handle is now.
 *
 * Every call leaves its own outcome with the thread that made it (lull_allocator_last). Nothing stale is ever read as
 * the outcome of another call, and a failure undoes what the call has done so far.
 *
 * Built without CUDA's headers: what is declared here is the driver's stable binary interface. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#define API __attribute__((visibility("default")))
#define GROUPS_MAX 1024
#define SPACES_MAX 256
#define BUCKETS 1024
#define REASON_BYTES 256

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUhandle;
typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; } flags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, RDMA_SUPPORTED = 110 };

#define DRIVER(F)                                                                                                      \
    F(cuInit, (unsigned))                                                                                              \
    F(cuDeviceGet, (int *, int))                                                                                       \
    F(cuDeviceGetAttribute, (int *, int, int))                                                                         \
    F(cuDevicePrimaryCtxRetain, (void **, int))                                                                        \
    F(cuDevicePrimaryCtxRelease_v2, (int))                                                                             \
    F(cuCtxPushCurrent_v2, (void *))                                                                                   \
    F(cuCtxPopCurrent_v2, (void **))                                                                                   \
    F(cuCtxSynchronize, (void))                                                                                        \
    F(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                           \
    F(cuMemAddressFree, (CUdeviceptr, size_t))                                                                         \
    F(cuMemCreate, (CUhandle *, size_t, const CUmemAllocationProp *, unsigned long long))                              \
    F(cuMemRelease, (CUhandle))                                                                                        \
    F(cuMemMap, (CUdeviceptr, size_t, size_t, CUhandle, unsigned long long))                                           \
    F(cuMemUnmap, (CUdeviceptr, size_t))                                                                               \
    F(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))
#define MEMBER(name, arguments) CUresult(*name) arguments;
#define NAME(name, arguments) #name,
static struct { DRIVER(MEMBER) } cu;
static const char *const names[] = {DRIVER(NAME)};

typedef struct {
    int used, ordinal, device, handle_types, rdma;
    size_t granularity;
    void *context;
    int frozen; /* how many transitions hold it */
    int busy;   /* allocations and frees under way */
    unsigned char barred[SPACES_MAX]; /* the space's tag is parked */
} Group;

typedef struct Entry {
    struct Entry *next; /* in its bucket */
    uint64_t serial;
    CUdeviceptr address;
    CUhandle handle; /* 0: none, it is parked */
    size_t nbytes, reserved_bytes;
    int group, space;
    int mapped, adopted;
    int freed;   /* by torch, while the group was frozen, or in a call that failed: to be done at the thaw */
    int freeing; /* by a thread that works on it now */
    int gone;    /* nothing of it is left */
    int forget;  /* the pool, which had adopted it, is yet to hear that it is ours again, whole or in part, or gone */
} Entry;

/* The layout is known to torch_allocator.py. */
typedef struct {
    uint64_t serial, address, handle, nbytes, reserved_bytes;
    int32_t space, reserved;
} Record;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows */
static pthread_cond_t idle;
static Group groups[GROUPS_MAX];
static Entry *buckets[BUCKETS];
static uint64_t serials;
static int opened;

static _Thread_local struct { int group, space; } scope; /* group is 1 more than its index: 0 is none */
static _Thread_local struct { int code; char reason[REASON_BYTES]; } last;

/* Our own codes beside the driver's. */
enum { OK = 0, OUT_OF_MEMORY = 2, NO_SCOPE = -1, FROZEN = -2, WRONG_DEVICE = -3, UNKNOWN_ADDRESS = -4, NO_HOST_MEMORY = -5, PARKED = -6 };

static int outcome(int code, const char *what)
{
    last.code = code;
    if (code == OK)
        last.reason[0] = 0;
    else
        snprintf(last.reason, sizeof last.reason, code < 0 ? "%s" : "%s failed with CUDA error %d", what, code);
    return code;
}

API int lull_allocator_last(char *reason, size_t nbytes)
{
    snprintf(reason, nbytes, "%s", last.reason);
    return last.code;
}

/* 0, or -1 with the reason. Again is no change. */
API int lull_allocator_open(char *reason, size_t nbytes)
{
    int result = -1;
    void **slot = (void **)&cu;
    pthread_condattr_t monotonic;
    pthread_mutex_lock(&lock);
    if (opened) goto done;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        snprintf(reason, nbytes, "%s", dlerror());
        goto failed;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(slot[i] = dlsym(library, names[i]))) {
            snprintf(reason, nbytes, "libcuda.so.1 has no %s", names[i]);
            goto failed;
        }
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&idle, &monotonic);
    pthread_condattr_destroy(&monotonic);
    opened = 1;
done:
    result = 0;
failed:
    pthread_mutex_unlock(&lock);
    return result;
}

/* The number of a new group, or -1: see lull_allocator_last. */
API int lull_allocator_group(int ordinal, size_t granularity, int handle_types)
{
    Group group = {.used = 1, .ordinal = ordinal, .handle_types = handle_types, .granularity = granularity};
    CUresult error = cu.cuInit(0);
    const char *what = "cuInit";
    if (!error) error = cu.cuDeviceGet(&group.device, ordinal), what = "cuDeviceGet";
    if (!error && cu.cuDeviceGetAttribute(&group.rdma, RDMA_SUPPORTED, group.device)) group.rdma = 0;
    if (!error) error = cu.cuDevicePrimaryCtxRetain(&group.context, group.device), what = "cuDevicePrimaryCtxRetain";
    if (outcome(error, what)) return -1;
    int number = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < GROUPS_MAX && number < 0; i++)
        if (!groups[i].used) groups[number = i] = group;
    pthread_mutex_unlock(&lock);
    if (number < 0) {
        cu.cuDevicePrimaryCtxRelease_v2(group.device);
        outcome(NO_SCOPE, "there are too many pools in this process");
    }
    return number;
}

static void remove_entry(Entry *entry)
{
    Entry **link = &buckets[entry->address / 4096 % BUCKETS];
    while (*link != entry) link = &(*link)->next;
    *link = entry->next;
    free(entry);
}

/* The pool is closed: what its spaces made belongs to nobody here any more. */
API void lull_allocator_close(int number)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUCKETS; i++)
        for (Entry *entry = buckets[i], *next; entry; entry = next) {
            next = entry->next;
            if (entry->group == number) remove_entry(entry);
        }
    int device = groups[number].device;
    groups[number].used = 0;
    pthread_mutex_unlock(&lock);
    cu.cuDevicePrimaryCtxRelease_v2(device);
}

/* What this thread allocates from now on is of this space. group -1: of none. The former ones come back. */
API void lull_allocator_enter(int group, int space, int *former_group, int *former_space)
{
    *former_group = scope.group - 1;
    *former_space = scope.space;
    scope.group = group + 1;
    scope.space = space;
}

static Entry *find(CUdeviceptr address)
{
    Entry *entry = buckets[address / 4096 % BUCKETS];
    while (entry && (entry->address != address || entry->gone)) entry = entry->next;
    return entry;
}

static void no_longer_busy(Group *group)
{
    pthread_mutex_lock(&lock);
    if (--group->busy == 0) pthread_cond_broadcast(&idle);
    pthread_mutex_unlock(&lock);
}

/* Up to the first step that fails: what was done until then stands in the entry. */
static CUresult make(const Group *group, Entry *entry, const char **what)
{
    CUmemAllocationProp prop = {
        .type = PINNED, .requestedHandleTypes = group->handle_types, .location = {ON_DEVICE, group->device}};
    prop.flags.gpuDirectRDMACapable = group->rdma != 0;
    CUmemAccessDesc access = {.location = {ON_DEVICE, group->device}, .flags = READ_WRITE};
    size_t nbytes = entry->reserved_bytes;
    void *popped;
    CUresult error = cu.cuCtxPushCurrent_v2(group->context);
    *what = "cuCtxPushCurrent";
    if (error) return error;
    *what = "cuMemAddressReserve";
    if ((error = cu.cuMemAddressReserve(&entry->address, nbytes, group->granularity, 0, 0))) entry->address = 0;
    if (!error) {
        *what = "cuMemCreate";
        if ((error = cu.cuMemCreate(&entry->handle, nbytes, &prop, 0))) entry->handle = 0;
    }
    if (!error) error = cu.cuMemMap(entry->address, nbytes, 0, entry->handle, 0), *what = "cuMemMap";
    if (!error) {
        entry->mapped = 1;
        *what = "cuMemSetAccess";
        error = cu.cuMemSetAccess(entry->address, nbytes, &access, 1);
    }
    cu.cuCtxPopCurrent_v2(&popped);
    return error;
}

/* Takes the entry's memory down step by step; what is down stays so if a later step fails. */
static CUresult unmake(const Group *group, Entry *entry, const char **what)
{
    void *popped;
    CUresult error = cu.cuCtxPushCurrent_v2(group->context);
    *what = "cuCtxPushCurrent";
    if (error) return error;
    /* Torch hands segments back without waiting for kernels that still use them. */
    if (entry->mapped) error = cu.cuCtxSynchronize(), *what = "cuCtxSynchronize";
    if (entry->mapped && !error) {
        *what = "cuMemUnmap";
        if (!(error = cu.cuMemUnmap(entry->address, entry->reserved_bytes))) entry->mapped = 0;
    }
    if (entry->handle && !error) {
        *what = "cuMemRelease";
        if (!(error = cu.cuMemRelease(entry->handle))) entry->handle = 0;
    }
    if (!error) error = cu.cuMemAddressFree(entry->address, entry->reserved_bytes), *what = "cuMemAddressFree";
    cu.cuCtxPopCurrent_v2(&popped);
    return error;
}

static int admit(int device, Group **group)
{
    int code = OK;
    pthread_mutex_lock(&lock);
    *group = scope.group ? &groups[scope.group - 1] : NULL;
    if (!*group || !(*group)->used)
        code = outcome(NO_SCOPE, "this thread is in no scope of a pool");
    else if ((*group)->ordinal != device)
        code = outcome(WRONG_DEVICE, "the scope's pool is on another device");
    else if ((*group)->frozen)
        code = outcome(FROZEN, "a park or wake of the pool is under way");
    else if ((*group)->barred[scope.space])
        code = outcome(PARKED, "the scope's tag is parked and its layout must not change");
    else
        (*group)->busy++;
    pthread_mutex_unlock(&lock);
    return code;
}

/* NULL is what torch takes for out of memory; it then frees what it has cached and tries again. */
API void *lull_allocator_malloc(ssize_t size, int device, void *stream)
{
    (void)stream;
    Group *group;
    if (size <= 0) return outcome(OK, ""), NULL;
    if (admit(device, &group)) return NULL;
    Entry *entry = calloc(1, sizeof *entry);
    const char *what = "no host memory for the allocator's table", *unused;
    CUresult error = NO_HOST_MEMORY, left = OK;
    if (entry) {
        entry->nbytes = (size_t)size;
        entry->reserved_bytes = ((size_t)size + group->granularity - 1) / group->granularity * group->granularity;
        entry->group = scope.group - 1;
        entry->space = scope.space;
        error = make(group, entry, &what);
        if (error && entry->address) left = unmake(group, entry, &unused);
    }
    void *address = error ? NULL : (void *)(uintptr_t)entry->address;
    outcome(error, what);
    pthread_mutex_lock(&lock);
    if (error && !left) {
        free(entry);
    } else {
        Entry **bucket = &buckets[entry->address / 4096 % BUCKETS];
        entry->serial = ++serials;
        entry->freed = error != OK; /* what could not be undone now is tried again at each thaw */
        entry->next = *bucket;
        *bucket = entry;
    }
    pthread_mutex_unlock(&lock);
    no_longer_busy(group);
    return address;
}

/* The entry is ours alone (`freeing`), and the group is busy. */
static void take_down(Group *group, Entry *entry)
{
    const char *what;
    CUresult error = unmake(group, entry, &what);
    outcome(error, what);
    pthread_mutex_lock(&lock);
    entry->freeing = 0;
    entry->freed = error != OK;
    entry->gone = error == OK;
    entry->forget = entry->adopted;
    if (entry->gone && !entry->forget) remove_entry(entry);
    pthread_mutex_unlock(&lock);
}

API void lull_allocator_free(void *pointer, ssize_t size, int device, void *stream)
{
    (void)size, (void)device, (void)stream;
    Group *group = NULL;
    outcome(OK, "");
    pthread_mutex_lock(&lock);
    Entry *entry = find((CUdeviceptr)(uintptr_t)pointer);
    if (!entry || entry->freed || entry->freeing) {
        outcome(UNKNOWN_ADDRESS, "this address is not one that this allocator has given out");
        entry = NULL;
    } else if (groups[entry->group].frozen) {
        entry->freed = 1;
        entry = NULL;
    } else {
        entry->freeing = 1;
        group = &groups[entry->group];
        group->busy++;
    }
    pthread_mutex_unlock(&lock);
    if (!entry) return;
    take_down(group, entry);
    no_longer_busy(group);
}

/* -- the pool's side: Python calls with the GIL released */

API void lull_allocator_bar(int number, int space, int barred)
{
    pthread_mutex_lock(&lock);
    groups[number].barred[space] = barred != 0;
    pthread_mutex_unlock(&lock);
}

/* From here until the thaw nothing of the group changes. -1 if it is still busy after so many seconds. */
API int lull_allocator_freeze(int number, double seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)seconds;
    int result = 0;
    pthread_mutex_lock(&lock);
    groups[number].frozen++;
    while (groups[number].busy && !result)
        if (pthread_cond_timedwait(&idle, &lock, &until) == ETIMEDOUT) result = -1;
    if (result) groups[number].frozen--;
    pthread_mutex_unlock(&lock);
    return result;
}

API void lull_allocator_thaw(int number)
{
    Group *group = &groups[number];
    pthread_mutex_lock(&lock);
    int last_one = --group->frozen == 0;
    if (last_one) group->busy++;
    pthread_mutex_unlock(&lock);
    if (!last_one) return;
    for (int i = 0; i < BUCKETS; i++) {
        uint64_t after = 0; /* each is tried once, whatever becomes of it */
        for (;;) {
            Entry *entry = NULL;
            pthread_mutex_lock(&lock);
            for (Entry *one = buckets[i]; one; one = one->next)
                if (one->group == number && one->freed && !one->freeing && !one->gone && one->serial > after &&
                    (!entry || one->serial < entry->serial))
                    entry = one;
            if (entry) {
                after = entry->serial;
                entry->freeing = 1;
            }
            pthread_mutex_unlock(&lock);
            if (!entry) break;
            take_down(group, entry);
        }
    }
    no_longer_busy(group);
}

/* Up to `max` entries: those that the pool does not know yet, which are adopted now, or those that it has to forget.
 * Call it again while it fills the array. */
API size_t lull_allocator_take(int number, int forget, Record *records, size_t max)
{
    size_t count = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUCKETS; i++)
        for (Entry *entry = buckets[i], *next; entry && count < max; entry = next) {
            next = entry->next;
            int wanted = forget ? entry->forget : !entry->adopted && !entry->freed && !entry->freeing;
            if (entry->group != number || !wanted) continue;
            records[count++] = (Record){
                entry->serial, entry->address, entry->handle, entry->nbytes, entry->reserved_bytes, entry->space, 0};
            entry->adopted = !forget;
            entry->forget = 0;
            if (entry->gone) remove_entry(entry);
        }
    pthread_mutex_unlock(&lock);
    return count;
}

/* Where the pool has left an adopted entry: its handle, or 0 and unmapped. -1 if there is no such entry any more. */
API int lull_allocator_settle(uint64_t address, uint64_t serial, uint64_t handle)
{
    pthread_mutex_lock(&lock);
    Entry *entry = find(address);
    int found = entry && entry->serial == serial && entry->adopted && !entry->forget;
    if (found) entry->handle = handle, entry->mapped = handle != 0;
    pthread_mutex_unlock(&lock);
    return found ? 0 : -1;
}
