/* The part of XLA's foreign function interface that is used here.
 *
 * It is a stable C interface: the structures are those of its header (xla/ffi/api/c_api.h) in every
 * version of the major number 0. Invariant: nothing here allocates or fails.
 */

#ifndef NNX_INSPECTOR_XLA_H
#define NNX_INSPECTOR_XLA_H

#include <stddef.h>
#include <stdint.h>

typedef struct { size_t size; void *extension; int32_t major, minor; } Version;
typedef struct { size_t size; void *extension; Version version; } Api;
typedef struct { size_t size; Version version; uint32_t traits; int64_t state; } Metadata;
typedef struct { size_t size; int32_t type; void *next; Metadata *metadata; } Extension;
typedef struct {
    size_t size;
    void *extension;
    int32_t dtype;
    void *data;
    int64_t rank, *dims;
} Buffer;
typedef struct { size_t size; void *extension; int64_t count; int32_t *types; Buffer **at; } Buffers;
typedef struct { int32_t dtype; int32_t *value; } Scalar;
typedef struct { int32_t dtype; size_t count; int64_t *values; } Array;
typedef struct {
    size_t size;
    void *extension;
    int64_t count;
    int32_t *types;
    void **names, **at; /* by name */
} Attributes;
typedef struct {
    size_t size;
    Extension *extension;
    const Api *api;
    void *context;
    int32_t stage;
    Buffers in, out;
    Attributes how;
} Frame;

enum { PRED = 1, S8, S16, S32, S64, U8, U16, U32, U64, F16, F32, F64, BF16 = 16 };

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

static inline int32_t whole_number(const Frame *frame, int attribute) {
    return *((const Scalar *)frame->how.at[attribute])->value;
}

static inline const int64_t *whole_numbers(const Frame *frame, int attribute) {
    return ((const Array *)frame->how.at[attribute])->values;
}

static inline int64_t product(const int64_t *lengths, int64_t n) {
    int64_t all = 1;
    for (int64_t i = 0; i < n; i++) all *= lengths[i];
    return all;
}

/* XLA asks a function for its version when the function is registered: any version of the major
 * number 0 has these structures. */
static inline int is_asked(Frame *frame) {
    Extension *asks = frame->extension;
    if (!asks || asks->type != 1) return 0;
    asks->metadata->version.major = 0;
    asks->metadata->version.minor = frame->api->version.minor;
    asks->metadata->traits = 0;
    asks->metadata->state = 0;
    return 1;
}

#endif
