/* Counts the bytes of blocks that PyTorch's allocator of the CPU has asked for and not given back, as they were
   requested. Loaded with LD_PRELOAD.

   All tensors, and the workspace that kernels take from PyTorch, come from posix_memalign called in libc10. What oneDNN
   and MKL allocate for themselves comes from elsewhere and is not counted. Nothing here knows of tensors or plans. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void __libc_free(void *block);

#define SLOTS ((size_t)1 << 20) /* a power of two, of which less than half are in use */
#define ALIGNMENT 64

static struct { uintptr_t address; size_t size; } slots[SLOTS]; /* open addressing; address 0 is free */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t alive, most;

size_t live_bytes(void) { return alive; }
size_t most_bytes(void) { return most; }
void forget_most(void) { most = alive; }

static size_t home(uintptr_t address) { return (address >> 6) * 0x9E3779B97F4A7C15u >> 44; }

static void note(void *block, size_t size) {
    pthread_mutex_lock(&lock);
    size_t slot = home((uintptr_t)block);
    while (slots[slot].address) slot = (slot + 1) & (SLOTS - 1);
    slots[slot].address = (uintptr_t)block;
    slots[slot].size = size;
    alive += size;
    if (alive > most) most = alive;
    pthread_mutex_unlock(&lock);
}

static void forget(void *block) {
    pthread_mutex_lock(&lock);
    size_t slot = home((uintptr_t)block);
    while (slots[slot].address && slots[slot].address != (uintptr_t)block) slot = (slot + 1) & (SLOTS - 1);
    if (slots[slot].address) {
        alive -= slots[slot].size;
        size_t hole = slot;
        for (;;) { /* close the hole, so that searches still end at a free slot */
            slot = (slot + 1) & (SLOTS - 1);
            if (!slots[slot].address) break;
            size_t wanted = home(slots[slot].address);
            if (((slot - wanted) & (SLOTS - 1)) >= ((slot - hole) & (SLOTS - 1))) {
                slots[hole] = slots[slot];
                hole = slot;
            }
        }
        slots[hole].address = 0;
    }
    pthread_mutex_unlock(&lock);
}

/* The places in code that call posix_memalign are few: each is looked up once. */
static struct { void *place; int is_torch; } callers[64];

static int is_torch(void *place) {
    for (size_t at = 0; at < sizeof callers / sizeof *callers; at++) {
        if (callers[at].place == place) return callers[at].is_torch;
        if (!callers[at].place) {
            Dl_info where;
            int found = dladdr(place, &where) && where.dli_fname && strstr(where.dli_fname, "libc10.");
            callers[at].is_torch = found;
            callers[at].place = place;
            return found;
        }
    }
    return 0;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) || alignment & (alignment - 1) || !alignment) return EINVAL;
    void *made = __libc_memalign(alignment, size);
    if (!made) return ENOMEM;
    if (is_torch(__builtin_return_address(0))) note(made, size);
    *block = made;
    return 0;
}

void free(void *block) {
    if (!block) return;
    if (!((uintptr_t)block & (ALIGNMENT - 1))) forget(block);
    __libc_free(block);
}

void *realloc(void *block, size_t size) {
    if (block && !((uintptr_t)block & (ALIGNMENT - 1))) forget(block);
    return __libc_realloc(block, size);
}
