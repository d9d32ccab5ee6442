// NVML, as far as PyTorch's allocator asks it: a handle for the card, and nothing that joins cards.

#include "card.h"

static const int NOT_SUPPORTED = 3;

PUBLIC int nvmlInit_v2() { return 0; }
PUBLIC int nvmlDeviceGetHandleByPciBusId_v2(const char *, void **handle) {
    static int only;
    *handle = &only;
    return 0;
}
PUBLIC int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}
PUBLIC int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
PUBLIC int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
PUBLIC int nvmlDeviceGetComputeRunningProcesses(void *, unsigned *count, void *) {
    *count = 0;
    return 0;
}
PUBLIC int nvmlDeviceGetGpuFabricInfoV() { return NOT_SUPPORTED; }
