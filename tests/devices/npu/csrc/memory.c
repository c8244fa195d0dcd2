/* Device and pinned memory, and copies between them. */
#include "null_device.h"

#include <sys/mman.h>

#define POISON 0xFF              /* NaN in every float type, -1 in every integer type */
#define POISON_LIMIT (64u << 20) /* larger blocks stay untouched zero pages, so that big pools cost nothing */
#define GRAVEYARD 256            /* freed blocks that stay mapped, so that a stale read shows NaN and is no crash */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct block {
    char *start;
    size_t size;
    bool device;
};
static struct block *blocks;
static size_t block_count, block_room, in_use;
static void *graveyard[GRAVEYARD];
static size_t graves;

size_t total_memory(void) { return strtoull(setting("NPU_STUB_MEMORY", "68719476736"), NULL, 0); }
static size_t free_memory(void) { /* a sixteenth is the driver's own, as on a card: 60 of 64 GiB */
    size_t total = total_memory(), gone = total / 16 + in_use;
    return gone < total ? total - gone : 0;
}

static struct block *find_block(const void *ptr) {
    for (size_t i = 0; i < block_count; i++)
        if ((char *)ptr >= blocks[i].start && (char *)ptr < blocks[i].start + blocks[i].size) return &blocks[i];
    return NULL;
}

static aclError allocate(void **ptr, size_t size, bool device) {
    size = (size + 511) & ~(size_t)511;
    pthread_mutex_lock(&lock);
    if (device && size > free_memory()) {
        pthread_mutex_unlock(&lock);
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%zu bytes asked, %zu free", size, free_memory());
    }
    char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        pthread_mutex_unlock(&lock);
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no %zu bytes", size);
    }
    if (device && size <= POISON_LIMIT) memset(start, POISON, size);
    if (block_count == block_room) {
        block_room = block_room ? 2 * block_room : 64;
        blocks = realloc(blocks, block_room * sizeof *blocks);
    }
    blocks[block_count++] = (struct block){start, size, device};
    if (device) in_use += size;
    pthread_mutex_unlock(&lock);
    *ptr = start;
    return 0;
}

static aclError release(void *ptr) {
    pthread_mutex_lock(&lock);
    struct block *b = find_block(ptr);
    if (!b) {
        pthread_mutex_unlock(&lock);
        return fail(ACL_ERROR_RT_PARAM_INVALID, "free of %p, which was not allocated", ptr);
    }
    struct block gone = *b;
    *b = blocks[--block_count];
    if (gone.device) in_use -= gone.size;
    if (gone.device && gone.size <= POISON_LIMIT) {
        memset(gone.start, POISON, gone.size);
        struct block *grave = malloc(sizeof *grave);
        *grave = gone;
        struct block *oldest = graveyard[graves % GRAVEYARD];
        graveyard[graves++ % GRAVEYARD] = grave;
        if (oldest) gone = *oldest, free(oldest);
        else gone.size = 0;
    }
    if (gone.size) munmap(gone.start, gone.size);
    pthread_mutex_unlock(&lock);
    return 0;
}

aclError aclrtMalloc(void **ptr, size_t size, aclrtMemMallocPolicy policy) {
    return (void)policy, allocate(ptr, size, true);
}
EXPORT aclError aclrtMallocAlign32(void **ptr, size_t size, aclrtMemMallocPolicy policy) {
    return (void)policy, allocate(ptr, size, true);
}
aclError aclrtFree(void *ptr) { return release(ptr); }
aclError aclrtMallocHost(void **ptr, size_t size) { return allocate(ptr, size, false); }
aclError aclrtFreeHost(void *ptr) {
    int error = deliver(NULL);
    return error ? error : release(ptr);
}

/* Expandable segments: an address range first, memory under parts of it later. */
aclError aclrtReserveMemAddress(void **ptr, size_t size, size_t alignment, void *expected, uint64_t flags) {
    (void)alignment, (void)expected, (void)flags;
    *ptr = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *ptr == MAP_FAILED ? fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no address range of %zu bytes", size) : 0;
}
aclError aclrtReleaseMemAddress(void *ptr) { return (void)ptr, 0; }
aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *prop, uint64_t flags) {
    (void)prop, (void)flags;
    size_t left = free_memory();
    if (size > left) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%zu bytes asked, %zu free", size, left);
    size_t *bytes = malloc(sizeof *bytes);
    in_use += *bytes = size;
    *handle = bytes;
    return 0;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    in_use -= *(size_t *)handle;
    free(handle);
    return 0;
}
aclError aclrtMapMem(void *ptr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    (void)offset, (void)handle, (void)flags;
    return mprotect(ptr, size, PROT_READ | PROT_WRITE) ? ACL_ERROR_RT_PARAM_INVALID : 0;
}
aclError aclrtUnmapMem(void *ptr) { return (void)ptr, 0; }

aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total) {
    (void)attr;
    *total = total_memory();
    *free = free_memory();
    return 0;
}
aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes) {
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&lock);
    struct block *b = find_block(ptr);
    attributes->location.type = !b          ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                                : b->device ? ACL_MEM_LOCATION_TYPE_DEVICE
                                            : ACL_MEM_LOCATION_TYPE_HOST;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* ---- copies from and to pinned memory, which a device makes later ------------------------------------------------ */

struct late {
    uint64_t serial;
    int32_t stream;
    bool upload;
    char *host, *bytes; /* a download puts `bytes` at `host`; an upload's source `host` must still hold `bytes` */
    size_t count;
};
static struct late *late;
static size_t late_count, late_room;
static uint64_t late_serial;

static void queue_late(struct stream *s, struct copy c, bool upload) {
    if (late_count == late_room) {
        late_room = late_room ? 2 * late_room : 16;
        late = realloc(late, late_room * sizeof *late);
    }
    char *bytes = malloc(c.bytes);
    memcpy(bytes, c.src, c.bytes);
    if (upload) memmove(c.dst, c.src, c.bytes);
    else memset(c.dst, POISON, c.bytes);
    s->clock[s->id] = ++late_serial;
    late[late_count++] = (struct late){late_serial, s->id, upload, upload ? (char *)c.src : c.dst, bytes, c.bytes};
}

int deliver(const uint64_t *clock) {
    int error = 0;
    size_t kept = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < late_count; i++) {
        struct late l = late[i];
        if (clock && l.serial > clock[l.stream]) {
            late[kept++] = l;
            continue;
        }
        if (!l.upload) memcpy(l.host, l.bytes, l.count);
        else if (memcmp(l.host, l.bytes, l.count))
            error = fail(ACL_ERROR_RT_PARAM_INVALID,
                         "pinned memory changed before the host waited for the copy of %zu bytes from it", l.count);
        free(l.bytes);
    }
    late_count = kept;
    pthread_mutex_unlock(&lock);
    return error;
}
EXPORT void npu_stub_deliver(void) { deliver(NULL); }

/* Pinned memory is what aclrtMallocHost gave; a copy from or to other host memory waits for itself. */
void move(struct copy c, struct stream *s) {
    bool upload = c.kind == ACL_MEMCPY_HOST_TO_DEVICE, download = c.kind == ACL_MEMCPY_DEVICE_TO_HOST;
    pthread_mutex_lock(&lock);
    struct block *b = s && (upload || download) ? find_block(upload ? c.src : c.dst) : NULL;
    if (b && !b->device && *setting("NPU_STUB_LATE_COPIES", "1") != '0') queue_late(s, c, upload);
    else memmove(c.dst, c.src, c.bytes);
    pthread_mutex_unlock(&lock);
}

static bool is_pinned(const void *ptr) {
    pthread_mutex_lock(&lock);
    struct block *b = find_block(ptr);
    pthread_mutex_unlock(&lock);
    return b && !b->device;
}

static int64_t captured_host_copies;
EXPORT int64_t npu_stub_captured_host_copies(void) { return captured_host_copies; }

static bool copies_on_device = true;
EXPORT void npu_stub_device_copies(int on) { copies_on_device = on; }

static aclError copy(struct copy c, struct stream *s, bool async) {
    static const char *kinds[] = {"h2h", "h2d", "d2h", "d2d"};
    char name[64];
    snprintf(name, sizeof name, "%s %zu", c.kind <= ACL_MEMCPY_DEVICE_TO_DEVICE ? kinds[c.kind] : "other", c.bytes);
    if (!async && active_capture && capture_mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED)
        return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a copy that waits (%s) while a graph is captured", name);
    bool captured = async && s && s->capturing;
    npu_stub_trace(captured ? "capture-copy" : async ? "copy" : "sync-copy", name);
    if (c.kind == ACL_MEMCPY_DEVICE_TO_DEVICE && !copies_on_device) return 0; /* numerics.py does the device's work */
    if (captured) {
        bool upload = c.kind == ACL_MEMCPY_HOST_TO_DEVICE, download = c.kind == ACL_MEMCPY_DEVICE_TO_HOST;
        const void *host = upload ? c.src : download ? c.dst : NULL;
        if (host && !is_pinned(host))
            return fail(ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC, "a copy (%s) of unpinned memory in a graph", name);
        captured_host_copies += host != NULL;
        add_copy(s->capturing, c);
        return 0;
    }
    move(c, async ? s : NULL);
    return 0;
}

aclError aclrtMemcpy(void *dst, size_t room, const void *src, size_t count, aclrtMemcpyKind kind) {
    if (count > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "copy of %zu bytes into %zu", count, room);
    return copy((struct copy){dst, src, count, kind}, NULL, false);
}
aclError aclrtMemcpyAsync(void *dst, size_t room, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    if (count > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "copy of %zu bytes into %zu", count, room);
    return copy((struct copy){dst, src, count, kind}, stream, true);
}
aclError aclrtMemcpyAsyncWithCondition(void *dst, size_t room, const void *src, size_t count, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
    return aclrtMemcpyAsync(dst, room, src, count, kind, stream);
}
aclError aclrtMemset(void *ptr, size_t room, int32_t value, size_t count) {
    return count > room ? ACL_ERROR_RT_PARAM_INVALID : (memset(ptr, value, count), 0);
}
aclError aclrtMemsetAsync(void *ptr, size_t room, int32_t value, size_t count, aclrtStream stream) {
    struct stream *s = stream;
    npu_stub_trace(s && s->capturing ? "capture" : "launch", "memset");
    return s && s->capturing ? 0 : aclrtMemset(ptr, room, value, count);
}
