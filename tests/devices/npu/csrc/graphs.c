/* Graphs: what is captured, task groups and their updates, replays. */
#include "null_device.h"

struct node {
    enum { NODE_NUMERICS, NODE_WAIT, NODE_WRITE, NODE_COPY } kind;
    int64_t index; /* NODE_NUMERICS: which recorded call */
    uint64_t *cell, value; /* NODE_WAIT, NODE_WRITE */
    uint32_t condition;
    struct copy copy; /* NODE_COPY */
};

struct graph {
    int64_t id;
    struct node *nodes;
    size_t count, room;
    size_t position; /* where a started replay stands; == count when none is under way */
    bool destroyed;
};

struct graph *active_capture;
aclmdlRICaptureMode capture_mode;
static int64_t next_graph = 1, next_group = 1, update_turn;
static int (*run_numerics)(int64_t graph, int64_t index);
static void (*graph_destroyed)(int64_t graph);

EXPORT void npu_stub_on_replay(int (*run)(int64_t, int64_t), void (*destroyed)(int64_t)) {
    run_numerics = run;
    graph_destroyed = destroyed;
}

/* {graph in capture, open task group, task group in update (0: none each), whether a replay stands, update's turn} */
EXPORT void npu_stub_state(void *handle, int64_t state[5]) {
    struct stream *s = handle;
    state[0] = s && s->capturing ? s->capturing->id : 0;
    state[1] = s && s->group ? s->group->id : 0;
    state[2] = s && s->updating ? s->updating->id : 0;
    state[3] = s && s->blocked != NULL;
    state[4] = update_turn;
}

static void add_node(struct graph *g, struct node node) {
    if (g->count == g->room) {
        g->room = g->room ? 2 * g->room : 64;
        g->nodes = realloc(g->nodes, g->room * sizeof *g->nodes);
    }
    g->nodes[g->count++] = node;
    g->position = g->count;
}

int64_t graph_id(const struct graph *g) { return g->id; }
void add_copy(struct graph *g, struct copy copy) { add_node(g, (struct node){.kind = NODE_COPY, .copy = copy}); }
void add_wait(struct graph *g, uint64_t *cell, uint64_t value, uint32_t condition) {
    add_node(g, (struct node){.kind = NODE_WAIT, .cell = cell, .value = value, .condition = condition});
}
void add_write(struct graph *g, uint64_t *cell, uint64_t value) {
    add_node(g, (struct node){.kind = NODE_WRITE, .cell = cell, .value = value});
}

EXPORT int npu_stub_record(void *handle, int64_t index) {
    struct stream *s = handle;
    if (!s || !s->capturing) return -1;
    add_node(s->capturing, (struct node){.kind = NODE_NUMERICS, .index = index});
    return 0;
}

bool holds(const uint64_t *cell, uint64_t value, uint32_t condition) {
    return condition == 0 ? *cell >= value : condition == 1 ? *cell == value : (*cell & value) != 0;
}

/* Returns an ACL error; the replay may stand again without one. */
int proceed(struct stream *s) {
    struct graph *g = s->blocked;
    s->blocked = NULL;
    while (g->position < g->count) {
        struct node *n = &g->nodes[g->position];
        if (n->kind == NODE_WAIT && !holds(n->cell, n->value, n->condition)) {
            s->blocked = g;
            return 0;
        }
        g->position++;
        if (n->kind == NODE_WRITE) *n->cell = n->value;
        if (n->kind == NODE_COPY) move(n->copy, s);
        if (n->kind == NODE_NUMERICS && run_numerics && run_numerics(g->id, n->index)) {
            g->position = g->count;
            return ACL_ERROR_RT_AICORE_EXCEPTION;
        }
    }
    return 0;
}

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    struct stream *s = stream;
    if (active_capture) return fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "a capture is already under way");
    struct graph *g = calloc(1, sizeof *g);
    g->id = next_graph++;
    s->capturing = active_capture = g;
    s->origin = true;
    capture_mode = mode;
    npu_stub_trace("graph", "capture-begin");
    return 0;
}
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    struct stream *s = stream;
    bool active = s && s->capturing;
    if (status) *status = active ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model) *model = active ? s->capturing : NULL;
    return 0;
}
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *model) {
    struct stream *s = stream;
    if (!s->capturing) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "no capture to end");
    if (!s->origin) return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture did not begin on this stream");
    if (s->group) return fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "a task group was left open");
    *model = s->capturing;
    for (int32_t i = 0; i < stream_count; i++)
        if (streams[i]->capturing == *model) streams[i]->capturing = NULL;
    s->origin = false;
    active_capture = NULL;
    npu_stub_trace("graph", "capture-end");
    return 0;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
    aclmdlRICaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
    struct stream *s = stream;
    if (!s->capturing) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a task group belongs into a capture");
    s->group = calloc(1, sizeof *s->group);
    *s->group = (struct group){next_group++, s->capturing};
    return 0;
}
aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle) {
    struct stream *s = stream;
    if (!s->group) return fail(ACL_ERROR_RT_PARAM_INVALID, "no task group to end");
    *handle = s->group;
    s->group = NULL;
    return 0;
}
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
    struct stream *s = stream;
    struct group *group = handle;
    if (group->graph->destroyed) return fail(ACL_ERROR_RT_PARAM_INVALID, "the task group's graph is gone");
    s->updating = group;
    update_turn++;
    return 0;
}
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
    struct stream *s = stream;
    if (!s->updating) return fail(ACL_ERROR_RT_PARAM_INVALID, "no update to end");
    s->updating = NULL;
    return 0;
}
aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
    struct graph *g = model;
    struct stream *s = stream;
    char name[32];
    if (g->destroyed) return fail(ACL_ERROR_RT_PARAM_INVALID, "replay of a graph that is gone");
    if (s->capturing) return fail(ACL_ERROR_RT_MODEL_CAPTURED, "a replay inside a capture");
    if (s->blocked || g->position < g->count)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "a second replay while the first still waits for its update");
    snprintf(name, sizeof name, "%ld", (long)g->id);
    npu_stub_trace("replay", name);
    g->position = 0;
    s->blocked = g;
    return proceed(s);
}
aclError aclmdlRIDestroy(aclmdlRI model) {
    struct graph *g = model;
    g->destroyed = true;
    if (graph_destroyed) graph_destroyed(g->id);
    return 0;
}
/* Let go of replays that stand and of a capture that was left open: a test that failed is not to fail the next one. */
EXPORT void npu_stub_let_go(void) {
    for (int32_t i = 0; i < stream_count; i++) {
        if (streams[i]->blocked) streams[i]->blocked->position = streams[i]->blocked->count;
        streams[i]->blocked = streams[i]->capturing = NULL;
        streams[i]->group = streams[i]->updating = NULL;
        streams[i]->origin = false;
    }
    active_capture = NULL;
}

aclError aclmdlRIGetId(aclmdlRI model, uint32_t *id) { return *id = (uint32_t)((struct graph *)model)->id, 0; }
