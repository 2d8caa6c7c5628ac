/* Floats by their bits, arrays of every dtype as float32, and loops for the processor at hand. */

#ifndef NNX_INSPECTOR_FLOATS_H
#define NNX_INSPECTOR_FLOATS_H

#include "xla.h"

enum { BLOCK = 512 }; /* values that are read at once: they stay in the nearest cache */

static const uint32_t SIGN = 0x80000000u, MAGNITUDE = 0x7FFFFFFFu, INFINITE = 0x7F800000u;
static const uint64_t SIGN64 = 1ull << 63, INFINITE64 = 0x7FFull << 52;

static inline uint32_t bits_of(float x) { union { float x; uint32_t bits; } u = {x}; return u.bits; }
static inline float float_of(uint32_t bits) { union { uint32_t bits; float x; } u = {bits}; return u.x; }
static inline uint64_t bits64_of(double x) { union { double x; uint64_t bits; } u = {x}; return u.bits; }
static inline double double_of(uint64_t bits) { union { uint64_t bits; double x; } u = {bits}; return u.x; }

/* Signed integers of the same order as the floats, and back. */
static inline int32_t folded(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }
static inline int64_t folded64(int64_t bits) { return bits ^ ((bits >> 63) & INT64_MAX); }

static inline uint32_t from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return sign | INFINITE | (rest & 0x3FF) << 13;
    if (rest >= 0x0400) return sign | ((rest << 13) + (112u << 23));
    return sign | bits_of((float)rest * 0x1p-24f); /* exact, and normal if it is not 0 */
}

/* The nearest float32 selects the bin of a double. One below the normal ones is the least of them,
 * because the processor may be set to make it 0. */
static inline uint32_t from_double(double x) {
    uint32_t sign = (uint32_t)(bits64_of(x) >> 32) & SIGN;
    double size = double_of(bits64_of(x) & ~SIGN64);
    if (bits64_of(size) == 0) return sign;
    if (bits64_of(size) > INFINITE64) return sign | MAGNITUDE;
    if (bits64_of(size) == INFINITE64) return sign | INFINITE;
    if (size < 0x1p-126) return sign | 1;
    return sign | (size > 0x1.fffffep127 ? INFINITE - 1 : bits_of((float)size));
}

/* Read n values, the first at an index and the others each a step further, as float32 patterns. */
typedef void Load(const void *from, int64_t at, int64_t step, int n, uint32_t *to);

#define LOAD(NAME, TYPE, PATTERN)                                                            \
    static void NAME(const void *from, int64_t at, int64_t step, int n, uint32_t *to) {      \
        const TYPE *x = (const TYPE *)from + at;                                             \
        if (step == 1)                                                                       \
            for (int i = 0; i < n; i++) { TYPE v = x[i]; to[i] = PATTERN; }                  \
        else                                                                                 \
            for (int i = 0; i < n; i++) { TYPE v = x[i * step]; to[i] = PATTERN; }           \
    }

LOAD(load_pred, uint8_t, bits_of((float)(v != 0)))
LOAD(load_s8, int8_t, bits_of((float)v))
LOAD(load_s16, int16_t, bits_of((float)v))
LOAD(load_s32, int32_t, bits_of((float)v))
LOAD(load_s64, int64_t, bits_of((float)v))
LOAD(load_u8, uint8_t, bits_of((float)v))
LOAD(load_u16, uint16_t, bits_of((float)v))
LOAD(load_u32, uint32_t, bits_of((float)v))
LOAD(load_u64, uint64_t, bits_of((float)v))
LOAD(load_f16, uint16_t, from_half(v))
LOAD(load_f32, uint32_t, v)
LOAD(load_f64, double, from_double(v))
LOAD(load_bf16, uint16_t, (uint32_t)v << 16)

static Load *const LOADS[BF16 + 1] = {
    [PRED] = load_pred, [S8] = load_s8,   [S16] = load_s16, [S32] = load_s32, [S64] = load_s64,
    [U8] = load_u8,     [U16] = load_u16, [U32] = load_u32, [U64] = load_u64, [F16] = load_f16,
    [F32] = load_f32,   [F64] = load_f64, [BF16] = load_bf16,
};

#define EVERYWHERE static inline __attribute__((always_inline))

/* XLA compiles for the processor that it finds; this is compiled once for all of them. */
#if defined(__x86_64__)
#define FASTER __attribute__((target("avx2,fma")))
static inline int has_avx2_and_fma(void) {
    const uint32_t wanted = 1u << 27 | 1u << 12; /* the system keeps the wide registers; FMA */
    uint32_t a = 1, b, c = 0, d, low, high;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if ((c & wanted) != wanted) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    a = 7, c = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (low & 6) == 6 && (b & (1u << 5));
}
/* Asked once: a virtual machine takes microseconds to answer. */
static inline int is_fast(void) {
    enum { UNKNOWN, SLOW, FAST };
    static int32_t known = UNKNOWN;
    int32_t found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (found == UNKNOWN) {
        found = has_avx2_and_fma() ? FAST : SLOW;
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found == FAST;
}
#else
#define FASTER
static inline int is_fast(void) { return 0; }
#endif

#endif
