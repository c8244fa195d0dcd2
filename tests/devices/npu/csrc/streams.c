/* Streams, events, and where the host waits. */
#include "null_device.h"

#include <time.h>

struct stream *streams[STREAMS];
int32_t stream_count;

struct event {
    struct stream *stream;
    struct graph *captured_in;
    uint64_t nanoseconds, clock[STREAMS];
};

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) {
    (void)priority, (void)flag;
    if (stream_count == STREAMS) return fail(ACL_ERROR_RT_STREAM_NO_CB_REG, "the null device has %d streams", STREAMS);
    struct stream *s = calloc(1, sizeof *s);
    s->id = stream_count;
    streams[stream_count++] = s;
    *stream = s;
    return 0;
}
aclError aclrtCreateStream(aclrtStream *stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(aclrtStream stream) { return (void)stream, 0; } /* kept: others may still name it */
aclError aclrtDestroyStreamForce(aclrtStream stream) { return (void)stream, 0; }
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) { return (void)stream, (void)mode, 0; }
aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr attr, aclrtStreamAttrValue *value) {
    return (void)stream, (void)attr, (void)value, 0;
}
aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    *id = stream ? ((struct stream *)stream)->id : -1;
    return 0;
}

static aclError wait_for(struct stream *s, const uint64_t *clock, const char *name) {
    if (active_capture && (capture_mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED || (s && s->capturing)))
        return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s while a graph is captured", name);
    for (int32_t i = 0; i < stream_count; i++)
        if (streams[i]->blocked && (!s || streams[i] == s))
            return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                        "%s would wait for ever: graph %ld was replayed, and its update never came", name,
                        (long)graph_id(streams[i]->blocked));
    npu_stub_trace("sync", name);
    return deliver(clock);
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
    struct stream *s = stream;
    return wait_for(s, s ? s->clock : NULL, "aclrtSynchronizeStream");
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
    return (void)timeout, aclrtSynchronizeStream(stream);
}
aclError aclrtSynchronizeDevice(void) { return wait_for(NULL, NULL, "aclrtSynchronizeDevice"); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return (void)timeout, aclrtSynchronizeDevice(); }
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    struct stream *s = stream;
    *status = s && s->blocked ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
    return s && !s->blocked ? deliver(s->clock) : 0;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
    (void)flag;
    *event = calloc(1, sizeof(struct event));
    return 0;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtDestroyEvent(aclrtEvent event) { return (void)event, 0; } /* kept: a stream's clock may still need it */
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) { return (void)event, (void)stream, 0; }

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    struct event *e = event;
    struct stream *s = stream;
    e->captured_in = s ? s->capturing : NULL;
    if (e->captured_in) return 0;
    e->stream = s;
    e->nanoseconds = now();
    if (s) memcpy(e->clock, s->clock, sizeof e->clock);
    return 0;
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    struct event *e = event;
    struct stream *s = stream;
    if (s && e->captured_in) s->capturing = e->captured_in; /* the stream joins the capture */
    for (int32_t i = 0; s && i < STREAMS; i++)
        if (e->clock[i] > s->clock[i]) s->clock[i] = e->clock[i];
    return 0;
}

/* torch_npu 2.10.0.post4 and 2.13.0 make an ExternalEvent of a cell in memory: record writes 1, wait waits for it. */
aclError aclrtValueWrite(void *cell, uint64_t value, uint32_t flag, aclrtStream stream) {
    (void)flag;
    struct stream *s = stream;
    if (s && s->capturing) {
        add_write(s->capturing, cell, value);
        return 0;
    }
    *(uint64_t *)cell = value;
    for (int32_t i = 0; i < stream_count; i++) {
        int error = streams[i]->blocked ? proceed(streams[i]) : 0;
        if (error) return error;
    }
    return 0;
}
aclError aclrtValueWait(void *cell, uint64_t value, uint32_t condition, aclrtStream stream) {
    struct stream *s = stream;
    if (s && s->capturing)
        add_wait(s->capturing, cell, value, condition);
    else if (!holds(cell, value, condition))
        return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the null device waits for a value in graphs only");
    return 0;
}
aclError aclrtSynchronizeEvent(aclrtEvent event) {
    struct event *e = event;
    return wait_for(e->stream, e->clock, "aclrtSynchronizeEvent");
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    struct event *e = event;
    bool ready = !(e->stream && e->stream->blocked);
    *status = ready ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ready ? deliver(e->clock) : 0;
}
EXPORT aclError aclQueryEventRecordedStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    return aclrtQueryEventStatus(event, status);
}
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    return (void)event, *status = ACL_EVENT_WAIT_STATUS_COMPLETE, 0;
}
EXPORT aclError aclQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    return aclrtQueryEventWaitStatus(event, status);
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    *milliseconds = (float)(((struct event *)end)->nanoseconds - ((struct event *)start)->nanoseconds) / 1e6f;
    return 0;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *timestamp) {
    *timestamp = ((struct event *)event)->nanoseconds / 1000;
    return 0;
}
