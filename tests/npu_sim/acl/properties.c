/* What torch_npu asks about devices and settings; the answers are those of an Ascend 910B. */
#include "sim.h"

#include "acl/acl_op_compiler.h"

static const char error_words[] = "EZ9999: Inner Error! (simulated)";

SIM_API const char *aclrtGetSocName(void)
{
    return "Ascend910B1";
}

SIM_API const char *aclGetRecentErrMsg(void)
{
    return error_words;
}

SIM_API aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peer)
{
    (void)deviceId, (void)peer;
    *canAccessPeer = 0;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtDeviceGetBareTgid(int32_t *pid)
{
    *pid = 1;
    return ACL_SUCCESS;
}

SIM_API aclError aclGetDeviceCapability(uint32_t deviceId, aclDeviceInfo deviceInfo, int64_t *value)
{
    (void)deviceId, (void)deviceInfo;
    *value = 0;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value)
{
    (void)deviceId, (void)attr;
    *value = 24; /* cores */
    return ACL_SUCCESS;
}

SIM_API size_t aclGetCompileoptSize(aclCompileOpt opt)
{
    (void)opt;
    return 16;
}

SIM_API aclError aclGetCompileopt(aclCompileOpt opt, char *value, size_t length)
{
    (void)opt;
    if (length != 0) {
        value[0] = '\0';
    }
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t *value)
{
    (void)opt;
    *value = 0;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtCtxGetSysParamOpt(aclSysParamOpt opt, int64_t *value)
{
    return aclrtGetSysParamOpt(opt, value);
}

SIM_API aclError aclrtGetPrimaryCtxState(int32_t deviceId, uint32_t *flags, int32_t *active)
{
    (void)deviceId;
    if (flags != NULL) {
        *flags = 0;
    }
    *active = 1;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t *const logicDevId)
{
    *logicDevId = userDevid;
    return ACL_SUCCESS;
}

/* Settings that change nothing here. */

SIM_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode)
{
    (void)mode;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetOpWaitTimeout(uint32_t timeout)
{
    (void)timeout;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetOpExecuteTimeOut(uint32_t timeout)
{
    (void)timeout;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode)
{
    (void)stream, (void)mode;
    return ACL_SUCCESS;
}

SIM_API aclError aclSetCompileopt(aclCompileOpt opt, const char *value)
{
    (void)opt, (void)value;
    return ACL_SUCCESS;
}

SIM_API aclError aclopSetCompileFlag(aclOpCompileFlag flag)
{
    (void)flag;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value)
{
    (void)opt, (void)value;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value)
{
    return aclrtSetSysParamOpt(opt, value);
}

SIM_API aclError aclrtGetLastError(aclrtLastErrLevel level)
{
    (void)level;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtPeekAtLastError(aclrtLastErrLevel level)
{
    (void)level;
    return ACL_SUCCESS;
}

/* A kernel of the real library was called, which nothing here can run: never say success. */
SIM_API aclError aclopCompileAndExecute(const char *opType, int numInputs,
                                        const aclTensorDesc *const inputDesc[],
                                        const aclDataBuffer *const inputs[], int numOutputs,
                                        const aclTensorDesc *const outputDesc[],
                                        aclDataBuffer *const outputs[], const aclopAttr *attr,
                                        aclopEngineType engineType, aclopCompileType compileFlag,
                                        const char *opPath, aclrtStream stream)
{
    (void)opType, (void)numInputs, (void)inputDesc, (void)inputs, (void)numOutputs;
    (void)outputDesc, (void)outputs, (void)attr, (void)engineType, (void)compileFlag;
    (void)opPath, (void)stream;
    return ACL_ERROR_INTERNAL_ERROR;
}

SIM_API aclError aclopCompileAndExecuteV2(const char *opType, int numInputs,
                                          aclTensorDesc *inputDesc[], aclDataBuffer *inputs[],
                                          int numOutputs, aclTensorDesc *outputDesc[],
                                          aclDataBuffer *outputs[], aclopAttr *attr,
                                          aclopEngineType engineType, aclopCompileType compileFlag,
                                          const char *opPath, aclrtStream stream)
{
    (void)opType, (void)numInputs, (void)inputDesc, (void)inputs, (void)numOutputs;
    (void)outputDesc, (void)outputs, (void)attr, (void)engineType, (void)compileFlag;
    (void)opPath, (void)stream;
    return ACL_ERROR_INTERNAL_ERROR;
}
