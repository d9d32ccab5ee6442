// cuBLAS: handles keep what is set on them. Products are generated functions that return success.

#include "card.h"

struct Handle {
    void *stream;
    int math, pointers;
};

PUBLIC int cublasCreate_v2(Handle **handle) {
    *handle = new Handle{};
    return 0;
}
PUBLIC int cublasDestroy_v2(Handle *handle) {
    delete handle;
    return 0;
}
PUBLIC int cublasSetStream_v2(Handle *handle, void *stream) {
    handle->stream = stream;
    return 0;
}
PUBLIC int cublasGetStream_v2(Handle *handle, void **stream) {
    *stream = handle->stream;
    return 0;
}
PUBLIC int cublasSetMathMode(Handle *handle, int mode) {
    handle->math = mode;
    return 0;
}
PUBLIC int cublasGetMathMode(Handle *handle, int *mode) {
    *mode = handle->math;
    return 0;
}
PUBLIC int cublasSetPointerMode_v2(Handle *handle, int mode) {
    handle->pointers = mode;
    return 0;
}
PUBLIC int cublasGetPointerMode_v2(Handle *handle, int *mode) {
    *mode = handle->pointers;
    return 0;
}
PUBLIC int cublasGetVersion_v2(Handle *, int *version) {
    *version = 130000;
    return 0;
}
PUBLIC const char *cublasGetStatusString(int status) { return status ? "an error of the hollow card" : "success"; }
PUBLIC const char *cublasGetStatusName(int status) { return status ? "AN_ERROR_OF_THE_HOLLOW_CARD" : "CUBLAS_STATUS_SUCCESS"; }
