/* The shared account of device memory: one file that every process of the state folder maps.
 *
 * A row says that a process holds a piece of memory. A piece is charged once, however many hold it. Rows of dead
 * processes are dropped at every question, as the driver frees what the killed have held. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static Budget *budget;
static int budget_fd = -1;
static uint64_t own_start_ticks;
/* What CUDA_VISIBLE_DEVICES makes of the machine's devices: everything outside this file counts by ordinals. */
static int visible[DEVICES_MAX], visible_count;
/* flock is between processes, the mutex between our threads. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void lock_budget(void)
{
    pthread_mutex_lock(&lock);
    flock(budget_fd, LOCK_EX);
}

static void unlock_budget(void)
{
    flock(budget_fd, LOCK_UN);
    pthread_mutex_unlock(&lock);
}

static void begin_budget(void)
{
    budget->devices = (int32_t)environment_number("FAKE_CUDA_DEVICES", 1);
    if (budget->devices > DEVICES_MAX) budget->devices = DEVICES_MAX;
    for (int device = 0; device < DEVICES_MAX; device++)
        budget->capacity_bytes[device] = environment_number("FAKE_CUDA_CAPACITY_BYTES", 64 << 20);
    budget->slices = (int32_t)environment_number("FAKE_CUDA_SLICES", 0);
    if (budget->slices >= budget->devices) budget->slices = budget->devices > 0 ? budget->devices - 1 : 0;
    budget->next_key = 1;
    budget->magic = MAGIC;
}

static void see(int device)
{
    for (int i = 0; i < visible_count; i++)
        if (visible[i] == device) return;
    visible[visible_count++] = device;
}

/* As the CUDA Programming Guide says of CUDA_VISIBLE_DEVICES: ordinals, or UUIDs by a prefix; the first word that means
 * nothing ends the list. A GPU in MIG mode is not there itself; of its slices a process sees the first, or a named one. */
static void choose_visible(void)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    int whole = budget->devices - budget->slices;
    visible_count = 0;
    if (!list) {
        for (int device = budget->slices ? 1 : 0; device < whole; device++) see(device);
        if (budget->slices) see(whole);
        return;
    }
    while (*list) {
        size_t length = strcspn(list, ",");
        int found = -1;
        char *end;
        long ordinal = strtol(list, &end, 10);
        if (end == list + length && end != list && ordinal >= 0 && ordinal < whole) found = (int)ordinal;
        for (int device = 0; device < budget->devices && found < 0; device++) {
            char uuid[UUID_BYTES];
            write_uuid(budget, device, uuid);
            if (length > 4 && !strncmp(list, uuid, length)) found = device;
        }
        if (found < 0 || (found == 0 && budget->slices)) return;
        see(found);
        list += length + (list[length] == ',');
    }
}

/* 0: opened. Without FAKE_CUDA_STATE this machine has no device. */
int budget_open(void)
{
    if (budget) return 0;
    const char *folder = getenv("FAKE_CUDA_STATE");
    char path[4096];
    if (!folder || snprintf(path, sizeof path, "%s/budget", folder) >= (int)sizeof path) return -1;
    budget_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (budget_fd < 0) return -1;
    lock_budget();
    struct stat status;
    void *mapped = MAP_FAILED;
    if (fstat(budget_fd, &status) == 0 &&
        (status.st_size >= (off_t)sizeof(Budget) || ftruncate(budget_fd, sizeof(Budget)) == 0))
        mapped = mmap(NULL, sizeof(Budget), PROT_READ | PROT_WRITE, MAP_SHARED, budget_fd, 0);
    if (mapped != MAP_FAILED) {
        budget = mapped;
        own_start_ticks = start_ticks_of(getpid());
        if (budget->magic != MAGIC) begin_budget();
        choose_visible();
    }
    unlock_budget();
    if (budget) return 0;
    close(budget_fd);
    return -1;
}

/* Our rows go with it, as when the process ends. */
void budget_close(void)
{
    if (!budget) return;
    lock_budget();
    for (Row *row = budget->rows; row < budget->rows + ROWS_MAX; row++)
        if (row->references && row->pid == getpid()) memset(row, 0, sizeof *row);
    unlock_budget();
    munmap(budget, sizeof(Budget));
    close(budget_fd);
    budget = NULL;
}

static void reap(void)
{
    for (Row *row = budget->rows; row < budget->rows + ROWS_MAX; row++)
        if (row->references && row->start_ticks != (row->pid == getpid() ? own_start_ticks : start_ticks_of(row->pid)))
            memset(row, 0, sizeof *row);
}

static uint64_t used_bytes(int device)
{
    uint64_t used = 0;
    for (int i = 0; i < ROWS_MAX; i++) {
        const Row *row = &budget->rows[i];
        if (!row->references || row->device != device) continue;
        int counted = 0;
        for (int j = 0; j < i && !counted; j++)
            counted = budget->rows[j].references && budget->rows[j].key == row->key;
        if (!counted) used += row->nbytes;
    }
    return used;
}

static uint64_t free_bytes_locked(int device)
{
    reap();
    uint64_t used = used_bytes(device), capacity = budget->capacity_bytes[device];
    return used < capacity ? capacity - used : 0;
}

static Row *own_row(uint64_t key)
{
    for (Row *row = budget->rows; row < budget->rows + ROWS_MAX; row++)
        if (row->references && row->key == key && row->pid == getpid()) return row;
    return NULL;
}

static CUresult hold_locked(int device, uint64_t nbytes, uint64_t key)
{
    Row *row = own_row(key);
    if (row) {
        row->references++;
        return CUDA_SUCCESS;
    }
    for (row = budget->rows; row < budget->rows + ROWS_MAX; row++) {
        if (row->references) continue;
        *row = (Row){key, nbytes, own_start_ticks, getpid(), device, 1, 0};
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

int budget_devices(void)
{
    return budget ? visible_count : 0;
}

int budget_physical(int device)
{
    return visible[device];
}

int budget_ordinal(int physical)
{
    for (int device = 0; device < visible_count; device++)
        if (visible[device] == physical) return device;
    return -1;
}

int budget_is_slice(int device)
{
    return is_slice(budget, visible[device]);
}

uint64_t budget_capacity_bytes(int device)
{
    return budget->capacity_bytes[visible[device]];
}

uint64_t budget_free_bytes(int device)
{
    lock_budget();
    uint64_t nbytes = free_bytes_locked(visible[device]);
    unlock_budget();
    return nbytes;
}

CUresult budget_charge(int device, uint64_t nbytes, uint64_t *key)
{
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    lock_budget();
    if (nbytes <= free_bytes_locked(visible[device])) {
        *key = budget->next_key++;
        result = hold_locked(visible[device], nbytes, *key);
    }
    unlock_budget();
    return result;
}

CUresult budget_hold(int device, uint64_t nbytes, uint64_t key)
{
    lock_budget();
    CUresult result = hold_locked(visible[device], nbytes, key);
    unlock_budget();
    return result;
}

void budget_drop(uint64_t key)
{
    lock_budget();
    Row *row = own_row(key);
    if (row && --row->references == 0) memset(row, 0, sizeof *row);
    unlock_budget();
}

/* Rows of a device that is none: -1 - device. Nobody's account of a device finds them. */
void budget_move_out(int pid)
{
    uint64_t ticks = start_ticks_of(pid);
    lock_budget();
    for (Row *row = budget->rows; row < budget->rows + ROWS_MAX; row++)
        if (row->references && row->pid == pid && row->start_ticks == ticks && row->device >= 0)
            row->device = -1 - row->device;
    unlock_budget();
}

/* All of them or none. What another process holds too is on the device already. */
CUresult budget_move_in(int pid)
{
    uint64_t ticks = start_ticks_of(pid), need[DEVICES_MAX] = {0};
    CUresult result = CUDA_SUCCESS;
    lock_budget();
    for (int i = 0; i < ROWS_MAX; i++) {
        const Row *row = &budget->rows[i];
        if (!row->references || row->pid != pid || row->start_ticks != ticks || row->device >= 0) continue;
        int there = 0;
        for (int j = 0; j < ROWS_MAX && !there; j++)
            there = budget->rows[j].references && budget->rows[j].key == row->key && budget->rows[j].device >= 0;
        if (!there) need[-1 - row->device] += row->nbytes;
    }
    for (int device = 0; device < DEVICES_MAX && !result; device++)
        if (need[device] > free_bytes_locked(device)) result = CUDA_ERROR_OUT_OF_MEMORY;
    for (Row *row = budget->rows; row < budget->rows + ROWS_MAX && !result; row++)
        if (row->references && row->pid == pid && row->start_ticks == ticks && row->device < 0)
            row->device = -1 - row->device;
    unlock_budget();
    return result;
}
