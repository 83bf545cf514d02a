/* Host memory that was registered for copies. Nothing is locked; what counts is that every registration ends. */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct Registration {
    uintptr_t address;
    size_t nbytes;
    struct Registration *next;
} Registration;

static Registration *registrations;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    if (!environment_number("FAKE_CUDA_PIN", 1)) return CUDA_ERROR_NOT_PERMITTED;
    if (!nbytes) return CUDA_ERROR_INVALID_VALUE;
    Registration *wanted = malloc(sizeof *wanted);
    if (!wanted) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    *wanted = (Registration){(uintptr_t)address, nbytes, registrations};
    for (Registration *other = registrations; other; other = other->next)
        if (wanted->address < other->address + other->nbytes && other->address < wanted->address + nbytes)
            result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (!result) registrations = wanted;
    pthread_mutex_unlock(&lock);
    if (result) free(wanted);
    return result;
}

static int remove_registration(uintptr_t address)
{
    for (Registration **link = &registrations; *link; link = &(*link)->next) {
        Registration *found = *link;
        if (found->address != address) continue;
        *link = found->next;
        free(found);
        return 0;
    }
    return -1;
}

CUresult cuMemHostUnregister(void *address)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    int failed = remove_registration((uintptr_t)address);
    pthread_mutex_unlock(&lock);
    return failed ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_SUCCESS;
}

long registrations_live(void)
{
    long live = 0;
    pthread_mutex_lock(&lock);
    for (Registration *found = registrations; found; found = found->next) live++;
    pthread_mutex_unlock(&lock);
    return live;
}

void registrations_reset(void)
{
    pthread_mutex_lock(&lock);
    while (registrations) remove_registration(registrations->address);
    pthread_mutex_unlock(&lock);
}
