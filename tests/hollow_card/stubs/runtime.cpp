// The CUDA runtime of a card that is not here, written from the public documentation of its functions.
//
// Memory of the card is memory of the host, which takes no page before it is written. Copies are real. A kernel
// launch does nothing: `values.cpp` computes what it would have written, where that is asked for. Everything has
// happened when a call returns, so streams and events keep no order of their own.

#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <sys/mman.h>

#include "card.h"

using Error = int;  // cudaError_t
enum : Error {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_SYMBOL = 13,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
};

static thread_local Error last_error = SUCCESS;
static thread_local int current_card = 0;

static Error fail(Error error) {
    last_error = error;
    return error;
}

static std::recursive_mutex &table_lock() {
    static auto *lock = new std::recursive_mutex;  // never destroyed: PyTorch frees memory while it ends
    return *lock;
}
#define LOCK std::lock_guard<std::recursive_mutex> guard(table_lock())

// ---- Memory

enum class Kind { HOST, DEVICE, REGISTERED };
struct Range {
    size_t bytes;
    Kind kind;
    int card;
};

static std::map<uintptr_t, Range> &ranges() {
    static auto *all = new std::map<uintptr_t, Range>;
    return *all;
}

static size_t taken[64];  // bytes of each card

static const size_t HOST_PAGE = 4096;
static const size_t CARD_PAGE = 2 << 20;  // a driver hands out pages of 2 MiB

static size_t rounded_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

static size_t room_on(int card) {
    static const size_t context = size_t(setting("HOLLOW_CONTEXT", 0));
    return memory_of_card() - context - taken[card];
}

static const Range *range_around(const void *pointer, uintptr_t *begin = nullptr) {
    auto after = ranges().upper_bound(uintptr_t(pointer));
    if (after == ranges().begin()) return nullptr;
    --after;
    if (uintptr_t(pointer) >= after->first + after->second.bytes) return nullptr;
    if (begin) *begin = after->first;
    return &after->second;
}

// Addresses rise from one request to the next, as those of a driver mostly do.
static void *mapped(size_t bytes) {
    static uintptr_t next = 0x300000000000;
    void *wanted = reinterpret_cast<void *>(next);
    next += rounded_up(bytes, CARD_PAGE);
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *found = mmap(wanted, bytes, PROT_READ | PROT_WRITE, how, -1, 0);
    return found == MAP_FAILED ? nullptr : found;
}

PUBLIC Error cudaMalloc(void **pointer, size_t wanted) {
    LOCK;
    *pointer = nullptr;
    if (!wanted) return SUCCESS;
    size_t bytes = rounded_up(wanted, CARD_PAGE);
    if (bytes > room_on(current_card)) return fail(OUT_OF_MEMORY);
    *pointer = mapped(bytes);
    if (!*pointer) return fail(OUT_OF_MEMORY);
    ranges()[uintptr_t(*pointer)] = {bytes, Kind::DEVICE, current_card};
    taken[current_card] += bytes;
    return SUCCESS;
}

static Error unmapped(void *pointer, Kind kind) {
    if (!pointer) return SUCCESS;
    LOCK;
    auto found = ranges().find(uintptr_t(pointer));
    if (found == ranges().end() || found->second.kind != kind) return fail(INVALID_VALUE);
    if (kind == Kind::DEVICE) taken[found->second.card] -= found->second.bytes;
    munmap(pointer, found->second.bytes);
    ranges().erase(found);
    return SUCCESS;
}

PUBLIC Error cudaFree(void *pointer) { return unmapped(pointer, Kind::DEVICE); }
PUBLIC Error cudaMallocAsync(void **pointer, size_t bytes, void *) { return cudaMalloc(pointer, bytes); }
PUBLIC Error cudaFreeAsync(void *pointer, void *) { return cudaFree(pointer); }
PUBLIC Error cudaMallocManaged(void **pointer, size_t bytes, unsigned) { return cudaMalloc(pointer, bytes); }

PUBLIC Error cudaHostAlloc(void **pointer, size_t wanted, unsigned) {
    LOCK;
    size_t bytes = rounded_up(wanted ? wanted : 1, HOST_PAGE);
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, how, -1, 0);
    if (found == MAP_FAILED) return fail(OUT_OF_MEMORY);
    ranges()[uintptr_t(found)] = {bytes, Kind::HOST, current_card};
    *pointer = found;
    return SUCCESS;
}
PUBLIC Error cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
PUBLIC Error cudaFreeHost(void *pointer) { return unmapped(pointer, Kind::HOST); }

PUBLIC Error cudaHostRegister(void *pointer, size_t bytes, unsigned) {
    LOCK;
    if (ranges().count(uintptr_t(pointer))) return fail(ALREADY_REGISTERED);
    ranges()[uintptr_t(pointer)] = {bytes, Kind::REGISTERED, current_card};
    return SUCCESS;
}
PUBLIC Error cudaHostUnregister(void *pointer) {
    LOCK;
    return ranges().erase(uintptr_t(pointer)) ? SUCCESS : fail(NOT_REGISTERED);
}
PUBLIC Error cudaHostGetDevicePointer(void **there, void *here, unsigned) {
    *there = here;
    return SUCCESS;
}

PUBLIC Error cudaMemGetInfo(size_t *free, size_t *total) {
    LOCK;
    *total = memory_of_card();
    *free = room_on(current_card);
    return SUCCESS;
}

struct PointerAttributes {  // cudaPointerAttributes
    int type, device;
    void *there, *here;
};
PUBLIC Error cudaPointerGetAttributes(PointerAttributes *found, const void *pointer) {
    LOCK;
    void *address = const_cast<void *>(pointer);
    const Range *range = range_around(pointer);
    if (!range) {
        *found = {0, -2, nullptr, address};
        return SUCCESS;
    }
    bool on_card = range->kind == Kind::DEVICE;
    *found = {on_card ? 2 : 1, range->card, address, on_card ? nullptr : address};
    return SUCCESS;
}

// ---- Copies

// While values are computed, what the host code of an op copies within a card is left to the computation.
static thread_local bool copies_left_out = false;
PUBLIC int hollow_leave_copies_out(int wanted) {
    int before = copies_left_out;
    copies_left_out = wanted;
    return before;
}

static bool is_untouched(size_t bytes) {
    static const size_t least = size_t(setting("HOLLOW_UNTOUCHED", 0));
    return least && bytes >= least;
}

static bool is_on_card(const void *pointer) {
    const Range *range = range_around(pointer);
    return range && range->kind == Kind::DEVICE;
}

static Error copy(void *target, const void *source, size_t bytes) {
    if (is_untouched(bytes)) return SUCCESS;
    if (copies_left_out) {
        LOCK;
        if (is_on_card(target) && is_on_card(source)) return SUCCESS;
    }
    memmove(target, source, bytes);
    return SUCCESS;
}

// A large fill with zeros gives the pages back.
static Error fill(void *target, int byte, size_t bytes) {
    if (copies_left_out) return SUCCESS;
    if (!is_untouched(bytes)) {
        memset(target, byte, bytes);
        return SUCCESS;
    }
    uintptr_t begin = rounded_up(uintptr_t(target), HOST_PAGE);
    uintptr_t end = (uintptr_t(target) + bytes) / HOST_PAGE * HOST_PAGE;
    if (byte == 0 && end > begin) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED);
    return SUCCESS;
}

PUBLIC Error cudaMemcpy(void *target, const void *source, size_t bytes, int) {
    return copy(target, source, bytes);
}
PUBLIC Error cudaMemcpyAsync(void *target, const void *source, size_t bytes, int, void *) {
    return copy(target, source, bytes);
}
PUBLIC Error cudaMemcpyPeer(void *target, int, const void *source, int, size_t bytes) {
    return copy(target, source, bytes);
}
PUBLIC Error cudaMemcpyPeerAsync(void *target, int, const void *source, int, size_t bytes, void *) {
    return copy(target, source, bytes);
}
PUBLIC Error cudaMemcpy2DAsync(
    void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width, size_t rows, int, void *
) {
    for (size_t row = 0; row < rows; row++) {
        copy(static_cast<char *>(target) + row * target_pitch, static_cast<const char *>(source) + row * source_pitch, width);
    }
    return SUCCESS;
}
PUBLIC Error cudaMemset(void *target, int byte, size_t bytes) { return fill(target, byte, bytes); }
PUBLIC Error cudaMemsetAsync(void *target, int byte, size_t bytes, void *) { return fill(target, byte, bytes); }

// ---- Cards

PUBLIC Error cudaGetDeviceCount(int *count) {
    *count = card_count();
    return *count ? SUCCESS : fail(NO_DEVICE);
}
PUBLIC Error cudaGetDevice(int *card) {
    *card = current_card;
    return SUCCESS;
}
PUBLIC Error cudaSetDevice(int card) {
    if (card < 0 || card >= card_count()) return fail(INVALID_DEVICE);
    current_card = card;
    return SUCCESS;
}
PUBLIC Error cudaDeviceSynchronize() { return SUCCESS; }
PUBLIC Error cudaDeviceReset() { return SUCCESS; }
PUBLIC Error cudaDeviceCanAccessPeer(int *can, int card, int other) {
    *can = card != other;
    return SUCCESS;
}
PUBLIC Error cudaDeviceEnablePeerAccess(int, unsigned) { return SUCCESS; }
PUBLIC Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}
PUBLIC Error cudaDeviceGetPCIBusId(char *text, int size, int card) {
    snprintf(text, size, "0000:%02X:00.0", card + 1);
    return SUCCESS;
}
PUBLIC Error cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}
PUBLIC Error cudaDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

static const int BLOCKS_OF_MULTIPROCESSOR = 32;

// By the numbers of cudaDeviceAttr. What is not listed is 0: not there.
PUBLIC Error cudaDeviceGetAttribute(int *value, int attribute, int) {
    static const std::map<int, int> known = {
        {1, 1024},           // threads of a block
        {2, 1024},           // block dimensions
        {3, 1024},
        {4, 64},
        {5, 2147483647},     // grid dimensions
        {6, 65535},
        {7, 65535},
        {8, 48 << 10},       // shared memory of a block, without asking for more
        {9, 64 << 10},       // constant memory
        {10, 32},            // threads of a warp
        {11, 2147483647},    // pitch
        {12, 64 << 10},      // registers of a block
        {13, 1410000},       // clock, kHz
        {14, 512},           // alignment of textures
        {15, 1},             // copies and kernels overlap
        {16, multiprocessors()},
        {19, 1},             // host memory can be mapped
        {31, 1},             // concurrent kernels
        {36, 1593000},       // memory clock, kHz
        {37, 5120},          // bus width
        {38, 40 << 20},      // level-2 cache
        {39, threads_of_multiprocessor()},
        {40, 3},             // copy engines
        {41, 1},             // unified addresses
        {75, capability() / 10},
        {76, capability() % 10},
        {78, 1},             // stream priorities
        {79, 1},             // level-1 caches
        {80, 1},
        {81, shared_memory_of_block() + 1024},
        {82, 64 << 10},      // registers of a multiprocessor
        {83, 1},             // managed memory
        {89, 1},             // concurrent managed access
        {90, 1},             // preemption
        {95, 1},             // cooperative launches
        {97, shared_memory_of_block()},
        {99, 1},             // host memory can be registered
        {106, BLOCKS_OF_MULTIPROCESSOR},
        {111, 1024},         // reserved shared memory of a block
        {115, 1},            // memory pools
    };
    auto found = known.find(attribute);
    *value = found == known.end() ? 0 : found->second;
    return SUCCESS;
}

struct Properties {  // cudaDeviceProp of CUDA 13, in its order
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t memory, shared_of_block;
    int registers_of_block, warp;
    size_t pitch;
    int threads_of_block, block[3], grid[3];
    size_t constant_memory;
    int major, minor;
    size_t texture_alignment, texture_pitch;
    int multiprocessors, integrated, maps_host_memory, textures[39];
    size_t surface_alignment;
    int concurrent_kernels, has_ecc, bus, device, domain, tcc, copy_engines, unified_addresses, bus_width, level2,
        persisting_level2, threads_of_multiprocessor, priorities, global_level1, local_level1;
    size_t shared_of_multiprocessor;
    int registers_of_multiprocessor, managed, multi_board, board_group, host_atomics, pageable, concurrent_managed,
        preemption, registered_address, cooperative;
    size_t shared_on_request;
    int pageable_tables, direct_managed, blocks_of_multiprocessor, access_window;
    size_t reserved_shared;
    int host_register, sparse, read_only_register, timeline, pools, rdma;
    unsigned rdma_flags;
    int rdma_order;
    unsigned pool_handles;
    int rest[67];
};

PUBLIC Error cudaGetDeviceProperties(Properties *found, int card) {
    if (card < 0 || card >= card_count()) return fail(INVALID_DEVICE);
    *found = Properties{};
    snprintf(found->name, sizeof found->name, "Hollow card %d.%d", capability() / 10, capability() % 10);
    found->uuid[15] = char(card + 1);
    found->memory = memory_of_card();
    found->shared_of_block = 48 << 10;
    found->registers_of_block = found->registers_of_multiprocessor = 64 << 10;
    found->warp = 32;
    found->pitch = 2147483647;
    found->threads_of_block = found->block[0] = found->block[1] = 1024;
    found->block[2] = 64;
    found->grid[0] = 2147483647;
    found->grid[1] = found->grid[2] = 65535;
    found->constant_memory = 64 << 10;
    found->major = capability() / 10;
    found->minor = capability() % 10;
    found->texture_alignment = found->surface_alignment = 512;
    found->texture_pitch = 32;
    found->multiprocessors = multiprocessors();
    found->maps_host_memory = found->concurrent_kernels = found->has_ecc = found->unified_addresses = 1;
    found->bus = card + 1;
    found->copy_engines = 3;
    found->bus_width = 5120;
    found->level2 = 40 << 20;
    found->threads_of_multiprocessor = threads_of_multiprocessor();
    found->priorities = found->global_level1 = found->local_level1 = 1;
    found->shared_of_multiprocessor = shared_memory_of_block() + 1024;
    found->managed = found->concurrent_managed = found->cooperative = found->host_register = found->pools = 1;
    found->shared_on_request = shared_memory_of_block();
    found->blocks_of_multiprocessor = BLOCKS_OF_MULTIPROCESSOR;
    found->reserved_shared = 1024;
    return SUCCESS;
}

// ---- Errors

PUBLIC Error cudaGetLastError() {
    Error error = last_error;
    last_error = SUCCESS;
    return error;
}
PUBLIC Error cudaPeekAtLastError() { return last_error; }
PUBLIC const char *cudaGetErrorString(Error error) {
    switch (error) {
        case SUCCESS: return "no error";
        case OUT_OF_MEMORY: return "out of memory";
        case INVALID_VALUE: return "invalid argument";
        case INVALID_DEVICE: return "invalid device ordinal";
        case NOT_SUPPORTED: return "operation not supported by the hollow card";
        default: return "an error of the hollow card";
    }
}
PUBLIC const char *cudaGetErrorName(Error error) {
    switch (error) {
        case SUCCESS: return "cudaSuccess";
        case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
        case INVALID_VALUE: return "cudaErrorInvalidValue";
        default: return "cudaErrorOfTheHollowCard";
    }
}

// ---- Streams, events, graphs

struct Stream {
    int priority;
    unsigned flags;
    bool is_captured;
    unsigned long long id;
};
struct Event {
    timespec at;
};

static Stream *stream_of(void *handle) {  // 0, 1 and 2 name the default streams
    return uintptr_t(handle) > 2 ? static_cast<Stream *>(handle) : nullptr;
}
static unsigned long long next_id() {
    LOCK;
    static unsigned long long last = 1;
    return ++last;
}

PUBLIC Error cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    *stream = new Stream{priority, flags, false, next_id()};
    return SUCCESS;
}
PUBLIC Error cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
PUBLIC Error cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
PUBLIC Error cudaStreamDestroy(void *stream) {
    delete stream_of(stream);
    return SUCCESS;
}
PUBLIC Error cudaStreamGetPriority(void *stream, int *priority) {
    *priority = stream_of(stream) ? stream_of(stream)->priority : 0;
    return SUCCESS;
}
PUBLIC Error cudaStreamGetFlags(void *stream, unsigned *flags) {
    *flags = stream_of(stream) ? stream_of(stream)->flags : 0;
    return SUCCESS;
}
PUBLIC Error cudaStreamQuery(void *) { return SUCCESS; }
PUBLIC Error cudaStreamSynchronize(void *) { return SUCCESS; }
PUBLIC Error cudaStreamWaitEvent(void *, void *, unsigned) { return SUCCESS; }
PUBLIC Error cudaStreamAddCallback(void *stream, void (*call)(void *, Error, void *), void *data, unsigned) {
    call(stream, SUCCESS, data);
    return SUCCESS;
}
PUBLIC Error cudaLaunchHostFunc(void *, void (*call)(void *), void *data) {
    call(data);
    return SUCCESS;
}

// A graph is captured as far as PyTorch's host code goes, and its launch does nothing.
PUBLIC Error cudaStreamIsCapturing(void *stream, int *status) {
    *status = stream_of(stream) && stream_of(stream)->is_captured;
    return SUCCESS;
}
PUBLIC Error cudaStreamGetCaptureInfo(
    void *stream, int *status, unsigned long long *id, void **graph, void ***before, void **edges, size_t *count
) {
    cudaStreamIsCapturing(stream, status);
    if (id) *id = *status ? stream_of(stream)->id : 0;
    if (graph) *graph = nullptr;
    if (before) *before = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return SUCCESS;
}
PUBLIC Error cudaStreamBeginCapture(void *stream, int) {
    if (!stream_of(stream)) return fail(CAPTURE_UNSUPPORTED);
    stream_of(stream)->is_captured = true;
    stream_of(stream)->id = next_id();
    return SUCCESS;
}
PUBLIC Error cudaStreamEndCapture(void *stream, void **graph) {
    stream_of(stream)->is_captured = false;
    *graph = malloc(16);
    return SUCCESS;
}
PUBLIC Error cudaThreadExchangeStreamCaptureMode(int *) { return SUCCESS; }
PUBLIC Error cudaGraphInstantiateWithFlags(void **made, void *, unsigned long long) {
    *made = malloc(16);
    return SUCCESS;
}
PUBLIC Error cudaGraphDestroy(void *graph) {
    free(graph);
    return SUCCESS;
}
PUBLIC Error cudaGraphExecDestroy(void *made) {
    free(made);
    return SUCCESS;
}
PUBLIC Error cudaGraphLaunch(void *, void *) { return SUCCESS; }
PUBLIC Error cudaGraphGetNodes(void *, void **, size_t *count) {
    *count = 1;
    return SUCCESS;
}
PUBLIC Error cudaUserObjectCreate(void **made, void *data, void (*)(void *), unsigned, unsigned) {
    *made = data;
    return SUCCESS;
}
PUBLIC Error cudaUserObjectRelease(void *, unsigned) { return SUCCESS; }
PUBLIC Error cudaGraphRetainUserObject(void *, void *, unsigned, unsigned) { return SUCCESS; }

PUBLIC Error cudaEventCreateWithFlags(void **event, unsigned) {
    *event = new Event{};
    return SUCCESS;
}
PUBLIC Error cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
PUBLIC Error cudaEventDestroy(void *event) {
    delete static_cast<Event *>(event);
    return SUCCESS;
}
PUBLIC Error cudaEventRecord(void *event, void *) {
    clock_gettime(CLOCK_MONOTONIC, &static_cast<Event *>(event)->at);
    return SUCCESS;
}
PUBLIC Error cudaEventRecordWithFlags(void *event, void *stream, unsigned) { return cudaEventRecord(event, stream); }
PUBLIC Error cudaEventQuery(void *) { return SUCCESS; }
PUBLIC Error cudaEventSynchronize(void *) { return SUCCESS; }
PUBLIC Error cudaEventElapsedTime(float *milliseconds, void *begin, void *end) {
    timespec from = static_cast<Event *>(begin)->at, to = static_cast<Event *>(end)->at;
    *milliseconds = float((to.tv_sec - from.tv_sec) * 1e3 + (to.tv_nsec - from.tv_nsec) * 1e-6);
    return SUCCESS;
}

// ---- Kernels: compiled CUDA code registers them when it is loaded, and calls these functions to launch them

struct Dimensions {
    unsigned x, y, z;
};
struct Launch {
    Dimensions grid, block;
    size_t shared;
    void *stream;
};
static thread_local std::vector<Launch> launches;

PUBLIC unsigned __cudaPushCallConfiguration(Dimensions grid, Dimensions block, size_t shared, void *stream) {
    launches.push_back({grid, block, shared, stream});
    return 0;
}
PUBLIC Error __cudaPopCallConfiguration(Dimensions *grid, Dimensions *block, size_t *shared, void *stream) {
    if (launches.empty()) return fail(INVALID_VALUE);
    Launch last = launches.back();
    launches.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *static_cast<void **>(stream) = last.stream;
    return SUCCESS;
}
PUBLIC Error cudaLaunchKernel(const void *, Dimensions, Dimensions, void **, size_t, void *) { return SUCCESS; }
PUBLIC Error __cudaLaunchKernel(void *, Dimensions, Dimensions, void **, size_t, void *) { return SUCCESS; }
PUBLIC Error cudaLaunchKernelExC(const void *, const void *, void **) { return SUCCESS; }
PUBLIC Error cudaLaunchCooperativeKernel(const void *, Dimensions, Dimensions, void **, size_t, void *) {
    return SUCCESS;
}
PUBLIC Error __cudaGetKernel(void **kernel, const void *function) {
    *kernel = const_cast<void *>(function);
    return SUCCESS;
}
PUBLIC void **__cudaRegisterFatBinary(void *) {
    static void *handle[1];
    return handle;
}
PUBLIC void __cudaRegisterFatBinaryEnd(void **) {}
PUBLIC void __cudaUnregisterFatBinary(void **) {}
PUBLIC char __cudaInitModule(void **) { return 1; }
PUBLIC void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *) {}

struct Variable {
    size_t bytes;
    void *there;
};
static std::map<const void *, Variable> &variables() {
    static auto *all = new std::map<const void *, Variable>;
    return *all;
}
PUBLIC void __cudaRegisterVar(void **, char *symbol, char *, const char *, int, size_t bytes, int, int) {
    LOCK;
    variables()[symbol] = {bytes, nullptr};
}
PUBLIC Error cudaGetSymbolAddress(void **pointer, const void *symbol) {
    LOCK;
    auto found = variables().find(symbol);
    if (found == variables().end()) return fail(INVALID_SYMBOL);
    if (!found->second.there) found->second.there = calloc(1, found->second.bytes + 256);
    *pointer = found->second.there;
    return SUCCESS;
}
PUBLIC Error cudaMemcpyToSymbol(const void *symbol, const void *source, size_t bytes, size_t offset, int) {
    void *target = nullptr;
    Error error = cudaGetSymbolAddress(&target, symbol);
    if (!error) memcpy(static_cast<char *>(target) + offset, source, bytes);
    return error;
}

struct KernelAttributes {  // cudaFuncAttributes begins so
    size_t shared, constant, local;
    int threads, registers, ptx, binary, caches, shared_on_request, carveout;
};
PUBLIC Error cudaFuncGetAttributes(KernelAttributes *found, const void *) {
    // A kernel reports the capability that it was compiled for: the nearest below the card's that PyTorch has.
    int compiled = 75;
    for (int each : {75, 80, 86, 90, 100, 120}) {
        if (each <= capability()) compiled = each;
    }
    *found = {0, 0, 0, 1024, 32, compiled, compiled, 0, shared_memory_of_block(), -1};
    return SUCCESS;
}
PUBLIC Error cudaFuncSetAttribute(const void *, int, int) { return SUCCESS; }
PUBLIC Error cudaKernelSetAttributeForDevice(void *, int, int, int) { return SUCCESS; }
PUBLIC Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int threads, size_t) {
    int fitting = threads > 0 ? threads_of_multiprocessor() / threads : 1;
    *count = fitting < BLOCKS_OF_MULTIPROCESSOR ? fitting : BLOCKS_OF_MULTIPROCESSOR;
    return SUCCESS;
}
PUBLIC Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *count, const void *kernel, int threads, size_t shared, unsigned
) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, threads, shared);
}
PUBLIC Error cudaProfilerStart() { return SUCCESS; }
PUBLIC Error cudaProfilerStop() { return SUCCESS; }

// ---- Memory pools, for cudaMallocAsync

PUBLIC Error cudaDeviceGetDefaultMemPool(void **pool, int) {
    static int only;
    *pool = &only;
    return SUCCESS;
}
PUBLIC Error cudaMemPoolSetAttribute(void *, int, void *) { return SUCCESS; }
PUBLIC Error cudaMemPoolGetAttribute(void *, int attribute, void *value) {
    LOCK;
    const int FIRST_COUNT_OF_BYTES = 5;
    *static_cast<uint64_t *>(value) = attribute >= FIRST_COUNT_OF_BYTES ? taken[current_card] : 0;
    return SUCCESS;
}
PUBLIC Error cudaMemPoolSetAccess(void *, const void *, size_t) { return SUCCESS; }
PUBLIC Error cudaMemPoolTrimTo(void *, size_t) { return SUCCESS; }

// ---- Functions of the driver that PyTorch asks the runtime for: virtual memory, for expandable segments

struct Pages {  // cuMemCreate's handle
    size_t bytes;
    int card;
    bool is_released;
    int mappings;
};
struct Mapping {
    Pages *pages;
    size_t bytes;
};
static std::map<uintptr_t, Mapping> &mappings() {
    static auto *all = new std::map<uintptr_t, Mapping>;
    return *all;
}
static void forget(Pages *pages) {
    if (!pages->is_released || pages->mappings) return;
    taken[pages->card] -= pages->bytes;
    delete pages;
}

static int reserve_addresses(uintptr_t *address, size_t wanted, size_t, uintptr_t, unsigned long long) {
    size_t bytes = rounded_up(wanted, CARD_PAGE) + CARD_PAGE;
    void *found = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    *address = rounded_up(uintptr_t(found), CARD_PAGE);
    return SUCCESS;
}
static int free_addresses(uintptr_t address, size_t bytes) {
    munmap(reinterpret_cast<void *>(address), bytes);
    return SUCCESS;
}
struct PagesWanted {  // CUmemAllocationProp begins so
    int type, handles, place, card;
};
static int create_pages(Pages **pages, size_t bytes, const PagesWanted *wanted, unsigned long long) {
    LOCK;
    if (bytes > room_on(wanted->card)) return OUT_OF_MEMORY;
    taken[wanted->card] += bytes;
    *pages = new Pages{bytes, wanted->card, false, 0};
    return SUCCESS;
}
static int release_pages(Pages *pages) {
    LOCK;
    pages->is_released = true;
    forget(pages);
    return SUCCESS;
}
static int map_pages(uintptr_t address, size_t bytes, size_t, Pages *pages, unsigned long long) {
    LOCK;
    if (mprotect(reinterpret_cast<void *>(address), bytes, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
    pages->mappings++;
    mappings()[address] = {pages, bytes};
    ranges()[address] = {bytes, Kind::DEVICE, pages->card};
    return SUCCESS;
}
static int unmap_pages(uintptr_t address, size_t bytes) {
    LOCK;
    for (auto each = mappings().lower_bound(address); each != mappings().end() && each->first < address + bytes;) {
        each->second.pages->mappings--;
        forget(each->second.pages);
        ranges().erase(each->first);
        each = mappings().erase(each);
    }
    int how = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    mmap(reinterpret_cast<void *>(address), bytes, PROT_NONE, how, -1, 0);
    return SUCCESS;
}
static int set_access(uintptr_t, size_t, const void *, size_t) { return SUCCESS; }
static int page_size(size_t *bytes, const void *, int) {
    *bytes = CARD_PAGE;
    return SUCCESS;
}
static int range_of(uintptr_t *begin, size_t *bytes, uintptr_t address) {
    LOCK;
    uintptr_t found = 0;
    const Range *range = range_around(reinterpret_cast<void *>(address), &found);
    if (!range) return INVALID_VALUE;
    if (begin) *begin = found;
    if (bytes) *bytes = range->bytes;
    return SUCCESS;
}
static int device_of_ordinal(int *device, int ordinal) {
    *device = ordinal;
    return SUCCESS;
}
static int current_context(void **context) {
    static int only;
    *context = &only;
    return SUCCESS;
}
static int error_text(int error, const char **text) {
    *text = cudaGetErrorString(error);
    return SUCCESS;
}
static int not_supported() { return NOT_SUPPORTED; }

template <class Function> static void *address_of(Function *function) { return reinterpret_cast<void *>(function); }

static void *driver_function(const std::string &name) {
    static const std::map<std::string, void *> known = {
        {"cuMemAddressReserve", address_of(reserve_addresses)},
        {"cuMemAddressFree", address_of(free_addresses)},
        {"cuMemCreate", address_of(create_pages)},
        {"cuMemRelease", address_of(release_pages)},
        {"cuMemMap", address_of(map_pages)},
        {"cuMemUnmap", address_of(unmap_pages)},
        {"cuMemSetAccess", address_of(set_access)},
        {"cuMemGetAllocationGranularity", address_of(page_size)},
        {"cuMemGetAddressRange", address_of(range_of)},
        {"cuDeviceGet", address_of(device_of_ordinal)},
        {"cuDeviceGetAttribute", address_of(cudaDeviceGetAttribute)},
        {"cuCtxGetCurrent", address_of(current_context)},
        {"cuGetErrorString", address_of(error_text)},
    };
    auto found = known.find(name);
    return found == known.end() ? address_of(not_supported) : found->second;
}
PUBLIC Error cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned, unsigned long long, int *status
) {
    *function = driver_function(name);
    if (status) *status = 0;
    return SUCCESS;
}
PUBLIC Error cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, 0, status);
}

// ---- What no file here defines: each such function of all libraries comes here with its name and its answer

PUBLIC int hollow_not_written(const char *name, int answer) {
    static const bool is_told = setting("HOLLOW_LOG", 0);
    if (is_told && answer) fprintf(stderr, "hollow card: %s is not written and returns %d\n", name, answer);
    return answer;
}
