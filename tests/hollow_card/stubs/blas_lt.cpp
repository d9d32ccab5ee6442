// cuBLASLt: one algorithm for each product, without a workspace of its own.

#include <cstring>

#include "card.h"

static int described(void **made) {  // larger than any of its descriptions
    *made = calloc(1, 256);
    return 0;
}
static int forgotten(void *made) {
    free(made);
    return 0;
}

PUBLIC int cublasLtCreate(void **handle) { return described(handle); }
PUBLIC int cublasLtDestroy(void *handle) { return forgotten(handle); }
PUBLIC size_t cublasLtGetVersion() { return 130000; }
PUBLIC int cublasLtMatmulDescCreate(void **made, int, int) { return described(made); }
PUBLIC int cublasLtMatmulDescDestroy(void *made) { return forgotten(made); }
PUBLIC int cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t) { return 0; }
PUBLIC int cublasLtMatrixLayoutCreate(void **made, int, uint64_t, uint64_t, int64_t) { return described(made); }
PUBLIC int cublasLtMatrixLayoutDestroy(void *made) { return forgotten(made); }
PUBLIC int cublasLtMatrixLayoutSetAttribute(void *, int, const void *, size_t) { return 0; }
PUBLIC int cublasLtMatmulPreferenceCreate(void **made) { return described(made); }
PUBLIC int cublasLtMatmulPreferenceDestroy(void *made) { return forgotten(made); }
PUBLIC int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t) { return 0; }

struct Choice {  // cublasLtMatmulHeuristicResult_t
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
PUBLIC int cublasLtMatmulAlgoGetHeuristic(
    void *, void *, void *, void *, void *, void *, void *, int most, Choice *choices, int *count
) {
    *count = most > 0;
    if (*count) {
        *choices = Choice{};
        choices->waves = 1;
    }
    return 0;
}
PUBLIC int cublasLtMatmulAlgoCheck(void *, void *, void *, void *, void *, void *, const void *, Choice *choice) {
    *choice = Choice{};
    return 0;
}
