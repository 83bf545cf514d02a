/* Checkpoints of other processes: cuCheckpointProcess*, over the file `checkpoint` of the state folder.
 *
 * A process is in it from its first call that needs a context on. While its state is not RUNNING, its calls wait where
 * every call begins. A checkpoint takes its bytes out of the account of the devices; their pages, which are memfds of
 * the process itself, stay: that is the host memory that the real driver copies them to. Replies and states have their
 * sources in tests/engines/replies/cuda_checkpoint.json. What the real one does and this one does not: it waits for
 * calls and work that are under way before it locks.
 *
 * What goes wrong is told by the file `checkpoint_faults` in the same folder, read at every call, "FAULT PID" a line,
 * PID may be "*": busy (a lock never gets through), lock_hangs, state_hangs, checkpoint_hangs, restore_hangs (while the
 * line is there), checkpoint_fails, restore_fails, keeps_memory (a checkpoint that frees nothing). */
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
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PROCESSES_MAX 64
enum { RUNNING, LOCKED, CHECKPOINTED, FAILED, CHECKPOINTING, RESTORING };

typedef struct {
    uint64_t start_ticks;
    int32_t pid, state, restore_tid, unused;
} Process;

static Process *processes;
static Process *own; /* of this process, once it has used a context */
static pid_t own_pid;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int in_folder(const char *name, char *path, size_t size)
{
    const char *folder = getenv("FAKE_CUDA_STATE");
    return folder && snprintf(path, size, "%s/%s", folder, name) < (int)size;
}

/* Maps the table; the descriptor that is left open for its lock, or -1. */
static int open_table(void)
{
    char path[4096];
    if (!in_folder("checkpoint", path, sizeof path)) return -1;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || processes) return fd;
    void *mapped = MAP_FAILED;
    size_t nbytes = PROCESSES_MAX * sizeof(Process);
    if (ftruncate(fd, (off_t)nbytes) == 0) mapped = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) {
        processes = mapped;
        return fd;
    }
    close(fd);
    return -1;
}

static void nap(void)
{
    nanosleep(&(struct timespec){0, 1000000}, NULL);
}

static int has_fault(const char *fault, int pid)
{
    char path[4096], line[128], name[64], whom[32], mine[32];
    if (!in_folder("checkpoint_faults", path, sizeof path)) return 0;
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    int found = 0;
    snprintf(mine, sizeof mine, "%d", pid);
    while (!found && fgets(line, sizeof line, file))
        found = sscanf(line, "%63s %31s", name, whom) == 2 && !strcmp(name, fault) &&
                (!strcmp(whom, "*") || !strcmp(whom, mine));
    fclose(file);
    return found;
}

static void hang_while(const char *fault, int pid)
{
    while (has_fault(fault, pid)) nap();
}

static void register_own(void)
{
    pthread_mutex_lock(&lock);
    int fd = own && own_pid == getpid() ? -1 : open_table();
    if (fd >= 0) {
        flock(fd, LOCK_EX);
        for (Process *row = processes; row < processes + PROCESSES_MAX; row++) {
            if (row->pid && start_ticks_of(row->pid) == row->start_ticks && row->pid != getpid()) continue;
            *row = (Process){start_ticks_of(getpid()), getpid(), RUNNING, (int32_t)syscall(SYS_gettid), 0};
            own = row;
            own_pid = getpid();
            break;
        }
        flock(fd, LOCK_UN); /* the mapping would keep it */
        close(fd);
    }
    pthread_mutex_unlock(&lock);
}

void checkpoint_gate(int needs_context)
{
    if (!own || own_pid != getpid()) {
        if (!needs_context) return;
        register_own();
    }
    while (own && __atomic_load_n(&own->state, __ATOMIC_ACQUIRE) != RUNNING) nap();
}

void checkpoint_reset(void)
{
    pthread_mutex_lock(&lock);
    if (own && own_pid == getpid()) memset(own, 0, sizeof *own);
    if (processes) munmap(processes, PROCESSES_MAX * sizeof(Process));
    own = processes = NULL;
    pthread_mutex_unlock(&lock);
}

/* The row of a process; what is wrong where there is none. */
static CUresult find(int pid, Process **found)
{
    uint64_t ticks = start_ticks_of(pid);
    if (!ticks) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int fd = processes ? -1 : open_table();
    if (fd >= 0) close(fd);
    pthread_mutex_unlock(&lock);
    if (!processes) return CUDA_ERROR_NOT_INITIALIZED;
    for (Process *row = processes; row < processes + PROCESSES_MAX; row++) {
        if (row->pid != pid || row->start_ticks != ticks) continue;
        *found = row;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_INITIALIZED;
}

/* From one state to another, at once; refused in any other. */
static CUresult change(Process *row, int from, int to)
{
    int found = from;
    int changed = __atomic_compare_exchange_n(&row->state, &found, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return changed ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

#define FIND(pid, row)                                                                                                 \
    Process *row;                                                                                                      \
    do {                                                                                                               \
        CUresult missing_ = find(pid, &row);                                                                           \
        if (missing_) return missing_;                                                                                 \
    } while (0)

CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
    ENTER(NEEDS_INIT);
    FIND(pid, row);
    unsigned long waited_ms = 0;
    hang_while("lock_hangs", pid);
    while (has_fault("busy", pid)) {
        if (args && args->timeoutMs && waited_ms++ >= args->timeoutMs) return CUDA_ERROR_NOT_READY;
        nap();
    }
    return change(row, RUNNING, LOCKED);
}

CUresult cuCheckpointProcessCheckpoint(int pid, void *args)
{
    ENTER(NEEDS_INIT);
    (void)args;
    FIND(pid, row);
    CUresult result = change(row, LOCKED, CHECKPOINTING);
    if (result) return result;
    hang_while("checkpoint_hangs", pid);
    if (has_fault("checkpoint_fails", pid)) {
        change(row, CHECKPOINTING, FAILED);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (!has_fault("keeps_memory", pid)) budget_move_out(pid);
    return change(row, CHECKPOINTING, CHECKPOINTED);
}

CUresult cuCheckpointProcessRestore(int pid, void *args)
{
    ENTER(NEEDS_INIT);
    (void)args;
    FIND(pid, row);
    CUresult result = change(row, CHECKPOINTED, RESTORING);
    if (result) return result;
    hang_while("restore_hangs", pid);
    result = has_fault("restore_fails", pid) ? CUDA_ERROR_OPERATING_SYSTEM : budget_move_in(pid);
    change(row, RESTORING, result ? FAILED : LOCKED);
    return result;
}

CUresult cuCheckpointProcessUnlock(int pid, void *args)
{
    ENTER(NEEDS_INIT);
    (void)args;
    FIND(pid, row);
    return change(row, LOCKED, RUNNING);
}

CUresult cuCheckpointProcessGetState(int pid, int *state)
{
    ENTER(NEEDS_INIT);
    FIND(pid, row);
    hang_while("state_hangs", pid);
    *state = __atomic_load_n(&row->state, __ATOMIC_ACQUIRE);
    return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    ENTER(NEEDS_INIT);
    FIND(pid, row);
    *tid = row->restore_tid;
    return CUDA_SUCCESS;
}
