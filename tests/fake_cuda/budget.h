/* The account of device memory as it lies in its file: libcuda's stand-in writes it, NVML's reads it. */
#pragma once

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEVICES_MAX 8
#define ROWS_MAX 4096
#define MAGIC 0x4c554c4c46414b46ULL
#define UUID_BYTES 48

typedef struct {
    uint64_t key, nbytes, start_ticks;
    int32_t pid, device, references, unused;
} Row;

typedef struct {
    uint64_t magic, next_key;
    uint64_t capacity_bytes[DEVICES_MAX];
    int32_t devices, slices; /* the last `slices` devices are MIG slices of device 0 */
    Row rows[ROWS_MAX];
} Budget;

static inline int is_slice(const Budget *budget, int device)
{
    return device >= budget->devices - budget->slices;
}

/* As NVML and nvidia-smi write them; the driver gives the last sixteen bytes. */
static inline void write_uuid(const Budget *budget, int device, char *uuid)
{
    const char *kind = is_slice(budget, device) ? "MIG" : "GPU";
    snprintf(uuid, UUID_BYTES, "%s-66616b65-2d67-7075-0000-%012x", kind, device);
}

/* Field 22 of /proc/PID/stat: a pid may be used again, a pid with its start time is not. 0: the process is gone. */
static inline uint64_t start_ticks_of(int pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) return 0;
    text[length] = 0;
    char *field = strrchr(text, ')'); /* the name before it may hold anything */
    if (!field || field[1] != ' ' || field[2] == 'Z' || field[2] == 'X') return 0; /* a zombie holds no memory */
    field += 2;
    for (int number = 3; number < 22; number++) {
        field = strchr(field, ' ');
        if (!field) return 0;
        field++;
    }
    return strtoull(field, NULL, 10);
}
