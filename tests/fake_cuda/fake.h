/* What the files of the fake tell each other.
 *
 * Device memory is memfd pages. A device address is a reserved range that the process itself may touch only outside
 * strict mode; copies always go through a second mapping of the same pages, an alias, as a DMA engine would.
 * Locks, in the order in which they may nest: streams, memory, budget. The control lock nests in nothing. */
#pragma once

#include "budget.h"
#include "cuda_abi.h"

typedef enum { ANYTIME, NEEDS_INIT, NEEDS_CONTEXT } Needs;

/* A device and its primary context, which are one here. */
typedef struct Device {
    int ordinal;
    int retained; /* how often the primary context was retained; 0: there is none */
    CUresult sticky; /* what broke the context for good */
} Device;

/* control.c: what begins every call. It counts, injects what is due, and checks state as the driver does. */
CUresult enter(const char *function, Needs needs);
CUresult injected(const char *function);
uint64_t environment_number(const char *name, uint64_t otherwise);
int environment_has(const char *name, const char *word, const char *otherwise);
void control_reset(void);

#define ENTER(needs)                                                                                                   \
    do {                                                                                                               \
        CUresult refused_ = enter(__func__, needs);                                                                    \
        if (refused_) return refused_;                                                                                 \
    } while (0)

/* device.c */
int is_initialized(void);
int device_count(void);
Device *device_at(int ordinal); /* NULL: there is none */
Device *current_device(void);   /* of the calling thread's context, or NULL */
void break_device(Device *device, CUresult error);
CUresult sticky_of(Device *device);
long contexts_live(void);
void devices_reset(void);

/* budget.c: who holds how much of which device, over all processes that share the state folder. */
int budget_open(void);
void budget_close(void);
int budget_devices(void); /* that this process may see */
int budget_physical(int device);
int budget_ordinal(int physical); /* -1: this process does not see it */
int budget_is_slice(int device);
uint64_t budget_capacity_bytes(int device);
uint64_t budget_free_bytes(int device);
CUresult budget_charge(int device, uint64_t nbytes, uint64_t *key); /* a new key, held once by this process */
CUresult budget_hold(int device, uint64_t nbytes, uint64_t key);
void budget_drop(uint64_t key);
void budget_move_out(int pid); /* what the process holds is on no device until it is moved in again */
CUresult budget_move_in(int pid);

/* checkpoint.c */
void checkpoint_gate(int needs_context); /* waits while another process has this one locked or checkpointed */
void checkpoint_reset(void);

/* memory.c */
typedef struct Mapping Mapping;
typedef struct {
    char *pointer;
    uint64_t nbytes;  /* how much lies there in one piece, at most what was asked for */
    Mapping *mapping; /* NULL: host memory */
} Span;
/* Where a copy may read or write; pinned until memory_unpin, so that the alias cannot go away under a copy. */
CUresult memory_pin(Device *device, CUdeviceptr address, uint64_t nbytes, int access, Span *span);
void memory_unpin(const Span *span);
long memory_live(const char *kind);
void memory_reset(void);

/* pinning.c */
long registrations_live(void);
void registrations_reset(void);

/* stream.c */
/* Waits until a broken device copies nothing any more: that is so before anybody hears of the error. */
void streams_stop(Device *device);
long streams_live(const char *kind);
void streams_reset(void);
