// cuDNN's legacy interface: descriptors, one algorithm for each convolution, batch norm without a reserve.
// PyTorch must be told to use it: TORCH_CUDNN_V8_API_DISABLED=1.

#include <cstring>

#include "card.h"

static size_t workspace() { return size_t(setting("HOLLOW_WORKSPACE", 0)); }

PUBLIC size_t cudnnGetVersion() { return 92400; }
PUBLIC size_t cudnnGetCudartVersion() { return 13000; }
PUBLIC int cudnnGetProperty(int which, int *value) {
    const int version[] = {9, 24, 0};
    *value = which < 3 ? version[which] : 0;
    return 0;
}
PUBLIC const char *cudnnGetErrorString(int status) {
    return status ? "CUDNN_STATUS_NOT_SUPPORTED by the hollow card" : "CUDNN_STATUS_SUCCESS";
}
PUBLIC void cudnnGetLastErrorString(char *text, size_t size) {
    if (size) *text = 0;
}

struct Handle {
    void *stream;
};
PUBLIC int cudnnCreate(Handle **handle) {
    *handle = new Handle{};
    return 0;
}
PUBLIC int cudnnDestroy(Handle *handle) {
    delete handle;
    return 0;
}
PUBLIC int cudnnSetStream(Handle *handle, void *stream) {
    handle->stream = stream;
    return 0;
}
PUBLIC int cudnnGetStream(Handle *handle, void **stream) {
    *stream = handle->stream;
    return 0;
}

struct Description {
    int dtype, dims, sizes[16], strides[16], format;
};
#define DESCRIPTION(NAME)                                             \
    PUBLIC int cudnnCreate##NAME##Descriptor(Description **made) {    \
        *made = new Description{};                                    \
        return 0;                                                     \
    }                                                                 \
    PUBLIC int cudnnDestroy##NAME##Descriptor(Description *made) {    \
        delete made;                                                  \
        return 0;                                                     \
    }
DESCRIPTION(Tensor)
DESCRIPTION(Filter)
DESCRIPTION(Convolution)
DESCRIPTION(Activation)
DESCRIPTION(Dropout)
DESCRIPTION(RNN)
DESCRIPTION(RNNData)
DESCRIPTION(Pooling)

PUBLIC int cudnnSetTensorNdDescriptor(Description *made, int dtype, int dims, const int *sizes, const int *strides) {
    made->dtype = dtype;
    made->dims = dims;
    memcpy(made->sizes, sizes, sizeof(int) * dims);
    memcpy(made->strides, strides, sizeof(int) * dims);
    return 0;
}
PUBLIC int cudnnGetTensorNdDescriptor(Description *made, int, int *dtype, int *dims, int *sizes, int *strides) {
    *dtype = made->dtype;
    *dims = made->dims;
    memcpy(sizes, made->sizes, sizeof(int) * made->dims);
    memcpy(strides, made->strides, sizeof(int) * made->dims);
    return 0;
}
PUBLIC int cudnnSetFilterNdDescriptor(Description *made, int dtype, int format, int dims, const int *sizes) {
    made->dtype = dtype;
    made->format = format;
    made->dims = dims;
    memcpy(made->sizes, sizes, sizeof(int) * dims);
    return 0;
}
PUBLIC int cudnnGetFilterNdDescriptor(Description *made, int, int *dtype, int *format, int *dims, int *sizes) {
    *dtype = made->dtype;
    *format = made->format;
    *dims = made->dims;
    memcpy(sizes, made->sizes, sizeof(int) * made->dims);
    return 0;
}
PUBLIC int cudnnSetConvolutionNdDescriptor(Description *, int, const int *, const int *, const int *, int, int) {
    return 0;
}
PUBLIC int cudnnSetConvolutionGroupCount(Description *, int) { return 0; }
PUBLIC int cudnnSetConvolutionMathType(Description *, int) { return 0; }
PUBLIC int cudnnSetActivationDescriptor(Description *, int, int, double) { return 0; }

struct Choice {  // cudnnConvolutionFwdAlgoPerf_t and its like
    int algorithm, status;
    float milliseconds;
    size_t workspace;
    int is_deterministic, math, reserved[3];
};
static int the_only(Choice *choices, int most, int *count) {
    const int BAD_PARAMETER = 2000, ALGORITHM = 1;
    if (most < 1) return BAD_PARAMETER;
    *choices = Choice{ALGORITHM, 0, 0, workspace(), 1, 0, {}};
    *count = 1;
    return 0;
}
static int asked(size_t *bytes, size_t answer) {
    *bytes = answer;
    return 0;
}
#define CONVOLUTION(WHICH)                                                                                       \
    PUBLIC int cudnnGetConvolution##WHICH##Algorithm_v7(                                                         \
        Handle *, Description *, Description *, Description *, Description *, int most, int *count, Choice *all  \
    ) {                                                                                                          \
        return the_only(all, most, count);                                                                       \
    }                                                                                                            \
    PUBLIC int cudnnGetConvolution##WHICH##WorkspaceSize(                                                        \
        Handle *, Description *, Description *, Description *, Description *, int, size_t *bytes                 \
    ) {                                                                                                          \
        return asked(bytes, workspace());                                                                        \
    }                                                                                                            \
    PUBLIC int cudnnConvolution##WHICH() { return 0; }
CONVOLUTION(Forward)
CONVOLUTION(BackwardData)
CONVOLUTION(BackwardFilter)
PUBLIC int cudnnConvolutionBiasActivationForward() { return 0; }

PUBLIC int cudnnBatchNormalizationForwardTrainingEx() { return 0; }
PUBLIC int cudnnBatchNormalizationForwardInference() { return 0; }
PUBLIC int cudnnBatchNormalizationBackwardEx() { return 0; }
PUBLIC int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    Handle *, int, int, Description *, Description *, Description *, Description *, Description *, size_t *bytes
) {
    return asked(bytes, 0);
}
PUBLIC int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    Handle *, int, int, Description *, Description *, Description *, Description *, Description *, Description *,
    Description *, size_t *bytes
) {
    return asked(bytes, 0);
}
PUBLIC int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    Handle *, int, int, Description *, Description *, size_t *bytes
) {
    return asked(bytes, 0);
}
