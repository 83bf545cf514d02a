/* Streams, each with a thread of its own, so that a missing synchronisation is seen; and events. */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum { COPY, SET, RECORD, WAIT } Kind;

typedef struct Work {
    Kind kind;
    CUdeviceptr destination, source;
    size_t nbytes;
    unsigned char value;
    CUevent event;
    uint64_t number; /* of the event's record */
    struct Work *next;
} Work;

struct Stream {
    Device *device;
    Work *first, *last;
    int working, copying, stopping;
    pthread_t thread;
    struct Stream *next;
};

struct Event {
    uint64_t recorded, completed; /* numbers of records: asked for, and reached by a stream */
    struct Event *next;
};

static CUstream streams;
static CUevent events;
static int held; /* tests: streams take nothing from their queues */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* anything of the above */

/* Streams stand still until they are let go: what is not synchronised is then certainly not done. */
API void fake_cuda_hold_streams(int hold);

void fake_cuda_hold_streams(int hold)
{
    pthread_mutex_lock(&lock);
    held = hold;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* As slow as the link that is modelled. */
static void pace(size_t nbytes)
{
    uint64_t bytes_per_second = environment_number("FAKE_CUDA_PACE_BYTES_PER_SECOND", 0);
    if (!bytes_per_second) return;
    double seconds = (double)nbytes / (double)bytes_per_second;
    struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
}

static CUresult copy(Device *device, const Work *work)
{
    size_t done = 0;
    while (done < work->nbytes) {
        Span to, from;
        CUresult result = memory_pin(device, work->destination + done, work->nbytes - done,
                                     CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &to);
        if (result) return result;
        result = memory_pin(device, work->source + done, to.nbytes, CU_MEM_ACCESS_FLAGS_PROT_READ, &from);
        if (!result) memmove(to.pointer, from.pointer, from.nbytes);
        memory_unpin(&to);
        if (result) return result;
        memory_unpin(&from);
        done += from.nbytes;
    }
    pace(work->nbytes);
    return CUDA_SUCCESS;
}

static CUresult set(Device *device, const Work *work)
{
    for (size_t done = 0; done < work->nbytes;) {
        Span to;
        CUresult result = memory_pin(device, work->destination + done, work->nbytes - done,
                                     CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &to);
        if (result) return result;
        if (!to.mapping) return CUDA_ERROR_ILLEGAL_ADDRESS; /* the device sets its own memory only */
        memset(to.pointer, work->value, to.nbytes);
        memory_unpin(&to);
        done += to.nbytes;
    }
    return CUDA_SUCCESS;
}

/* Outside the lock. Nothing is done any more once the context is broken. */
static void perform(Device *device, const Work *work)
{
    if (work->kind == RECORD || work->kind == WAIT) return;
    if (sticky_of(device)) return;
    CUresult result = injected(work->kind == COPY ? "stream:copy" : "stream:set");
    if (!result) result = work->kind == COPY ? copy(device, work) : set(device, work);
    if (result) break_device(device, result);
}

static void *work_through(void *argument)
{
    CUstream stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while ((!stream->first || held) && !stream->stopping) pthread_cond_wait(&changed, &lock);
        Work *work = stream->first;
        if (!work) break;
        stream->first = work->next;
        if (!stream->first) stream->last = NULL;
        stream->working = 1;
        if (work->kind == WAIT)
            while (work->event->completed < work->number) pthread_cond_wait(&changed, &lock);
        stream->copying = work->kind == COPY || work->kind == SET;
        pthread_mutex_unlock(&lock);
        perform(stream->device, work);
        pthread_mutex_lock(&lock);
        stream->copying = 0;
        if (work->kind == RECORD) work->event->completed = work->number;
        stream->working = 0;
        free(work);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static int is_idle(CUstream stream)
{
    return !stream->first && !stream->working;
}

static int exists(CUstream stream)
{
    for (CUstream other = streams; other; other = other->next)
        if (other == stream) return 1;
    return 0;
}

void streams_stop(Device *device)
{
    pthread_mutex_lock(&lock);
    for (CUstream stream = streams; stream;) {
        if (stream->device == device && stream->copying) {
            pthread_cond_wait(&changed, &lock);
            stream = streams; /* the list may be another by now */
        } else {
            stream = stream->next;
        }
    }
    pthread_mutex_unlock(&lock);
}

static CUresult enqueue(CUstream stream, const Work *wanted)
{
    Work *work = malloc(sizeof *work);
    if (!work) return CUDA_ERROR_OUT_OF_MEMORY;
    *work = *wanted;
    pthread_mutex_lock(&lock);
    /* There is no default stream: a copy without a stream of its own is a mistake of the caller. */
    int known = exists(stream) && stream->device == current_device();
    if (known) {
        if (work->kind == RECORD) work->number = ++work->event->recorded;
        if (work->kind == WAIT) work->number = work->event->recorded;
        *(stream->last ? &stream->last->next : &stream->first) = work;
        stream->last = work;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    if (!known) free(work);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t nbytes, CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    return enqueue(stream, &(Work){.kind = COPY, .destination = destination, .source = source, .nbytes = nbytes});
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, const void *source, size_t nbytes, CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    return enqueue(stream, &(Work){.kind = COPY, .destination = destination, .source = (uintptr_t)source, .nbytes = nbytes});
}

CUresult cuMemcpyDtoHAsync_v2(void *destination, CUdeviceptr source, size_t nbytes, CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    return enqueue(stream, &(Work){.kind = COPY, .destination = (uintptr_t)destination, .source = source, .nbytes = nbytes});
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source, size_t nbytes, CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    return enqueue(stream, &(Work){.kind = COPY, .destination = destination, .source = source, .nbytes = nbytes});
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t nbytes, CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    return enqueue(stream, &(Work){.kind = SET, .destination = address, .nbytes = nbytes, .value = value});
}

CUresult cuStreamCreate(CUstream *created, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    CUstream stream = calloc(1, sizeof *stream);
    if (!stream) return CUDA_ERROR_OUT_OF_MEMORY;
    stream->device = current_device();
    if (pthread_create(&stream->thread, NULL, work_through, stream)) {
        free(stream);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    *created = stream;
    return CUDA_SUCCESS;
}

static void destroy(CUstream stream)
{
    pthread_mutex_lock(&lock);
    stream->stopping = 1;
    for (CUstream *link = &streams; *link; link = &(*link)->next) {
        if (*link != stream) continue;
        *link = stream->next;
        break;
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(stream->thread, NULL); /* what is queued is still done */
    free(stream);
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    int known = exists(stream);
    pthread_mutex_unlock(&lock);
    if (!known) return CUDA_ERROR_INVALID_HANDLE;
    destroy(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    int known = exists(stream);
    while (known && !is_idle(stream)) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return known ? sticky_of(current_device()) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuStreamQuery(CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    CUresult result = !exists(stream) ? CUDA_ERROR_INVALID_HANDLE : is_idle(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuCtxSynchronize(void)
{
    ENTER(NEEDS_CONTEXT);
    Device *device = current_device();
    pthread_mutex_lock(&lock);
    for (CUstream stream = streams; stream;) {
        if (stream->device == device && !is_idle(stream)) {
            pthread_cond_wait(&changed, &lock);
            stream = streams; /* the list may be another by now */
        } else {
            stream = stream->next;
        }
    }
    pthread_mutex_unlock(&lock);
    return sticky_of(device);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    return enqueue(stream, &(Work){.kind = WAIT, .event = event});
}

CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    *event = calloc(1, sizeof **event);
    if (!*event) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    (*event)->next = events;
    events = *event;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    return enqueue(stream, &(Work){.kind = RECORD, .event = event});
}

CUresult cuEventQuery(CUevent event)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    CUresult result = event->completed < event->recorded ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuEventSynchronize(CUevent event)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    uint64_t number = event->recorded;
    while (event->completed < number) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return sticky_of(current_device());
}

CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER(NEEDS_CONTEXT);
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    for (CUevent *link = &events; *link; link = &(*link)->next) {
        if (*link != event) continue;
        *link = event->next;
        /* A stream may still reach a record of it. */
        while (event->completed < event->recorded) pthread_cond_wait(&changed, &lock);
        free(event);
        result = CUDA_SUCCESS;
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

long streams_live(const char *kind)
{
    long live = 0;
    pthread_mutex_lock(&lock);
    if (!strcmp(kind, "streams"))
        for (CUstream stream = streams; stream; stream = stream->next) live++;
    else if (!strcmp(kind, "events"))
        for (CUevent event = events; event; event = event->next) live++;
    else
        live = -1;
    pthread_mutex_unlock(&lock);
    return live;
}

void streams_reset(void)
{
    fake_cuda_hold_streams(0);
    while (streams) destroy(streams);
    pthread_mutex_lock(&lock);
    while (events) {
        CUevent event = events;
        events = event->next;
        free(event);
    }
    pthread_mutex_unlock(&lock);
}
