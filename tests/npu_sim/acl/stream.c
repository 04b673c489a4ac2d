/* Streams, events and copies.
 *
 * Kernels run when Python launches them, so a stream has nothing to do but copies with pinned
 * memory: these are carried out as late as the rules allow. What comes from a device lands when
 * the host has waited for it, or has been told by a query that it is there; until then the host
 * reads rubbish. What goes to a device must not have been changed by then. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum pending_kind { LAND, CHECK, WAIT };

struct pending {
    enum pending_kind kind;
    uint64_t ordinal;
    void *host;            /* LAND: where to; CHECK: where it came from */
    char *bytes;           /* LAND: what; CHECK: what it was */
    size_t size;
    struct stream *stream; /* WAIT: for this one, */
    uint64_t until;        /* up to this task */
    struct pending *next;
};

static struct stream *streams[4096];
static uint32_t num_streams;
/* torch_npu may name the default stream NULL. */
static struct stream default_streams[SIM_MAX_DEVICES];

struct stream *sim_stream(aclrtStream handle)
{
    return handle != NULL ? handle : &default_streams[sim_current_device()];
}

SIM_API uint32_t sim_stream_number(aclrtStream handle)
{
    return sim_stream(handle)->number;
}

static aclError create_stream(aclrtStream *handle)
{
    struct stream *stream = calloc(1, sizeof(*stream));

    pthread_mutex_lock(&sim_lock);
    if (num_streams == sizeof(streams) / sizeof(*streams)) {
        abort();
    }
    stream->device = sim_current_device();
    streams[num_streams++] = stream;
    stream->number = num_streams;
    pthread_mutex_unlock(&sim_lock);
    *handle = stream;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtCreateStream(aclrtStream *stream)
{
    return create_stream(stream);
}

SIM_API aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag)
{
    (void)priority, (void)flag;
    return create_stream(stream);
}

SIM_API aclError aclrtStreamGetId(aclrtStream stream, int32_t *streamId)
{
    *streamId = (int32_t)sim_stream(stream)->number;
    return ACL_SUCCESS;
}

static void push(struct stream *stream, struct pending task)
{
    struct pending *last = malloc(sizeof(*last));

    *last = task;
    last->ordinal = stream->next++;
    last->next = NULL;
    if (stream->last != NULL) {
        stream->last->next = last;
    } else {
        stream->first = last;
    }
    stream->last = last;
}

static void carry_out(struct stream *stream, struct pending *task)
{
    if (task->kind == WAIT) {
        sim_drain(task->stream, task->until);
    } else if (task->host != NULL && task->kind == LAND) {
        memcpy(task->host, task->bytes, task->size);
    } else if (task->host != NULL && memcmp(task->host, task->bytes, task->size) != 0) {
        sim_note_locked(NOTE_HOST_OVERWRITE, stream->number, 0, task->size);
    }
    free(task->bytes);
    free(task);
}

void sim_drain(struct stream *stream, uint64_t ordinal)
{
    while (stream->first != NULL && stream->first->ordinal < ordinal) {
        struct pending *task = stream->first;
        stream->first = task->next;
        if (stream->first == NULL) {
            stream->last = NULL;
        }
        carry_out(stream, task);
    }
}

bool sim_drain_device(int32_t device)
{
    bool is_done = true;

    for (uint32_t i = 0; i < num_streams; i++) {
        if (streams[i] != NULL && streams[i]->device == device) {
            is_done = is_done && !streams[i]->is_stuck;
            sim_drain(streams[i], UINT64_MAX);
        }
    }
    sim_drain(&default_streams[device], UINT64_MAX);
    return is_done;
}

void sim_push_wait(struct stream *stream, struct stream *other, uint64_t until)
{
    push(stream, (struct pending){.kind = WAIT, .stream = other, .until = until});
}

/* Pinned memory is given back: nothing lands there any more. */
void sim_forget_host(const void *pointer, size_t size)
{
    const char *start = pointer;

    for (uint32_t i = 0; i < num_streams; i++) {
        struct pending *task = streams[i] != NULL ? streams[i]->first : NULL;
        for (; task != NULL; task = task->next) {
            if ((char *)task->host >= start && (char *)task->host < start + size) {
                task->host = NULL;
            }
        }
    }
}

SIM_API aclError aclrtDestroyStream(aclrtStream handle)
{
    struct stream *stream = handle;

    pthread_mutex_lock(&sim_lock);
    sim_drain(stream, UINT64_MAX);
    streams[stream->number - 1] = NULL;
    pthread_mutex_unlock(&sim_lock);
    return ACL_SUCCESS; /* an event may point to it still */
}

SIM_API aclError aclrtDestroyStreamForce(aclrtStream stream)
{
    return aclrtDestroyStream(stream);
}

SIM_API aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count,
                             aclrtMemcpyKind kind)
{
    (void)destMax;
    if (sim_is_any_capturing()) {
        return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    }
    pthread_mutex_lock(&sim_lock);
    aclError status = sim_controls()->wait_error;
    if (status == ACL_SUCCESS) {
        sim_drain_device(sim_current_device());
        memcpy(dst, src, count);
        sim_note_locked(NOTE_COPY, 0, kind, count);
    }
    pthread_mutex_unlock(&sim_lock);
    return status;
}

static char *copy_of(const void *bytes, size_t size)
{
    return memcpy(malloc(size), bytes, size);
}

SIM_API aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count,
                                  aclrtMemcpyKind kind, aclrtStream handle)
{
    struct stream *stream = sim_stream(handle);

    (void)destMax;
    if (stream->capture != 0 && kind != ACL_MEMCPY_DEVICE_TO_DEVICE) {
        return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    }
    pthread_mutex_lock(&sim_lock);
    bool is_down = kind == ACL_MEMCPY_DEVICE_TO_HOST && sim_is_pinned(dst);
    bool is_up = kind == ACL_MEMCPY_HOST_TO_DEVICE && sim_is_pinned(src);
    if (is_down) {
        struct pending task = {.kind = LAND, .host = dst, .size = count};
        task.bytes = copy_of(src, count);
        memset(dst, 0xA5, count);
        push(stream, task);
    } else {
        memcpy(dst, src, count);
    }
    if (is_up) {
        struct pending task = {.kind = CHECK, .host = (void *)src, .size = count};
        task.bytes = copy_of(src, count);
        push(stream, task);
    }
    uint32_t note = is_up || is_down ? NOTE_PINNED_COPY : NOTE_COPY;
    sim_note_locked(note, stream->number, kind, count);
    pthread_mutex_unlock(&sim_lock);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count)
{
    (void)maxCount;
    memset(devPtr, value, count);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count,
                                  aclrtStream stream)
{
    (void)stream;
    return aclrtMemset(devPtr, maxCount, value, count);
}
