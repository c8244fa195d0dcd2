/* What the device was asked for ("kind name" lines, in memory and in the file NPU_STUB_TRACE), and the last error. */
#include "null_device.h"

#include <stdarg.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char last_error[4096];

int fail(int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return code;
}
EXPORT void npu_stub_error(const char *text) { snprintf(last_error, sizeof last_error, "%s", text); }
const char *aclGetRecentErrMsg(void) { return last_error; }

const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

static char **trace_lines;
static size_t trace_count, trace_room;
static bool tracing, trace_asked;
static FILE *trace_file;

EXPORT void npu_stub_trace(const char *kind, const char *name) {
    pthread_mutex_lock(&lock);
    if (!trace_asked) {
        trace_asked = true;
        const char *path = getenv("NPU_STUB_TRACE");
        if (path && *path) trace_file = fopen(path, "a");
    }
    if (tracing) {
        if (trace_count == trace_room) {
            trace_room = trace_room ? 2 * trace_room : 1024;
            trace_lines = realloc(trace_lines, trace_room * sizeof *trace_lines);
        }
        if (asprintf(&trace_lines[trace_count], "%s %s", kind, name) >= 0) trace_count++;
    }
    if (trace_file) {
        fprintf(trace_file, "%s %s\n", kind, name);
        fflush(trace_file);
    }
    pthread_mutex_unlock(&lock);
}

EXPORT void npu_stub_trace_start(void) { tracing = true; }
EXPORT void npu_stub_trace_stop(void) { tracing = false; }
EXPORT size_t npu_stub_trace_count(void) { return trace_count; }
EXPORT const char *npu_stub_trace_line(size_t i) { return i < trace_count ? trace_lines[i] : ""; }
EXPORT void npu_stub_trace_clear(void) {
    pthread_mutex_lock(&lock);
    while (trace_count) free(trace_lines[--trace_count]);
    pthread_mutex_unlock(&lock);
}
