/* The null device: an Ascend card whose memory is host memory and whose kernels do nothing.
 *
 * Compiled against the ACL headers inside the torch_npu wheel, so the compiler holds every signature here against the
 * one torch_npu was built with. What torch_npu asks for beyond these files is generated as a weak `return 0` by
 * stubs.py. Everything happens when it is issued, but for what a device does later and programs get wrong: a copy to
 * pinned memory arrives when the host waits for it, the source of a copy from pinned memory may not change until then,
 * and a graph stops at an external event until that is recorded. docs/npu-contract.md lists the NPU_STUB_* variables.
 */
#pragma once

#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC visibility push(default) /* what the ACL headers declare is what torch_npu calls */
#include "acl/acl.h"
#include "acl/acl_mdl.h"
#include "acl/acl_op_compiler.h"
#include "acl/acl_rt.h"
#include "acl/error_codes/rt_error_codes.h"
#pragma GCC visibility pop

#define EXPORT __attribute__((visibility("default")))
#define STREAMS 256 /* torch_npu keeps two pools of 32 a device */

struct graph;

struct group { /* a task group: what `graph_task_update_begin` names */
    int64_t id;
    struct graph *graph;
};

struct stream {
    int32_t id;
    struct graph *capturing, *blocked; /* blocked: a replay stands at an external event */
    bool origin;                       /* the stream that began the capture */
    struct group *group, *updating;
    uint64_t clock[STREAMS]; /* of every stream, the last pinned copy that this one comes after */
};

/* A copy in a graph. */
struct copy {
    void *dst;
    const void *src;
    size_t bytes;
    aclrtMemcpyKind kind;
};

extern struct stream *streams[STREAMS];
extern int32_t stream_count;
extern struct graph *active_capture;
extern aclmdlRICaptureMode capture_mode;

/* device.c */
EXPORT int npu_stub_launch(const char *name, void *stream);

/* trace.c */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *setting(const char *name, const char *otherwise);
void npu_stub_trace(const char *kind, const char *name);

/* memory.c */
size_t total_memory(void);
void move(struct copy copy, struct stream *stream);
int deliver(const uint64_t *clock); /* what `clock` comes after; all of it if NULL */

/* graphs.c */
int64_t graph_id(const struct graph *graph);
void add_copy(struct graph *graph, struct copy copy);
void add_wait(struct graph *graph, uint64_t *cell, uint64_t value, uint32_t condition);
void add_write(struct graph *graph, uint64_t *cell, uint64_t value);
bool holds(const uint64_t *cell, uint64_t value, uint32_t condition);
int proceed(struct stream *stream); /* run a replay on from where it stands */
