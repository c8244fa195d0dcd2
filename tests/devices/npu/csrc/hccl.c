/* Collectives, which are traced on their streams like kernels. The numerics compute what they move.
 *
 * HCCL's own header is C++, so the compiler does not hold these signatures against it.
 */
#include "null_device.h"

enum { ROOT_INFO_BYTES = 4108 };
static char communicator[64];

EXPORT int HcclGetRootInfo(void *root) { return memset(root, 0, ROOT_INFO_BYTES), 0; }
EXPORT int HcclCommInitRootInfo(uint32_t size, const void *root, uint32_t rank, void **comm) {
    return (void)size, (void)root, (void)rank, *comm = communicator, 0;
}
EXPORT int HcclCommInitRootInfoConfig(uint32_t size, const void *root, uint32_t rank, const void *config, void **comm) {
    return (void)config, HcclCommInitRootInfo(size, root, rank, comm);
}
EXPORT int HcclCommDestroy(void *comm) { return (void)comm, 0; }
EXPORT int HcclGetCommName(void *comm, char *name) { return (void)comm, strcpy(name, "null"), 0; }
EXPORT int HcclGetCommAsyncError(void *comm, int *error) { return (void)comm, *error = 0; }
EXPORT const char *HcclGetErrorString(int code) { return (void)code, "an error of the null device"; }

EXPORT int HcclAllReduce(void *from, void *to, uint64_t count, int type, int op, void *comm, void *stream) {
    (void)from, (void)to, (void)count, (void)type, (void)op, (void)comm;
    return npu_stub_launch("HcclAllReduce", stream);
}
EXPORT int HcclAllGather(void *from, void *to, uint64_t count, int type, void *comm, void *stream) {
    (void)from, (void)to, (void)count, (void)type, (void)comm;
    return npu_stub_launch("HcclAllGather", stream);
}
EXPORT int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, void *comm, void *stream) {
    (void)buffer, (void)count, (void)type, (void)root, (void)comm;
    return npu_stub_launch("HcclBroadcast", stream);
}
