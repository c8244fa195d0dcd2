/* Kernels, which do nothing but be traced; the device's and CANN's properties. */
#include "null_device.h"

/* Every generated aclnn entry ends here. */
EXPORT int npu_stub_launch(const char *name, void *handle) {
    struct stream *s = handle;
    npu_stub_trace(s && s->updating ? "update" : s && s->capturing ? "capture" : "launch", name);
    return 0;
}
aclError aclopCompileAndExecute(const char *type, int inputs, const aclTensorDesc *const in_desc[],
                                const aclDataBuffer *const in[], int outputs, const aclTensorDesc *const out_desc[],
                                aclDataBuffer *const out[], const aclopAttr *attr, aclopEngineType engine,
                                aclopCompileType flag, const char *path, aclrtStream stream) {
    (void)inputs, (void)in_desc, (void)in, (void)outputs, (void)out_desc, (void)out, (void)attr, (void)engine;
    (void)flag, (void)path;
    char name[128];
    snprintf(name, sizeof name, "aclop:%s", type);
    return npu_stub_launch(name, stream);
}

/* What the kernels take: never looked into, but never NULL. */
static char opaque[64];
EXPORT void *aclCreateTensor(void) { return opaque; }
EXPORT void *aclCreateScalar(void) { return opaque; }
EXPORT void *aclCreateIntArray(void) { return opaque; }
EXPORT void *aclCreateBoolArray(void) { return opaque; }
EXPORT void *aclCreateFloatArray(void) { return opaque; }
EXPORT void *aclCreateTensorList(void) { return opaque; }
EXPORT void *aclCreateScalarList(void) { return opaque; }
aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) { return (void)data, (void)size, (aclDataBuffer *)opaque; }
aclTensorDesc *aclCreateTensorDesc(aclDataType type, int dims, const int64_t *shape, aclFormat format) {
    return (void)type, (void)dims, (void)shape, (void)format, (aclTensorDesc *)opaque;
}
aclopAttr *aclopCreateAttr(void) { return (aclopAttr *)opaque; }

/* A format cast first asks for the target's shape: here the shape stays, as in the plain ND format (2). */
EXPORT int aclnnNpuFormatCastCalculateSizeAndFormat(const void *src, int format, int dtype, int64_t **shape,
                                                    uint64_t *dims, int *actual) {
    (void)src, (void)format, (void)dtype, (void)shape, (void)dims;
    if (actual) *actual = 2;
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the null device knows no NZ format");
}

static struct {
    int dummy;
} context;
static int32_t current_device;

static bool present(void) { return *setting("NPU_STUB_DEVICES", "1") != '0'; }

aclError aclrtGetDeviceCount(uint32_t *count) { return *count = (uint32_t)atoi(setting("NPU_STUB_DEVICES", "1")), 0; }
aclError aclrtSetDevice(int32_t device) {
    if (!present()) return fail(ACL_ERROR_RT_NO_DEVICE, "NPU_STUB_DEVICES=0");
    return current_device = device, 0;
}
aclError aclrtResetDevice(int32_t device) { return (void)device, 0; }
aclError aclrtGetDevice(int32_t *device) {
    if (!present()) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set");
    return *device = current_device, 0;
}
aclError aclrtGetCurrentContext(aclrtContext *it) { return *it = &context, 0; }
aclError aclrtSetCurrentContext(aclrtContext it) { return (void)it, 0; }
aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    return *active = device == current_device, 0;
}
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic) { return *logic = user, 0; }
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    return *can = device == peer, 0;
}
aclError aclrtDeviceGetBareTgid(int32_t *pid) { return *pid = 1, 0; }
aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = (char)device;
    return 0;
}
const char *aclrtGetSocName(void) { return setting("NPU_STUB_SOC", "Ascend910B3"); }

/* An Ascend 910B3 has 20 cube and 40 vector cores; 192 MiB of L2 are a 910B2's. */
aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
    (void)device;
    *value = info == ACL_DEVICE_INFO_AI_CORE_NUM ? 20 : info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 40 : 192 << 20;
    return 0;
}
aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attr, int64_t *value) {
    (void)device;
    switch (attr) {
        case ACL_DEV_ATTR_AICORE_CORE_NUM:
        case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = 20; break;
        case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = 40; break;
        case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = (int64_t)total_memory(); break;
        case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = 192 << 20; break;
        default: *value = 0;
    }
    return 0;
}

aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t *value) {
    return (void)device, *value = type == ACL_RT_DEV_RES_CUBE_CORE ? 20 : 40, 0;
}
aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t *value) {
    return (void)stream, aclrtGetDeviceResLimit(0, type, value);
}
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) { return (void)option, *value = 0, 0; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag) { return (void)stream, *flag = 0, 0; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel level) { return (void)level, 0; }
aclError aclrtGetLastError(aclrtLastErrLevel level) { return (void)level, 0; }

static const char *cann(void) { return setting("NPU_STUB_CANN", "9.1.0"); }

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    if (!strcmp(cann(), "none")) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    const char *text = name == ACL_PKG_NAME_DRIVER ? setting("NPU_STUB_DRIVER", "25.5.1") : cann();
    snprintf(version->version, sizeof version->version, "%s", text);
    return 0;
}
aclError aclsysGetVersionStr(char *name, char *version) {
    (void)name;
    if (!strcmp(cann(), "none")) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    strcpy(version, cann());
    return 0;
}

/* "disable": operators are not compiled just in time, which is the path that calls aclnn. */
size_t aclGetCompileoptSize(aclCompileOpt option) { return (void)option, sizeof "disable"; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t room) {
    (void)option;
    snprintf(value, room, "disable");
    return 0;
}
aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
    static const aclCannAttr all[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
    *list = all;
    *count = 3;
    return 0;
}
aclError aclGetCannAttribute(aclCannAttr attr, int32_t *value) { return (void)attr, *value = 1, 0; }
