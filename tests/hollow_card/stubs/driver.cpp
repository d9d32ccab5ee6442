// The driver, as far as PyTorch asks it for contexts and memory. Modules and launches are not written yet.

#include <cstdio>
#include <cstring>

#include "card.h"

extern "C" {
int cudaDeviceGetAttribute(int *, int, int);
int cudaGetDevice(int *);
int cudaSetDevice(int);
int cudaGetDeviceCount(int *);
int cudaMemGetInfo(size_t *, size_t *);
}

static int contexts[64];  // one for each card: its address is the handle

static int current_card() {
    int card = 0;
    cudaGetDevice(&card);
    return card;
}

PUBLIC int cuInit(unsigned) { return 0; }
PUBLIC int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}
PUBLIC int cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
PUBLIC int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}
PUBLIC int cuDeviceGetName(char *text, int size, int) {
    snprintf(text, size, "Hollow card");
    return 0;
}
PUBLIC int cuDeviceTotalMem_v2(size_t *bytes, int) {
    size_t free = 0;
    return cudaMemGetInfo(&free, bytes);
}
PUBLIC int cuDeviceGetAttribute(int *value, int attribute, int card) {
    return cudaDeviceGetAttribute(value, attribute, card);
}
PUBLIC int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = 1;
    return 0;
}
PUBLIC int cuDevicePrimaryCtxRetain(void **context, int card) {
    *context = contexts + card;
    return 0;
}
PUBLIC int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
PUBLIC int cuCtxGetCurrent(void **context) {
    *context = contexts + current_card();
    return 0;
}
PUBLIC int cuCtxSetCurrent(void *context) {
    return context ? cudaSetDevice(int(static_cast<int *>(context) - contexts)) : 0;
}
PUBLIC int cuCtxGetDevice(int *card) {
    *card = current_card();
    return 0;
}
PUBLIC int cuCtxSynchronize() { return 0; }
PUBLIC int cuMemGetInfo_v2(size_t *free, size_t *total) { return cudaMemGetInfo(free, total); }
PUBLIC int cuGetErrorString(int error, const char **text) {
    *text = error ? "an error of the hollow card" : "no error";
    return 0;
}
PUBLIC int cuGetErrorName(int error, const char **text) {
    *text = error ? "CUDA_ERROR_OF_THE_HOLLOW_CARD" : "CUDA_SUCCESS";
    return 0;
}
