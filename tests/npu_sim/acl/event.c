/* Events, and every way in which the host waits for a device. */
#include <stdlib.h>

#include "sim.h"

static uint32_t num_events;

SIM_API uint32_t sim_event_number(aclrtEvent handle)
{
    return ((struct event *)handle)->number;
}

SIM_API aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flag)
{
    struct event *event = calloc(1, sizeof(*event));

    pthread_mutex_lock(&sim_lock);
    event->number = ++num_events;
    pthread_mutex_unlock(&sim_lock);
    (void)flag;
    *handle = event;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag)
{
    return aclrtCreateEventExWithFlag(event, flag);
}

SIM_API aclError aclrtCreateEvent(aclrtEvent *event)
{
    return aclrtCreateEventExWithFlag(event, ACL_EVENT_SYNC);
}

SIM_API aclError aclrtDestroyEvent(aclrtEvent event)
{
    free(event);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle)
{
    struct event *event = handle;
    struct stream *stream = sim_stream(stream_handle);

    pthread_mutex_lock(&sim_lock);
    event->stream = stream;
    event->ordinal = stream->next;
    event->num_late = sim_controls()->late_queries;
    sim_note_locked(NOTE_RECORD, stream->number, event->number, 0);
    pthread_mutex_unlock(&sim_lock);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle)
{
    struct event *event = handle;
    struct stream *stream = sim_stream(stream_handle);

    /* Work of several streams in one graph is not simulated. */
    if (stream->capture != 0 || (event->stream != NULL && event->stream->capture != 0)) {
        bool is_own = event->stream == NULL || event->stream == stream;
        return is_own ? ACL_SUCCESS : ACL_ERROR_RT_CAPTURE_DEPENDENCY;
    }
    pthread_mutex_lock(&sim_lock);
    if (event->stream != NULL) {
        sim_push_wait(stream, event->stream, event->ordinal);
    }
    sim_note_locked(NOTE_WAIT, stream->number, event->number, 0);
    pthread_mutex_unlock(&sim_lock);
    return ACL_SUCCESS;
}

static bool is_done(const struct event *event)
{
    return event->stream == NULL || (event->num_late == 0 && !event->stream->is_stuck);
}

static aclError query(struct event *event, bool *is_complete)
{
    if (event->stream != NULL && event->stream->capture != 0) {
        return ACL_ERROR_RT_EVENT_CAPTURED;
    }
    pthread_mutex_lock(&sim_lock);
    *is_complete = is_done(event);
    if (*is_complete && event->stream != NULL) {
        sim_drain(event->stream, event->ordinal);
    } else if (event->num_late > 0) {
        event->num_late--;
    }
    pthread_mutex_unlock(&sim_lock);
    return sim_controls()->wait_error;
}

SIM_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status)
{
    bool is_complete = false;
    aclError error = query(event, &is_complete);

    *status =
        is_complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return error;
}

SIM_API aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus *status)
{
    bool is_complete = false;
    aclError error = query(event, &is_complete);

    *status = is_complete ? ACL_EVENT_STATUS_COMPLETE : ACL_EVENT_STATUS_NOT_READY;
    return error;
}

SIM_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status)
{
    bool is_complete = false;
    aclError error = query(event, &is_complete);

    *status = is_complete ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return error;
}

SIM_API aclError aclrtEventElapsedTime(float *ms, aclrtEvent start, aclrtEvent end)
{
    (void)start, (void)end;
    *ms = 1; /* nothing here says how long anything takes */
    return ACL_SUCCESS;
}

/* Return what a wait returns; a wait for a replay that is stuck would never end. */
static aclError outcome(bool is_done)
{
    aclError error = sim_controls()->wait_error;

    return error == ACL_SUCCESS && !is_done ? ACL_ERROR_RT_STREAM_SYNC_TIMEOUT : error;
}

SIM_API aclError aclrtSynchronizeEvent(aclrtEvent handle)
{
    struct event *event = handle;
    bool is_free = true;

    if (sim_is_any_capturing()) {
        return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    }
    pthread_mutex_lock(&sim_lock);
    if (event->stream != NULL) {
        is_free = !event->stream->is_stuck;
        event->num_late = 0;
        sim_drain(event->stream, event->ordinal);
    }
    sim_note_locked(NOTE_EVENT_SYNC, 0, event->number, 0);
    pthread_mutex_unlock(&sim_lock);
    return outcome(is_free);
}

SIM_API aclError aclrtSynchronizeStream(aclrtStream handle)
{
    struct stream *stream = sim_stream(handle);

    if (sim_is_any_capturing()) {
        return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    }
    pthread_mutex_lock(&sim_lock);
    sim_drain(stream, UINT64_MAX);
    sim_note_locked(NOTE_STREAM_SYNC, stream->number, 0, 0);
    bool is_free = !stream->is_stuck;
    pthread_mutex_unlock(&sim_lock);
    return outcome(is_free);
}

SIM_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout)
{
    (void)timeout;
    return aclrtSynchronizeStream(stream);
}

SIM_API aclError aclrtSynchronizeDevice(void)
{
    if (sim_is_any_capturing()) {
        return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    }
    pthread_mutex_lock(&sim_lock);
    bool is_free = sim_drain_device(sim_current_device());
    sim_note_locked(NOTE_DEVICE_SYNC, 0, 0, 0);
    pthread_mutex_unlock(&sim_lock);
    return outcome(is_free);
}

SIM_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout)
{
    (void)timeout;
    return aclrtSynchronizeDevice();
}

SIM_API aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status)
{
    struct stream *stream = sim_stream(handle);

    pthread_mutex_lock(&sim_lock);
    bool is_free = !stream->is_stuck;
    *status = is_free ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    sim_drain(stream, UINT64_MAX);
    pthread_mutex_unlock(&sim_lock);
    return sim_controls()->wait_error;
}
