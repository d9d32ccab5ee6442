// The card that is described: one place for its figures, which the libraries of this folder share.
//
// Settings are environment variables, so that a card is described before any library is loaded:
//   HOLLOW_CAPABILITY       compute capability, "8.0"
//   HOLLOW_MEMORY           bytes of each card
//   HOLLOW_CONTEXT          bytes of them that the context takes
//   HOLLOW_MULTIPROCESSORS  how many a card has
//   HOLLOW_CARDS            how many cards there are
//   HOLLOW_UNTOUCHED        copies and fills of at least so many bytes are left out: a card larger than this machine
//   HOLLOW_WORKSPACE        bytes that each convolution of cuDNN asks for
//   HOLLOW_LOG              1: name each function that is called and does nothing
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#define PUBLIC extern "C" __attribute__((visibility("default")))

inline long setting(const char *name, long otherwise) {
    const char *text = std::getenv(name);
    return text ? std::strtol(text, nullptr, 0) : otherwise;
}

// Compute capability 8.6 as 86.
inline int capability() {
    static const int found = [] {
        const char *text = std::getenv("HOLLOW_CAPABILITY");
        char *rest = nullptr;
        long major = std::strtol(text ? text : "8.0", &rest, 10);
        return int(major * 10 + (*rest == '.' ? std::strtol(rest + 1, nullptr, 10) : 0));
    }();
    return found;
}

inline size_t memory_of_card() {
    static const size_t bytes = size_t(setting("HOLLOW_MEMORY", 84987740160));
    return bytes;
}

inline int card_count() {
    static const int count = int(setting("HOLLOW_CARDS", 1));
    return count;
}

inline int multiprocessors() {
    static const int count = int(setting("HOLLOW_MULTIPROCESSORS", capability() >= 90 ? 132 : 108));
    return count;
}

// As the programming guide lists them by capability.
inline int threads_of_multiprocessor() {
    const int found = capability();
    if (found == 75) return 1024;
    return found == 86 || found == 87 || found == 89 || found == 120 ? 1536 : 2048;
}

// Bytes of shared memory that a block may ask for, by capability, as the programming guide lists them.
inline int shared_memory_of_block() {
    const int found = capability();
    if (found == 75) return 64 << 10;
    if (found == 80 || found == 87) return 163 << 10;
    if (found >= 90 && found < 120) return 227 << 10;
    return 99 << 10;
}
