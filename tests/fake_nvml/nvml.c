/* A libnvidia-ml.so.1 without a GPU behind it, for the unmodified nvidia-ml-py.
 *
 * It reads the account that the fake libcuda keeps (../fake_cuda/budget.h): bytes by process are what processes really
 * hold through that driver, and the dead hold nothing. What goes wrong is told by the file `nvml` in the same folder,
 * which is read at every call, one fault a line; DEVICE is a number, FUNCTION a name without "nvml", either may be "*":
 *
 *   error FUNCTION DEVICE CODE    the function answers CODE
 *   hang FUNCTION DEVICE          it does not return while the line is there
 *   hide DEVICE                   the GPU has fallen off the bus: it is not listed, and its UUID is not found
 *   process DEVICE PID BYTES TYPE one more process in a list: C compute, G graphics, M MPS client; BYTES "na": not told
 *   bytes_na DEVICE               no process's bytes are told
 *   keep DEVICE                   what was once seen stays: the driver frees late
 *   persistence DEVICE MODE       0: off; compute DEVICE MODE: nvmlComputeMode_t
 *   reserved DEVICE BYTES         taken by the driver itself: part of `total`, neither `used` nor `free` in v2
 *
 * What the real one does, as told in public:
 * - return codes, structs, and the two calls for a list (size first): nvml.h of the CUDA toolkit; nvidia-ml-py 13.615.
 * - GPU_IS_LOST (15) from every query of a GPU that fell off the bus: NVML API reference, nvmlReturn_t.
 * - LIB_RM_VERSION_MISMATCH (18) from nvmlInit after a driver update without a reboot ("Driver/library version
 *   mismatch"): mozilla/translations#1167, oddmario/NVIDIA-Ubuntu-Driver-Guide#4.
 * - NOT_SUPPORTED (3) from nvmlDeviceGetMemoryInfo on GB10, whose processes' bytes are told all the same:
 *   leptonai/gpud#1170, Syllo/nvtop#449.
 * - usedGpuMemory NVML_VALUE_NOT_AVAILABLE under WSL: Syllo/nvtop#432; and where the right is missing: nvml.h.
 * - a driver that frees after the process said so: mostlygeek/llama-swap#97.
 * - pids are those of the host's namespace, whoever asks: NVIDIA/nvidia-docker#1483. */
#define _GNU_SOURCE
#include "../fake_cuda/budget.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

typedef int Return; /* nvmlReturn_t */
enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
};
#define NOT_AVAILABLE UINT64_MAX
#define PROCESSES_MAX 256
#define FAULTS_BYTES_MAX 16384
#define EXPORTED __attribute__((visibility("default")))

typedef struct {
    int number;
} Device;
typedef struct {
    unsigned long long total, free, used;
} Memory;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;
typedef struct {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
} Process;
typedef struct {
    unsigned pid;
    char type;
    uint64_t nbytes;
} Seen;

static Device devices[DEVICES_MAX];
static const Budget *budget;
static char folder[4000];
static int initialized;
static Seen kept[DEVICES_MAX][PROCESSES_MAX]; /* for `keep` */
static int kept_count[DEVICES_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void read_faults(char *text)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/nvml", folder);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, text, FAULTS_BYTES_MAX - 1);
    if (fd >= 0) close(fd);
    text[length < 0 ? 0 : length] = 0;
}

static int about(const char *word, const char *what)
{
    return !strcmp(word, "*") || !strcmp(word, what);
}

/* The next line that begins with `verb`: its other words, at most four. Returns how many; -1: there is none. */
static int next_fault(char **text, const char *verb, char words[4][64])
{
    while (**text) {
        char line[256], first[64];
        size_t length = strcspn(*text, "\n");
        snprintf(line, sizeof line, "%.*s", (int)length, *text);
        *text += length + ((*text)[length] == '\n');
        int count = sscanf(line, "%63s %63s %63s %63s %63s", first, words[0], words[1], words[2], words[3]);
        if (count >= 1 && !strcmp(first, verb)) return count - 1;
    }
    return -1;
}

static int has_fault(const char *verb, int device, uint64_t *number)
{
    char buffer[FAULTS_BYTES_MAX], *text = buffer, words[4][64], own[16];
    snprintf(own, sizeof own, "%d", device);
    read_faults(buffer);
    for (int count; (count = next_fault(&text, verb, words)) >= 0;)
        if (count >= 1 && about(words[0], own)) {
            if (number && count >= 2) *number = strtoull(words[1], NULL, 10);
            return 1;
        }
    return 0;
}

static int hangs(const char *function, const char *device)
{
    char buffer[FAULTS_BYTES_MAX], *text = buffer, words[4][64];
    read_faults(buffer);
    for (int count; (count = next_fault(&text, "hang", words)) >= 0;)
        if (count >= 2 && about(words[0], function) && about(words[1], device)) return 1;
    return 0;
}

/* What begins every call. `device` < 0: it is about none. */
static Return enter(const char *symbol, int device)
{
    char buffer[FAULTS_BYTES_MAX], *text = buffer, words[4][64], own[16];
    const char *function = symbol + strlen("nvml");
    snprintf(own, sizeof own, "%d", device);
    while (hangs(function, own)) nanosleep(&(struct timespec){0, 5000000}, NULL);
    read_faults(buffer);
    for (int count; (count = next_fault(&text, "error", words)) >= 0;)
        if (count >= 3 && about(words[0], function) && about(words[1], own)) return atoi(words[2]);
    return initialized ? SUCCESS : UNINITIALIZED;
}

#define ENTER(device)                                                                                                  \
    do {                                                                                                               \
        Return refused_ = enter(__func__, device);                                                                     \
        if (refused_) return refused_;                                                                                 \
    } while (0)
#define ENTER_DEVICE(device)                                                                                           \
    do {                                                                                                               \
        if (!(device)) return INVALID_ARGUMENT;                                                                        \
        ENTER((device)->number);                                                                                       \
        if (has_fault("hide", (device)->number, NULL)) return GPU_IS_LOST;                                             \
    } while (0)

/* ---- the library ------------------------------------------------------------------------------------------------ */

EXPORTED Return nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    const char *state = getenv("FAKE_CUDA_STATE");
    pthread_mutex_lock(&lock);
    if (budget && strcmp(folder, state ? state : "")) { /* another test's machine: as if this process had just begun */
        munmap((void *)budget, sizeof(Budget));
        budget = NULL;
        initialized = 0;
        memset(kept_count, 0, sizeof kept_count);
    }
    snprintf(folder, sizeof folder, "%s", state ? state : "/nonexistent");
    pthread_mutex_unlock(&lock);
    Return refused = enter(__func__, -1);
    if (refused && refused != UNINITIALIZED) return refused;
    char path[4096];
    snprintf(path, sizeof path, "%s/budget", folder);
    pthread_mutex_lock(&lock);
    int fd = initialized ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd >= 0 && !fstat(fd, &status) && status.st_size >= (off_t)sizeof(Budget)) {
        void *mapped = mmap(NULL, sizeof(Budget), PROT_READ, MAP_SHARED, fd, 0);
        if (mapped != MAP_FAILED) budget = mapped;
    }
    if (fd >= 0) close(fd);
    if (budget) initialized++;
    for (int i = 0; i < DEVICES_MAX; i++) devices[i].number = i;
    pthread_mutex_unlock(&lock);
    return budget ? SUCCESS : DRIVER_NOT_LOADED;
}

EXPORTED Return nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

EXPORTED Return nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    Return result = initialized ? SUCCESS : UNINITIALIZED;
    if (initialized && !--initialized) {
        munmap((void *)budget, sizeof(Budget));
        budget = NULL;
        memset(kept_count, 0, sizeof kept_count);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORTED const char *nvmlErrorString(Return result)
{
    switch (result) {
    case SUCCESS: return "The operation was successful";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "RM has detected an NVML/RM version mismatch.";
    default: return "Unknown Error";
    }
}

EXPORTED Return nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    ENTER(-1);
    snprintf(version, length, "580.95.05");
    return SUCCESS;
}

EXPORTED Return nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    ENTER(-1);
    snprintf(version, length, "13.580.95.05");
    return SUCCESS;
}

EXPORTED Return nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER(-1);
    *version = 13000;
    return SUCCESS;
}

/* ---- devices ---------------------------------------------------------------------------------------------------- */

static int gpu_at(unsigned index)
{
    for (int device = 0; device < budget->devices - budget->slices; device++)
        if (!has_fault("hide", device, NULL) && index-- == 0) return device;
    return -1;
}

EXPORTED Return nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER(-1);
    for (*count = 0; gpu_at(*count) >= 0;) ++*count;
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device)
{
    ENTER(-1);
    int found = gpu_at(index);
    if (found < 0) return INVALID_ARGUMENT;
    Return refused = enter(__func__, found);
    if (refused) return refused;
    *device = &devices[found];
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetHandleByUUID(const char *uuid, Device **device)
{
    ENTER(-1);
    for (int i = 0; i < budget->devices; i++) {
        char own[UUID_BYTES];
        write_uuid(budget, i, own);
        if (strcmp(own, uuid)) continue;
        Return refused = enter(__func__, i);
        if (refused) return refused;
        if (has_fault("hide", i, NULL)) return NOT_FOUND;
        *device = &devices[i];
        return SUCCESS;
    }
    return NOT_FOUND;
}

EXPORTED Return nvmlDeviceGetUUID(const Device *device, char *uuid, unsigned length)
{
    ENTER_DEVICE(device);
    char own[UUID_BYTES];
    write_uuid(budget, device->number, own);
    snprintf(uuid, length, "%s", own);
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetName(const Device *device, char *name, unsigned length)
{
    ENTER_DEVICE(device);
    snprintf(name, length, is_slice(budget, device->number) ? "Fake GPU MIG %d" : "Fake GPU %d", device->number);
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetIndex(const Device *device, unsigned *index)
{
    ENTER_DEVICE(device);
    if (is_slice(budget, device->number)) return NOT_SUPPORTED;
    for (*index = 0; gpu_at(*index) != device->number;) ++*index;
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetMigMode(const Device *device, unsigned *now, unsigned *pending)
{
    ENTER_DEVICE(device);
    if (!budget->slices) return NOT_SUPPORTED;
    *now = *pending = device->number == 0;
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetPersistenceMode(const Device *device, unsigned *mode)
{
    ENTER_DEVICE(device);
    uint64_t number = 1;
    has_fault("persistence", device->number, &number);
    *mode = (unsigned)number;
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetComputeMode(const Device *device, unsigned *mode)
{
    ENTER_DEVICE(device);
    uint64_t number = 0;
    has_fault("compute", device->number, &number);
    *mode = (unsigned)number;
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetMaxMigDeviceCount(const Device *device, unsigned *count)
{
    ENTER_DEVICE(device);
    *count = device->number == 0 && budget->slices ? 7 : 0;
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetMigDeviceHandleByIndex(const Device *device, unsigned index, Device **slice)
{
    ENTER_DEVICE(device);
    if (device->number != 0 || (int)index >= budget->slices) return NOT_FOUND;
    *slice = &devices[budget->devices - budget->slices + (int)index];
    return SUCCESS;
}

EXPORTED Return nvmlDeviceIsMigDeviceHandle(const Device *device, unsigned *is_mig)
{
    ENTER_DEVICE(device);
    *is_mig = (unsigned)is_slice(budget, device->number);
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(const Device *slice, Device **device)
{
    ENTER_DEVICE(slice);
    if (!is_slice(budget, slice->number)) return INVALID_ARGUMENT;
    *device = &devices[0];
    return SUCCESS;
}

/* ---- who holds what --------------------------------------------------------------------------------------------- */

static int belongs(int device, int holder)
{
    return holder == device || (device == 0 && is_slice(budget, holder)); /* a GPU in MIG mode has what its slices have */
}

static Seen *seen_of(Seen *seen, int *count, unsigned pid, char type)
{
    for (int i = 0; i < *count; i++)
        if (seen[i].pid == pid && seen[i].type == type) return &seen[i];
    if (*count == PROCESSES_MAX) return NULL;
    seen[*count] = (Seen){pid, type, 0};
    return &seen[(*count)++];
}

/* Every process with memory on the device; returns how many. Memory that several hold is each one's. */
static int look(int device, Seen *seen)
{
    int count = 0;
    for (const Row *row = budget->rows; row < budget->rows + ROWS_MAX; row++) {
        if (!row->references || !belongs(device, row->device) || start_ticks_of(row->pid) != row->start_ticks) continue;
        Seen *one = seen_of(seen, &count, (unsigned)row->pid, 'C');
        if (one) one->nbytes += row->nbytes;
    }
    char buffer[FAULTS_BYTES_MAX], *text = buffer, words[4][64], own[16];
    snprintf(own, sizeof own, "%d", device);
    read_faults(buffer);
    for (int words_count; (words_count = next_fault(&text, "process", words)) >= 0;) {
        if (words_count < 4 || !about(words[0], own)) continue;
        Seen *one = seen_of(seen, &count, (unsigned)strtoul(words[1], NULL, 10), words[3][0]);
        if (one) one->nbytes = !strcmp(words[2], "na") ? NOT_AVAILABLE : strtoull(words[2], NULL, 10);
    }
    pthread_mutex_lock(&lock);
    if (has_fault("keep", device, NULL)) {
        for (int i = 0; i < kept_count[device]; i++) {
            Seen *one = seen_of(seen, &count, kept[device][i].pid, kept[device][i].type);
            if (one && one->nbytes < kept[device][i].nbytes) one->nbytes = kept[device][i].nbytes;
        }
        memcpy(kept[device], seen, sizeof *seen * (size_t)count);
        kept_count[device] = count;
    } else {
        kept_count[device] = 0;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

static uint64_t used_bytes(int device)
{
    uint64_t used = 0;
    for (int i = 0; i < ROWS_MAX; i++) {
        const Row *row = &budget->rows[i];
        if (!row->references || !belongs(device, row->device) || start_ticks_of(row->pid) != row->start_ticks) continue;
        int counted = 0;
        for (int j = 0; j < i && !counted; j++)
            counted = budget->rows[j].references && budget->rows[j].key == row->key;
        if (!counted) used += row->nbytes;
    }
    Seen seen[PROCESSES_MAX];
    uint64_t by_process = 0;
    int count = look(device, seen);
    for (int i = 0; i < count; i++)
        if (seen[i].nbytes != NOT_AVAILABLE) by_process += seen[i].nbytes;
    /* Beyond the account: what is only said to be there, and what is freed late. */
    char buffer[FAULTS_BYTES_MAX];
    read_faults(buffer);
    int told = strstr(buffer, "process ") || strstr(buffer, "keep ");
    return told && by_process > used ? by_process : used;
}

static Return memory_of(const Device *device, MemoryV2 *memory)
{
    memory->reserved = 0;
    has_fault("reserved", device->number, (uint64_t *)&memory->reserved);
    memory->total = 0;
    for (int i = 0; i < budget->devices; i++)
        if (i == device->number) memory->total += budget->capacity_bytes[i];
    uint64_t used = used_bytes(device->number), most = memory->total - memory->reserved;
    memory->used = used < most ? used : most;
    memory->free = most - memory->used;
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetMemoryInfo(const Device *device, Memory *memory)
{
    ENTER_DEVICE(device);
    MemoryV2 all;
    memory_of(device, &all);
    *memory = (Memory){all.total, all.free, all.used + all.reserved};
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetMemoryInfo_v2(const Device *device, MemoryV2 *memory)
{
    ENTER_DEVICE(device);
    if (memory->version != (sizeof *memory | 2u << 24)) return 25; /* ARGUMENT_VERSION_MISMATCH */
    return memory_of(device, memory);
}

static Return list(const Device *device, char type, unsigned *room, Process *processes)
{
    Seen seen[PROCESSES_MAX];
    int count = look(device->number, seen), found = 0, silent = has_fault("bytes_na", device->number, NULL);
    for (int i = 0; i < count; i++) found += seen[i].type == type;
    if (found && (!processes || *room < (unsigned)found)) {
        *room = (unsigned)found;
        return INSUFFICIENT_SIZE;
    }
    *room = (unsigned)found;
    for (int i = 0; i < count; i++)
        if (seen[i].type == type)
            *processes++ = (Process){seen[i].pid, silent ? NOT_AVAILABLE : seen[i].nbytes, UINT32_MAX, UINT32_MAX};
    return SUCCESS;
}

EXPORTED Return nvmlDeviceGetComputeRunningProcesses_v3(const Device *device, unsigned *room, Process *processes)
{
    ENTER_DEVICE(device);
    return list(device, 'C', room, processes);
}

EXPORTED Return nvmlDeviceGetGraphicsRunningProcesses_v3(const Device *device, unsigned *room, Process *processes)
{
    ENTER_DEVICE(device);
    return list(device, 'G', room, processes);
}

EXPORTED Return nvmlDeviceGetMPSComputeRunningProcesses_v3(const Device *device, unsigned *room, Process *processes)
{
    ENTER_DEVICE(device);
    return list(device, 'M', room, processes);
}
