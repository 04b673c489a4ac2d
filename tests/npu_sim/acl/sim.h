/* A simulated ACL: devices whose memory is the host's, streams that are late on purpose.
 *
 * Signatures are those of the headers that the torch_npu wheel ships. What lies in `struct
 * controls` is shared with Python, and by a file with other processes (see control.c). */
#ifndef NPU_SIM_H
#define NPU_SIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "acl/acl.h"
#include "acl/acl_rt.h"

#define SIM_API __attribute__((visibility("default")))
#define SIM_MAX_DEVICES 8
#define SIM_MAX_NOTES 65536

enum note_kind {
    NOTE_OP,             /* value: number of the name that Python gave the operation */
    NOTE_COPY,           /* value: 1 host to device, 2 device to host, 3 within; bytes */
    NOTE_PINNED_COPY,    /* the same, the host's end is pinned and the copy is asynchronous */
    NOTE_RECORD,         /* value: the event */
    NOTE_WAIT,           /* a stream waits for an event; value: the event */
    NOTE_EVENT_SYNC,     /* the host waits for an event; value: the event */
    NOTE_STREAM_SYNC,
    NOTE_DEVICE_SYNC,
    NOTE_REPLAY,         /* value: the graph */
    NOTE_HOST_OVERWRITE, /* a pinned source has changed before its copy was known to be done */
};

struct note {
    uint32_t kind;
    uint32_t stream; /* number of the stream in the order of creation; 0 is none */
    uint64_t value;
    uint64_t bytes;
};

struct controls {
    uint64_t memory_bytes;  /* of each device */
    int32_t wait_error;     /* what every wait for a device returns, and every query; 0 is fine */
    uint32_t late_queries;  /* how often an event that is done says that it is not */
    uint32_t is_recording;  /* whether notes are taken */
    uint32_t num_notes;     /* that were taken; more than SIM_MAX_NOTES are not kept */
    struct note notes[SIM_MAX_NOTES];
};

struct pending; /* what a stream still has to do, see stream.c */

struct stream {
    uint32_t number;
    int32_t device;
    uint64_t next;     /* ordinal of the next task */
    struct pending *first, *last;
    uint64_t capture;  /* the graph that this stream's work goes into, 0: none */
    bool is_stuck;     /* in a replay that waits for an event which nobody has recorded */
};

struct event {
    uint32_t number;
    struct stream *stream; /* where it was recorded, NULL: never */
    uint64_t ordinal;      /* and before which task */
    uint32_t num_late;     /* queries that will still say: not ready */
};

extern pthread_mutex_t sim_lock;

struct controls *sim_controls(void);
void sim_note_locked(uint32_t kind, uint32_t stream, uint64_t value, uint64_t bytes);
uint32_t sim_num_devices(void);
int32_t sim_current_device(void);
bool sim_is_pinned(const void *pointer);
void sim_forget_host(const void *pointer, size_t size);
struct stream *sim_stream(aclrtStream handle);

/* Call these with the lock held. */
void sim_drain(struct stream *stream, uint64_t ordinal); /* what is before the task */
bool sim_drain_device(int32_t device);                   /* false: something is stuck */
void sim_push_wait(struct stream *stream, struct stream *other, uint64_t until);

/* Graphs are kept in Python, which is told by `sim_tell`; never call it with the lock held. */
enum told {
    TOLD_CAPTURE_BEGIN,
    TOLD_CAPTURE_END,
    TOLD_REPLAY,
    TOLD_DESTROY,
    TOLD_GROUP_BEGIN,
    TOLD_GROUP_END,
    TOLD_UPDATE_BEGIN,
    TOLD_UPDATE_END,
    TOLD_VALUE_WAIT,  /* on a stream that captures, for a value in memory */
    TOLD_VALUE_CLEAR, /* on a stream that captures: the value is to be 0 */
    TOLD_VALUE_SET,   /* it was set to something else */
};
int64_t sim_tell(enum told what, const void *subject, aclrtStream stream);
bool sim_is_any_capturing(void);

#endif
