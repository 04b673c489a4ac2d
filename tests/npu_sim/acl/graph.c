/* Graphs: Python keeps them, because what is captured are its calls; see graphs.py. */
#include "sim.h"

static int64_t (*listener)(int what, const void *subject, aclrtStream stream);
static uint64_t num_graphs;
static uint32_t num_capturing;

SIM_API void sim_listen(int64_t (*callback)(int, const void *, aclrtStream))
{
    listener = callback;
}

SIM_API void sim_set_stuck(aclrtStream stream, bool is_stuck)
{
    sim_stream(stream)->is_stuck = is_stuck;
}

int64_t sim_tell(enum told what, const void *subject, aclrtStream stream)
{
    return listener != NULL ? listener(what, subject, stream) : ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

bool sim_is_any_capturing(void)
{
    return num_capturing > 0;
}

SIM_API aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode)
{
    struct stream *stream = sim_stream(handle);

    (void)mode;
    if (num_capturing > 0) {
        return ACL_ERROR_RT_STREAM_CAPTURED;
    }
    stream->capture = ++num_graphs;
    num_capturing++;
    return (aclError)sim_tell(TOLD_CAPTURE_BEGIN, (void *)stream->capture, handle);
}

SIM_API aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status,
                                        aclmdlRI *modelRI)
{
    struct stream *stream = sim_stream(handle);

    *status = stream->capture != 0 ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE
                                   : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (modelRI != NULL) {
        *modelRI = (aclmdlRI)stream->capture;
    }
    return ACL_SUCCESS;
}

SIM_API aclError aclmdlRIGetId(aclmdlRI modelRI, uint32_t *modelRIId)
{
    *modelRIId = (uint32_t)(uintptr_t)modelRI;
    return ACL_SUCCESS;
}

SIM_API aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *modelRI)
{
    struct stream *stream = sim_stream(handle);

    if (stream->capture == 0) {
        return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    }
    *modelRI = (aclmdlRI)stream->capture;
    stream->capture = 0;
    num_capturing--;
    return (aclError)sim_tell(TOLD_CAPTURE_END, *modelRI, handle);
}

SIM_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode)
{
    *mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    return ACL_SUCCESS;
}

SIM_API aclError aclmdlRIExecuteAsync(aclmdlRI modelRI, aclrtStream stream)
{
    pthread_mutex_lock(&sim_lock);
    sim_note_locked(NOTE_REPLAY, sim_stream(stream)->number, (uintptr_t)modelRI, 0);
    pthread_mutex_unlock(&sim_lock);
    return (aclError)sim_tell(TOLD_REPLAY, modelRI, stream);
}

SIM_API aclError aclmdlRIDestroy(aclmdlRI modelRI)
{
    return (aclError)sim_tell(TOLD_DESTROY, modelRI, NULL);
}

SIM_API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream)
{
    return (aclError)sim_tell(TOLD_GROUP_BEGIN, NULL, stream);
}

/* Python numbers the groups, and the number serves as the handle. */
SIM_API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle)
{
    int64_t group = sim_tell(TOLD_GROUP_END, NULL, stream);

    if (group <= 0) {
        return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
    }
    *handle = (aclrtTaskGrp)(uintptr_t)group;
    return ACL_SUCCESS;
}

SIM_API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle)
{
    return (aclError)sim_tell(TOLD_UPDATE_BEGIN, handle, stream);
}

SIM_API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream)
{
    return (aclError)sim_tell(TOLD_UPDATE_END, NULL, stream);
}

/* What the wheel makes its external events of: a stream waits until a value in memory is 1. */

enum { WAIT_FOR_EQUAL = 1 };

SIM_API bool sim_is_set(const uint64_t *value)
{
    return *value == 1;
}

SIM_API void sim_clear(uint64_t *value)
{
    *value = 0;
}

SIM_API aclError aclrtValueWait(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream)
{
    if (value != 1 || flag != WAIT_FOR_EQUAL) {
        return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    }
    if (sim_stream(stream)->capture != 0) {
        return (aclError)sim_tell(TOLD_VALUE_WAIT, devAddr, stream);
    }
    return sim_is_set(devAddr) ? ACL_SUCCESS : ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

SIM_API aclError aclrtValueWrite(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream)
{
    (void)flag;
    if (sim_stream(stream)->capture != 0) {
        bool is_clear = value == 0;
        return is_clear ? (aclError)sim_tell(TOLD_VALUE_CLEAR, devAddr, stream)
                        : ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    }
    *(uint64_t *)devAddr = value;
    return value == 1 ? (aclError)sim_tell(TOLD_VALUE_SET, devAddr, stream) : ACL_SUCCESS;
}
